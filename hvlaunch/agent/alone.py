"""Signs that a worker was a job of its own: the library that its program imports, and a port that was never used."""

from __future__ import annotations

import os

from hvlaunch.agent.in_time import in_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator, List, Optional, Sequence, Tuple

__all__ = ["MPI", "library_of", "was_used"]

MPI = "mpi4py"
_LIBRARIES = {
    "torch": "torch",
    "transformers": "torch",
    "accelerate": "torch",
    "lightning": "torch",
    "pytorch_lightning": "torch",
    "tensorflow": "tensorflow",
    "keras": "tensorflow",
    "mpi4py": MPI,
}
"""The library for jobs of several processes that a program has if it imports these packages."""
_OTHER_WAYS = ("init_method", "TF_CONFIG")
"""A program that names these may meet others without MASTER_PORT."""
_LONGEST_PROGRAM = 1 << 16
_PATIENCE = 1.0


def library_of(argv: Sequence[str]) -> Optional[str]:
    """Return the library for jobs of several processes that the Python program of this command imports.

    The program's text is read, because the memory of a worker that has ended is gone. None if the text imports no such
    library, names another way for workers to meet, or can't be read.
    """
    text = in_time(lambda: _program(argv), _PATIENCE, "")
    if any(word in text for word in _OTHER_WAYS):
        return None
    libraries = {_LIBRARIES[name] for name in _imports(text) if name in _LIBRARIES}
    return next((library for library in ("torch", "tensorflow", MPI) if library in libraries), None)


def _program(argv: Sequence[str]) -> str:
    """Return the text behind `-c`, or the start of the file of `-m`, or of the first argument that ends in .py."""
    for number, word in enumerate(argv):
        operand = argv[number + 1] if number + 1 < len(argv) else ""
        if word == "-c":
            return operand[:_LONGEST_PROGRAM]
        if word == "-m":
            path = operand.replace(".", "/")
            return _start_of(path + ".py") or _start_of(path + "/__main__.py")
        if word.endswith(".py"):
            return _start_of(word)
    return ""


def _start_of(path: str) -> str:
    try:
        # A FIFO as the program would block an ordinary open for ever.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError):
        return ""
    try:
        return os.read(fd, _LONGEST_PROGRAM).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def _imports(text: str) -> Iterator[str]:
    """The top-level packages that the text imports, as far as its lines show."""
    for statement in text.replace(";", "\n").splitlines():
        keyword, _, names = statement.strip().partition(" ")
        if keyword == "import":
            for name in names.split(","):
                yield name.strip().partition(" ")[0].partition(".")[0]
        elif keyword == "from":
            yield names.strip().partition(" ")[0].partition(".")[0]


def was_used(port: int) -> bool:
    """True if this host has a connection to or from the port, had one a moment ago, or a program listens on it."""
    # The kernel lists a closed connection for another minute (TIME_WAIT), at the end that closed it first.
    end = ":%04X" % port
    return any(here.endswith(end) or peer.endswith(end) for here, peer in _tcp())


def _tcp() -> List[Tuple[str, str]]:
    """All TCP sockets of this host: their own address, and their peer's."""
    sockets: List[Tuple[str, str]] = []
    for table in ("tcp", "tcp6"):
        try:
            with open("/proc/self/net/" + table) as listing:
                rows = [line.split() for line in listing.readlines()[1:]]
                sockets.extend((row[1], row[2]) for row in rows)
        except OSError:  # noqa: PERF203 (two turns)
            continue  # a kernel without IPv6
    return sockets
