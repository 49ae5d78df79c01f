"""Reconnecting: how often, for how long, and its ends."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hvlaunch.agent.wire.carrier import EXIT_NO_AGENT
from hvlaunch.driver.links.session import Candidate, Renewal, RenewalFailed
from hvlaunch.errors import ConnectFailed, HostError, PermissionDenied, StartTimeout

REFUSED = ConnectFailed("no connection to b port 22: 10.0.0.2: Connection refused", host="b")
SILENT = StartTimeout("no connection to b port 22: 10.0.0.2: no answer within 3 s", host="b")
DENIED = PermissionDenied("permission denied", host="b", hint="", tried=())


class FakeChannel:
    def __init__(self, frames: list[Any], status: int | None = None) -> None:
        self._frames, self._status = frames, status

    def frames(self) -> Iterator[Any]:
        yield from self._frames

    def exit_status(self, _timeout: float) -> int | None:
        return self._status

    def stderr(self) -> bytes:
        return b"the host's words\n"


class FakeConnection:
    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


class Attempts:
    """The results of attempts, an error or a channel; each takes a second of the played clock."""

    def __init__(self, *results: Any) -> None:
        self.now = 0.0
        self.limits: list[float] = []
        self.connections: list[FakeConnection] = []
        self.found = threading.Event()
        self._results = list(results)

    def connect(self, _ears: Any, limit: float) -> Any:
        self.now += 1.0
        self.limits.append(limit)
        result = self._results.pop(0) if len(self._results) > 1 else self._results[0]
        if isinstance(result, HostError):
            raise result
        self.connections.append(FakeConnection())
        return self.connections[-1], result

    def renewal(self, patience: float = 5.0) -> Renewal:
        return Renewal(
            "b", self.connect, patience, self.found.set, random=lambda: -0.99, clock=lambda: self.now
        )


def challenge() -> FakeChannel:
    return FakeChannel([({"type": "challenge", "nonce": "n"}, b"")])


def test_the_first_agent_that_asks_is_the_candidate() -> None:
    attempts = Attempts(REFUSED, SILENT, challenge())
    candidate = attempts.renewal().wait()
    assert isinstance(candidate, Candidate)
    assert candidate.nonce == "n"
    assert attempts.limits == [3.0, 6.0, 12.0]
    assert attempts.found.wait(60)


@pytest.mark.parametrize("error", [REFUSED, DENIED])
def test_a_host_that_refuses_is_given_up_when_the_patience_is_over(error: HostError) -> None:
    attempts = Attempts(error)
    with pytest.raises(RenewalFailed, match=error.cause):
        attempts.renewal(patience=4.0).wait()
    assert attempts.now == 4.0
    assert attempts.found.wait(60)


def test_host_without_an_answer_is_tried_until_stopped() -> None:
    attempts = Attempts(SILENT, SILENT, SILENT, SILENT, SILENT, SILENT, challenge())
    assert attempts.renewal(patience=2.0).wait().nonce == "n"


class Mute:
    """A channel without data until its connection is closed, as of a very busy host."""

    def __init__(self, attempts: "Attempts", error: type[Exception] | None) -> None:
        self._attempts, self._error = attempts, error

    def frames(self) -> Iterator[Any]:
        assert self._attempts.connections[-1].closed.wait(60)
        if self._error is not None:
            raise self._error
        yield from ()

    def exit_status(self, _timeout: float) -> int | None:
        return None

    def stderr(self) -> bytes:
        return b""


@pytest.mark.parametrize("error", [None, OSError])
def test_agent_without_an_answer_is_tried_until_stopped(
    error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvlaunch.driver.links.session._FIRST_LIMIT", 0.01)
    attempts = Attempts()
    attempts._results += [*(Mute(attempts, error) for _ in range(5)), challenge()]
    assert attempts.renewal(patience=2.0).wait().nonce == "n"


def test_host_without_an_agent_is_not_tried_again() -> None:
    attempts = Attempts(FakeChannel([], EXIT_NO_AGENT))
    with pytest.raises(RenewalFailed, match="its agent is gone"):
        attempts.renewal(patience=1e9).wait()
    assert len(attempts.limits) == 1
    assert attempts.connections[0].closed.is_set()


@pytest.mark.parametrize(
    ("channel", "words"),
    [
        (lambda: FakeChannel([], 127), "the host's words"),
        (lambda: FakeChannel([({"type": "pong"}, b"")]), "a first frame of type pong"),
    ],
)
def test_answer_of_another_program_is_in_the_cause(channel: Callable[[], FakeChannel], words: str) -> None:
    attempts = Attempts(channel())
    with pytest.raises(RenewalFailed, match=words):
        attempts.renewal(patience=2.0).wait()
    assert all(connection.closed.is_set() for connection in attempts.connections)


def test_wait_ends_when_the_renewal_is_stopped() -> None:
    renewal = Attempts(SILENT).renewal()
    renewal.stop()
    with pytest.raises(RenewalFailed):
        renewal.wait()
