"""What a training outlives: connections are lost in many ways, and no worker is restarted, no step and no line lost or doubled.

    python benchmarks/outlived.py
    python benchmarks/outlived.py --kind "the link of a host is cut for 20 s" --times 3
    python benchmarks/outlived.py --list

On hosts made of namespaces on this machine (root, iproute2, iptables, sshd): 2 workers on each of 4 hosts train with torch and Gloo.
Each step is checked by its value, and printed with its number by each worker. A job gets one fault after the other, at random
moments; one has come through when all workers have shown later steps. The exit code is 1 where one has not.
"""

import contextlib
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser, need_hosts
from benchmarks.measure import heading, spread, table
from tests.cluster.jobs import HVLAUNCH
from tests.testhosts.hosts import Host, TestHosts, wait_until
from tests.testhosts.places import Place

PROGRAM = Path(__file__).with_name("outlived_training.py")
NAMES = "abcd"
GATE = "gate"
RANKS = 2 * len(NAMES)
FACTOR = RANKS * (RANKS + 1) // 2
START, PATIENCE, END = 300.0, 150.0, 60.0
CUT = 20.0
LATER = 5
"""Steps that all workers must show after a fault."""
CALM = 2.0
"""Seconds at most from one fault to the next."""
_SAID = re.compile(r"(began|step|ended) (\d+)(?: (\d+))?(?: (\d+))?$")


class Wrong(Exception):
    """What a training did not outlive."""


class Shown:
    """What the workers print, in the order in which it must come."""

    def __init__(self) -> None:
        self.steps = [-1] * RANKS
        """How many steps each worker has shown; -1 before it has begun."""
        self.ended = 0
        self.wrong = ""

    def line(self, text: str) -> None:
        if found := _SAID.search(text):
            what, rank, number, value = found[1], int(found[2]), int(found[3] or 0), int(found[4] or 0)
            expected = {
                "began": self.steps[rank] == -1,
                "step": (number, value) == (self.steps[rank], FACTOR * (number + 1)),
                "ended": number == self.steps[rank],
            }
            if not expected[what]:
                self.wrong = self.wrong or f"{text!r} of a worker that has shown {self.steps[rank]} steps"
            self.steps[rank] += what != "ended"
            self.ended += what == "ended"


