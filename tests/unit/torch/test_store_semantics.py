"""HTTPStore does what torch's own stores do: one table, for HashStore, TCPStore and HTTPStore."""

import threading
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from hvlaunch.torch import HTTPStore

SHORT = timedelta(milliseconds=200)
LONG = timedelta(seconds=60)


TORCHS = ["HashStore", "TCPStore", "HTTPStore"]


@pytest.fixture(params=[*TORCHS, "PrefixStore on HTTPStore"])
def store(request, rendezvous: tuple[str, str]):
    made: dist.Store
    if request.param == "HashStore":
        made = dist.HashStore()
    elif request.param == "TCPStore":
        made = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    else:
        made = HTTPStore(*rendezvous, scope=request.node.name)
    if request.param.startswith("PrefixStore"):
        made = dist.PrefixStore("prefix", made)
    made.set_timeout(LONG)
    return made


not_prefixed = pytest.mark.parametrize("store", TORCHS, indirect=True)
"""For what torch does not pass on through a PrefixStore to a store in Python."""


def needs(*names: str) -> pytest.MarkDecorator:
    """Marks a test of what the stores of old releases of torch lack."""
    missing = [name for name in names if not hasattr(dist.Store, name)]
    return pytest.mark.skipif(
        bool(missing), reason=f"torch {torch.__version__}: its stores have no {missing}"
    )


@pytest.mark.parametrize(
    "value", ["text", b"\xff\x00/", "", "ä"], ids=["text", "bytes", "empty", "not ASCII"]
)
def test_a_value_comes_back_as_bytes(store, value):
    store.set("a/b c?", value)
    assert store.get("a/b c?") == (value.encode() if isinstance(value, str) else value)
    assert store.check(["a/b c?"])


def test_a_value_is_replaced_and_deleted(store):
    store.set("a", "1")
    store.set("a", "2")
    assert store.get("a") == b"2"
    assert store.delete_key("a") is True
    assert store.delete_key("a") is False
    assert store.check(["a"]) is False


def test_numbers_are_added_up_as_text(store):
    assert [store.add("n", amount) for amount in (5, -7, 0)] == [5, -2, -2]
    assert store.get("n") == b"-2"
    assert store.add("zero", 0) == 0
    assert store.check(["zero"])
    store.set("written", "41")
    assert store.add("written", 1) == 42


@pytest.mark.parametrize(
    ("before", "expected", "answer", "after"),
    [
        (None, "", b"new", b"new"),
        (None, "x", b"x", None),
        ("old", "x", b"old", b"old"),
        ("old", "", b"old", b"old"),
        ("old", "old", b"new", b"new"),
        ("", "", b"new", b"new"),
    ],
)
def test_compare_set(store, before, expected, answer, after):
    if before is not None:
        store.set("c", before)
    assert store.compare_set("c", expected, "new") == answer
    assert (store.get("c") if store.check(["c"]) else None) == after


def test_many_keys_at_once(store):
    store.multi_set(["a", "b"], ["1", b"\xff"])
    assert store.multi_get(["b", "a", "b"]) == [b"\xff", b"1", b"\xff"]
    assert store.multi_get([]) == []
    assert store.check([]) is True
    assert store.check(["a", "b"]) is True
    assert store.check(["a", "none"]) is False
    store.wait([])
    store.wait(["a", "b"], LONG)


def test_append(store):
    store.append("a", "1")
    store.append("a", "23")
    assert store.get("a") == b"123"


@needs("list_keys")
@not_prefixed
def test_numbers_and_names_of_keys(store):
    store.multi_set(["a", "b"], ["1", "2"])
    store.add("c", 1)
    store.delete_key("a")
    assert store.num_keys() == 2
    assert sorted(store.list_keys()) == ["b", "c"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.get("none"),
        lambda store: store.wait(["none"]),
        lambda store: store.wait(["there", "none"]),
        lambda store: store.multi_get(["there", "none"]),
    ],
    ids=["get", "wait", "wait for two", "multi_get"],
)
def test_a_key_that_nobody_sets_is_an_error_after_the_stores_timeout(store, ask):
    store.set("there", "1")
    store.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError):
        ask(store)


