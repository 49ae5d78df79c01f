"""Drivers are killed while jobs connect, start and stop: each job ends right, or goes on, and nothing is left.

    python benchmarks/outlived_moments.py
    python benchmarks/outlived_moments.py --mode detached --phase starting --times 5

On hosts made of namespaces on this machine (root, iproute2, sshd): jobs of 2 workers on each of 4 hosts, whose driver gets SIGKILL
once, at a random moment of the phase. A detached job has a minder; one in the foreground is followed by `attach`, or by nobody.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser, need_hosts
from benchmarks.measure import heading, spread, table
from hvlaunch.driver.job_record import JOURNAL
from hvlaunch.errors import EXIT_HOSTS
from hvlaunch.outside import RESULT, KnownJob, known_jobs
from tests.cluster.conftest import clear, running
from tests.cluster.jobs import HVLAUNCH
from tests.testhosts.hosts import TestHosts, wait_until

WORKER = """
import os, signal, sys, time
def end(*_):
    time.sleep(0.5)
    os._exit(1)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
rank, how, count = os.environ["HVLAUNCH_RANK"], sys.argv[1], int(sys.argv[2])
for number in range(count):
    print("line", rank, number, ".", flush=True)
    time.sleep(0.05)
while not os.path.exists(sys.argv[3]):
    time.sleep(0.02)
if how == "fails" and rank == "3":
    sys.exit(7)
if how != "ends":
    time.sleep(1000)
"""
LINE = re.compile(r"line (\d+) (\d+) ")
RANKS, COUNT = 8, 10
OPTIONS = ["-H", "a:2,b:2,c:2,d:2", "--grace", "1", "--lease", "10"]
CODES = {"ends": {0}, "fails": {7}, "is stopped": {130, 143}}
PHASES = {"starting": ("ends",), "stopping": tuple(CODES)}
MODES = {
    "detached": ["--detach"],
    "attach follows": ["--reconnect-timeout", "20"],  # on a busy machine it comes late
    "nobody follows": [],
}
LIMIT = 90.0
STARTING, STOPPING = 2.5, 1.2
"""Seconds from the beginning of a phase, in which its driver is killed."""
EMPTY = 40.0
"""Seconds after which nothing may be left."""


MOMENTS = [
    ("HostClosed", "closing"),
    ("WorkerExited", "stopping"),
    ("WorkerStarted", "running"),
    ("HostReady", "probing"),
]
"""The newest kind of event in the journal, and how far its job is."""


class Wrong(Exception):
    """What is neither a good end nor a job that goes on."""


@dataclass
class Result:
    """What became of the jobs; what was wrong; seconds from the kill until nothing was left of jobs that did not go on."""

    became: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    empty: list[float] = field(default_factory=list)


class Reader:
    """What a process prints on stdout and stderr."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self.out = self.err = b""
        self._threads = [
            threading.Thread(target=self._read, args=[name], daemon=True) for name in ("out", "err")
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, name: str) -> None:
        pipe = getattr(self.process, f"std{name}")
        for line in pipe:
            setattr(self, name, getattr(self, name) + line)

    def wait(self) -> int:
        """Its exit code."""
        code = self.process.wait(LIMIT)
        for thread in self._threads:
            thread.join(LIMIT)
        return code