class Training:
    """A job that trains until it is told to end."""

    def __init__(self, hosts: TestHosts, folder: Path, options: tuple[str, ...]) -> None:
        folder.mkdir()
        self.hosts = hosts
        self.shown = Shown()
        self.is_launched = "--mpi" in options
        self.errors = folder / "errors"
        self._end = folder / "end"
        names = ",".join(f"{name}:2" for name in NAMES)
        words = ["-H", names, "-x", "OMP_NUM_THREADS=1", *options, sys.executable, str(PROGRAM), str(folder)]
        self.folder = folder
        self.process = self._start(words)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.await_steps(0, START)

    def _start(self, words: list[str]) -> "subprocess.Popen[str]":
        """What prints the workers' output."""
        return self._watched(words)

    def _watched(self, words: list[str], **options: Any) -> "subprocess.Popen[str]":
        return self.hosts.driver.popen(
            [*HVLAUNCH, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("ab"),
            text=True,
            **options,
        )

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.shown.line(line.rstrip())

    def await_steps(self, count: int, patience: float = PATIENCE) -> None:
        """Until each worker has shown so many. Raises Wrong."""
        deadline = time.monotonic() + patience
        while min(self.shown.steps) < count and time.monotonic() < deadline and self.process.poll() is None:
            time.sleep(0.01)
        if self.shown.wrong or min(self.shown.steps) < count:
            raise Wrong(f"{self.shown.wrong or self.shown.steps}, code {self.process.poll()}: {self.said()}")

    def said(self) -> str:
        return " | ".join(self.errors.read_text(errors="replace").splitlines()[-6:])

    @property
    def again(self) -> int:
        """How often a host was connected to again."""
        return self.errors.read_text(errors="replace").count("connected again")

    def end(self) -> None:
        """Have it end well. Raises Wrong."""
        self._end.touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END)
        self._reader.join(END)
        if self.process.returncode or self.shown.wrong or self.shown.ended != RANKS:
            raise Wrong(f"code {self.process.poll()}, {self.shown.wrong or self.shown.ended}: {self.said()}")

    def clear(self) -> None:
        """End it, however it is, and wait until nothing is left. Raises Wrong."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(END)
        try:
            wait_until(lambda: not any(host.user_processes() for host in self.hosts), "nothing is left", END)
        except TimeoutError as error:
            raise Wrong(str(error)) from None


# Faults


def sshd_sessions(host: Host) -> list[str]:
    return [str(process.pid) for process in host.processes() if process.comm.startswith("sshd")]


def any_host(training: Training) -> Host:
    return training.hosts[random.choice(NAMES)]


def kill_sshd(training: Training) -> None:
    host = any_host(training)
    host.run(["kill", "-9", *sshd_sessions(host)], check=True)


def reset(training: Training) -> None:
    """A firewall answers all that the driver sends by the connection with RST, until it is gone."""
    host = any_host(training)
    host.touched = True
    _filter_until_gone(training, host, host)


def reset_agent(training: Training) -> None:
    """The same for what the agent sends: the driver does not hear of it."""
    host = any_host(training)
    _filter_until_gone(training, host, training.hosts.driver)


def half_open(training: Training) -> None:
    """A firewall has forgotten one connection, and drops all that comes of it: the two ends have to notice."""
    _forget(training, any_host(training), 1)


def half_open_gate(training: Training) -> None:
    """The same with the connection that all hosts are behind."""
    _forget(training, training.hosts[GATE], len(NAMES))


def _forget(training: Training, host: Host, count: int) -> None:
    """Until so many hosts were connected to again."""
    rules = [
        ["INPUT", "-s", host.address, "-p", "tcp", "--sport", theirs, "--dport", ours, "-j", "DROP"]
        for ours, theirs in _connections(training, host)
    ]
    for rule in rules:
        training.hosts.driver.run(["iptables", "-w", "-I", *rule], check=True)
    before = training.again
    wait_until(lambda: training.again >= before + count, "connected again", PATIENCE)
    for rule in rules:
        training.hosts.driver.run(["iptables", "-w", "-D", *rule], check=True)


def _connections(training: Training, host: Host) -> set[tuple[str, str]]:
    """Those to the host's sshd, or with --mpi those of hvlaunch itself: the ports, ours first."""
    query = ["ss", "-Htnp", "state", "established", "dst", host.address]
    lines = training.hosts.driver.run(query, check=True).stdout.splitlines()
    if training.is_launched:
        lines = [line for line in lines if f"pid={training.process.pid}," in line]
    ports = {tuple(end.rpartition(":")[2] for end in line.split()[2:4]) for line in lines}
    return {(ours, theirs) for ours, theirs in ports if training.is_launched or theirs == "22"}


def _filter_until_gone(training: Training, host: Host, place: Place) -> None:
    """What comes to `place` by the host's connection is refused."""
    [(ours, theirs)] = _connections(training, host)
    source, port = (theirs, ours) if place is training.hosts.driver else (ours, theirs)
    rule = ["INPUT", "-p", "tcp", "--sport", source, "--dport", port]
    rule += ["-j", "REJECT", "--reject-with", "tcp-reset"]
    place.run(["iptables", "-w", "-I", *rule], check=True)
    wait_until(lambda: (ours, theirs) not in _connections(training, host), "the connection is reset")
    place.run(["iptables", "-w", "-D", *rule], check=True)


def cut_one(training: Training) -> None:
    host = any_host(training)
    host.cut()
    time.sleep(CUT)
    host.heal()


def cut_all(training: Training) -> None:
    for host in training.hosts:
        host.cut()
    time.sleep(CUT)
    for host in training.hosts:
        host.heal()


def restart_gate(training: Training) -> None:
    gate = training.hosts[GATE]
    gate.stop_sshd()
    if sessions := sshd_sessions(gate):
        gate.run(["kill", "-9", *sessions], check=True)
    time.sleep(random.uniform(0.0, 1.0))
    gate.start_sshd()


@dataclass(frozen=True)
class Kind:
    """A fault, which is over when `harm` returns, and the options of jobs that it is for."""

    harm: Callable[[Training], None]
    options: tuple[str, ...] = ()
    behind_gate: bool = False
    most: int = sys.maxsize
    """Faults for one job."""
    training: Callable[[TestHosts, Path, tuple[str, ...]], Training] = Training


