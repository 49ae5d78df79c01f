"""The store through real HTTP, against a model: alone step by step, and with many clients at once.

HVLAUNCH_EXAMPLES=5000 pytest tests/unit/rendezvous/test_properties.py    # a long run
"""

import itertools
import os
import re
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hvlaunch.rendezvous import NotANumber, RendezvousClosed, RendezvousUnreachable, WaitTimeout
from hvlaunch.rendezvous.client import Client, Versioned
from hvlaunch.rendezvous.messages import Changes
from hvlaunch.rendezvous.serving import RendezvousServer
from tests.unit.rendezvous.wire import TOKEN

EXAMPLES = int(os.environ.get("HVLAUNCH_EXAMPLES", "40"))
RELAXED = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
SOON = 30.0
NAMES = st.sampled_from(["a", "b", "key with spaces/%", "ä", "0"])
VALUES = st.one_of(st.binary(max_size=20), st.integers(-5, 5).map(lambda number: b"%d" % number))
THREADS = 4
fresh = itertools.count()


def start_server() -> RendezvousServer:
    server = RendezvousServer(TOKEN, host="127.0.0.1")
    server.start()
    return server


@pytest.fixture(scope="module")
def server():
    server = start_server()
    yield server
    stats = server.stats()
    server.close()
    assert (stats.faults, stats.waiting) == (0, 0)


def client_of(server: RendezvousServer) -> Client:
    return Client(f"http://127.0.0.1:{server.port}", TOKEN)


def at_once(*calls):
    """Call all of them in threads of their own, as much at one time as can be; their results in order."""
    gate = threading.Barrier(len(calls))

    def run(call):
        gate.wait(SOON)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(SOON) for future in [pool.submit(run, call) for call in calls]]


# Step by step


class Read(NamedTuple):
    """A version that a client was told, and which change of the scope had made it; None: the key was not set."""

    scope: int
    key: str
    version: str
    change: int | None


class Seen(NamedTuple):
    """What a watcher has heard of a scope: up to that version, which is after so many changes."""

    scope: int
    version: int
    changes: int


