"""Much output: 200 MB of 8 ranks arrive whole, each stream in its order, and nothing on the way grows with it."""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs import HVLAUNCH, Job, agents
from tests.testhosts.hosts import Process, TestHosts, wait_until

RANKS = 8
PLACED = "a:4,b:4"
EACH = 25_000_000  # bytes of a rank
TOTAL = RANKS * EACH
STREAMS = ("stdout", "stderr")
PROGRAM = f"""
import hashlib, os, random
dice = random.Random(os.environ["RANK"])
seen = {{1: hashlib.sha256(), 2: hashlib.sha256()}}

def write(fd, data):
    seen[fd].update(data)
    while data:
        data = data[os.write(fd, data):]

for number in range(int(os.environ.get("BYTES", {EACH})) // 1_000_000):
    text = dice.randbytes(500_000).hex().encode()
    lines = []
    at = 0
    while at < len(text):
        size = dice.choice((0, 7, 80, 80, 200, 1000, 70_000))
        lines.append(text[at:at + size] + b"\\n")
        at += size + 1
    write(2 if number % 4 == 3 else 1, b"".join(lines))
for fd in (1, 2):
    write(fd, b"sha256 " + seen[fd].hexdigest().encode() + b"\\n")
"""
MIB = 1 << 20
LIMIT = 120.0  # seconds for what takes 3 on an idle machine
pytestmark = pytest.mark.timeout(300)
# While nobody reads, as much is on its way as ever is: the credit of 4 MiB for each of 2 hosts, in copies
# from paramiko's buffer to the page that is being written, and the agents' frames. That makes the first
# peak. From then on 200 MB pass through; what they leave is room that the allocator keeps.
MOST_AT_FIRST = {"driver": 120 * MIB, "agent": 40 * MIB}  # measured: 59 and 16
MOST_GROWTH = 48 * MIB  # measured: 0 to 15, and 2
_PREFIX = re.compile(rb"\[(\d+)\]<(\w+)>: (.*\n)", re.DOTALL)


def start(cluster: TestHosts, *options: object, stdout: object, stderr: object) -> "subprocess.Popen[bytes]":
    words = ["--quiet", *options, "-H", PLACED, sys.executable, "-c", PROGRAM]
    process: subprocess.Popen[bytes] = cluster.driver.popen(
        [*HVLAUNCH, *map(str, words)], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
    )
    return process


def check_whole(text: bytes, what: str) -> int:
    """The last line tells the checksum of those before it. Returns the size."""
    rest, _, told = text.removesuffix(b"\n").rpartition(b"\n")
    assert told == b"sha256 " + hashlib.sha256(rest + b"\n").hexdigest().encode(), what
    return len(text)


def check_console(lines: Iterator[bytes], stream: str) -> int:
    """Every line has its prefix, and without them each rank's are whole. Returns their size."""
    found: dict[bytes, list[bytes]] = {}
    for line in lines:
        prefixed = _PREFIX.fullmatch(line)
        assert prefixed is not None, line[:200]
        assert prefixed[2] == stream.encode()
        found.setdefault(prefixed[1], []).append(prefixed[3])
    assert sorted(found) == [b"%d" % rank for rank in range(RANKS)]
    return sum(check_whole(b"".join(kept), f"rank {rank!r}, {stream}") for rank, kept in found.items())


def test_on_the_console_and_in_files(cluster: TestHosts, tmp_path: Path) -> None:
    console = {stream: tmp_path / stream for stream in STREAMS}
    kept = tmp_path / "kept"
    with console["stdout"].open("wb") as stdout, console["stderr"].open("wb") as stderr:
        job = start(cluster, "--output-filename", kept, stdout=stdout, stderr=stderr)
        assert job.wait(LIMIT) == 0, console["stderr"].read_bytes()[-2000:]
    shown = filed = 0
    for stream, path in console.items():
        with path.open("rb") as lines:
            shown += check_console(lines, stream)
        for rank in range(RANKS):
            filed += check_whole(
                (kept / "latest" / f"rank.{rank}" / stream).read_bytes(), f"file of {rank}, {stream}"
            )
    assert shown == filed
    assert shown > TOTAL


