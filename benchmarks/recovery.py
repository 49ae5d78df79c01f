"""How long training stands still when a worker is killed, a host is lost, or one is added: hvlaunch's ways, and torchrun.

    python benchmarks/recovery.py
    python benchmarks/recovery.py --turns 1 --only shrink    # one contender
    python benchmarks/recovery.py --parts goodput --faults 10    # a fault a minute, ten minutes each

Real agents and Gloo workers, on hosts made of namespaces on this machine (root, iproute2, sshd): 2 hosts with 2
workers each, that tell the time of each of their steps. Timed is from the fault to the first training step that all
ranks of the next round have done. All take turns; a turn is a job, with several faults.
"""

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser, need_hosts
from benchmarks.measure import heading, spread, table
from benchmarks.steps import Run, Steps
from tests.cluster.jobs import HVLAUNCH
from tests.testhosts.hosts import CHECKOUT, Host, TestHosts, wait_until

TRAINING = str(Path(__file__).with_name("training.py"))
UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LEASE = 5.0
SETTLED = 0.3
"""Seconds that a round must have trained before the next fault."""
START = 120.0
"""Seconds that a job may take to train with all its workers."""
IMPORTS = "import torch, time; torch.set_num_threads(1); print(time.monotonic(), flush=True)"

PARTS = ("killed", "lost", "added")
GOODPUT = "goodput"
BETWEEN = 60.0
"""Seconds between two faults, where goodput is measured."""

Process = subprocess.Popen[Any]


class Ended(Exception):
    """A job has ended, which it was not told to."""


@dataclass(slots=True)
class Contender:
    """A way to train, and what was measured.

    `begin` starts it on some hosts. `whole` is how many workers it has then, `after` how many after the fault,
    `spares` how many wait beside them, and `standbys` how many processes of --preload. `limit` is how many seconds a recovery is waited for; where there is a
    `rival`, it is four times as long as that takes, if that is more.
    """

    name: str
    begin: Callable[[Sequence[str]], list[Process]]
    after: int
    limit: float
    whole: int = 4
    spares: int = 0
    standbys: int = 0
    rival: "Contender | None" = None
    seconds: list[float] = field(default_factory=list)
    faults: int = 0

    def row(self) -> list[str]:
        never = f"never within {self.patience:.0f} s" if self.faults else ""
        times = spread(self.seconds) if self.seconds else never
        return [self.name, times, f"{len(self.seconds)} of {self.faults}"]

    @property
    def patience(self) -> float:
        """Seconds that a recovery is waited for."""
        if self.rival is None or not self.rival.seconds:
            return self.limit
        return max(self.limit, 4.0 * self.rival.median)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


Measure = Callable[["Field", Contender, int], None]
"""Runs a job with so many faults."""


