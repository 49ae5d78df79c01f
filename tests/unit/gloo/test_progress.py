"""Workers' progress: reports at a real rendezvous, and the driver's view of them."""

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

import pytest

from hvlaunch.driver.observing.progress import Progress, Steps
from hvlaunch.rendezvous import worker
from hvlaunch.rendezvous.messages import PROGRESS
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.rendezvous.worker import Teller

LONG = 60.0
A, B = ("a", 0, 0), ("b", 1, 2)


@pytest.fixture
def server():
    with RendezvousServer("t0ken", host="127.0.0.1") as server:
        yield server


class Rig:
    def __init__(self, server: RendezvousServer) -> None:
        self.now = 100.0
        self.server = server
        self.progress = Progress(server, lambda *worker: worker in (A, B), lambda: self.now)
        self.progress.open()

    def of(self, worker: tuple[str, int, int]) -> Mapping[str, Any]:
        progress = self.progress.of(worker)
        assert progress is not None
        return progress

    def tell(self, now: float, worker: tuple[str, int, int] = A, **reports: Any) -> None:
        self.now = now
        self.server.put(PROGRESS, "{}/{}/{}".format(*worker), json.dumps(reports).encode())


@pytest.fixture
def rig(server: RendezvousServer) -> Rig:
    return Rig(server)


def test_reported_progress_has_a_rate(rig: Rig) -> None:
    rig.tell(100.0, step=10)
    assert rig.progress.of(A) == {"step": 10, "total": None, "metrics": {}, "rate": None}
    for second in range(1, 60):
        rig.tell(100.0 + second, step=10 + 4 * second, total=1000, metrics={"loss": 0.5, "lr": None})
    progress = rig.progress.of(A)
    assert progress == {"step": 246, "total": 1000, "metrics": {"loss": 0.5, "lr": None}, "rate": 4.0}
    assert rig.progress.of(B) is None


def test_the_rate_decays_without_steps_and_restarts_when_steps_go_back(rig: Rig) -> None:
    rig.tell(100.0, step=0)
    rig.tell(101.0, step=2)
    rig.now = 112.0
    assert rig.of(A)["rate"] == 0.1
    rig.tell(113.0, step=1)
    assert rig.of(A)["rate"] is None


@pytest.mark.parametrize(
    "reports",
    [
        b"", b"7", b"{}", b'{"step": -1}', b'{"step": true}', b'{"step": 1.5}', b'{"step": 9007199254740993}',
        b'{"step": 1, "total": "x"}', b'{"step": 1, "rate": 7}', b'{"step": 1, "metrics": {"a": NaN}}',
        b'{"step": 1, "metrics": {"a": 1e999}}', b'{"step": 1, "metrics": {"a": "x"}}', b"[" * 5000,
        b'{"step": 1, "metrics": {"\\u001b[2J": 1}}', b'{"step": 1, "metrics": {"%s": 1}}' % (b"a" * 65),
        json.dumps({"step": 1, "metrics": dict.fromkeys(map(str, range(33)), 1)}).encode(),
        b'{"step": 1%s}' % (b" " * 9000),
    ],
)  # fmt: skip
def test_nonsense_changes_nothing(rig: Rig, reports: bytes) -> None:
    rig.tell(100.0, step=3)
    rig.server.put(PROGRESS, "a/0/0", reports)
    assert rig.of(A)["step"] == 3


@pytest.mark.parametrize("name", ["c/0/0", "a/0", "a/0/00", "a/x/0", "a/0/1"])
def test_reports_of_unknown_workers_are_ignored(rig: Rig, name: str) -> None:
    rig.server.put(PROGRESS, name, b'{"step": 3}')
    assert rig.progress.steps([A, B, ("c", 0, 0), ("a", 0, 1)]) == Steps(None, False, {})


def test_any_news_is_progress_and_steps_count_until_the_last(rig: Rig) -> None:
    rig.tell(100.0, step=9, total=10)
    rig.tell(101.0, B, step=9, total=10)
    assert rig.progress.steps([A, B]) == Steps(101.0, True, {A: 9, B: 9})
    rig.tell(105.0, step=9, total=10)
    assert rig.progress.steps([A, B]).moved_at == 101.0
    rig.tell(106.0, step=9, total=10, metrics={"evaluated": 7})
    assert rig.progress.steps([A, B]).moved_at == 106.0
    rig.tell(107.0, step=10, total=10)
    assert rig.progress.steps([A]) == Steps(107.0, False, {A: 10})
    assert rig.progress.steps([A, B]).are_exact


