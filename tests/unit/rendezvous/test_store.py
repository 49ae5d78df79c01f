"""The store against a model, its limits, and who is called when a key is set; the scopes of Horovod's workers."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hvlaunch.rendezvous import RendezvousError, StoreFull, ValueTooLarge
from hvlaunch.rendezvous.serving.http import Answer, Head
from hvlaunch.rendezvous.serving.routes import Routes
from hvlaunch.rendezvous.store import HorovodScopes, Store, StoreLimits
from tests.unit.rendezvous.wire import TOKEN

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


HOST = "10.0.0.1"
SIZES = {"global": 3, "local_a": 2, "cross_0": 1}
OPEN = ["global", "local_a", "cross_0", "global_process_set_hash_1f", "local_a_process_set_hash_1f"]
CLOSED = [
    "s",
    "local_b",
    "globals",
    "global_process_set",
    "x_process_set_hash_1f",
    "_process_set_hash_1f",
    "Global",
    "hvlaunch.asks",
]


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def scopes():
    scopes = HorovodScopes()
    scopes.open(SIZES, {HOST, "relay:b"}, 0)
    return scopes


@pytest.fixture
def ask(store, scopes):
    """ask(method, target, body, peer=…, authorization=…), of a worker that has no token."""
    routes = Routes(store, token=TOKEN, horovod=scopes)

    def ask_routes(method, target, body=b"", *, peer=HOST, authorization=b""):
        outcome = routes(Head(method, target.encode(), authorization, peer))
        return outcome if isinstance(outcome, Answer) else outcome(body)

    return ask_routes


@pytest.mark.parametrize("scope", OPEN)
def test_workers_on_the_job_s_hosts_need_no_token(ask, store, scope):
    for peer in (HOST, "relay:b"):
        assert ask("GET", f"/{scope}/rank_0", peer=peer) == Answer(404)
        assert ask("PUT", f"/{scope}/rank_0", b"a", peer=peer) == Answer(200)
        assert ask("GET", f"/{scope}/rank_0", peer=peer) == Answer(200, b"a")
        assert ask("DELETE", f"/{scope}/rank_0", peer=peer) == Answer(200)
        assert store.keys == 0
        assert ask("HEAD", f"/{scope}/rank_0", peer=peer).status == 405
        assert ask("GET", f"/{scope}/a/b", peer=peer).status == 400


def test_workers_may_say_where_to_notify_them_and_nobody_may_read_it(ask, store, scopes):
    """Horovod's elastic state tells it, also in a job that is not elastic."""
    assert ask("PUT", "/worker_addresses/a:0", b"secret") == Answer(200)
    for method in ("GET", "DELETE", "HEAD"):
        assert ask(method, "/worker_addresses/a:0").status == 401
    assert ask("PUT", "/worker_addresses/a:0", b"x", peer="10.0.0.2").status == 401
    assert ask("PUT", "/worker_addresses_process_set_hash_1f/a:0", b"x").status == 401
    scopes.clear(store)
    assert store.keys == 0


@pytest.mark.parametrize("peer", ["10.0.0.2", "", "10.0.0.10", "relay:a"])
def test_nobody_else_gets_in(ask, store, peer):
    for scope in OPEN:
        for method in ("GET", "PUT", "DELETE", "HEAD", "POST"):
            assert ask(method, f"/{scope}/0", b"x", peer=peer).status == 401
    assert store.version == 0


@pytest.mark.parametrize("scope", [*CLOSED, "-"])
def test_no_other_scope_is_open(ask, store, scope):
    for method in ("GET", "PUT", "DELETE", "HEAD", "POST"):
        assert ask(method, f"/{scope}/0", b"x").status == 401
    for verb in ("get", "read", "watch", "add"):
        assert ask("GET", f"/-/{verb}/global/0").status == 401
    assert ask("GET", "/global").status == 400
    assert store.version == 0


@pytest.mark.parametrize("authorization", [b"Bearer wrong", b"Bearer ", b"Basic x", b"x"])
def test_a_wrong_token_is_worse_than_none(ask, authorization):
    assert ask("GET", "/global/0", authorization=authorization).status == 401


def test_the_token_opens_them_to_all(ask, store):
    assert (
        ask("PUT", "/global/0", b"x", peer="10.9.9.9", authorization=f"Bearer {TOKEN}".encode()).status == 200
    )
    assert store.get("global", "0") == b"x"


def test_a_scope_is_cleared_when_all_ranks_have_finished(ask, store):
    for rank in range(3):
        ask("PUT", f"/global/rank_{rank}", b"host")
        ask("PUT", f"/global/{rank}", b"addresses")
    ask("PUT", "/local_a/0", b"other")
    for rank in (2, 0, 0, 2):
        assert ask("DELETE", f"/global/{rank}") == Answer(200)
    assert store.count("global") == 6
    ask("DELETE", "/global/rank_1")
    assert store.count("global") == 5
    ask("DELETE", "/global/1")
    assert store.count("global") == 0
    assert store.get("local_a", "0") == b"other"
    ask("PUT", "/global/0", b"the next time")
    ask("DELETE", "/global/0")
    assert store.get("global", "0") == b"the next time"


def test_a_scope_of_one(ask, store):
    ask("PUT", "/cross_0/rank_0", b"host")
    ask("DELETE", "/cross_0/0")
    assert store.keys == 0


def test_a_process_set_s_scope_is_cleared_when_its_ranks_have_finished(ask, store):
    scope = "global_process_set_hash_1f"  # of two of three ranks
    for rank in (0, 2):
        ask("PUT", f"/{scope}/rank_{rank}", b"host")
        ask("PUT", f"/{scope}/{rank}", b"addresses")
    ask("DELETE", f"/{scope}/2")
    assert store.keys_of(scope) == ["0", "rank_0", "rank_2"]
    ask("DELETE", f"/{scope}/0")
    assert store.count(scope) == 0


def test_in_other_scopes_a_delete_is_a_delete(ask, store):
    for scope in ("s", "globals"):
        store.put(scope, "0", b"")
        store.put(scope, "1", b"")
        ask("DELETE", f"/{scope}/0", authorization=f"Bearer {TOKEN}".encode())
        assert store.keys_of(scope) == ["1"]


def test_a_new_round_has_scopes_of_its_own(ask, scopes, store):
    ask("PUT", "/global/0", b"")
    ask("DELETE", "/global/0")
    ask("DELETE", "/global/1")
    store.put("s", "k", b"")
    scopes.clear(store)
    assert store.scopes() == ["s"]
    scopes.open({"global": 2}, {"10.0.0.2"}, 1)
    assert ask("GET", "/global/0").status == 401
    assert ask("GET", "/local_a/0", peer="10.0.0.2").status == 401
    ask("PUT", "/global/0", b"", peer="10.0.0.2")
    ask("DELETE", "/global/2", peer="10.0.0.2")
    assert store.count("global") == 1