class StoreMachine(RuleBasedStateMachine):
    """The model is a dict for each scope. Requests go by one client or another, waits by threads of their own."""

    server: RendezvousServer
    pool: ThreadPoolExecutor

    reads: Bundle[Read] = Bundle("reads")
    sightings: Bundle[Seen] = Bundle("sightings")
    clients = st.sampled_from([0, 1, 2])
    scopes = st.sampled_from([0, 1])
    batches = st.dictionaries(NAMES, VALUES, max_size=4)

    def __init__(self) -> None:
        super().__init__()
        number = next(fresh)
        self.names = [f"scope {number}.{index}" for index in (0, 1)]
        self.connections = [client_of(self.server) for _ in range(3)]
        self.values: list[dict[str, bytes]] = [{}, {}]
        self.latest: list[dict[str, int]] = [{}, {}]
        self.changed: list[list[str]] = [[], []]
        self.waits: list[tuple[int, list[str], Future[bytes | None]]] = []
        self.watches: list[tuple[int, str | None, int, Future[Changes]]] = []

    def teardown(self) -> None:
        everything = dict.fromkeys(("a", "b", "key with spaces/%", "ä", "0"), b"end")
        for name in self.names:
            self.connections[0].put_many(name, everything)
        for future in self._pending():
            future.result(SOON)
        for name in self.names:
            self.connections[0].delete_scope(name)
        for connection in self.connections:
            connection.close()

    def _change(self, scope: int, changes: dict[str, bytes | None]) -> None:
        """The model does what the server has done; who waited for that, and no one else, has been told of just that."""
        for key, value in changes.items():
            self.changed[scope].append(key)
            if value is None:
                del self.values[scope][key], self.latest[scope][key]
            else:
                self.values[scope][key] = value
                self.latest[scope][key] = len(self.changed[scope])
        values = self.values[scope]
        for wait in list(self.waits):
            place, keys, future = wait
            if place == scope and all(key in values for key in keys):
                assert future.result(SOON) in (None, values[keys[0]])
                self.waits.remove(wait)
        for watch in list(self.watches):
            place, watched, since, changes_seen = watch
            news = {one: values.get(one) for one in self.changed[place][since:] if watched in (None, one)}
            if place == scope and news:
                assert changes_seen.result(SOON).values == news
                self.watches.remove(watch)

    def _pending(self) -> list[Future[bytes | None] | Future[Changes]]:
        return [*(wait[-1] for wait in self.waits), *(watch[-1] for watch in self.watches)]

    def _begin(self, call):
        """In a thread of its own, until it waits at the server."""
        before = self.server.stats().waiting
        future = self.pool.submit(call)
        deadline = time.monotonic() + SOON
        while self.server.stats().waiting == before:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return future

    @invariant()
    def who_waits_for_something_else_still_waits(self):
        assert not [future for future in self._pending() if future.done()]

    @rule(client=clients, scope=scopes, key=NAMES, value=VALUES)
    def put(self, client, scope, key, value):
        self.connections[client].put(self.names[scope], key, value)
        self._change(scope, {key: value})

    @rule(client=clients, scope=scopes, key=NAMES)
    def delete(self, client, scope, key):
        was_set = self.connections[client].delete(self.names[scope], key)
        assert was_set == (key in self.values[scope])
        self._change(scope, {key: None} if was_set else {})

    @rule(client=clients, scope=scopes)
    def delete_scope(self, client, scope):
        self.connections[client].delete_scope(self.names[scope])
        self._change(scope, dict.fromkeys(self.values[scope]))

    @rule(client=clients, scope=scopes, values=batches)
    def put_many(self, client, scope, values):
        self.connections[client].put_many(self.names[scope], values)
        self._change(scope, dict(values))

    @rule(client=clients, scope=scopes, key=NAMES, amount=st.integers(-(1 << 62), 1 << 62))
    def add(self, client, scope, key, amount):
        old = self.values[scope].get(key, b"0")
        if re.fullmatch(rb"[+-]?[0-9]+", old) and -(1 << 63) <= int(old) + amount < 1 << 63:
            total = int(old) + amount
            assert self.connections[client].add(self.names[scope], key, amount) == total
            self._change(scope, {key: b"%d" % total})
        else:
            with pytest.raises(NotANumber):
                self.connections[client].add(self.names[scope], key, amount)

    @rule(client=clients, scope=scopes, key=NAMES, value=VALUES)
    def append(self, client, scope, key, value):
        self.connections[client].append(self.names[scope], key, value)
        self._change(scope, {key: self.values[scope].get(key, b"") + value})

    @rule(target=reads, client=clients, scope=scopes, key=NAMES)
    def read(self, client, scope, key):
        found = self.connections[client].read(self.names[scope], key)
        assert found.value == self.values[scope].get(key)
        return Read(scope, key, found.version, self.latest[scope].get(key))

    @rule(target=reads, client=clients, read=reads, value=VALUES)
    def compare_and_set(self, client, read, value):
        scope, key, version, change = read
        done, now = self.connections[client].compare_and_set(self.names[scope], key, value, version)
        assert done == (self.latest[scope].get(key) == change)
        if done:
            self._change(scope, {key: value})
        assert now.value == self.values[scope].get(key)
        return Read(scope, key, now.version, self.latest[scope].get(key))

    @rule(client=clients, scope=scopes, keys=st.lists(NAMES, max_size=4))
    def look_at_many(self, client, scope, keys):
        values, name, connection = self.values[scope], self.names[scope], self.connections[client]
        assert connection.get_many(name, keys) == [values.get(key) for key in keys]
        assert connection.check(name, keys) == all(key in values for key in keys)
        assert connection.keys(name) == sorted(values)
        assert connection.count(name) == len(values)
        assert [connection.get(name, key) for key in keys] == [values.get(key) for key in keys]

    @rule(target=sightings, client=clients, scope=scopes)
    def see(self, client, scope):
        seen = self.connections[client].watch(self.names[scope], timeout=0)
        assert (seen.values, seen.complete) == (self.values[scope], bool(self.values[scope]))
        return Seen(scope, seen.version, len(self.changed[scope]))

    @rule(target=sightings, client=clients, seen=sightings)
    def see_what_changed_since(self, client, seen):
        values, changed = self.values[seen.scope], self.changed[seen.scope][seen.changes :]
        now = self.connections[client].watch(self.names[seen.scope], since=seen.version, timeout=0)
        assert now.values == {key: values.get(key) for key in changed}
        assert now.version >= seen.version
        return Seen(seen.scope, now.version, len(self.changed[seen.scope]))

    @rule(client=clients, seen=sightings, key=NAMES)
    def see_whether_a_key_changed_since(self, client, seen, key):
        changed = self.changed[seen.scope][seen.changes :]
        now = self.connections[client].watch(self.names[seen.scope], key, since=seen.version, timeout=0)
        assert now.values == ({key: self.values[seen.scope].get(key)} if key in changed else {})

    @precondition(lambda self: len(self.waits) + len(self.watches) < THREADS)
    @rule(client=clients, scope=scopes, keys=st.lists(NAMES, min_size=1, max_size=3))
    def wait(self, client, scope, keys):
        connection, name, values = self.connections[client], self.names[scope], self.values[scope]

        def call():
            return (
                connection.wait(name, keys[0], SOON)
                if len(keys) == 1
                else connection.wait_all(name, keys, SOON)
            )

        if all(key in values for key in keys):
            assert call() in (None, values[keys[0]])
        else:
            self.waits.append((scope, keys, self._begin(call)))

    @precondition(lambda self: len(self.waits) + len(self.watches) < THREADS)
    @rule(client=clients, scope=scopes, key=st.none() | NAMES)
    def watch(self, client, scope, key):
        connection, name = self.connections[client], self.names[scope]
        since = connection.watch(name, timeout=0).version
        future = self._begin(lambda: connection.watch(name, key, since=since, timeout=SOON))
        self.watches.append((scope, key, len(self.changed[scope]), future))

    @rule(client=clients, scope=scopes, key=NAMES)
    def wait_in_vain(self, client, scope, key):
        if key not in self.values[scope]:
            with pytest.raises(WaitTimeout):
                self.connections[client].wait(self.names[scope], key, 0.001)


