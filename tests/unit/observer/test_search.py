"""Whether a host has what a worker of another did not find."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvlaunch.agent.errands.observer.stacks import Search

WAITS = "print('up', flush=True)\nimport time; time.sleep(600)\n"


@pytest.fixture
def worker(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """It has `beside` beside its script, `below` by PYTHONPATH, and a file in its working directory."""
    for name in ("work", "src", "lib/below"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "work" / "data.npy").touch()
    (tmp_path / "src" / "beside.py").write_text("raise SystemExit('it is not to be run')")
    (tmp_path / "lib" / "below" / "__init__.py").write_text("raise SystemExit('it is not to be run')")
    (tmp_path / "lib" / "below" / "deep.py").touch()
    (tmp_path / "src" / "train.py").write_text(WAITS)
    process = subprocess.Popen(
        [sys.executable, "../src/train.py"],
        cwd=tmp_path / "work",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "lib")},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    yield process
    process.kill()
    process.communicate()


def test_a_module_is_found_by_the_workers_python_without_running_it(
    worker: "subprocess.Popen[bytes]",
) -> None:
    asked = {
        ("file", "data.npy"): True,
        ("file", "other.npy"): False,
        ("module", "beside"): True,
        ("module", "below.deep"): True,
        ("module", "below.none"): False,
        ("module", "nowhere.at_all"): False,
        ("module", "pytest"): True,
    }
    searches = {case: Search(*case, worker.pid) for case in asked}
    deadline = time.monotonic() + 60
    assert {case: search.result(deadline) for case, search in searches.items()} == asked


def test_a_late_search_or_a_missing_process_gives_no_result(
    worker: "subprocess.Popen[bytes]",
) -> None:
    assert Search("module", "beside", worker.pid).result(0.0) is None
    worker.kill()
    worker.wait()
    for kind in ("module", "file"):
        assert Search(kind, "beside", worker.pid).result(time.monotonic() + 60) is None
