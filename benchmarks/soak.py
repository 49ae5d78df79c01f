"""An hour of training in the process under random faults, one after the other and two at a time; by seed.

    python benchmarks/soak.py --minutes 60 --seed 1
    python benchmarks/soak.py --minutes 60 --defaults    # hvlaunch's own waits, and a fault a minute

On hosts made of namespaces on this machine (root, iproute2, sshd), with one Gloo worker each. Every worker counts every sample: at
the start of each round, and at the end of each epoch, the weights must be the sum of the samples that were seen, and none may
have been seen twice. All workers must begin a round with the same state, which is not older than what one of them had saved. After every
fault all workers must train again, and training may not stand still for more than --longest seconds beyond the time that a fault takes by
itself. At the end nothing may be left on any host. The exit code is 1 where any of that is not so; events and output of the job are kept then.
"""

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser, need_hosts
from benchmarks.faulty.scene import Missed, Pool, Scene, left_on, until
from benchmarks.faulty.training_kinds import KINDS
from benchmarks.measure import heading
from benchmarks.soak_check import Fault, Soak, Told, longest, standstills
from tests.cluster.jobs import HVLAUNCH
from tests.testhosts.hosts import TestHosts

TRAINING = str(Path(__file__).with_name("soak_training.py"))
COMMIT_EVERY = 8  # as in soak_training.py, which needs torch
LEASE = 8
PATIENCE = 180.0
"""Seconds in which all workers must train again after a fault, new ones included, which import torch."""
_TALK = 2.0
"""Seconds for workers to say where they stand."""
_EMPTY = 100.0
"""Seconds until nothing is left: three leases as long as by default."""
# Without a cool-down a lost host is left out for good, as in Horovod, and soon none would be left.
ALWAYS = {"--min-np": 1, "--blacklist-cooldown-range": "1 4", "-x": "OMP_NUM_THREADS=1"}
SHORT_WAITS = {
    "--lease": LEASE,
    "--worker-timeout": LEASE,
    "--grace": 2,
    "--discovery-interval": 0.5,
    "--start-timeout": 20,
    "--reset-timeout": 20,
    "--commit-timeout": 20,
}
"""So that many faults fit into an hour."""