def test_the_store_is_as_the_model_says(server):
    with ThreadPoolExecutor(THREADS) as pool:
        machine = type("Machine", (StoreMachine,), {"server": server, "pool": pool})
        run_state_machine_as_test(machine, settings=settings(RELAXED, stateful_step_count=40))


# Many at once


class Event(NamedTuple):
    """One operation of one client on the one key: when it began and ended, what it was and gave."""

    begun: float
    ended: float
    kind: str
    argument: Any
    result: Any


def linearizable(events: frozenset[Event], value: bytes | None, tried: set[Any] | None = None) -> bool:
    """Whether there is an order, in which none comes before one that had ended when it began, that explains all results.

    By trial, as Wing and Gong have it (Testing and Verifying Concurrent Objects, 1993).
    """
    tried = set() if tried is None else tried
    if not events:
        return True
    if (events, value) in tried:
        return False
    tried.add((events, value))
    first_end = min(event.ended for event in events)
    for event in events:
        if event.begun <= first_end:
            fits, new = step(event, value)
            if fits and linearizable(events - {event}, new, tried):
                return True
    return False


def step(event: Event, value: bytes | None) -> tuple[bool, bytes | None]:
    """Whether the event can happen to this value, and the value after it."""
    kind, argument, result = event[2:]
    if kind == "put":
        return True, argument
    if kind == "get":
        return result == value, value
    if kind == "append":
        return True, (value or b"") + argument
    if kind == "delete":
        return result == (value is not None), None
    expected = argument[0]  # compare and set: every value is set once, so it tells the version
    return result == (expected == value), argument[1] if result else value


def act(client: Client, scope: str, kind: str, mine: bytes) -> Event:
    begun = time.monotonic()
    argument: Any = mine
    if kind == "swap":
        read = client.read(scope, "k")
        begun = time.monotonic()  # what was read stands for itself
        argument = (read.value, mine)
        result = client.compare_and_set(scope, "k", mine, read.version)[0]
    elif kind in ("put", "append"):
        result = getattr(client, kind)(scope, "k", mine)
    else:
        result = getattr(client, kind)(scope, "k")
    return Event(begun, time.monotonic(), kind, argument, result)


PROGRAM = st.lists(st.sampled_from(["put", "get", "append", "swap", "delete", "get"]), min_size=1, max_size=5)


@given(programs=st.lists(PROGRAM, min_size=2, max_size=4))
@RELAXED
def test_what_clients_do_to_a_key_at_once_has_an_order(server, programs):
    scope = f"order {next(fresh)}"

    def run(number: int) -> list[Event]:
        with client_of(server) as client:
            kinds = enumerate(programs[number])
            return [act(client, scope, kind, b"<%d.%d>" % (number, index)) for index, kind in kinds]

    events = at_once(*(partial(run, number) for number in range(len(programs))))
    assert linearizable(frozenset(itertools.chain(*events)), None), events


def test_a_history_without_an_order_is_told_from_one_with():
    put = Event(0, 1, "put", b"1", None)
    assert linearizable(frozenset([put, Event(0.5, 2, "get", None, None)]), None)
    assert linearizable(frozenset([put, Event(0.5, 2, "get", None, b"1")]), None)
    assert not linearizable(frozenset([put, Event(1.5, 2, "get", None, None)]), None)
    swaps = [Event(0, 9, "swap", (None, b"x"), True), Event(0, 9, "swap", (None, b"y"), True)]
    assert not linearizable(frozenset(swaps), None)


