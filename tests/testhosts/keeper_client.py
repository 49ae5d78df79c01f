"""Our end of the keeper: start it, ask it, end it."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

__all__ = ["PATH", "KeeperClient", "TestHostsError"]

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAM = Path(__file__).resolve().with_name("keeper.py")


class TestHostsError(RuntimeError):
    """The hosts can't be made, or can't be changed, as asked; the text says why."""

    __test__ = False


class KeeperClient:
    """One keeper process (keeper.py), which owns the directory `state` from now on and removes it at its end."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROGRAM), str(state)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": PATH, "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, verb: str, *arguments: Any) -> Any:
        """What the keeper's method `verb` returns. Raises TestHostsError."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with self._lock:
            try:
                stdin.write(json.dumps([verb, *arguments]) + "\n")
                stdin.flush()
                line = stdout.readline()
            except BrokenPipeError:
                line = ""
        answer = json.loads(line or '{"error": "the keeper of the hosts has ended"}')
        if "error" in answer:
            raise TestHostsError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """End it and all that it keeps; returns when all is gone."""
        self._process.communicate()