class Field:
    """The hosts, and the files that all share: the workers' steps, hvlaunch's events, its pool."""

    def __init__(self, hosts: TestHosts, folder: Path) -> None:
        self.hosts = hosts
        self.steps = Steps(folder / "steps")
        self.events = folder / "events"
        self.pool = folder / "pool"
        self._output = folder / "output"
        self._processes: list[Process] = []

    def hvlaunch(self, *options: str, unmodified: bool = False) -> Callable[[Sequence[str]], list[Process]]:
        """hvlaunch in the driver place; with hosts from the pool's file, where none are named."""

        def begin(names: Sequence[str]) -> list[Process]:
            self.events.unlink(missing_ok=True)
            self.pool.write_text("".join(f"{name}:2\n" for name in names))
            argv = [*HVLAUNCH, "--events", str(self.events), *options]
            argv += [] if "-H" in options else ["--hostfile", str(self.pool), "--discovery-interval", "0.2"]
            argv += [sys.executable, TRAINING, str(self.steps.path), *([] if unmodified else ["--elastic"])]
            return [self.hosts.driver.popen(argv, **self._streams())]

        return begin

    def torchrun(self, nnodes: str, **env: str) -> Callable[[Sequence[str]], list[Process]]:
        """An agent on each host; the c10d store is at host a."""

        def begin(names: Sequence[str]) -> list[Process]:
            words = ["--nnodes", nnodes, "--nproc-per-node", "2", "--max-restarts", "100", "--rdzv-id", "job"]
            words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "a:29400"]
            argv = [sys.executable, "-m", "torch.distributed.run", *words, TRAINING, str(self.steps.path)]
            settings = {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", **env}
            hosts = [self.hosts[name] for name in names]
            return [host.popen(argv, env={**host.env, **settings}, **self._streams()) for host in hosts]

        return begin

    def imports(self) -> float:
        """Seconds for 4 workers, 2 on each host, to start Python and import torch."""
        started = time.monotonic()
        argv = [sys.executable, "-c", IMPORTS]
        hosts = [self.hosts[name] for name in "aabb"]
        processes = [host.popen(argv, stdout=subprocess.PIPE, text=True) for host in hosts]
        return max(float(process.communicate()[0]) for process in processes) - started

    @contextlib.contextmanager
    def job(self, contender: Contender) -> Iterator[Run]:
        """A job of the contender on a and b, once it is whole; at the end nothing of it is left."""
        self.steps.forget()
        self._processes = contender.begin("ab")
        try:
            yield self.whole(contender)
        finally:
            self.clear(self._processes)

    def clear(self, processes: Sequence[Process]) -> None:
        """End a job, and whatever it has left on the hosts."""
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
        for host in self.hosts:
            host.touched = host.touched or bool(host.user_processes())
        self.hosts.repair()

    def whole(self, contender: Contender) -> Run:
        """Wait until the job is as it was meant to be: all its workers have trained for a while."""

        def found() -> Run | None:
            if any(process.poll() is not None for process in self._processes):
                raise Ended(f"{contender.name} has ended:\n{self._output.read_text(errors='replace')}")
            run = self.steps.settled(contender.whole, SETTLED)
            return run if run is not None and self._is_ready(contender) else None

        return wait_until(found, f"{contender.name}: all {contender.whole} workers train", START)

    def _is_ready(self, contender: Contender) -> bool:
        """Whether as many workers wait as there are to be spares: every worker asks once that was in no round."""
        if not contender.spares:
            return sum(map(self._is_standby, Path("/proc").glob("[0-9]*"))) >= contender.standbys
        told = self.events.read_text()
        living = told.count('"worker_started"') - told.count('"worker_exited"')
        return living == contender.whole + contender.spares and told.count('"after_round": -1') == told.count(
            '"worker_started"'
        )

    def _is_standby(self, process: Path) -> bool:
        """Whether it is a process of this training that waits in front of its script (agent/workers/standby.py)."""
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            score = (process / "oom_score_adj").read_text()
        except OSError:
            return False
        return str(self.steps.path).encode() in command and score == "1000\n"

    def recovery(self, contender: Contender, before: set[int]) -> Run | None:
        """The first round that is none of those before; None where none comes in time."""
        contender.faults += 1
        find = partial(self.steps.new, before, contender.after)
        try:
            return wait_until(find, f"{contender.name} trains again", contender.patience)
        except TimeoutError as error:
            print(error, file=sys.stderr)
            return None

    def _streams(self) -> dict[str, Any]:
        self._output.write_bytes(b"")
        said = self._output.open("ab")
        return {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}


def kill_workers(place: Field, contender: Contender, faults: int) -> None:
    """Workers are killed by SIGKILL, one at a time, at random."""
    with place.job(contender):
        for _ in range(faults):
            before = set(place.steps.runs)
            host, pid = random.choice(sorted(place.whole(contender).first))
            victim = machine_pid(place.hosts[host], pid)
            when = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            following = place.recovery(contender, before)
            if following is None:
                return
            contender.seconds.append(following.began - when)


def train_under_faults(place: Field, contender: Contender, faults: int) -> None:
    """A worker is killed each minute. Noted is the share of the time in which all workers train that are left, in each minute."""
    with place.job(contender):
        for _ in range(faults):
            until = time.monotonic() + BETWEEN
            before = set(place.steps.runs)
            host, pid = random.choice(sorted(place.whole(contender).first))
            when = time.monotonic()
            os.kill(machine_pid(place.hosts[host], pid), signal.SIGKILL)
            following = place.recovery(contender, before)
            stood = BETWEEN if following is None else following.began - when
            # The worker that takes the place of the killed one stops the others once more.
            if following is not None and following.size < contender.whole:
                stood += place.whole(contender).pause(following)
            contender.seconds.append(1.0 - min(1.0, stood / BETWEEN))
            if following is None:
                return
            time.sleep(max(0.0, until - time.monotonic()))


def lose_a_host(place: Field, contender: Contender, faults: int) -> None:
    """A host is switched off, and no packet tells anyone; a job for each."""
    for _ in range(faults):
        with place.job(contender):
            before = set(place.steps.runs)
            name = "b" if "torchrun" in contender.name else random.choice("ab")  # its store is on a
            when = time.monotonic()
            place.hosts[name].kill()
            following = place.recovery(contender, before)
            if following is not None:
                contender.seconds.append(following.began - when)


def add_a_host(place: Field, contender: Contender, faults: int) -> None:
    """A third host comes into the pool; a job for each. Timed is how long those that were there stand still."""
    for _ in range(faults):
        with place.job(contender) as run:
            before = set(place.steps.runs)
            if "torchrun" in contender.name:
                contender.begin("c")
            else:
                place.pool.write_text("a:2\nb:2\nc:2\n")
            following = place.recovery(contender, before)
            if following is not None:
                contender.seconds.append(pause(following, run))


def pause(after: Run, before: Run) -> float:
    """Of the workers that stayed; where all were started anew, of all."""
    stayed = after.first.keys() & before.last.keys()
    return after.pause(before) if stayed else after.began - min(before.last.values())


def machine_pid(host: Host, pid: int) -> int:
    """What this machine calls the host's process."""
    space = Path(f"/proc/{host.pid}/ns/pid").readlink()
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, ValueError):
            (line,) = (one for one in status.read_text().splitlines() if one.startswith("NSpid:"))
            if int(line.split()[-1]) == pid and (status.parent / "ns" / "pid").readlink() == space:
                return int(status.parent.name)
    raise ProcessLookupError(f"{pid} on host {host.name}")


