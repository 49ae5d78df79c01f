"""An errand of tests: does what its arguments say."""

from __future__ import annotations

import os
import sys
import time

from hvlaunch.agent.proc import command_of
from hvlaunch.agent.wire.frames import of, record, text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hvlaunch.agent.errands import ErrandStream

__all__ = ["ARGUMENTS", "RESULT", "run"]

_ACTS = of("echo", "fill", "raise", "allocate", "sleep", "exit", "kill", "print", "misfit", "long", "spawn")
ARGUMENTS = record(
    {"act": _ACTS, "size": whole(0, 1 << 40), "words": text(1 << 21)}, optional=("size", "words")
)
RESULT = record({"bytes": whole(0, 1 << 53), "command": text(1 << 12), "words": text(1 << 21)}, ("words",))


def run(arguments: dict[str, Any], stream: ErrandStream) -> dict[str, Any]:
    """Carry out the act. The result has the number of bytes that the stream carried."""
    act, size, words = arguments["act"], arguments.get("size", 0), arguments.get("words", "")
    count = 0
    if act == "echo":
        while True:
            data = stream.read(1 << 16)
            if not data:
                break
            stream.write(data)
            count += len(data)
    elif act == "fill":
        while count < size:
            stream.write(b"x" * min(1 << 16, size - count))
            count += min(1 << 16, size - count)
    elif act == "raise":
        raise ValueError(words)
    elif act == "allocate":
        count = len(bytearray(size))
    elif act == "sleep":
        time.sleep(size)
    elif act == "exit":
        os._exit(size)
    elif act == "kill":
        os.kill(os.getpid(), size)
    elif act == "print":
        print(words, flush=True)  # noqa: T201 (to see where it goes)
        print(words, file=sys.stderr, flush=True)  # noqa: T201 (as above)
    elif act == "misfit":
        return {"bytes": -1}
    elif act == "long":
        return {"bytes": 0, "command": "", "words": "x" * size}
    elif act == "spawn":
        import subprocess

        subprocess.Popen(["sleep", words])
        time.sleep(size)
    return {"bytes": count, "command": command_of(os.getpid())[:80]}
