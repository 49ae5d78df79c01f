"""The launcher as a child."""

import os
import threading

from hvlaunch.mpi import controller as module
from hvlaunch.mpi.builders import LauncherCommand
from hvlaunch.mpi.controller import LauncherProcess


def test_killed_launcher_whose_ssh_holds_its_pipes_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(module, "_LAST_WORDS", 1000.0)
    ended: list[int] = []
    is_there = threading.Event()
    process = LauncherProcess(
        LauncherCommand(("sh", "-c", "sleep 3600 & echo there; wait"), {}),
        dict(os.environ),
        say=lambda _: is_there.set(),
        ended=ended.append,
    )
    assert is_there.wait(60)
    closing = threading.Thread(target=process.close, args=(0.0,), daemon=True)
    closing.start()
    closing.join(60)
    assert ended == [143]