def killed(place: Field) -> list[Contender]:
    unshared = Contender("torchrun c10d, store not shared", place.torchrun("2", **UNSHARED), 4, 60.0)
    here = ["-H", "a:2,b:2"]
    room = ["-H", "a:2,b:3"]
    return [
        Contender("shrink", place.hvlaunch("--min-np", "3", *here), 3, 20.0),
        Contender(
            "spare",
            place.hvlaunch("--min-np", "3", "--max-np", "4", "--spares", "1", *room),
            4,
            20.0,
            spares=1,
        ),
        Contender(
            "restart, unmodified script", place.hvlaunch("--min-np", "4", *here, unmodified=True), 4, 20.0
        ),
        Contender(
            "preloaded restart, unmodified script",
            place.hvlaunch("--min-np", "4", "--preload", "torch", *here, unmodified=True),
            4,
            20.0,
            standbys=4,
        ),
        unshared,
        Contender("torchrun c10d", place.torchrun("2"), 4, 15.0, rival=unshared),
    ]


def lost(place: Field, limit: float) -> list[Contender]:
    options = ["--lease", f"{LEASE:g}", "--min-np", "2", "-H", "a:2,b:2"]
    return [
        Contender("in the process", place.hvlaunch(*options), 2, 30.0),
        Contender("restart, unmodified script", place.hvlaunch(*options, unmodified=True), 2, 30.0),
        Contender("torchrun c10d, store not shared", place.torchrun("1:2", **UNSHARED), 2, limit),
    ]


def added(place: Field) -> list[Contender]:
    return [
        Contender("in the process", place.hvlaunch("--min-np", "2"), 6, 30.0),
        Contender("restart, unmodified script", place.hvlaunch("--min-np", "2", unmodified=True), 6, 30.0),
        Contender("torchrun c10d, store not shared", place.torchrun("2:3", **UNSHARED), 6, 60.0),
    ]


