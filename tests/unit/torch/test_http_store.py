"""HTTPStore's own side: where it finds the rendezvous, its errors, its scopes, and C++ as its caller."""

import gc
import weakref
from datetime import timedelta

import pytest
from torch import distributed as dist

from hvlaunch.rendezvous import NoRendezvous, RendezvousUnreachable, Unauthorized, WaitTimeout
from hvlaunch.rendezvous.client import Client
from hvlaunch.torch import HTTPStore
from hvlaunch.torch.http_store import default_scope
from tests.unit.torch.ranks import in_forks


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    for name in ("HVLAUNCH_RENDEZVOUS", "HVLAUNCH_TOKEN", "HVLAUNCH_TOKEN_FILE", "HVLAUNCH_ROUND"):
        monkeypatch.delenv(name, raising=False)


def test_in_a_job_the_environment_suffices(rendezvous: tuple[str, str], monkeypatch):
    url, token = rendezvous
    monkeypatch.setenv("HVLAUNCH_RENDEZVOUS", url)
    monkeypatch.setenv("HVLAUNCH_TOKEN", token)
    monkeypatch.setenv("HVLAUNCH_TOKEN_FILE", "/of/another/rendezvous")
    monkeypatch.setenv("HVLAUNCH_ROUND", "7")
    HTTPStore().set("a", "1")
    assert Client(url, token).get("round.7.torch", "a") == b"1"


def test_every_round_has_a_scope_of_its_own():
    scopes = {default_scope(environ) for environ in ({}, {"HVLAUNCH_ROUND": "0"}, {"HVLAUNCH_ROUND": "1"})}
    assert len(scopes) == 3


def test_a_token_file_opens_another_rendezvous_than_the_jobs(
    rendezvous: tuple[str, str], monkeypatch, tmp_path
):
    url, token = rendezvous
    file = tmp_path / "token"
    file.write_text(f"{token}\n")
    monkeypatch.setenv("HVLAUNCH_RENDEZVOUS", "http://127.0.0.1:1")
    monkeypatch.setenv("HVLAUNCH_TOKEN", "the-jobs")
    monkeypatch.setenv("HVLAUNCH_TOKEN_FILE", str(file))
    HTTPStore(url, scope="by file").set("a", "1")
    assert Client(url, token).get("by file", "a") == b"1"


def test_what_is_missing_is_named(rendezvous: tuple[str, str], monkeypatch):
    with pytest.raises(NoRendezvous, match="HVLAUNCH_RENDEZVOUS is not set"):
        HTTPStore()
    with pytest.raises(
        NoRendezvous, match="the rendezvous' token is not set; try: set HVLAUNCH_TOKEN_FILE or HVLAUNCH_TOKEN"
    ):
        HTTPStore(rendezvous[0])
    monkeypatch.setenv("HVLAUNCH_TOKEN_FILE", "/no/such/file")
    with pytest.raises(NoRendezvous, match="the token file /no/such/file can't be read: No such file"):
        HTTPStore(rendezvous[0])


def test_scopes_do_not_see_each_other(rendezvous: tuple[str, str]):
    one, other = (HTTPStore(*rendezvous, scope=scope) for scope in ("one", "other"))
    one.set("a", "1")
    one.queue_push("q", "1")
    assert not other.check(["a"])
    assert (other.num_keys(), other.queue_len("q")) == (0, 0)


def test_errors_are_torchs_and_say_what_the_client_says(rendezvous: tuple[str, str]):
    url, token = rendezvous
    store = HTTPStore(url, token, scope="errors", timeout=timedelta(milliseconds=10))
    with pytest.raises(dist.DistStoreError, match=r"nobody set errors/none within 0\.01 s") as error:
        store.get("none")
    assert isinstance(error.value.__cause__, WaitTimeout)
    store.set("text", "no number")
    with pytest.raises(dist.DistStoreError):
        store.add("text", 1)
    with pytest.raises(dist.DistStoreError, match="2 keys and 1 values"):
        store.multi_set(["a", "b"], ["1"])
    with pytest.raises(dist.DistStoreError) as error:
        HTTPStore(url, "wrong", scope="errors").set("a", "1")
    assert isinstance(error.value.__cause__, Unauthorized)
    with pytest.raises(dist.DistNetworkError, match="Connection refused") as unreachable:
        HTTPStore("http://127.0.0.1:1", token, scope="errors").set("a", "1")
    assert isinstance(unreachable.value.__cause__, RendezvousUnreachable)


def test_concurrent_compare_and_set_is_atomic(rendezvous: tuple[str, str]):
    def count(_rank):
        store = HTTPStore(*rendezvous, scope="counter")
        for _ in range(20):
            value = store.compare_set("n", "", "0")
            while (now := store.compare_set("n", value, str(int(value) + 1))) != str(int(value) + 1).encode():
                value = now

    store = HTTPStore(*rendezvous, scope="counter")
    in_forks(range(3), count)
    assert int(store.get("n")) > 20


def test_a_store_that_only_torch_holds_still_works_until_it_is_closed(rendezvous: tuple[str, str]):
    store = HTTPStore(*rendezvous, scope="held")
    prefixed = dist.PrefixStore("p", store)
    gone = weakref.ref(store)
    del store
    gc.collect()
    prefixed.set("a", "1")
    assert prefixed.get("a") == b"1"
    held = gone()
    assert held is not None
    held.close()
    del held
    del prefixed
    gc.collect()
    assert gone() is None


def test_a_token_is_in_no_message_and_no_repr(rendezvous: tuple[str, str]):
    store = HTTPStore(rendezvous[0], "secret-word", scope="s")
    assert "secret-word" not in repr(store)
    with pytest.raises(dist.DistStoreError) as error:
        store.get("a")
    assert "secret-word" not in str(error.value)


def test_a_real_group_stands_on_it_and_its_subgroups_too(rendezvous: tuple[str, str]):
    def train(rank):
        store = HTTPStore(*rendezvous, scope="group")
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
        some = dist.new_group([0, 2])
        found = [None] * 3
        dist.all_gather_object(found, rank)
        pair = [None] * 2
        if rank != 1:
            dist.all_gather_object(pair, rank, group=some)
        dist.barrier()
        dist.destroy_process_group()
        return found, pair

    assert in_forks(range(3), train) == [
        ([0, 1, 2], [0, 2]),
        ([0, 1, 2], [None, None]),
        ([0, 1, 2], [0, 2]),
    ]
