"""How long `--sync` takes to bring a tree to many hosts, beside `rsync -a` and clush, and what the driver sends for it.

    python benchmarks/sync.py
    python benchmarks/sync.py --files 500 --size 20 --hosts 3      # a small one

Half of the tree's bytes are in many small files, half in eight large ones; none of it can be compressed. Hosts are namespaces on
this machine (root, iproute2, sshd), and share its processors and its disk: what is compared is CPU more than bandwidth, and a tree
that reaches eight hosts costs each program eight times the writing. "first": no host has anything. "changed": one small file is
another one. The driver's bytes are those that its network has sent. rsync and clush take part where they are installed.
"""

import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser, need_hosts
from benchmarks.launch import HVLAUNCH, PACKAGE
from benchmarks.measure import heading, run, table
from tests.testhosts.hosts import TestHosts

LARGE_FILES = 8
PER_FOLDER = 100
FIRST, UNCHANGED, CHANGED = "first", "unchanged", "changed"
KEPT = "~/.cache/hvlaunch ~/copy"
"""What programs leave on hosts."""


class Took(NamedTuple):
    """One run: seconds, and bytes that the driver sent."""

    wall: float
    sent: int


def make_tree(root: Path, files: int, size: int) -> None:
    """Fill the directory: about so many files, with so many bytes together."""
    for number in range(files):
        folder = root / f"part{number // PER_FOLDER}"
        if not number % PER_FOLDER:
            folder.mkdir()
        (folder / f"file{number}.bin").write_bytes(os.urandom(size // 2 // files))
    for number in range(LARGE_FILES):
        (root / f"large{number}.bin").write_bytes(os.urandom(size // 2 // LARGE_FILES))


class Bench:
    """Runs programs in the driver place of `hosts`, with the tree at `root`."""

    def __init__(self, hosts: TestHosts, root: Path) -> None:
        self._hosts = hosts
        self._root = root
        # In the tree's directory Python would not see the checkout.
        self._env = {**hosts.driver.env, "PWD": str(root), "PYTHONPATH": str(PACKAGE.parent)}

    def _sent(self) -> int:
        words = ["sh", "-c", "cat /sys/class/net/*/statistics/tx_bytes | sort -n | tail -1"]
        return int(self._hosts.driver.run(words, check=True).stdout)

    def take(self, words: Sequence[str]) -> Took:
        before = self._sent()
        sample = run(self._hosts.driver.popen, words, env=self._env, cwd=self._root)
        return Took(sample.wall, self._sent() - before)

    def wipe(self) -> None:
        """Remove all copies, and what is waiting to be written, so that nobody pays for another one's."""
        for host in self._hosts:
            host.run(["sh", "-c", f"rm -rf {KEPT}"], check=True, timeout=120.0)
        shutil.rmtree(self._hosts.driver.home / ".cache/hvlaunch", ignore_errors=True)
        os.sync()

    def change(self) -> None:
        """Another content of the same size, for one file."""
        file = self._root / "part0/file0.bin"
        file.write_bytes(os.urandom(file.stat().st_size))

    def launch(self, *words: str) -> list[str]:
        names = self._hosts.names
        placed = ",".join(f"{name}:1" for name in names)
        return [*HVLAUNCH, *words, "-np", str(len(names)), "-H", placed, "true"]

    def shell(self, line: str, *, at_once: bool, names: Sequence[str]) -> list[str]:
        """The line for each host, whose name is {}."""
        end = " & " if at_once else "; "
        return [
            "sh",
            "-ec",
            end.join(line.replace("{}", name) for name in names) + (" & wait" if at_once else ""),
        ]


def contenders(bench: Bench, names: Sequence[str], root: Path) -> dict[str, list[str]]:
    """Command lines by name; the first one is hvlaunch's."""
    lines = {"hvlaunch --sync": bench.launch("--sync")}
    if shutil.which("rsync"):
        line = f"rsync -a {root}/ {{}}:copy/"
        lines["rsync -a, one host"] = bench.shell(line, at_once=False, names=names[:1])
        lines["rsync -a, one after the other"] = bench.shell(line, at_once=False, names=names)
        lines["rsync -a, all at once"] = bench.shell(line, at_once=True, names=names)
    if shutil.which("clush"):
        lines["clush --copy"] = [
            "clush",
            "-q",
            "-w",
            ",".join(names),
            "--copy",
            str(root),
            "--dest",
            "/run/home/root/copy",
        ]
    return lines


def measure(bench: Bench, lines: dict[str, list[str]], runs: int) -> dict[str, dict[str, Took]]:
    """What each program took, by name and case; of hvlaunch's short cases the medians of `runs`, with a plain launch in turns."""
    results: dict[str, dict[str, Took]] = {}
    for name, words in lines.items():
        bench.wipe()
        results[name] = {FIRST: bench.take(words)}
        samples: dict[str, list[Took]] = {}
        is_ours = name == next(iter(lines))
        # clush sends everything again.
        for _ in range(runs if is_ours else name != "clush --copy"):
            if is_ours:
                samples.setdefault("plain", []).append(bench.take(bench.launch("--cwd", "/")))
            samples.setdefault(UNCHANGED, []).append(bench.take(words))
            bench.change()
            samples.setdefault(CHANGED, []).append(bench.take(words))
        results[name].update({case: _median(taken) for case, taken in samples.items()})
        # A program takes minutes on a busy machine: its numbers are shown at once.
        numbers = ", ".join(f"{case} {took.wall:.2f} s" for case, took in results[name].items())
        print(f"{name}: {numbers}; {results[name][FIRST].sent} bytes first", file=sys.stderr, flush=True)
    return results


def _median(taken: Sequence[Took]) -> Took:
    walls, sizes = zip(*taken, strict=True)
    return Took(statistics.median(walls), int(statistics.median(sizes)))


def rows(results: dict[str, dict[str, Took]], size: int) -> Iterator[list[str]]:
    """hvlaunch, the first, is compared with each."""
    ours = next(iter(results.values()))
    for name, cases in results.items():
        cells = [name, f"{cases[FIRST].wall:.1f}", f"{cases[FIRST].sent / size:.2f}"]
        cells.append(f"{ours[FIRST].wall / cases[FIRST].wall:.2f}")
        short = (f"{cases[case].wall:.2f}" if case in cases else "" for case in (UNCHANGED, CHANGED))
        yield [*cells, *short]


@contextmanager
def tree(files: int, size: int) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="hvlaunch-tree-"))
    try:
        (folder / "project").mkdir()
        make_tree(folder / "project", files, size)
        yield folder / "project"
    finally:
        shutil.rmtree(folder)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--files", type=int, default=20_000, help="files of the tree (default 20000)")
    parser.add_argument("--size", type=int, default=1000, help="megabytes of the tree (default 1000)")
    parser.add_argument("--hosts", type=int, default=8, help="number of hosts (default 8)")
    parser.add_argument("--runs", type=int, default=3, help="runs with no change or one (default 3)")
    parser.add_argument("--alone", action="store_true", help="hvlaunch alone")
    options = parser.parse_args()
    need_hosts()
    size = options.size * 1_000_000
    with tree(options.files, size) as root, TestHosts(options.hosts) as hosts:
        bench = Bench(hosts, root)
        print(heading(f"{options.files} files, {options.size} MB, to {options.hosts} hosts"))
        lines = contenders(bench, hosts.names, root)
        if options.alone:
            lines = dict([next(iter(lines.items()))])
        results = measure(bench, lines, options.runs)
        bench.wipe()
    print(
        table(
            [
                "program",
                "first s",
                "driver's bytes / tree's",
                "hvlaunch's first / its",
                "unchanged s",
                "one changed s",
            ],
            list(rows(results, size)),
        )
    )
    ours = next(iter(results.values()))
    plain = ours["plain"].wall
    print(
        f"\na launch without --sync: {plain:.2f} s; unchanged {ours[UNCHANGED].wall - plain:+.2f} s, "
        f"one changed file {ours[CHANGED].wall - plain:+.2f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
