"""How soon an elastic job goes on without a host that has lost its power, and whether a host is suspected that is well.

    python benchmarks/suspicion.py
    python benchmarks/suspicion.py --turns 5 --seconds 1800

Three hosts (namespaces on this machine: root, iproute2, sshd, iptables) train at the default settings. For each turn, one host loses
every packet: the time from then to the next step of the other two is measured, and the host comes back. Then the job trains for
`--seconds` under each of: 20 % of all packets lost, 300 ms of latency, 30 busy processes, a driver that is stopped for 5 s again
and again, links that are filled with data. Every suspicion there is a false one. `--trouble NAME` plays one of them alone.
"""

import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser, need_hosts
from benchmarks.measure import heading, table
from tests.cluster.elastic_jobs import COMMIT, ElasticJob, Work
from tests.testhosts.hosts import TestHosts, wait_until
from tests.testhosts.places import Place

WORK = Work("elastic_sums.py", sys.executable)
ALL = "a:1,b:1,c:1"
LOSS = "-m statistic --mode random --probability 0.2 -j DROP"
STOPPED, BETWEEN = 5.0, 10.0
BUSY = 30
LINK, QUEUE = "40mbit", "200ms"
LATENCY = 150.0
"""Milliseconds in each direction."""
SUSPICION = "host_set_aside"


@contextmanager
def training(hosts: TestHosts, *options: object) -> Iterator[ElasticJob]:
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder, "events.jsonl")
        job = ElasticJob(
            hosts, WORK, events, ALL, "--min-np", 2, "--suspect-after", 1.5, *options, is_fixed=True
        )
        try:
            job.goes_on_with(ALL)
            yield job
        finally:
            for host in hosts:
                host.heal()
            job.end()
            job.close()


def seconds_to_next_step(job: ElasticJob, hosts: TestHosts, name: str) -> float:
    others = ",".join(f"{host.name}:1" for host in hosts if host.name != name)
    number = job.round
    began = time.monotonic()
    hosts[name].cut()

    def has_gone_on() -> bool:
        text = job.stdout
        begun = text.find(f"round {number + 1} has 2 at step")
        return begun >= 0 and COMMIT in text[begun:]

    wait_until(has_gone_on, f"{others} go on", 60.0)
    took = time.monotonic() - began
    hosts[name].heal()
    job.goes_on_with(ALL, after=number + 1)
    return took


@contextmanager
def loss(hosts: TestHosts, _job: ElasticJob) -> Iterator[None]:
    for host in hosts:
        host.run(["sh", "-c", f"iptables -A INPUT {LOSS}; iptables -A OUTPUT {LOSS}"], check=True)
    yield
    for host in hosts:
        host.run(["iptables", "-F"], check=True)


@contextmanager
def latency(hosts: TestHosts, _job: ElasticJob) -> Iterator[None]:
    for host in hosts:
        host.delay(LATENCY)
    yield


@contextmanager
def load(_hosts: TestHosts, _job: ElasticJob) -> Iterator[None]:
    busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(BUSY)]
    yield
    for process in busy:
        process.kill()
        process.wait()


@contextmanager
def stops(_hosts: TestHosts, job: ElasticJob) -> Iterator[None]:
    script = f"while :; do sleep {BETWEEN}; kill -STOP {job.process.pid}; sleep {STOPPED}; kill -CONT {job.process.pid}; done"
    stopper = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    yield
    os.killpg(stopper.pid, signal.SIGKILL)
    stopper.wait()
    job.process.send_signal(signal.SIGCONT)


@contextmanager
def data(hosts: TestHosts, _job: ElasticJob) -> Iterator[None]:
    # Beside the session, over the same link, in both directions. The queue of a slow link is what delays beats.
    senders = []
    for host in hosts:
        limit(host)
        for pipe in ("cat /dev/zero | ssh {0} 'cat > /dev/null'", "ssh {0} 'cat /dev/zero' > /dev/null"):
            script = f"while :; do {pipe.format(host.name)}; done"
            senders.append(
                hosts.driver.popen(["sh", "-c", script], env=hosts.driver.env, start_new_session=True)
            )
    limit(hosts.driver)
    yield
    hosts.driver.run(["tc", "qdisc", "del", "dev", "eth0", "root"], check=True)
    for sender in senders:
        os.killpg(sender.pid, signal.SIGKILL)
        sender.wait()


def limit(host: Place, rate: str = LINK, queue: str = QUEUE) -> None:
    """Let the host send slowly, with a queue of so many milliseconds."""
    host.touched = True
    host.run(f"tc qdisc add dev eth0 root tbf rate {rate} burst 64kb latency {queue}".split(), check=True)


TROUBLES: dict[str, Callable[[TestHosts, ElasticJob], object]] = {
    "loss": loss,
    "latency": latency,
    "load": load,
    "stops": stops,
    "data": data,
}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--trouble", action="append", choices=[*TROUBLES], help="all by default")
    parser.add_argument("--seconds", type=float, default=60.0, help="time of each trouble")
    options = parser.parse_args()
    need_hosts()
    with TestHosts(3) as hosts:
        if options.turns:
            print(
                heading(
                    f"A host without power: seconds to the next step of the others, {options.turns} times"
                )
            )
            with training(hosts) as job:
                names = itertools.cycle("cba")
                took = sorted(seconds_to_next_step(job, hosts, next(names)) for _ in range(options.turns))
                lost = job.events("host_lost")
            row = [f"{took[0]:.2f}", f"{statistics.median(took):.2f}", f"{took[-1]:.2f}", str(len(lost))]
            print(table(["least", "median", "most", "lost for good"], [row]), flush=True)
        print(heading(f"False suspicions, {options.seconds:g} s of each"))
        rows = []
        for name in options.trouble or TROUBLES:
            with training(hosts) as job, TROUBLES[name](hosts, job):  # type: ignore[attr-defined]
                before = job.stdout.count(COMMIT)
                time.sleep(options.seconds)
                commits = job.stdout.count(COMMIT) - before
                rows.append([name, str(len(job.events(SUSPICION))), str(commits)])
        print(table(["under", "suspicions", "commits meanwhile"], rows))


if __name__ == "__main__":
    main()
