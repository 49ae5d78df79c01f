"""Bindings as /proc has them, of real processes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvlaunch.agent.errands.observer.bindings import answer
from hvlaunch.agent.workers.binding import LEDGER, ranges

_CHILD = "import os, sys; os.sched_setaffinity(0, {%d}); print(flush=True); sys.stdin.read()"
_WORKER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


@pytest.fixture
def worker() -> Iterator["subprocess.Popen[bytes]"]:
    """A process whose child has bound itself to this machine's lowest processor."""
    words = [sys.executable, "-c", _WORKER, _CHILD % min(os.sched_getaffinity(0))]
    env = {**os.environ, "OMP_NUM_THREADS": "3", "HIP_VISIBLE_DEVICES": "1,2"}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.communicate()


def test_a_row_has_what_the_kernel_says(worker: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    [row] = answer({"workers": [[5, worker.pid]], "scratch": str(tmp_path)})
    assert row == {
        "rank": 5,
        "ordered": None,
        "cpus": ranges(os.sched_getaffinity(0)),
        "memory": "default",
        "threads": "3",
        "gpus": "1,2",
        "other": None,
        "notes": [],
    }


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it needs two processors")
def test_a_process_with_another_mask_than_ordered(worker: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    mask = ranges(os.sched_getaffinity(0))
    orders = [
        {"pid": worker.pid, "cpus": mask, "gpus": [], "notes": [["memory", "no\x1b"]]},
        {"pid": 1, "cpus": "7", "gpus": [], "notes": []},
    ]
    # The last line is being written.
    (tmp_path / LEDGER).write_text("\n".join([*map(json.dumps, orders), '{"pid": ']))
    [row] = answer({"workers": [[5, worker.pid], [6, 1 << 22]], "scratch": str(tmp_path)})
    assert row["ordered"] == mask
    assert row["notes"] == [["memory", "no\\x1b"]]
    other = row["other"]
    assert other["cpus"] == str(min(os.sched_getaffinity(0)))
    assert other["pid"] != worker.pid
