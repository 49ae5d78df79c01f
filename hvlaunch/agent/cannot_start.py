"""Why a worker's command could not be started."""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Sequence, Tuple

__all__ = ["reason"]

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_MAX_STRING_PAGES = 32
"""execve(2): MAX_ARG_STRLEN, in pages."""


def reason(error: Exception, program: str, argv: Sequence[str], env: Dict[str, str]) -> Tuple[int, str]:
    """The exit code that a shell would have, and the cause in words."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        return _NOT_EXECUTABLE, "%s: %s" % (program, error)
    if number == errno.ENOENT and os.path.exists(program):
        return _NOT_FOUND, "%s: its interpreter (first line) was not found" % program
    if number in (errno.ENOENT, errno.ENOTDIR):
        return _NOT_FOUND, "%s: command not found" % program
    if number == errno.E2BIG:
        return _NOT_EXECUTABLE, _too_big(argv, env)
    if number == errno.EACCES and os.path.isdir(program):
        return _NOT_EXECUTABLE, "%s: is a directory" % program
    return _NOT_EXECUTABLE, "%s: %s" % (program, os.strerror(number).lower())


def _too_big(argv: Sequence[str], env: Dict[str, str]) -> str:
    """What of the command and its environment is more than the kernel takes, in bytes."""
    limit = _MAX_STRING_PAGES * os.sysconf("SC_PAGE_SIZE")
    words = [("argument %d" % number, word) for number, word in enumerate(argv)]
    words.extend(("variable %s" % name, "%s=%s" % (name, value)) for name, value in env.items())
    sizes = [(name, len(os.fsencode(word)) + 1) for name, word in words]
    for name, size in sizes:
        if size > limit:
            return "%s has %d bytes; this kernel allows %d for one string (execve(2))" % (name, size, limit)
    return (
        "command and environment have %d bytes, more than this kernel allows "
        "(execve(2): a quarter of the stack limit, ulimit -s)" % sum(size for _, size in sizes)
    )
