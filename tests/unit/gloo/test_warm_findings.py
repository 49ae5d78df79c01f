"""What the hosts of a pool find out of the network: what a job tells, and how long it holds."""

from pathlib import Path
from typing import Any

import pytest

from hvlaunch.driver import warm_findings as module
from hvlaunch.driver.warm_findings import WarmFindings
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.errors import HvlaunchError
from hvlaunch.job import JobResult
from hvlaunch.outside.pools import KnownPool, PoolGone
from hvlaunch.pool.findings import FINDINGS, Findings
from tests.unit.gloo.history import facts

POOL = KnownPool("p", Path("/nowhere"), {}, is_up=True)
DRIVER = {"tried": ["10.0.0.9"], "port": None, "at": "10.0.0.9"}
BOTH = [["10.0.0.2", "10.9.0.2"], ["10.0.0.2"]]
FOUND: dict[str, Any] = {
    "a": {"hosts": {"b": BOTH}, "rendezvous": DRIVER},
    "b": {"hosts": {"a": BOTH}, "rendezvous": None},
}


class Site:
    """Hosts with connections, by number; and a clock."""

    def __init__(self) -> None:
        self.connections = {"a": 1, "b": 1}
        self.now = 0.0
        self.findings = Findings(self.connections.get, lambda: self.now)


def test_what_was_found_holds_for_ten_minutes() -> None:
    site = Site()
    site.findings.add(FOUND)
    site.now = 599.0
    assert site.findings.of_all() == FOUND
    site.now = 600.0
    assert site.findings.of_all() == {}


def test_what_was_found_again_holds_anew() -> None:
    site = Site()
    site.findings.add(FOUND)
    site.now = 500.0
    site.findings.add({"b": FOUND["b"]})
    site.now = 700.0
    assert site.findings.of_all() == {"b": FOUND["b"]}


@pytest.mark.parametrize("connection", [2, None], ids=["another", "none"])
def test_it_holds_for_the_connections_that_there_were(connection: int | None) -> None:
    site = Site()
    site.findings.add(FOUND)
    if connection is None:
        del site.connections["b"]
    else:
        site.connections["b"] = connection
    assert site.findings.of_all() == {"a": {"hosts": {}, "rendezvous": DRIVER}}
    site.connections["b"] = 1
    assert site.findings.of_all() == {"a": {"hosts": {}, "rendezvous": DRIVER}}


def test_hosts_that_the_pool_has_not_are_not_kept() -> None:
    site = Site()
    site.findings.add(
        {"x": {"hosts": {"a": BOTH}, "rendezvous": DRIVER}, "a": {"hosts": {"x": BOTH}, "rendezvous": None}}
    )
    assert site.findings.of_all() == {}


def test_all_is_forgotten_at_once() -> None:
    site = Site()
    site.findings.add(FOUND)
    site.findings.forget()
    assert site.findings.of_all() == {}


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        {"a": {}},
        {"a": {"hosts": {"b": [["10.0.0.2"]]}, "rendezvous": None}},
        {"a": {"hosts": {"b": [["10.0.0.2"], ["here"]]}, "rendezvous": None}},
        {"a": {"hosts": {"b\x1b[1m": BOTH}, "rendezvous": None}},
        {"a": {"hosts": {}, "rendezvous": {**DRIVER, "at": "driver"}}},
        {"a": {"hosts": {}, "rendezvous": {**DRIVER, "port": 0}}},
        {"a": {"hosts": {}, "rendezvous": {**DRIVER, "tried": ["10.0.0.9"] * 65}}},
    ],
)
def test_what_is_none_is_not_taken(found: Any) -> None:
    assert not FINDINGS(found)


def test_what_a_job_tells_may_be_told() -> None:
    assert FINDINGS(FOUND)
    assert FINDINGS({})


class Told:
    """A job's findings, and what the pool is told."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, port: int = 0, error: HvlaunchError | None = None
    ) -> None:
        self.requests: list[Any] = []

        def ask(pool: KnownPool, request: Any, timeout: float) -> None:
            assert (pool, timeout) == (POOL, 1.0)
            self.requests.append(request)
            if error is not None:
                raise error

        monkeypatch.setattr(module, "ask", ask)
        self._findings = WarmFindings(POOL, port)

    def play(self, event: on.Event, *actions: do.Action) -> None:
        self._findings.see(event, actions, 0.0)

    def ask(self, agent: int = 0) -> None:
        """a is to try b."""
        self.play(on.Tick(), do.Probe("a", "b", ("10.0.0.2", "10.9.0.2"), 9, agent))

    def end(self, code: int = 0) -> list[Any]:
        self.play(on.Tick(), do.Finish(JobResult(exit_code=code, elapsed=1.0)))
        return self.requests


def test_a_job_that_ends_well_tells_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    told.ask()
    told.play(on.RendezvousReached("a", "10.0.0.9", ("10.0.0.9",)))
    told.play(on.HostProbed("a", "b", "10.0.0.2"))
    told.play(on.HostProbed("a", "b", None))
    assert told.requests == []
    [request] = told.end()
    assert request == {"what": "found", "found": {"a": {"hosts": {"b": BOTH}, "rendezvous": DRIVER}}}
    assert FINDINGS(request["found"])


def test_the_port_that_the_user_chose_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch, port=29400)
    told.play(on.RendezvousReached("a", "10.0.0.9", ("10.0.0.9",)))
    [request] = told.end()
    assert request["found"]["a"]["rendezvous"] == {**DRIVER, "port": 29400}


@pytest.mark.parametrize(
    "event",
    [
        on.RendezvousReached("a", None, ("10.0.0.9",)),
        on.RendezvousReached("a", "127.0.0.1", ("10.0.0.9",), 4711),
        on.RendezvousReached("a", "10.0.0.9", ("fe80::1%eth0",)),
        on.HostProbed("a", "b", None),
        on.HostProbed("a", "c", "10.0.0.3"),
        on.HostProbed("a", "b", "10.0.0.2", 1),
    ],
    ids=["not reached", "relayed", "no address of others", "nothing", "not asked", "another agent"],
)
def test_nothing_is_told_of(monkeypatch: pytest.MonkeyPatch, event: on.Event) -> None:
    told = Told(monkeypatch)
    told.ask()
    told.play(event)
    assert told.end() == []


@pytest.mark.parametrize(
    "known",
    [{"rendezvous": "10.0.0.9"}, {"findings": {"b": on.Reached(("10.0.0.2",), ("10.0.0.2",))}}],
    ids=["rendezvous", "hosts"],
)
def test_a_job_that_went_by_earlier_findings_and_failed_has_them_forgotten(
    monkeypatch: pytest.MonkeyPatch, known: dict[str, Any]
) -> None:
    told = Told(monkeypatch)
    told.play(on.HostReady("a", facts(1, **known)))
    told.play(on.HostReady("b", facts(2)))
    assert told.end(1) == [{"what": "forget"}]


def test_a_job_that_found_all_itself_and_failed_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    told.play(on.HostReady("a", facts(1)))
    told.play(on.RendezvousReached("a", "10.0.0.9", ("10.0.0.9",)))
    assert told.end(1) == []


def test_a_job_that_ended_well_by_earlier_findings_has_nothing_to_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told(monkeypatch)
    told.play(on.HostReady("a", facts(1, rendezvous="10.0.0.9")))
    assert told.end() == []


def test_a_pool_that_is_gone_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch, error=PoolGone("gone"))
    told.play(on.RendezvousReached("a", "10.0.0.9", ("10.0.0.9",)))
    assert len(told.end()) == 1
