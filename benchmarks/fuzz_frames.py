"""A fuzzer for frames and the door: broken ones in both directions, for as long as you like.

    python benchmarks/fuzz_frames.py --seconds 3600
    python benchmarks/fuzz_frames.py --seed 7 --sessions 1    # the same ones again

tests/security/frame_fuzzer.py says what must hold: no traceback, no blame on another host, no file, no forged line. The
numbers, with the memory that is in use, are printed every so often; at a failure the seed is.
"""

import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.command_line import argument_parser
from tests.security.frame_fuzzer import door_session, driver_session, order_session

_KINDS = (driver_session, order_session, door_session)
_MOST_MEMORY = 200 << 20
_EVERY = 10.0


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--sessions", type=int, help="as many, however long they take")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        return _fuzz(args.seed, args.seconds, args.sessions, Path(place))


def _fuzz(seed: int, seconds: float, sessions: int | None, place: Path) -> int:
    frames: Counter[str] = Counter()
    began = told = time.monotonic()
    number = 0
    while number < sessions if sessions is not None else time.monotonic() < began + seconds:
        for session in _KINDS:
            try:
                frames[session.__name__] += session(seed + number)
            except Exception:  # noqa: PERF203 (a session takes longer)
                print(f"{session.__name__} fails: --seed {seed + number} --sessions 1", flush=True)
                raise
        number += 1
        if time.monotonic() > told + _EVERY or number == sessions:
            told = time.monotonic()
            print(f"{told - began:6.0f} s  {dict(frames)}  {_memory() >> 20} MiB", flush=True)
    files = [*place.iterdir()]
    print(f"{frames.total()} frames, {_memory() >> 20} MiB, files: {files}")
    return 1 if files or _memory() > _MOST_MEMORY else 0


def _memory() -> int:
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    sys.exit(main())
