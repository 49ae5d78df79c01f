"""The store against a model, its limits, and who is called when a key is set."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hvlaunch.rendezvous import RendezvousError, StoreFull, ValueTooLarge
from hvlaunch.rendezvous.store import Store, StoreLimits

NAMES = st.sampled_from(["a", "b", "round-0"])


class AgainstAModel(RuleBasedStateMachine):
    """A dict, and lists of what waiters should have been told."""

    def __init__(self):
        super().__init__()
        self.store = Store(StoreLimits(value=8, total=40, keys=4))
        self.model = {}
        self.waiters = []

    @rule(scope=NAMES, key=NAMES, value=st.binary(max_size=10))
    def put(self, scope, key, value):
        wanted = {**self.model, (scope, key): value}
        expected: type[Exception] | None
        if len(value) > 8:
            expected = ValueTooLarge
        elif len(wanted) > 4 or weight(wanted) > 40:
            expected = StoreFull
        else:
            expected = None
        if expected:
            with pytest.raises(expected):
                self.store.put(scope, key, value)
            return
        self.store.put(scope, key, value)
        self.model = wanted
        for waiter in self.waiters:
            if waiter["place"] == (scope, key) and waiter["live"]:
                waiter["expected"].append(value)
                waiter["live"] = False

    @rule(scope=NAMES, key=NAMES)
    def delete(self, scope, key):
        assert self.store.delete(scope, key) == ((scope, key) in self.model)
        self.model.pop((scope, key), None)

    @rule(scope=NAMES, key=NAMES)
    def wait(self, scope, key):
        told: list[bytes] = []
        call_off = self.store.when_set(scope, key, told.append)
        self.waiters.append(
            {"place": (scope, key), "told": told, "expected": [], "live": True, "call_off": call_off}
        )

    @rule(data=st.data())
    def call_off(self, data):
        if self.waiters:
            waiter = data.draw(st.sampled_from(self.waiters))
            waiter["call_off"]()
            waiter["live"] = False

    @invariant()
    def is_as_the_model(self):
        for scope in ("a", "b", "round-0"):
            for key in ("a", "b", "round-0"):
                assert self.store.get(scope, key) == self.model.get((scope, key))
        assert self.store.keys == len(self.model)
        assert self.store.size == weight(self.model)
        assert self.store.waiting == sum(waiter["live"] for waiter in self.waiters)
        assert all(waiter["told"] == waiter["expected"] for waiter in self.waiters)


def weight(model):
    return sum(len(scope) + len(key) + len(value) for (scope, key), value in model.items())


AgainstAModel.TestCase.settings = settings(max_examples=60, deadline=None)
TestStoreAgainstAModel = AgainstAModel.TestCase


def test_a_refused_put_has_no_effect():
    store = Store(StoreLimits(value=4))
    store.put("s", "k", b"old")
    told: list[bytes] = []
    store.when_set("s", "k", told.append)
    with pytest.raises(ValueTooLarge, match="s/k: 5 bytes, but a value may have at most 4"):
        store.put("s", "k", b"large")
    assert store.get("s", "k") == b"old"
    assert told == []


def test_a_full_store_still_takes_smaller_values_for_the_keys_it_has():
    store = Store(StoreLimits(total=10, keys=1))
    store.put("s", "k", b"12345678")
    with pytest.raises(StoreFull, match="the rendezvous is full: it has 1 keys"):
        store.put("s", "other", b"")
    with pytest.raises(StoreFull, match="the rendezvous is full: it would have 11 bytes, and may have 10"):
        store.put("s", "k", b"123456789")
    store.put("s", "k", b"1")
    assert store.get("s", "k") == b"1"


def test_limits_are_one_kind_of_error():
    assert issubclass(ValueTooLarge, RendezvousError)
    assert issubclass(StoreFull, RendezvousError)


def test_a_waiter_may_wait_again_from_inside_its_call():
    store = Store()
    told = []

    def again(value):
        told.append(value)
        store.when_set("s", "k", told.append)

    store.when_set("s", "k", again)
    store.put("s", "k", b"1")
    store.put("s", "k", b"2")
    assert told == [b"1", b"2"]
    assert store.waiting == 0


def test_cancelled_waits_free_their_memory():
    store = Store()
    offs = [store.when_set("s", f"k{number}", lambda value: None) for number in range(100)]
    for off in offs:
        off()
        off()
    assert store.waiting == 0
    assert not store._until_set._calls


def test_deleted_keys_free_their_memory():
    store = Store(StoreLimits(deletions=3))
    for number in range(100):
        store.put(f"round-{number}", "k", b"v")
        store.delete(f"round-{number}", "k")
    assert len(store._scopes) == len(store._deletions) == 3
    assert store._deleted_names == 3 * len("round-99k")
