"""The servers of benchmarks/rendezvous.py leave no files behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import rendezvous_servers

SCRIPT = rendezvous_servers.__file__


@pytest.mark.parametrize("end", ["stdin", "SIGTERM"])
def test_a_server_removes_its_folder_when_it_ends(end, tmp_path):
    before = sorted(Path(SCRIPT).parent.iterdir())
    with subprocess.Popen(
        [sys.executable, SCRIPT, "hvlaunch-file"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        assert int(server.stdout.readline()) > 0
        [folder] = tmp_path.iterdir()
        assert (folder / "store").exists()
        if end == "SIGTERM":
            server.send_signal(signal.SIGTERM)
        else:
            server.stdin.close()
        assert server.wait(60) == (128 + signal.SIGTERM if end == "SIGTERM" else 0)
    assert list(tmp_path.iterdir()) == []
    assert sorted(Path(SCRIPT).parent.iterdir()) == before