def test_wait_has_a_timeout_of_its_own(store):
    with pytest.raises(dist.DistStoreError):
        store.wait(["none"], SHORT)


@needs("clone")
@pytest.mark.parametrize("how", ["get", "wait", "multi_get"])
def test_a_waiting_get_returns_when_the_key_is_set(store, how):
    other = store.clone()
    got = []
    calls = {
        "get": lambda: store.get("late"),
        "wait": lambda: (store.wait(["early", "late"]), store.get("late"))[1],
        "multi_get": lambda: store.multi_get(["early", "late"])[1],
    }
    waiting = threading.Thread(target=lambda: got.append(calls[how]()))
    waiting.start()
    other.set("early", "0")
    other.set("late", "1")
    waiting.join(60)
    assert got == [b"1"]


@needs("clone")
def test_a_clone_has_the_same_keys_and_the_timeout(store):
    store.set("a", "1")
    copy = store.clone()
    assert copy.get("a") == b"1"
    assert copy.timeout == LONG


@pytest.mark.parametrize(
    "words", ["Wait timeout", r"wait timeout after \d+ms, keys: /(prefix/)?none", "[t -i]imeout"]
)
def test_a_wait_in_vain_says_so_in_the_words_of_torchs_stores(rendezvous: tuple[str, str], words):
    """Each of them has others, and torch's callers look for some: its own tests for the last."""
    made = HTTPStore(*rendezvous, scope="in vain", timeout=SHORT)
    for ask in (
        lambda: made.get("none"),
        lambda: made.wait(["none"]),
        lambda: made.wait(["none"], SHORT),
        lambda: made.multi_get(["none"]),
        lambda: made.queue_pop("none"),
        lambda: dist.PrefixStore("prefix", made).get("none"),
    ):
        with pytest.raises(dist.DistStoreError, match=words):
            ask()


@needs("list_keys", "queue_push")
@pytest.mark.parametrize("ask", ["list_keys", "queue_push", "queue_len"])
def test_limits_of_python_stores_in_a_prefix_store(rendezvous: tuple[str, str], ask):
    """docs/reference/torch.md names it; where torch passes it on one day, this test fails, and the page can say less."""
    prefixed = dist.PrefixStore("prefix", HTTPStore(*rendezvous, scope="prefixed"))
    arguments = {"list_keys": (), "queue_push": ("q", "1"), "queue_len": ("q",)}[ask]
    with pytest.raises(NotImplementedError):
        getattr(prefixed, ask)(*arguments)


@not_prefixed
def test_the_extended_api_is_there(store):
    assert store.has_extended_api() is True


@needs("queue_push")
@not_prefixed
def test_a_queue_gives_back_in_order(store):
    assert store.queue_len("q") == 0
    for item in ("1", b"", b"\x00\xff"):
        store.queue_push("q", item)
    assert store.queue_len("q") == 3
    assert [store.queue_pop("q") for _ in range(3)] == [b"1", b"", b"\x00\xff"]
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop("q", False)
    assert store.num_keys() == 0


@needs("clone", "queue_push")
@not_prefixed
def test_a_waiting_pop_returns_when_an_item_is_pushed(store):
    other = store.clone()
    got = []
    waiting = [threading.Thread(target=lambda: got.append(store.clone().queue_pop("q"))) for _ in range(2)]
    for thread in waiting:
        thread.start()
    other.queue_push("q", "1")
    other.queue_push("q", "2")
    for thread in waiting:
        thread.join(60)
    assert sorted(got) == [b"1", b"2"]


@needs("queue_pop")
@not_prefixed
def test_an_item_that_nobody_pushes_is_an_error_after_the_stores_timeout(store):
    store.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError):
        store.queue_pop("q")


@needs("barrier")
def test_the_barrier_of_the_store(store):
    store.barrier("gate", 1, LONG)
    with pytest.raises(dist.DistStoreError):
        store.barrier("other gate", 2, SHORT)
