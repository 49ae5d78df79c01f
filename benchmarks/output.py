"""How fast workers' output gets to the user: lines and bytes per second, next to ssh and mpirun --tag-output.

    python benchmarks/output.py --runs 5

Many ranks print lines of 100 bytes, then one rank prints lines of 1 MiB, all with `cat` of a file, through
the launcher into a pipe that `wc -c` reads. Hosts are made of namespaces on this machine (root, iproute2,
sshd) and share its processors with the launcher. `ssh HOST cat` of the same bytes, which has no prefixes,
one connection and nothing to sort, is what the machine's sshd and ssh can do.
"""

import compileall
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser, need_hosts
from benchmarks.launch import HVLAUNCH, MPIRUN, PACKAGE, contender
from benchmarks.measure import Contender, Failed, heading, in_turns, spread, table
from tests.testhosts.hosts import TestHosts

MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Case:
    """`ranks` workers on the first `hosts` hosts, who print `size` bytes in all, in lines of `width` bytes."""

    hosts: int
    ranks: int
    width: int
    size: int

    @property
    def lines_each(self) -> int:
        return self.size // self.ranks // self.width

    @property
    def bytes(self) -> int:
        return self.lines_each * self.width * self.ranks

    def __str__(self) -> str:
        return f"{self.ranks} on {self.hosts}, {self.width} B"


def into_wc(hosts: TestHosts, least: int) -> Any:
    """What starts a command next to the hosts with a pipe for stdout, whose reader counts: at least `least` bytes."""

    def popen(argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        with subprocess.Popen(["wc", "-c"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
            process = hosts.driver.popen(argv, **{**options, "stdout": reader.stdin})
            said, _ = reader.communicate()
        if int(said) < least:
            process.wait()
            raise Failed(f"{' '.join(argv)} printed {int(said)} bytes, and not {least}")
        return process

    return popen


def contenders(hosts: TestHosts, case: Case, folder: Path) -> list[Contender]:
    """All print the same bytes; ssh all that the ranks print, on one host."""
    text = (b"x" * (case.width - 1) + b"\n") * case.lines_each
    share, whole = folder / "share", folder / "whole"
    share.write_bytes(text)
    whole.write_bytes(text * case.ranks)
    names = hosts.names[: case.hosts]
    placed = ",".join(f"{name}:{case.ranks // case.hosts}" for name in names)
    both = ["-np", str(case.ranks), "-H", placed]
    cat = ["cat", str(share)]
    popen = into_wc(hosts, case.bytes)
    debian = "apt-get install openmpi-bin"
    return [
        contender("hvlaunch", popen, [*HVLAUNCH, *both, *cat], ""),
        contender("mpirun --tag-output", popen, [*MPIRUN, "--tag-output", *both, *cat], debian),
        contender(
            "ssh HOST cat", popen, ["ssh", names[0], "cat", str(whole)], "apt-get install openssh-client"
        ),
    ]


def rows(case: Case, found: Sequence[Contender]) -> list[list[str]]:
    """hvlaunch, the first, is compared with each."""
    ours = found[0].median("wall")
    lines = []
    for one in found:
        if not one.samples:
            lines.append([str(case), one.name, one.absent, "", "", "", ""])
            continue
        walls = [sample.wall for sample in one.samples]
        rates = [case.bytes / MB / wall for wall in walls]
        lines.append(
            [
                str(case),
                one.name,
                spread(walls),
                f"{case.bytes / case.width / one.median('wall') / 1000:.3g}",
                spread(rates, 0),
                f"{one.median('cpu'):.2f}",
                f"{one.median('wall') / ours:.2f}",
            ]
        )
    return lines


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="turns that count (default 5)")
    parser.add_argument("--megabytes", type=int, default=64, help="output of all ranks together (default 64)")
    options = parser.parse_args()
    need_hosts()
    compileall.compile_dir(PACKAGE, quiet=1)
    size = options.megabytes * MB
    cases = [Case(2, 8, 100, size), Case(4, 8, 100, size), Case(1, 1, 1 << 20, size)]
    found = []
    with tempfile.TemporaryDirectory() as folder, TestHosts(4, share=[folder]) as hosts:
        print(heading(f"{options.megabytes} MB of output; median (least-most) of {options.runs} runs"))
        for case in cases:
            taking_part = contenders(hosts, case, Path(folder))
            in_turns(taking_part, options.runs)
            found += rows(case, taking_part)
    head = [
        "ranks, hosts, lines",
        "program",
        "wall s",
        "1000 lines/s",
        "MB/s",
        "its CPU s",
        "hvlaunch's rate / its",
    ]
    print(table(head, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