class Job:
    """A job on all hosts."""

    def __init__(
        self, hosts: TestHosts, folder: Path, drawn: random.Random, options: Mapping[str, object]
    ) -> None:
        self.hosts = hosts
        self.folder = folder
        self._random = drawn
        self.pool = Pool(folder, dict.fromkeys(hosts.names, 1))
        self._told = Told(folder / "told")
        self._soak = Soak(COMMIT_EVERY)
        words = [word for name, value in options.items() for word in (name, *str(value).split())]
        words += ["--host-discovery-script", self.pool.command, "--events", str(folder / "events")]
        said = (folder / "output").open("wb")
        self.process = hosts.driver.popen(
            [*HVLAUNCH, *words, sys.executable, TRAINING, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )

    @property
    def soak(self) -> Soak:
        return self._soak.add(self._told)

    def trains_on(self, steps: int) -> None:
        """Wait until all hosts have a worker that trains, and they have done so many more steps."""
        before = self.soak.done
        size = len(self.hosts.names)

        def does() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the job has ended with {self.process.returncode}")
            time.sleep(0.05)
            return self.soak.size == size and self.soak.done >= before + steps

        if not until(does, PATIENCE):
            self.process.send_signal(signal.SIGUSR1)  # the workers print where they are
            for host in self.hosts:
                lines = host.run(["ss", "-tnpoi"], check=False).stdout
                (self.folder / f"sockets.{host.name}").write_text(lines)
            time.sleep(_TALK)
            raise AssertionError(f"not all workers train within {PATIENCE:g} s: {self.soak.size} do")

    def suffers(self, kinds: list[str]) -> list[Fault]:
        """These faults at once, each on another host. Each is undone as soon as it has been for some seconds."""
        hosts = self._random.sample(list(self.hosts), len(kinds))
        faults = [Fault(kind, host.name) for kind, host in zip(kinds, hosts, strict=True)]
        threads = [
            threading.Thread(target=self._suffer, args=(fault, self._random.random())) for fault in faults
        ]
        for thread in threads:
            thread.start()
            time.sleep(self._random.choice((0.0, self._random.uniform(0.0, 3.0))))
        for thread in threads:
            thread.join()
        return faults

    def _suffer(self, fault: Fault, seed: float) -> None:
        drawn, host = random.Random(seed), self.hosts[fault.host]
        scene = Scene(
            self.hosts, host, self.process, self.folder, TRAINING, drawn, list(self.hosts), self.pool
        )
        play, lasts = KINDS[fault.kind]
        tell(f"{fault.kind}, {host.name}")
        fault.began = fault.over = time.monotonic()
        with scene.undo, contextlib.suppress(Missed):
            play(scene)
            scene.pause(*lasts)
            fault.done = True
        if fault.done and (lasts[1] == 0 or host.touched):
            fault.over = time.monotonic()

    def end(self) -> list[str]:
        """Let the job end; what is wrong with how it ended."""
        (self.folder / "end").touch()
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return [f"it has not ended within {PATIENCE:g} s"]
        problems = [] if code == 0 else [f"the job has ended with {code}"]
        return problems if (self.folder / "done").exists() else [*problems, "its training was not done"]


def tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {time.monotonic():.0f} {text}", flush=True)


def left(hosts: TestHosts) -> list[str]:
    """What still runs anywhere, when it had time to end."""

    def found() -> list[str]:
        return [f"{host.name}: {one}" for host in hosts for one in left_on(host)]

    return [] if until(lambda: not found(), _EMPTY) else found()


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--defaults", action="store_true", help="leave all waits as they are by default")
    parser.add_argument("--every", type=float, help="seconds between faults (with --defaults 60, else none)")
    parser.add_argument(
        "--longest", type=float, default=30.0, help="seconds for which training may stand still (default 30)"
    )
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="these only")
    options = parser.parse_args()
    every = options.every if options.every is not None else 60.0 * options.defaults
    need_hosts()
    drawn = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    faults: list[Fault] = []
    with TestHosts(options.hosts, share=[str(folder)]) as hosts:
        job = Job(hosts, folder, drawn, ALWAYS if options.defaults else ALWAYS | SHORT_WAITS)
        until_when = time.monotonic() + 60.0 * options.minutes
        kinds: list[str] = []
        try:
            job.trains_on(1)
            while time.monotonic() < until_when:
                if len(kinds) <= 1:
                    kinds = options.kind or drawn.sample(list(KINDS), len(KINDS))
                count = drawn.choice((1, 1, 2))
                next_fault = time.monotonic() + every
                faults += job.suffers(kinds[:count])
                kinds = kinds[count:]
                job.trains_on(drawn.randint(1, 3 * COMMIT_EVERY))
                time.sleep(max(0.0, next_fault - time.monotonic()))
            problems = job.end()
        except AssertionError as error:
            problems = [str(error)]
            job.process.terminate()
        problems += job.soak.problems() + [f"left running: {one}" for one in left(hosts)]
        problems += report(job.soak, faults, options.longest)
    print("\n".join(f"WRONG: {problem}" for problem in problems) or "all was right")
    if problems:
        print(f"kept in {folder}", flush=True)
    else:
        shutil.rmtree(folder)
    return bool(problems)


def report(soak: Soak, faults: list[Fault], limit: float) -> list[str]:
    """Print the table; what is wrong with how long training stood still."""
    done = [fault for fault in faults if fault.done]
    lost = [count for count, _ in soak.lost()]
    print(heading(f"{len(done)} faults of {len({fault.kind for fault in done})} kinds"))
    print(
        f"{len(soak.rounds)} rounds, {soak.step} steps, {soak.done} with those that were done again; {soak.saves} saves"
    )
    print(
        f"a commit after every {COMMIT_EVERY} steps; lost at a change of rounds: at most {max(lost, default=0)}, {sum(lost)} in all"
    )
    print(f"goodput: {soak.goodput:.1%} of the time made steps that count")
    print(
        "\n| fault | times | stood still: median s | longest s | beyond the fault's own time, longest s |\n|---|---|---|---|---|"
    )
    problems = []
    for kind, stood in sorted(standstills(soak.steps, done).items()):
        print(
            f"| {kind} | {len(stood.whole)} | {stood.median:.1f} | {max(stood.whole):.1f} | {max(stood.beyond):.1f} |"
        )
        if max(stood.beyond) > limit:
            problems.append(f"{kind}: training stood still for {max(stood.beyond):.0f} s")
    print("\nThe longest standstills:", *longest(soak.steps, done, 10), sep="\n")
    return problems


if __name__ == "__main__":
    sys.exit(main())
