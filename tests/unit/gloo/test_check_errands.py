"""The driver's side of `hvlaunch check` between hosts: each host in a thread, with errands in this process."""

import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from hvlaunch.agent.errands import pairs as pairs_errand
from hvlaunch.agent.errands.deep import OUTCOMES
from hvlaunch.check.measures import find_faults
from hvlaunch.driver.links.errands import Answers, ErrandFailed
from hvlaunch.engine.events import HostFacts
from hvlaunch.gloo import measures
from hvlaunch.gloo.measures import Deep, Pairs

PATIENCE = 30.0
Program = Callable[[Mapping[str, Any], "Stream"], object]


class Stream:
    """Both ends of an errand's stream: the errand's methods, and those of the driver's Errand."""

    name = "pairs"
    opened: ClassVar[list["Stream"]] = []

    def __init__(self, program: Program, arguments: Mapping[str, Any]) -> None:
        self._to_errand: queue.Queue[bytes] = queue.Queue()
        self._to_driver: queue.Queue[bytes] = queue.Queue()
        self._thread = threading.Thread(target=self._run, args=(program, arguments), daemon=True)
        self._thread.start()
        self.opened.append(self)

    def _run(self, program: Program, arguments: Mapping[str, Any]) -> None:
        program(arguments, self)
        self._to_driver.put(b"")

    def read_line(self) -> bytes:
        line = self._to_errand.get(timeout=PATIENCE)
        if not line:
            raise EOFError
        return line

    def answer(self, value: Any) -> None:
        self._to_driver.put(json.dumps(value).encode() + b"\n")

    def write(self, data: bytes) -> None:
        # The errand's thread writes answers, and the driver's orders.
        (self._to_driver if threading.current_thread() is self._thread else self._to_errand).put(data)

    def read(self, timeout: float) -> bytes | None:
        return self._to_driver.get(timeout=max(timeout, PATIENCE))

    def stop(self) -> None:
        self._to_errand.put(b"")

    def end(self) -> None:
        """End the errand's thread: if it ended later by an error, another test's job in this process would fail."""
        self.stop()
        self._thread.join(PATIENCE)

    def wait(self, _timeout: float) -> bool:
        return True

    def result(self) -> Any:
        raise ErrandFailed("pairs", "stopped", "it was stopped", host="?")


def facts() -> HostFacts:
    return HostFacts(
        addresses={"lo": ("127.0.0.1",)},
        cpus=1,
        gpus=None,
        scratch="/tmp",
        beacon_port=1,
        master_port=1,
        peer_address="127.0.0.1",
    )


