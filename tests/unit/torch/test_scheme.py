"""init_process_group(init_method="hvlaunch://…"), inside a job and from anywhere."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from hvlaunch.rendezvous import NoRendezvous
from hvlaunch.rendezvous.client import Client
from tests.unit.torch.ranks import in_forks

LONG = timedelta(seconds=60)


def total(url, own, **options):
    dist.init_process_group("gloo", init_method=url, timeout=LONG, **options)
    mine = torch.tensor([own + 1])
    dist.all_reduce(mine)
    dist.barrier()
    dist.destroy_process_group()
    return int(mine)


def test_inside_a_job_the_bare_address_suffices(rendezvous, monkeypatch):
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
            ValueError,
            "world_size parameter missing; try: hvlaunch:// in a worker of hvlaunch",
        ),
        ("hvlaunch://a:1?world_size=1", ValueError, "rank parameter missing"),
        ("hvlaunch://a:1?rank=x&world_size=1", ValueError, "rank parameter 'x' is not a whole number"),
        ("hvlaunch://a:1?rank=-1&world_size=1", ValueError, "rank parameter '-1' is not a whole number"),
        (
            "hvlaunch://a:1?rank=2&world_size=2",
            ValueError,
            "rank parameter 2 is too high, since world_size is 2",
        ),
        ("hvlaunch://a?rank=0&world_size=1", ValueError, "port number missing"),
        ("hvlaunch://a:1?rank=0&world_size=0", ValueError, "world_size parameter 0 is less than 1"),
        ("hvlaunch://?rank=1", ValueError, "rank parameter 1 is too high, since world_size is 1"),
        ("hvlaunch://a:1?rank=0&world_size=1&token=t", NoRendezvous, "a token is a secret"),
        ("hvlaunch://a:1?rank=0&world_size=1&scop=t", NoRendezvous, "does not know scop"),
        (
            "hvlaunch://",
            NoRendezvous,
            "HVLAUNCH_RENDEZVOUS is not set; try: start this program with hvlaunch",
        ),
    ],
)
def test_invalid_addresses_are_explained(monkeypatch, url, kind, text):
    for name in ("RANK", "HVLAUNCH_RANK", "HVLAUNCH_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(kind, match=text):
        dist.init_process_group("gloo", init_method=url)


def test_two_ranks_in_one_process(rendezvous, monkeypatch):
    url, token = rendezvous
    address = url.replace("http", "hvlaunch")
    monkeypatch.setenv("HVLAUNCH_TOKEN", token)
    for _ in range(2):  # the second group does not find the first one's keys
        where = f"{address}?scope=two&world_size=2"
        (one, *_), (other, *_) = (next(dist.rendezvous(f"{where}&rank={rank}")) for rank in range(2))
        assert one.num_keys() == 0
        one.set("key", "value")
        assert other.get("key") == b"value"


def test_two_ranks_in_two_threads_of_a_worker(rendezvous, monkeypatch):
    url, token = rendezvous
    place = {"HVLAUNCH_RANK": 0, "HVLAUNCH_SIZE": 2, "HVLAUNCH_LOCAL_RANK": 0, "HVLAUNCH_ROUND": 52}
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    environ = {"HVLAUNCH_RENDEZVOUS": url, "HVLAUNCH_TOKEN": token, "MASTER_ADDR": "127.0.0.1", **place}
    for name, value in environ.items():
        monkeypatch.setenv(name, str(value))

    def meet(rank):
        return next(dist.rendezvous("hvlaunch://", rank, 2, timeout=LONG))

    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            found = list(threads.map(meet, range(2)))
            assert [(rank, size) for _, rank, size in found] == [(0, 2), (1, 2)]
            found[0][0].set("key", "value")
            assert found[1][0].get("key") == b"value"


def test_under_another_launcher_an_address_is_required(monkeypatch):
    monkeypatch.delenv("HVLAUNCH_RANK", raising=False)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NoRendezvous, match="started by torchrun"):
        dist.init_process_group("gloo", init_method="hvlaunch://")
