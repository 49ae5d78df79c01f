"""Whether jobs are said to hang that only look like it. docs/guides/hangs.md is about hangs.

    python benchmarks/no_hangs.py
    python benchmarks/no_hangs.py --minutes 2 --timeout 15 --only compiling stdin

Jobs of two workers on this machine, all at the same time: rank 0 compiles, evaluates, writes 1 GB again and again to a
disk that takes 20 MB/s (a loop device that the kernel slows down, which needs root and blkio of cgroup version 1), or waits for
stdin, while rank 1 waits for it in a collective; in one both compute without a line.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser
from benchmarks.measure import heading, table

WORKER = Path(__file__).resolve().with_name("busy_worker.py")
PHASES = tuple(re.findall(r'^    "([\w-]+)": ', WORKER.read_text(), re.MULTILINE))
RATE = 20_000_000
"""Bytes per second of the slow disk."""
THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")


@contextlib.contextmanager
def slow_disk(folder: Path) -> Iterator[None]:
    """A file system at `folder`/slow that takes RATE."""
    image, mounted = folder / "image", folder / "slow"
    with image.open("wb") as file:
        file.truncate(3 << 30)
    mounted.mkdir()
    loop = ["losetup", "--find", "--show", "--direct-io=on", str(image)]
    device = subprocess.run(loop, capture_output=True, text=True, check=True).stdout.strip()
    numbers = Path(device).stat().st_rdev
    name = f"{os.major(numbers)}:{os.minor(numbers)}"
    try:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        subprocess.run(["mount", device, mounted], check=True)
        THROTTLE.write_text(f"{name} {RATE}")
        yield
    finally:
        with contextlib.suppress(OSError):
            THROTTLE.write_text(f"{name} 0")
        subprocess.run(["umount", "-l", mounted], check=False)
        subprocess.run(["losetup", "-d", device], check=False)


def start(phase: str, seconds: float, timeout: float, folder: Path) -> "subprocess.Popen[str]":
    worker = [sys.executable, str(WORKER), phase, str(seconds), str(folder)]
    options = ["-np", "2", "-H", "localhost:2", "--hang-timeout", str(timeout), "--on-hang", "warn"]
    return subprocess.Popen(
        [sys.executable, "-m", "hvlaunch", *options, *worker],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
    )


def row(phase: str, job: "subprocess.Popen[str]", began: float) -> list[str]:
    """What a job has said; it has printed so little that none of it had to wait for us."""
    assert job.stdout is not None
    lines = job.stdout.read().splitlines()
    code = job.wait()
    alarms = [line for line in lines if "the job hangs" in line]
    is_right = code == 0 and not alarms and any("the phase is over" in line for line in lines)
    words = (alarms or lines[-1:] or ["nothing"])[0].replace("|", "/")
    return [
        phase,
        "yes" if is_right else "NO",
        f"{time.monotonic() - began:.0f} s",
        str(len(alarms)),
        str(code),
        words,
    ]


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="--hang-timeout")
    parser.add_argument("--only", nargs="+", choices=PHASES, default=PHASES, metavar="PHASE")
    args = parser.parse_args()
    seconds = 60 * args.minutes
    with (
        tempfile.TemporaryDirectory(prefix="no-hangs-", dir="/var/tmp") as name,
        contextlib.ExitStack() as opened,
    ):
        folder = Path(name)
        if "slow-disk" in args.only:
            opened.enter_context(slow_disk(folder))
        began = time.monotonic()
        jobs = {phase: start(phase, seconds, args.timeout, folder) for phase in args.only}
        time.sleep(seconds)
        if "stdin" in jobs:
            stdin = jobs["stdin"].stdin
            assert stdin is not None
            stdin.write("go on\n")
            stdin.close()
        rows = [row(phase, job, began) for phase, job in jobs.items()]
    print(heading("Jobs that do not hang"))
    print(table(["phase", "right", "took", "alarms", "code", "what was said"], rows))
    return 0 if all(row[1] == "yes" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
