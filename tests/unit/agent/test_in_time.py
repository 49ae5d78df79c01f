"""What is read of a process that the kernel lets nobody see into for now holds nobody up for long."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from hvlaunch.agent.quick import in_time
from hvlaunch.agent.workers import diagnosis, family
from tests.unit.agent.harness import PATIENCE

SECONDS = 0.05


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """stuck(module): what the module reads of a process's memory does not come during the test."""
    is_over = threading.Event()

    def read(path: str, mode: str = "r") -> IO[Any]:
        if Path(path).name in ("maps", "cmdline", "environ"):
            assert is_over.wait(PATIENCE), "somebody waits for it"
        return open(path, mode)  # noqa: PTH123 (as the modules do)

    yield lambda module: monkeypatch.setattr(module, "open", read, raising=False)
    is_over.set()


def test_late_result_is_replaced_by_the_default(
    stuck: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (diagnosis, family):
        stuck(module)
    monkeypatch.setattr(diagnosis, "_PATIENCE", SECONDS)
    released = threading.Event()
    monkeypatch.setattr(diagnosis, "start_of", lambda *_: released.wait(PATIENCE) and "import torch")
    assert diagnosis.library_of(["python", "train.py"]) is None  # as on a file system that hangs
    released.set()
    assert diagnosis.programs_of(os.getpgrp()) == []
    with subprocess.Popen(["sleep", "3600"]) as child:
        family.kill_marked([b"HVLAUNCH_WORKER=a/0/0"], SECONDS)
        assert child.poll() is None
        child.kill()


def test_default_without_a_free_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a limit of processes that is reached."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    assert in_time(lambda: 1, 60.0, 2) == 2


def test_result_in_time() -> None:
    assert in_time(lambda: 1, PATIENCE, 2) == 1