def peaks(cluster: TestHosts, driver: int) -> dict[str, int]:
    """The most memory that driver and agents ever had, in bytes."""
    found = {"driver": _peak(Path(f"/proc/{driver}"))}
    for name in ("a", "b"):
        (agent,) = agents(cluster[name].processes())
        found[f"agent of {name}"] = _peak(_proc(cluster, name, agent))
    return found


def _proc(cluster: TestHosts, name: str, process: Process) -> Path:
    return Path(f"/proc/{cluster[name].pid}/root/proc/{process.pid}")


def _peak(proc: Path) -> int:
    """VmHWM of proc(5)."""
    line = next(one for one in (proc / "status").read_text().splitlines() if one.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def all_block(cluster: TestHosts, least: int = 1) -> bool:
    """Whether every worker, and at least so many, waits in a write to stdout or stderr."""
    workers = [
        _proc(cluster, name, process)
        for name in ("a", "b")
        for process in cluster[name].processes()
        if PROGRAM in process.argv
    ]
    return len(workers) >= least and all(_blocks(worker) for worker in workers)


def _blocks(proc: Path) -> bool:
    """By /proc/PID/syscall: the number of the system call, then its arguments, the first of which is the descriptor."""
    words = (proc / "syscall").read_text().split()
    return len(words) > 1 and words[1] in ("0x1", "0x2")


def test_a_stopped_reader_blocks_the_workers_without_loss(cluster: TestHosts, tmp_path: Path) -> None:
    said, shown = tmp_path / "stderr", tmp_path / "stdout"
    with said.open("wb") as stderr, shown.open("wb") as copy:
        job = start(cluster, stdout=subprocess.PIPE, stderr=stderr)
        assert job.stdout is not None
        wait_until(lambda: all_block(cluster, RANKS), "every worker blocks, since nobody reads", LIMIT)
        first = peaks(cluster, job.pid)
        for pause in (20_000_000, 60_000_000):
            while copy.tell() < pause:
                copy.write(os.read(job.stdout.fileno(), 1 << 16))
            wait_until(lambda: all_block(cluster), f"every worker blocks again after {pause} bytes", LIMIT)
        while copy.tell() < TOTAL // 2:
            copy.write(os.read(job.stdout.fileno(), 1 << 16))
        last = peaks(cluster, job.pid)
        while data := os.read(job.stdout.fileno(), 1 << 16):
            copy.write(data)
        assert job.wait(LIMIT) == 0
    for who, peak in first.items():
        assert peak < MOST_AT_FIRST[who.partition(" ")[0]], f"{who}: {peak >> 20} MiB"
        assert last[who] - peak < MOST_GROWTH, f"{who}: {peak >> 20}, then {last[who] >> 20} MiB"
    sizes = []
    for path, stream in ((shown, "stdout"), (said, "stderr")):
        with path.open("rb") as lines:
            sizes.append(check_console(lines, stream))
    assert sum(sizes) > TOTAL


@pytest.mark.parametrize("client", ["paramiko", "openssh"])
def test_background_output_of_start_up_files_disturbs_no_channel(cluster: TestHosts, client: str) -> None:
    """It is told once, and nothing of it is in the output; nothing of it is left running either."""
    startup = cluster["a"].home / "root" / ".bashrc"
    startup.write_text("while :; do echo backup: $((at += 1)) files of $RANDOM; done &\n")
    try:
        words = ["--ssh-client", client, "-H", PLACED, "-x", "BYTES=4000000", sys.executable, "-c", PROGRAM]
        job = Job(cluster, words)
        assert job.code(2 * LIMIT) == 0, job.stderr[-2000:]
    finally:
        startup.unlink()
    lines = job.stderr.encode().splitlines(keepends=True)
    own = [line for line in lines if line.startswith(b"hvlaunch: ")]
    words_of_it = b"host a: its shell start-up files left a program running, which prints; its further output is ignored"
    assert sum(words_of_it in line for line in own) == 1, own
    check_console(iter(job.stdout.encode().splitlines(keepends=True)), "stdout")
    check_console((line for line in lines if line not in own), "stderr")
