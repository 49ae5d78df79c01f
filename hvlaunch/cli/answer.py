"""Answers to questions: texts for stdout, and the exit codes that come of them."""

import errno
import os
import sys
from contextlib import suppress

from hvlaunch.console.visible import visible
from hvlaunch.errors import EXIT_NOT_WRITTEN

__all__ = ["BROKEN_PIPE", "complain", "print_answer"]

BROKEN_PIPE = 141  # 128 + SIGPIPE


def print_answer(text: str) -> int:
    """Write to stdout and flush; the exit code that this leads to."""
    if sys.stdout is None:  # closed before we started
        return 0
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails again
        if isinstance(error, BrokenPipeError):
            return BROKEN_PIPE
        complain(f"stdout: {os.strerror(error.errno or errno.EIO).lower()}")
        return EXIT_NOT_WRITTEN
    return 0


def complain(message: str) -> None:
    """Write a message to stderr: one line, or one for each host; control characters, which may be a host's, escaped."""
    with suppress(OSError):
        for line in message.split("\n"):
            print(f"hvlaunch: {visible(line)}", file=sys.stderr, flush=True)  # noqa: T201 (printing errors is done here)