def one_turn(place: Field, measure: Measure, contender: Contender, faults: int) -> None:
    """A job that fails is a result, too."""
    print(f"{time.strftime('%H:%M:%S')} {contender.name}", file=sys.stderr, flush=True)
    try:
        measure(place, contender, faults)
    except (Ended, TimeoutError) as error:
        print(error, file=sys.stderr)


def show(title: str, contenders: Sequence[Contender], notes: Sequence[str]) -> None:
    if not contenders:
        return
    print(heading(title))
    print(table(["", "seconds", "trained again"], [one.row() for one in contenders]))
    print("", *notes, sep="\n", flush=True)


def about_killed(contenders: Sequence[Contender], imports: Sequence[float]) -> list[str]:
    """How it is next to the import of torch, and to the peer."""
    notes = [f"to start Python and import torch, 4 at once: {spread(imports)} s"]
    ours = {one.name.partition(",")[0]: one for one in contenders if one.seconds}
    if "restart" in ours:
        more = ours["restart"].median - statistics.median(imports)
        notes.append(f"the restart path takes {more:+.2f} s more than that")
    peers = [one for name, one in ours.items() if "torchrun" in name]
    if "shrink" in ours and peers:
        best = min(peers, key=lambda one: one.median)
        notes.append(f"shrink is {best.median / ours['shrink'].median:.0f} times as quick as {best.name}")
    return notes


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--turns", type=int, default=2, help="jobs of each kind (default 2)")
    parser.add_argument("--faults", type=int, default=3, help="killed workers in each job (default 3)")
    parser.add_argument("--only", default="", metavar="WORD", help="only contenders with this word")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=(*PARTS, GOODPUT),
        default=PARTS,
        help="what to measure (all but goodput)",
    )
    parser.add_argument(
        "--patience", type=float, default=30.0, help="seconds that torchrun has for a lost host"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    need_hosts()
    random.seed(options.seed)
    with tempfile.TemporaryDirectory() as folder, TestHosts(["a", "b", "c"], share=[folder]) as hosts:
        place = Field(hosts, Path(folder))

        def chosen(contenders: Sequence[Contender]) -> list[Contender]:
            taking_part = [one for one in contenders if options.only in one.name]
            if not taking_part:
                names = ", ".join(one.name for one in contenders)
                print(f"no contender has {options.only!r} in its name; there are: {names}", flush=True)
            return taking_part

        if "killed" in options.parts:
            contenders, imports = chosen(killed(place)), []
            for contender in contenders * options.turns:
                imports.append(place.imports())
                one_turn(place, kill_workers, contender, options.faults)
            title = "A worker is killed (kill -9); 2 hosts with 2 each"
            show(title, contenders, about_killed(contenders, imports) if contenders else [])
        if GOODPUT in options.parts:
            contenders = chosen(killed(place))
            for contender in contenders:
                one_turn(place, train_under_faults, contender, options.faults)
            print(heading("Goodput while a worker is killed each minute; 2 hosts with 2 each"))
            rows = [
                [one.name, f"{statistics.mean(one.seconds):.1%}" if one.seconds else "never", str(one.faults)]
                for one in contenders
            ]
            print(table(["", "of the time", "faults"], rows), flush=True)
        if "lost" in options.parts:
            contenders = chosen(lost(place, options.patience))
            for contender in contenders * options.turns:
                if contender.seconds or not contender.faults:  # who never came back gets no other chance
                    one_turn(place, lose_a_host, contender, 1)
            show(f"A host is switched off, silently; --lease {LEASE:g}", contenders, [])
        if "added" in options.parts:
            contenders = chosen(added(place))
            for contender in contenders * options.turns:
                one_turn(place, add_a_host, contender, 1)
            show("A third host is added: the pause of those that train", contenders, [])
    return 0


if __name__ == "__main__":
    sys.exit(main())
