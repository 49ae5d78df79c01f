"""A fuzzer for frames and the door: broken ones in both directions, for as long as you like.

    python benchmarks/fuzz_frames.py --seconds 3600
    python benchmarks/fuzz_frames.py --seed 7 --sessions 1    # the same ones again

tests/security/fuzz says what must hold: no traceback, no blame on another host, no file, no program, no forged line. How
many broken frames there were, by who sent them to whom, and the memory that is in use, are printed every so often; at a
failure the seed is, and the fuzzer goes on unless told otherwise.
"""

import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.command_line import argument_parser
from tests.security.fuzz import SESSIONS
from tests.security.fuzz.judge import files_below, nothing_else

_MOST_MEMORY = 200 << 20
_EVERY = 10.0


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--sessions", type=int, help="as many of each kind, however long they take")
    parser.add_argument(
        "--seed", type=int, default=1, help="the first one's; each further session has the next"
    )
    parser.add_argument("--first-failure", action="store_true", help="end there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        fuzz = _Fuzz(args.seed, Path(place))
        return fuzz.run(args.seconds, args.sessions, goes_on=not args.first_failure)


class _Fuzz:
    def __init__(self, seed: int, place: Path) -> None:
        self._seed = seed
        self._place = place
        self._broken: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    def run(self, seconds: float, sessions: int | None, *, goes_on: bool) -> int:
        """The exit code."""
        for play in SESSIONS.values():
            play(0, is_broken=False)  # what is imported later is there
        before = _memory()
        began = shown = time.monotonic()
        number = 0
        while number < sessions if sessions is not None else time.monotonic() < began + seconds:
            self._play(self._seed + number)
            number += 1
            if time.monotonic() > shown + _EVERY:
                shown = time.monotonic()
                print(f"{shown - began:6.0f} s  seed {self._seed + number}  {self._figures()}", flush=True)
            if self._failures and not goes_on:
                break
        grown = _memory() - before
        files = files_below(self._place)
        print(f"{number} sessions of each kind, from seed {self._seed}: {self._figures()}")
        print(f"{self._broken.total()} broken frames, {grown >> 20} MiB more, files: {sorted(files)}")
        return 1 if files or self._failures or grown > _MOST_MEMORY else 0

    def _play(self, seed: int) -> None:
        for kind, play in SESSIONS.items():
            try:
                with nothing_else():
                    self._broken[kind] += play(seed)
            except Exception:  # noqa: BLE001, PERF203 (whatever it is, it is told; and a session takes longer)
                self._failures[kind] += 1
                print(f"{kind}: seed {seed} fails (--seed {seed} --sessions 1)", flush=True)
                traceback.print_exc(file=sys.stdout)

    def _figures(self) -> str:
        return f"{dict(self._broken)}, failures: {dict(self._failures)}, {_memory() >> 20} MiB"


def _memory() -> int:
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    sys.exit(main())