def visit(check: Pairs | Deep, programs: Mapping[str, Program | None]) -> dict[str, str]:
    """Measure on all hosts, each with its program, None for a host that is lost; return errors by host."""
    errors: dict[str, str] = {}

    def work(name: str, program: Program | None) -> None:
        if program is None:
            check.gathering.leave(name)
            return
        start = lambda _name, arguments, _limits: Stream(program, arguments)  # noqa: E731
        link = SimpleNamespace(host=SimpleNamespace(name=name), errands=SimpleNamespace(start=start))
        try:
            if isinstance(check, Deep):
                check.measure(link, facts())  # type: ignore[arg-type]  # a link as far as it is used
                return
            errand: Any = Stream(program, check.arguments(name, facts()))
            check.measure(name, facts(), errand, Answers(errand, name))
        except ErrandFailed as error:
            errors[name] = str(error)

    threads = [threading.Thread(target=work, args=item, daemon=True) for item in programs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return errors


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(measures, "candidates", lambda _facts: ("127.0.0.1",))
    yield
    while Stream.opened:
        Stream.opened.pop().end()


def real(arguments: Mapping[str, Any], stream: Stream) -> None:
    before = threading.stack_size()
    try:
        pairs_errand.run(arguments, stream)  # type: ignore[arg-type]  # its methods are enough
    finally:
        threading.stack_size(before)


def test_every_pair_of_hosts_is_measured() -> None:
    check = Pairs(["a", "b", "c"])
    assert visit(check, dict.fromkeys("abc", real)) == {}
    assert [finding for finding in check.findings() if finding.level == "error"] == []
    values = check.values()
    assert all(0 < values[host]["rtt"] < 1 for host in "abc")


def test_suspicious_pairs_are_found_once_for_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host's thread asks for them; with 32 hosts that took 5 s of the driver's time."""
    judged: list[int] = []

    def judge(measures: Mapping[Any, Any], hosts: Sequence[str], **_: float) -> list[Any]:
        judged.append(len(measures))
        return list(find_faults(measures, hosts))

    monkeypatch.setattr(measures, "find_faults", judge)
    assert visit(Pairs(["a", "b", "c"]), dict.fromkeys("abc", real)) == {}
    assert judged == [6]


@pytest.mark.parametrize(
    "lie",
    [None, b'{"ports": ["22"], "low": 1, "high": 2}\n', b"{no JSON\n", b"\xff\n", b"[" * 100_000 + b"\n"],
)
def test_lost_or_lying_host_does_not_hold_the_others(lie: bytes | None) -> None:
    def lies(_arguments: Mapping[str, Any], stream: Stream) -> None:
        stream.write(lie or b"")

    is_lost = lie is None
    check = Pairs(["a", "b", "c"])
    errors = visit(check, {"a": real, "b": real, "c": None if is_lost else lies})
    assert errors == ({} if is_lost else {"c": "host c: errand pairs: its answer makes no sense"})
    assert [finding for finding in check.findings() if finding.level == "error"] == []
    assert check.values()["a"]["rtt"] is not None
    assert check.values()["c"]["rtt"] is None


class Site:
    """Hosts with GPUs that run the orders of --deep: a bad host makes its group slow or fail."""

    def __init__(self, bad: str, *, fails: bool) -> None:
        self._bad = bad
        self._fails = fails
        self._lock = threading.Lock()
        self._orders: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
        self._port = 20000

    def program(self, name: str) -> Program:
        def run(_arguments: Mapping[str, Any], stream: Stream) -> None:
            with self._lock:
                self._port += 3
                ports = [self._port, self._port + 1, self._port + 2]
            stream.answer(ports)
            while True:
                try:
                    order = json.loads(stream.read_line())
                except EOFError:
                    return
                stream.answer(self._outcomes(name, order))

        return run

    def _outcomes(self, name: str, order: dict[str, Any]) -> list[dict[str, Any]]:
        outcome: dict[str, Any] = {
            "error": None,
            "gpus": 2,
            "nccl": [2, 31, 0],
            "matmul": [],
            "sum": None,
            "wrong": False,
            "notes": [],
        }
        if order["size"] == 0:
            return [{**outcome, "matmul": [0.01, 0.01]}]
        place = order["env"]["MASTER_ADDR"], order["env"]["MASTER_PORT"]
        with self._lock:
            group = self._orders.setdefault(place, [])
            group.append((name, order))
        # A real group meets before it ends.
        for _ in range(1000):
            if len(group) == 2:
                break
            threading.Event().wait(0.005)
        assert sorted(part["rank"] for _, part in group) == [0, 2]
        assert all(part["size"] == 4 and part["local"] == 2 for _, part in group)
        assert order["env"]["NCCL_RUN_DIAGNOSTICS"] == "1"
        if self._bad in {host for host, _ in group}:
            outcome |= {"error": "NCCL error"} if self._fails else {"sum": 1.0}
        else:
            outcome["sum"] = 0.01
        assert OUTCOMES([outcome] * order["local"])
        return [outcome] * order["local"]


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_deep_rounds_name_the_bad_host(count: int, fails: bool) -> None:
    hosts = [f"h{number}" for number in range(count)]
    site = Site("h2", fails=fails)
    check = Deep(hosts, "python3", {}, "/")
    assert visit(check, {host: site.program(host) for host in hosts}) == {}
    [finding] = check.findings()
    assert (finding.host, finding.subject) == ("h2", "all_reduce")
    assert finding.level == ("error" if fails else "warning")
    assert check.values()["h0"]["matmul"] == [0.01, 0.01]
