"""How long a job is without a driver: seconds from its SIGKILL until another one has the sessions of all hosts.

    python benchmarks/takeover.py
    python benchmarks/takeover.py --hosts 128 --times 5

On hosts made of namespaces on this machine (root, iproute2, sshd), each with a real sshd, agent, and workers that do nothing; a minder
starts the other driver. All hosts' sshd and agents share this machine's processors with the driver.
"""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser, need_hosts
from benchmarks.measure import heading, spread, table
from hvlaunch.console.output_store import items, segment_path, segments
from hvlaunch.outside import ABOUT, known_jobs
from tests.cluster.jobs import HVLAUNCH
from tests.testhosts.hosts import TestHosts, wait_until

LIMIT = 300.0
BACK = "connected again"


class Takeover(NamedTuple):
    """Seconds from the kill until there was another driver, and until it had half of the sessions, and all; its CPU until then."""

    begun: float
    half: float
    all: float
    cpu: float


class Job:
    """A detached one, whose workers do nothing."""

    def __init__(self, hosts: TestHosts, names: list[str], slots: int, state: Path) -> None:
        self._hosts, self._names, self._slots = hosts, names, slots
        self._env = {**hosts.driver.env, "XDG_STATE_HOME": str(state)}
        where = ",".join(f"{name}:{slots}" for name in names)
        began = time.monotonic()
        self._do("--detach", "--lease", "60", "-H", where, "tail", "-f", "/dev/null")
        self.start = time.monotonic() - began
        [job] = known_jobs(state / "hvlaunch/jobs")
        self._directory = job.directory
        self._workers = self._sleepers()

    def _do(self, *words: str) -> None:
        self._hosts.driver.run([*HVLAUNCH, *words], env=self._env, timeout=LIMIT, check=True)

    @property
    def _driver(self) -> int:
        return int(json.loads((self._directory / ABOUT).read_text())["pid"])

    def _sleepers(self) -> set[tuple[str, int]]:
        """The workers: host and pid."""
        hosts = [self._hosts[name] for name in self._names]
        found = [
            (host.name, one.pid) for host in hosts for one in host.user_processes() if one.comm == "tail"
        ]
        if len(found) != self._slots * len(hosts):
            raise RuntimeError(f"{len(found)} workers on {len(hosts)} hosts")
        return set(found)

    def _back(self) -> list[float]:
        """When each host was said to be back, in seconds since 1970."""
        times = []
        for number in segments(self._directory):
            with segment_path(self._directory, number).open("rb") as file:
                for item, _ in items(file.fileno()):
                    if item.kind == "said" and BACK.encode() in item.data:
                        times.append(item.time)
        return times

    def kill(self) -> Takeover:
        """The driver; what it took until another had all."""
        before, killed, at = len(self._back()), self._driver, time.time()
        os.kill(killed, signal.SIGKILL)
        successor = wait_until(lambda: self._driver != killed and self._driver, "another driver", LIMIT)
        begun = time.time() - at
        count = len(self._names)
        wait_until(lambda: len(self._back()) >= before + count, "all are back", LIMIT)
        cpu = psutil.Process(successor).cpu_times()
        if self._sleepers() != self._workers:
            raise RuntimeError("workers have come or gone")
        back = sorted(self._back()[before:])
        return Takeover(begun, back[count // 2 - 1] - at, back[-1] - at, cpu.user + cpu.system)

    def stop(self) -> None:
        self._hosts.driver.run([*HVLAUNCH, "stop", "--kill"], env=self._env, timeout=LIMIT)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--times", type=int, default=3, help="kills for each number of hosts, 3 at most (default 3)"
    )
    parser.add_argument(
        "--hosts", type=int, nargs="+", default=[8, 32, 128], help="numbers of hosts (8 32 128)"
    )
    parser.add_argument("--slots", type=int, default=8, help="workers on each host (default 8)")
    options = parser.parse_args()
    need_hosts()
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="takeover-", dir="/var/tmp") as name,
        TestHosts(max(options.hosts)) as hosts,
    ):
        for count in options.hosts:
            job = Job(hosts, hosts.names[:count], options.slots, Path(name) / str(count))
            found = [job.kill() for _ in range(min(3, options.times))]
            job.stop()
            columns = [spread(column, 1) for column in zip(*found, strict=True)]
            rows.append([str(count), str(count * options.slots), f"{job.start:.1f}", *columns])
    print(heading("How long a job is without a driver that was killed, until another has all sessions"))
    print(
        table(
            [
                "hosts",
                "workers",
                "start, s",
                "another driver, s",
                "half of the hosts, s",
                "all, s",
                "its CPU, s",
            ],
            rows,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