@given(amounts=st.lists(st.lists(st.integers(-100, 100), min_size=1, max_size=8), min_size=2, max_size=6))
@RELAXED
def test_no_addition_is_lost_and_each_sum_is_told_once(server, amounts):
    scope = f"add {next(fresh)}"

    def run(mine: list[int]) -> list[int]:
        with client_of(server) as client:
            return [client.add(scope, "n", amount * 1000 + 1) for amount in mine]

    sums = list(itertools.chain(*at_once(*(partial(run, mine) for mine in amounts))))
    total = sum(amount * 1000 + 1 for mine in amounts for amount in mine)
    assert client_of(server).get(scope, "n") == b"%d" % total
    assert len({one % 1000 for one in sums}) == len(
        sums
    )  # by the ones that have been added, the order of the sums
    assert total in sums


@given(clients=st.integers(2, 8), versions=st.integers(1, 6))
@RELAXED
def test_each_version_has_one_winner(server, clients, versions):
    scope = f"race {next(fresh)}"
    with client_of(server) as referee:
        for _ in range(versions):
            before = referee.read(scope, "k")

            def race(number: int, version: str = before.version) -> tuple[bool, Versioned]:
                with client_of(server) as client:
                    return client.compare_and_set(scope, "k", b"%d" % number, version)

            results = at_once(*(partial(race, number) for number in range(clients)))
            [winner] = [number for number, (done, _) in enumerate(results) if done]
            after = referee.read(scope, "k")
            assert after.value == b"%d" % winner
            assert {now for _, now in results} == {after}


@given(writers=st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=3))
@RELAXED
def test_a_watch_misses_nothing_and_never_goes_back(server, writers):
    """Each writer counts in its own key, or deletes it; watchers follow the scope, or one key, to the end."""
    scope = f"watch {next(fresh)}"

    def write(number: int) -> None:
        with client_of(server) as client:
            for index, keep in enumerate(writers[number]):
                if keep:
                    client.put(scope, str(number), b"%d" % index)
                else:
                    client.delete(scope, str(number))
            client.put(scope, str(number), b"1000")

    def follow(key: str | None) -> dict[str, list[int]]:
        told: dict[str, list[int]] = {str(number): [] for number in range(len(writers))}
        wanted = list(told) if key is None else [key]
        since = 0
        with client_of(server) as client:
            while any(told[name][-1:] != [1000] for name in wanted):
                changes = client.watch(scope, key, since=since, timeout=SOON)
                assert changes.values  # or it was missed
                assert changes.version > since
                since = changes.version
                for name, value in changes.values.items():
                    told[name] += [] if value is None else [int(value)]
        return told

    watchers = [partial(follow, key) for key in (None, None, "0")]
    results = at_once(*watchers, *(partial(write, number) for number in range(len(writers))))
    for told in results[: len(watchers)]:
        for values in told.values():
            assert values == sorted(values)


@given(fates=st.lists(st.sampled_from(["set", "never", "batch", "add"]), min_size=1, max_size=10))
@RELAXED
def test_every_long_poll_ends(server, fates):
    scope = f"poll {next(fresh)}"

    def wait(number: int) -> bytes | None:
        patience = 0.02 if fates[number] == "never" else SOON
        with client_of(server) as client:
            try:
                return client.wait(scope, str(number), patience)
            except WaitTimeout:
                return None

    def fulfil() -> None:
        with client_of(server) as client:
            for number, fate in enumerate(fates):
                if fate == "set":
                    client.put(scope, str(number), b"1")
                elif fate == "add":
                    client.add(scope, str(number), 1)
            client.put_many(
                scope, {str(number): b"1" for number, fate in enumerate(fates) if fate == "batch"}
            )

    *found, _ = at_once(*(partial(wait, number) for number in range(len(fates))), fulfil)
    assert found == [None if fate == "never" else b"1" for fate in fates]


def test_every_long_poll_ends_with_the_server(until):
    server = start_server()
    waits = [
        lambda c: c.wait("s", "k", SOON),
        lambda c: c.wait_all("s", ["k", "l"], SOON),
        lambda c: c.watch("s", timeout=SOON),
    ] * 5
    with ThreadPoolExecutor(len(waits)) as pool:
        futures = [pool.submit(wait, client_of(server)) for wait in waits]
        until(lambda: server.stats().waiting == len(waits))
        server.close()
        for future in futures:
            with pytest.raises((RendezvousClosed, RendezvousUnreachable)):
                future.result(SOON)
