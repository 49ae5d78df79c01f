"""init_process_group(init_method="hvlaunch://…"), inside a job and from anywhere."""

from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.client_errors import NoRendezvous
from hvlaunch.torch.group_errors import BadPlace
from tests.unit.torch.ranks import in_forks

LONG = timedelta(seconds=60)


def total(url, own, **options):
    dist.init_process_group("gloo", init_method=url, timeout=LONG, **options)
    mine = torch.tensor([own + 1])
    dist.all_reduce(mine)
    dist.barrier()
    dist.destroy_process_group()
    return int(mine)


def test_inside_a_job_the_address_is_all(rendezvous, monkeypatch):
    url, token = rendezvous

    def work(rank):
        environ = {
            "HVLAUNCH_RENDEZVOUS": url,
            "HVLAUNCH_TOKEN": token,
            "HVLAUNCH_RANK": rank,
            "HVLAUNCH_SIZE": 2,
            "HVLAUNCH_LOCAL_RANK": rank,
            "HVLAUNCH_HOST": "a",
            "HVLAUNCH_ROUND": 51,
            "MASTER_ADDR": "127.0.0.1",
        }
        for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, str(value))
        return [total("hvlaunch://", rank) for _ in range(2)]

    assert in_forks(range(2), work) == [[3, 3]] * 2
    assert set(Client(url, token).keys("round.51")) == {"store", "store.1"}  # no group's own keys


def test_from_anywhere_by_address_rank_and_size(rendezvous, monkeypatch):
    url, token = rendezvous
    address = url.replace("http", "hvlaunch")
    monkeypatch.setenv("HVLAUNCH_TOKEN", token)

    def work(rank):
        return [
            total(f"{address}?rank={rank}&world_size=2", rank),
            total(f"{address}?rank={rank}&world_size=2", rank),
            total(f"{address}?scope=mine", rank, rank=rank, world_size=2),
        ]

    assert in_forks(range(2), work) == [[3, 3, 3]] * 2
    client = Client(url, token)
    assert all(client.count(scope) for scope in ("torch", "torch.1", "mine"))


@pytest.mark.parametrize(
    ("url", "kind", "text"),
    [
        (
            "hvlaunch://a:1?rank=0",
            BadPlace,
            "world_size: it is not given; try: hvlaunch:// in a worker of hvlaunch",
        ),
        ("hvlaunch://a:1?rank=x&world_size=1", BadPlace, "'x' is not a whole number"),
        ("hvlaunch://a:1?rank=0&world_size=1&token=t", NoRendezvous, "a token is a secret"),
        ("hvlaunch://a:1?rank=0&world_size=1&scop=t", NoRendezvous, "does not know scop"),
        (
            "hvlaunch://",
            NoRendezvous,
            "HVLAUNCH_RENDEZVOUS is not set; try: start this program with hvlaunch",
        ),
    ],
)
def test_what_is_wrong_is_said(monkeypatch, url, kind, text):
    for name in ("RANK", "HVLAUNCH_RANK", "HVLAUNCH_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(kind, match=text):
        dist.init_process_group("gloo", init_method=url)


def test_in_a_worker_of_another_launcher_it_needs_an_address(monkeypatch):
    monkeypatch.delenv("HVLAUNCH_RANK", raising=False)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NoRendezvous, match="started by torchrun"):
        dist.init_process_group("gloo", init_method="hvlaunch://")
