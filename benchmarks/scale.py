"""What very many hosts cost the driver: CPU to start and to end, memory, threads, and CPU while nothing happens.

    python benchmarks/scale.py                      # 1,000 simulated hosts x 8 workers
    python benchmarks/scale.py --real --hosts 128   # real sshd's, on hosts made of namespaces; needs root

The simulated hosts are in this process: connections whose agents answer at once. All else is real:
driver, engine, links with their threads, printer. Their own work counts as the driver's, so the
numbers are a little high, and there is no SSH in them.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.command_line import argument_parser, need_hosts
from benchmarks.measure import heading, mebibytes, table
from benchmarks.simulated import SimulatedHosts
from tests.testhosts.hosts import TestHosts, wait_until

PATIENCE = 300.0


class Watch:
    """The driver's process, at moments of the job."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.rows: list[list[str]] = []

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Note what the block took."""
        started, cpu = time.monotonic(), self._cpu()
        yield
        wall, used = time.monotonic() - started, self._cpu() - cpu
        memory = self._process.memory_info().rss
        threads = self._process.num_threads()
        self.rows.append([what, f"{wall:.2f}", f"{used:.2f}", mebibytes(memory), str(threads)])

    def _cpu(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


def simulated(hosts: int, slots: int, idle: float) -> Watch:
    """A job on hosts that are only played, in this process."""
    watch = Watch(psutil.Process().pid)
    world = SimulatedHosts(hosts, slots)
    codes: SimpleQueue[int] = SimpleQueue()
    job = threading.Thread(target=lambda: codes.put(world.run().exit_code))
    with watch.during(f"start of {hosts} x {slots}"):
        job.start()
        world.wait_until_started(PATIENCE)
    with watch.during(f"idle, {idle:g} s"):
        time.sleep(idle)
    with watch.during("end"):
        world.let_workers_end()
        code = codes.get(timeout=PATIENCE)
        job.join()
    if code != 0:
        raise SystemExit(f"the simulated job ended with {code}")
    return watch


def real(count: int, slots: int, idle: float) -> Watch:
    """A job of `sleep` on real test hosts."""
    with TestHosts(count) as hosts:
        placed = ",".join(f"{name}:{slots}" for name in hosts.names)
        words = ["--start-timeout", "200", "-H", placed, "sleep", str(PATIENCE + idle)]
        job = hosts.driver.popen([sys.executable, "-m", "hvlaunch", *words], stdin=subprocess.DEVNULL)

        def sleeping(least: int, most: int) -> Callable[[], bool]:
            def enough() -> bool:
                found = [one for host in hosts for one in host.processes() if one.comm == "sleep"]
                return least <= len(found) <= most

            return enough

        total = count * slots
        watch = Watch(job.pid)
        with watch.during(f"start of {count} x {slots}"):
            wait_until(sleeping(total, total), "all workers run", PATIENCE)
        with watch.during(f"idle, {idle:g} s"):
            time.sleep(idle)
        with watch.during("end, by SIGTERM"):
            job.terminate()
            wait_until(sleeping(0, 0), "no worker runs", PATIENCE)
        code = job.wait(PATIENCE)
        if code != 143:  # noqa: PLR2004 - 128 + SIGTERM
            raise SystemExit(f"hvlaunch ended with {code}")
        left = [str(process) for host in hosts for process in host.user_processes()]
        if left:
            raise SystemExit("left behind:\n" + "\n".join(left))
    return watch


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--real", action="store_true", help="real hosts, on this machine")
    parser.add_argument("--hosts", type=int, help="how many (1000; 128 if real)")
    parser.add_argument("--slots", type=int, default=8, help="workers on each (8)")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds in which nothing happens (10)")
    options = parser.parse_args()
    if options.real:
        need_hosts()
    hosts = options.hosts or (128 if options.real else 1000)
    watch = (real if options.real else simulated)(hosts, options.slots, options.idle)
    print(heading("Real hosts" if options.real else "Simulated hosts"))
    print(table(["", "wall s", "driver's CPU s", "MiB", "threads"], watch.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
