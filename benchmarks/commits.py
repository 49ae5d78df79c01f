"""How long hvlaunch.torch.checkpoint.save() pauses a step, beside a copy of the same tensors into memory that is in use.

    python benchmarks/commits.py                      # 2 GiB, as 1 tensor and as 500
    python benchmarks/commits.py --gib 0.5 --runs 9

Each run is a new state: its first save makes the files, its later saves overwrite them. Before each save the checksums of the
save before are complete, as in a training whose saves are far apart. A state shared by the ranks has two files: it takes four times its size.
"""

import os
import shutil
import sys
import time
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.command_line import argument_parser
from benchmarks.measure import heading, spread, table
from hvlaunch.agent import commits
from hvlaunch.torch.kept import KeptState
from hvlaunch.torch.sharing import split

SAVES = 6
"""Saves of a run. Both files exist from the third save on, hence all of these count alike."""
NAMES = ("first", "second", "third and later")


def measure(gib: float, count: int, runs: int) -> dict[str, list[tuple[float, float]]]:
    """Return pairs of seconds, a save's pause and a copy's, by the number of the save."""
    elements = int(gib * (1 << 30)) // count // 4
    value = {str(number): torch.ones(elements) for number in range(count)}
    used = [torch.ones(elements) for _ in range(count)]
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    for _ in range(runs):
        os.environ["HVLAUNCH_SCRATCH"] = scratch = f"/tmp/hvlaunch-{uuid.uuid4().hex}"
        state = KeptState("default.shared")
        try:
            for step in range(SAVES):
                begun = time.perf_counter()
                for target, source in zip(used, value.values(), strict=True):
                    target.copy_(source)
                copied = time.perf_counter()
                complete = state.write((0, step), 0, split(value))
                pairs[NAMES[min(step, 2)]].append((time.perf_counter() - copied, copied - begun))
                if complete is None:
                    sys.exit("there is too little memory")
                # save() does this in a thread, beside the steps.
                complete()
        finally:
            shutil.rmtree(commits.directory_of(scratch), ignore_errors=True)
    return pairs


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state (default: 2)")
    parser.add_argument("--runs", type=int, default=5, help="runs (default: 5)")
    options = parser.parse_args()
    print(heading(f"Pause of save(), {options.gib} GiB, {torch.get_num_threads()} threads"))
    rows = []
    for count in (1, 500):
        for name, pairs in measure(options.gib, count, options.runs).items():
            saves, copies = zip(*pairs, strict=True)
            ratio = spread([save / copy for save, copy in pairs])
            rows.append([str(count), name, spread(saves), spread(copies), ratio])
    print(table(["tensors", "save", "pause s", "copy s", "pause / copy"], rows))


if __name__ == "__main__":
    main()