PATIENT = ("--lease", "60")
HASTY = ("--lease", "8")
OPENSSH = ("--ssh-client", "openssh")
MPI = ("--mpi", "--mpirun", "mpirun.openmpi")
KINDS = {
    "a host's connection is reset": Kind(reset),
    "a host's connection is reset (openssh)": Kind(reset, OPENSSH),
    "an agent's connection is reset (--mpi)": Kind(reset_agent, MPI),
    "the driver's connection to an agent is reset (--mpi)": Kind(reset, MPI),
    "an agent's connection is half open (--mpi)": Kind(half_open, (*MPI, *HASTY)),
    "a host's connection is half open": Kind(half_open, HASTY),
    "a host's sshd child is killed": Kind(kill_sshd),
    "a host's sshd child is killed (openssh)": Kind(kill_sshd, OPENSSH),
    "the link of a host is cut for 20 s": Kind(cut_one, PATIENT),
    "the link of a host is cut for 20 s (--mpi)": Kind(cut_one, (*MPI, *PATIENT)),
    "all links are cut for 20 s": Kind(cut_all, PATIENT),
    "all links are cut for 20 s (--mpi)": Kind(cut_all, (*MPI, *PATIENT)),
    "the jump host's connection is half open": Kind(half_open_gate, ("--lease", "16"), behind_gate=True),
    "the jump host's sshd is restarted": Kind(restart_gate, behind_gate=True),
    "the jump host's sshd is restarted (openssh)": Kind(restart_gate, OPENSSH, behind_gate=True),
}


# Trials


@dataclass
class Result:
    """Seconds from the fault's end until all workers had shown later steps; what was not outlived; new connections."""

    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    again: int = 0

    def row(self, name: str) -> list[str]:
        times = len(self.seconds) + len(self.wrong)
        seconds = spread(self.seconds, 1) if self.seconds else ""
        return [name, f"{len(self.seconds)} of {times}", str(self.again), seconds]


class Lane(threading.Thread):
    """Hosts of its own, on which it tries one kind after the other."""

    def __init__(self, work: "queue.SimpleQueue[str | None]", folder: Path, times: int) -> None:
        super().__init__()
        self._work = work
        self._folder = folder
        self._times = times
        self.results: dict[str, Result] = {}
        self.start()

    def run(self) -> None:
        while (name := self._work.get()) is not None:
            result = self.results[name] = Result()
            with TestHosts([*NAMES, GATE], share=[str(self._folder)]) as hosts:
                if KINDS[name].behind_gate:
                    config = "".join(f"Host {each}\n  ProxyJump {GATE}\n" for each in NAMES)
                    (hosts.driver.home / ".ssh" / "config").write_text(config)
                while len(result.seconds) + len(result.wrong) < self._times:
                    self._job(hosts, name, result)

    def _job(self, hosts: TestHosts, name: str, result: Result) -> None:
        """One job, as many faults as it outlives."""
        training: Training | None = None
        try:
            folder = self._folder / f"{time.monotonic_ns()}"
            kind = KINDS[name]
            training = kind.training(hosts, folder, kind.options)
            left = min(kind.most, self._times - len(result.seconds) - len(result.wrong))
            for _ in range(left):
                result.seconds.append(self._fault(training, kind))
                tell(name, f"{len(result.seconds)}: {result.seconds[-1]:.1f} s")
            training.end()
            training.clear()
        except (Wrong, TimeoutError, subprocess.SubprocessError) as error:
            result.wrong.append(str(error))
            tell(name, f"WRONG: {error}")
            if training is not None:
                with contextlib.suppress(Wrong):
                    training.clear()
            for host in hosts:
                host.touched = True
            hosts.repair()
        if training is not None:
            result.again += training.again

    @staticmethod
    def _fault(training: Training, kind: Kind) -> float:
        time.sleep(random.uniform(0.0, CALM))
        kind.harm(training)
        over = time.monotonic()
        training.await_steps(max(training.shown.steps) + LATER)
        return time.monotonic() - over


def tell(*words: str) -> None:
    print(time.strftime("%H:%M:%S"), *words, file=sys.stderr, flush=True)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--times", type=int, default=20, help="faults of each kind (default 20)")
    parser.add_argument(
        "--kind", action="append", choices=list(KINDS), metavar="KIND", help="these only; may be repeated"
    )
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="jobs at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print all kinds")
    options = parser.parse_args()
    if options.list:
        print("\n".join(KINDS))
        return 0
    need_hosts()
    random.seed(options.seed)
    work: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for name in options.kind or KINDS:
        work.put(name)
    with tempfile.TemporaryDirectory(prefix="outlived-", dir="/var/tmp") as folder:
        lanes = [Lane(work, Path(folder), options.times) for _ in range(options.at_once)]
        for _ in lanes:
            work.put(None)
        for lane in lanes:
            lane.join()
    results = {name: result for lane in lanes for name, result in lane.results.items()}
    print(heading(f"What a training outlives, with 2 workers on each of {len(NAMES)} hosts"))
    rows = [results[name].row(name) for name in KINDS if name in results]
    print(table(["fault", "outlived", "connected again", "steps go on after, s"], rows))
    return int(any(result.wrong for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
