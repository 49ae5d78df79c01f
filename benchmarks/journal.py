"""What a job's journal costs its driver: to begin it, to write turns, to take idle turns together, and to read it.

    python benchmarks/journal.py
    python benchmarks/journal.py --turns 20000 --times 9 --folder /var/tmp

Each row is a process of its own, so that imports count. CPU time, but for rows with --fsync, which wait for the disk.
"""

import compileall
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser
from benchmarks.measure import heading, spread, table

AT_ONCE = (1, 8, 64)
SYNCED = 200
"""Turns that are written one by one with --fsync."""


def parts(folder: Path, turns: int) -> dict[str, float]:
    """Seconds of each part, or microseconds of each turn. Of what a driver has loaded, only the journal's own imports count."""
    import hvlaunch.driver.loop  # noqa: PLC0415
    import hvlaunch.driver.turn as arrivals  # noqa: PLC0415 (only in the process that measures)
    import hvlaunch.gloo.controller  # noqa: F401, PLC0415 (what a driver has loaded before)
    from hvlaunch import __version__  # noqa: PLC0415
    from hvlaunch.engine import events as on  # noqa: PLC0415
    from hvlaunch.engine.codec import begin_entry, encode  # noqa: PLC0415
    from tests.unit.gloo.history import spec  # noqa: PLC0415

    source: Any = SimpleNamespace(number=3, offset=0.5)
    numbers: dict[str, float] = {}

    def beats(count: int) -> list[arrivals.Turn]:
        return [
            arrivals.Turn(
                100.0 + number,
                arrivals.Arrival(on.WorkerBeat("host-a", 3, 0, number), source, number),
                (),
                is_idle=True,
            )
            for number in range(count)
        ]

    encode(on.Event, on.Tick())
    begin = time.process_time()
    from hvlaunch.driver.job_record import JOURNAL, Journal  # noqa: PLC0415 (it is what is measured)

    def new(name: str, *, is_synced: bool = False) -> Journal:
        (folder / name).mkdir()
        journal = Journal(folder / name / JOURNAL, sys.exit, is_synced=is_synced)
        journal.begin(begin_entry(__version__, "j0b", spec("host-a:4"), 4711, "/home"))
        return journal

    journal = new("first")
    numbers["begin, with imports, ms"] = 1e3 * (time.process_time() - begin)
    journal.close()
    begin = time.process_time()
    journal = new("second")
    numbers["begin, ms"] = 1e3 * (time.process_time() - begin)
    journal.close()
    all_turns = beats(turns)
    for count in AT_ONCE:
        journal = new(f"by {count}")
        begin = time.process_time()
        for start in range(0, turns, count):
            journal.write(all_turns[start : start + count], {})
        numbers[f"a turn, {count} at once, us"] = 1e6 * (time.process_time() - begin) / turns
        if count == AT_ONCE[-1]:
            size = sum(file.stat().st_size for file in (folder / f"by {count}").iterdir())
            numbers["bytes a turn"] = size / turns
        journal.close()
    journal = new("folded")
    journal.write(all_turns[:5000], {})
    begin = time.process_time()
    journal.compact(on.Lull())
    numbers["5000 idle turns taken together, ms"] = 1e3 * (time.process_time() - begin)
    journal.close()
    journal = new("synced", is_synced=True)
    begin = time.monotonic()
    for one in all_turns[:SYNCED]:
        journal.write([one], {})
    numbers["a turn with --fsync, us"] = 1e6 * (time.monotonic() - begin) / SYNCED
    journal.close()
    from hvlaunch.driver.job_record import read_past  # noqa: PLC0415

    begin = time.process_time()
    past = read_past(folder / "by 64" / JOURNAL)
    numbers["to read a turn, us"] = 1e6 * (time.process_time() - begin) / len(past.turns)
    return numbers


def in_process(folder: Path, turns: int) -> dict[str, float]:
    words = [sys.executable, __file__, "--turns", str(turns), "--measure", str(folder)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    numbers: dict[str, float] = json.loads(done.stdout)
    return numbers


def main(collect: Callable[[Path, int], dict[str, float]] = in_process) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--turns", type=int, default=10_000, help="turns written of each kind (default 10000)"
    )
    parser.add_argument("--times", type=int, default=5, help="processes (default 5)")
    parser.add_argument(
        "--folder", type=Path, help="where journals are made (default: the temporary directory)"
    )
    parser.add_argument("--measure", type=Path, help="measure once, there, and print JSON")
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(parts(options.measure, options.turns)))
        return 0
    compileall.compile_dir(Path(__file__).resolve().parents[1] / "hvlaunch", quiet=1)  # as pip does
    samples: list[dict[str, float]] = []
    for _ in range(options.times):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            samples.append(collect(Path(folder), options.turns))
    rows: Sequence[Sequence[str]] = [
        [name, spread([sample[name] for sample in samples], 2)] for name in samples[0]
    ]
    print(heading("A job's journal"))
    print(table(["part", "median (least-most)"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