class Trial:
    """One job, one kill."""

    def __init__(self, hosts: TestHosts, folder: Path, mode: str, how: str) -> None:
        self.hosts, self.mode, self.how = hosts, mode, how
        self.trigger = folder / "trigger"
        """When it is there workers do what ends the job."""
        folder.mkdir()
        self._jobs = folder / "hvlaunch" / "jobs"
        self._env = {**hosts.driver.env, "XDG_STATE_HOME": str(folder)}
        words = [*MODES[mode], *OPTIONS, sys.executable, "-c", WORKER, how, str(COUNT), str(self.trigger)]
        self.typed = self.seen = self._start(*words)
        self.killed = 0.0

    def _start(self, *words: str) -> Reader:
        pipes: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        return Reader(self.hosts.driver.popen([*HVLAUNCH, *words], env=self._env, **pipes))

    @property
    def job(self) -> KnownJob | None:
        return next(iter(known_jobs(self._jobs)), None)

    def await_last_lines(self) -> None:
        """All workers are about to do what ends the job."""
        if self.mode == "detached":
            if self.typed.wait():
                raise Wrong(f"did not begin: {self.typed.err!r}")
            assert self.job is not None
            self.seen = self._start("logs", "-f", self.job.id)
        last = [f"line {rank} {COUNT - 1} ".encode() for rank in range(RANKS)]
        wait_until(
            lambda: all(line in self.seen.out for line in last), f"they print {self.seen.err!r}", LIMIT
        )

    def stop(self) -> None:
        job = self.job
        if job is not None:
            self._start("stop", job.id)

    def kill(self) -> bool:
        """Whether there was a driver."""
        pid = self.typed.process.pid
        if self.mode == "detached":
            job = self.job
            if job is None or not job.has_driver:
                return False
            pid = int(job.about["pid"])
        elif self.typed.process.poll() is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.killed = time.monotonic()
        self.moment = self._moment()
        return True

    def _moment(self) -> str:
        """How far the job was, by its journal."""
        job = self.job
        if job is None:
            return "begun"
        try:
            text = (job.directory / JOURNAL).read_text(errors="replace")
        except OSError:
            return "begun"
        return next((moment for word, moment in MOMENTS if word in text), "connecting")

    def judge(self) -> str:
        """What has become of the job whose driver was killed. Raises Wrong."""
        if self.mode == "nobody follows":
            self.typed.wait()
            return "ended"
        if self.mode == "detached":
            return self._judge_detached()
        self.typed.wait()
        job = self.job
        if job is None:
            return "ended"
        attached = self._start("attach", job.id)
        self._stop_again(attached)
        code = attached.wait()
        if code == EXIT_HOSTS and not (job.directory / RESULT).exists():
            return f"ended: {reason(attached.err)}"
        return self._judge_end(code, self.typed.out + attached.out, attached.err)

    def _judge_detached(self) -> str:
        code = self.typed.wait()
        job = self.job
        if code:
            return "ended"
        if job is None:
            raise Wrong("its directory is gone")
        waiting = self._start("wait", job.id)
        self._stop_again(waiting)
        code = waiting.wait()
        logs = self._start("logs", job.id)
        logs.wait()
        return self._judge_end(code, logs.out, logs.err)

    def _stop_again(self, reader: Reader) -> None:
        """An order that the driver was killed over is not carried out: the job goes on."""
        if self.how != "is stopped":
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            reader.process.wait(5.0)
            return
        self.stop()

    def _judge_end(self, code: int, out: bytes, err: bytes) -> str:
        found = sorted(
            (int(rank), int(number)) for rank, number in LINE.findall(out.decode(errors="replace"))
        )
        if found != [(rank, number) for rank in range(RANKS) for number in range(COUNT)]:
            lacks = Counter((rank, number) for rank in range(RANKS) for number in range(COUNT))
            lacks.subtract(found)
            odd = {line: count for line, count in lacks.items() if count}
            raise Wrong(f"code {code}; lines lost (+) or doubled (-): {odd}; {err[-400:]!r}")
        if code not in CODES[self.how]:
            raise Wrong(f"code {code} where it {self.how}: {err[-600:]!r}")
        return "went on"

    def await_nothing(self) -> float:
        """Seconds from the kill until there was nothing. Raises Wrong."""
        try:
            wait_until(lambda: not running(self.hosts), "nothing runs", EMPTY)
        except TimeoutError:
            left = running(self.hosts)
            clear(self.hosts)
            raise Wrong(f"left: {left}") from None
        return time.monotonic() - self.killed


def reason(err: bytes) -> str:
    """Of an end, in few words."""
    text = err.decode(errors="replace").strip().splitlines()[-1]
    return re.sub(r"^.*take it over: hvlaunch: |/\S+|; try.*$", "", text)[:90]


def attempt(hosts: TestHosts, folder: Path, mode: str, phase: str, result: Result) -> None:
    how = random.choice(PHASES[phase])
    trial = Trial(hosts, folder, mode, how)
    try:
        if phase == "starting":
            trial.trigger.touch()
        else:
            trial.await_last_lines()
            trial.trigger.touch()
            if how == "is stopped":
                trial.stop()
        time.sleep(random.uniform(0.0, STARTING if phase == "starting" else STOPPING))
        if not trial.kill():
            result.became["no driver at that moment"] += 1
            trial.stop()
            trial.typed.wait()
            trial.await_nothing()
            return
        became = trial.judge()
        empty = trial.await_nothing()
        result.became[f"{trial.moment}: {became}"] += 1
        if became.startswith("ended"):
            result.empty.append(empty)
    except (Wrong, TimeoutError, subprocess.SubprocessError) as error:
        result.wrong.append(f"{how}: {error}")
        tell(mode, phase, f"WRONG: {how}: {error}; journal in {folder}")
        shutil.copytree(
            folder, f"/var/tmp/wrong-{folder.name}", dirs_exist_ok=True, ignore=lambda *_: {"control"}
        )
        for process in (trial.typed.process, trial.seen.process):
            process.kill()
        clear(hosts)
        hosts.repair()


def tell(*words: str) -> None:
    print(time.strftime("%H:%M:%S"), *words, file=sys.stderr, flush=True)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--times", type=int, default=20, help="kills for each row (default 20)")
    parser.add_argument("--mode", action="append", choices=MODES, help="these only; may be repeated")
    parser.add_argument("--phase", action="append", choices=PHASES, help="these only; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    need_hosts()
    random.seed(options.seed)
    rows, is_wrong = [], False
    with (
        tempfile.TemporaryDirectory(prefix="moments-", dir="/var/tmp") as name,
        TestHosts(["a", "b", "c", "d"]) as hosts,
    ):
        for phase in options.phase or PHASES:
            for mode in options.mode or MODES:
                result = Result()
                while (
                    sum(result.became.values())
                    - result.became["no driver at that moment"]
                    + len(result.wrong)
                    < options.times
                ):
                    folder = Path(name) / str(time.monotonic_ns())
                    attempt(hosts, folder, mode, phase, result)
                tell(mode, phase, str(dict(result.became)))
                is_wrong = is_wrong or bool(result.wrong)
                became = "; ".join(f"{count} {what}" for what, count in result.became.most_common())
                empty = spread(result.empty, 1) if result.empty else ""
                rows.append([phase, mode, became, str(len(result.wrong)), empty])
    print(heading("What becomes of jobs whose driver is killed"))
    print(table(["killed while", "then", "the jobs", "wrong", "nothing left after, s"], rows))
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