def test_the_next_driver_knows_the_progress_at_once(rig: Rig) -> None:
    rig.tell(100.0, step=5)
    assert Rig(rig.server).of(A)["step"] == 5


class Tensor:
    """One with one number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value


class Told:
    """Reports of a teller, with a clock of the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.messages: SimpleQueue[Any] = SimpleQueue()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.teller = Teller(self._put, lambda: self.now)

    def _put(self, message: bytes) -> None:
        self.may_go_on.wait(LONG)
        self.messages.put(json.loads(message))

    def newest(self) -> Any:
        return self.messages.get(timeout=LONG)


def test_the_newest_step_is_reported_and_not_each() -> None:
    reports = Told()
    reports.teller.tell(1, 10, {"loss": 0.5})
    assert reports.newest() == {"step": 1, "total": 10, "metrics": {"loss": 0.5}}
    for step in range(2, 8):
        reports.teller.tell(step, 10, {"loss": 0.1})
    assert reports.newest() == {"step": 7, "total": 10, "metrics": {"loss": 0.5}}
    assert reports.messages.empty()


def test_training_does_not_wait_for_a_lost_network() -> None:
    reports = Told()
    reports.may_go_on.clear()
    for step in range(1000):
        reports.now += 1.0
        reports.teller.tell(step, None, {})
    reports.may_go_on.set()
    while reports.newest()["step"] != 999:
        pass


def test_infinite_metrics_are_null_and_other_values_an_error() -> None:
    reports = Told()
    reports.teller.tell(1, None, {"loss": math.nan, "norm": math.inf, "lr": Tensor(0.1)})
    assert reports.newest()["metrics"] == {"loss": None, "norm": None, "lr": 0.1}
    reports.now = 10.0
    for step, total, metrics in [
        ("x", None, {}),
        (1, 2.5, {}),
        (1, None, {"a": "x"}),
        (1, None, {"a" * 65: 1}),
    ]:
        with pytest.raises((TypeError, ValueError)):
            reports.teller.tell(step, total, metrics)  # type: ignore[arg-type]


def test_a_forked_child_reports_too(server: RendezvousServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVLAUNCH_RENDEZVOUS", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("HVLAUNCH_TOKEN", "t0ken")
    monkeypatch.setenv("HVLAUNCH_WORKER", "a/0/0")
    script = (
        "import os, sys, time; from hvlaunch.rendezvous import Client, progress; progress(1, loss=2)\n"
        "if os.fork(): os.wait(); sys.exit('torch' in sys.modules)\n"
        "progress(2)\n"
        f"while b': 2' not in (Client.from_environment().get({PROGRESS!r}, 'a/0/0') or b''): time.sleep(0.01)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=LONG, check=False).returncode == 0


def test_progress_does_nothing_outside_hvlaunch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("HVLAUNCH_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(worker, "_teller", None)
    before = threading.active_count()
    worker.progress(3, 10, loss=1.0)
    assert threading.active_count() == before


def test_the_first_new_step_of_a_round_is_noted(server: RendezvousServer) -> None:
    number: int | None = None
    noted: list[tuple[int, int]] = []
    progress = Progress(
        server,
        lambda *worker: worker in (A, B),
        lambda: 100.0,
        lambda: number,
        lambda current, step: noted.append((current, step)),
    )
    progress.open()

    def tell(step: int, worker: tuple[str, int, int] = A) -> None:
        server.put(PROGRESS, "{}/{}/{}".format(*worker), json.dumps({"step": step}).encode())

    tell(0)
    assert noted == [], "no round has begun"
    number = 0
    for step in (1, 2, 50):
        tell(step)
    assert noted == [(0, 1)]
    # The next round goes back to a checkpoint, and gets no further.
    number = 1
    for step in (40, 45, 50):
        tell(step)
        tell(step, B)
    assert noted == [(0, 1)]
    tell(51, B)
    tell(52)
    assert noted == [(0, 1), (1, 51)]
    # Epochs that count from the beginning.
    number = 2
    tell(10)
    assert noted == [(0, 1), (1, 51)], "a worker that goes back at the beginning of a round"
    tell(30)
    tell(3)
    assert noted == [(0, 1), (1, 51), (2, 3)]
