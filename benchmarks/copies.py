"""How long `hvlaunch cp` takes to many hosts with links of their own, beside one host.

    python benchmarks/copies.py
    python benchmarks/copies.py --hosts 8 --size 100 --rate 20mbit

Each host is a namespace on this machine (root, iproute2, sshd), and may send so much and no more; so may the driver. The content is one
file which can't be compressed. A perfect chain takes as long to all hosts as to one.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser, need_hosts
from benchmarks.launch import HVLAUNCH
from benchmarks.measure import heading, run, spread, table
from benchmarks.suspicion import limit
from tests.testhosts.hosts import TestHosts

COPY = "/tmp/copy.bin"
QUEUE = "50ms"


def take(hosts: TestHosts, names: list[str], source: Path) -> float:
    """Return the seconds of a copy. Raises AssertionError for a copy that differs."""
    for name in names:
        hosts[name].run(["rm", "-f", COPY], check=True)
    seconds = run(hosts.driver.popen, [*HVLAUNCH, "cp", "-H", ",".join(names), str(source), COPY]).wall
    assert all(hosts[name].run(["cmp", str(source), COPY]).returncode == 0 for name in names)
    return seconds


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--hosts", type=int, default=16, help="number of hosts (default 16)")
    parser.add_argument("--size", type=int, default=315, help="megabytes of the file (default 315)")
    parser.add_argument("--rate", default="60mbit", help="limit of each link, as tc has it (default 60mbit)")
    parser.add_argument("--runs", type=int, default=1, help="runs of each (default 1)")
    options = parser.parse_args()
    need_hosts()
    times: dict[int, list[float]] = {1: [], options.hosts: []}
    with (
        tempfile.NamedTemporaryFile(dir="/var/tmp", prefix="hvlaunch-copies-") as file,
        TestHosts(options.hosts) as hosts,
    ):
        for _ in range(options.size):
            file.write(os.urandom(1_000_000))
        file.flush()
        for place in (hosts.driver, *hosts):
            limit(place, options.rate, QUEUE)
        print(heading(f"{options.size} MB over links of {options.rate}"))
        for _ in range(options.runs):
            for count, taken in times.items():
                taken.append(take(hosts, hosts.names[:count], Path(file.name)))
        hosts.driver.run(["tc", "qdisc", "del", "dev", "eth0", "root"], check=True)
    one = statistics.median(times[1])
    rows = [
        (str(count), spread(taken), f"{statistics.median(taken) / one:.2f}") for count, taken in times.items()
    ]
    print(table(["hosts", "s", "/ one host's"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
