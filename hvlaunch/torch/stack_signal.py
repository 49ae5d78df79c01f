"""How hvlaunch learns what this process is doing where nobody may look at it from outside: it asks by a signal.

faulthandler answers it with the stacks of all threads, into a file in the job's private directory. The signal's
number, and the file's name, are as in hvlaunch/agent/observer/stacks.py.
"""

import faulthandler
import os
import signal
from contextlib import suppress
from typing import TextIO

__all__ = ["STACK_SIGNAL", "answer_stack_signal"]

_files: list[TextIO] = []
"""Which must stay open."""

STACK_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else None


def answer_stack_signal() -> None:
    """Let the host's agent ask this process for its stacks, where it is a worker, and uses the signal for nothing else."""
    scratch = os.environ.get("HVLAUNCH_SCRATCH")
    if scratch is None or STACK_SIGNAL is None or _files or signal.getsignal(STACK_SIGNAL) != signal.SIG_DFL:
        return
    with suppress(OSError, ValueError):  # the directory is no more, or another program's
        path = os.path.join(scratch, f"stack.{os.getpid()}")  # noqa: PTH118 (as cheap as can be)
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "w")
        faulthandler.register(STACK_SIGNAL, file, all_threads=True, chain=False)
        _files.append(file)
