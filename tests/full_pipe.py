"""A pipe that nobody reads."""

import fcntl
import os

__all__ = ["full_pipe"]

_LARGEST = 1 << 20
"""/proc/sys/fs/pipe-max-size, if nobody has changed it: nobody can make room in it."""


def full_pipe() -> tuple[int, int]:
    """Its two ends. Nobody can write to it."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _LARGEST)
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writer, True)
    return reader, writer
