"""What a process has from its start on: a driver can be forked only by one that has the same.

Namespaces, ids and hard limits can't be had otherwise, and what Python reads at its start it does not read again.
"""

from __future__ import annotations

import os
import resource
import sys

from hvlaunch import __version__

TYPE_CHECKING = False  # see forked.py
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["setting", "soft_limits", "umask"]

_LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_RIGHTS = ("Cap", "NoNewPrivs", "Seccomp")
_UMASK = "Umask:"
_READ_AT_START = ("GLIBC_", "LANG", "LC_", "LD_", "MALLOC_", "OPENSSL_", "PYTHON")


def setting(environ: Mapping[str, str] | None = None) -> str:
    """Two processes that have the same text are alike.

    With an environment it tells too what this Python was started with, its flags and those variables; without, it is for
    drivers that have always been started alike. Raises OSError, where the system does not tell.
    """
    root = os.stat("/")  # noqa: PTH116 (as in state.py)
    facts: list[object] = [
        __version__,
        __file__,
        sys.executable,
        sys.prefix,
        os.getresuid(),
        os.getresgid(),
        sorted(os.getgroups()),
        [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES],  # noqa: PTH115 (as above)
        (root.st_dev, root.st_ino),
        os.getpriority(os.PRIO_PROCESS, 0),
        [resource.getrlimit(number)[1] for number in _LIMITS],
        [line for line in _status() if line.startswith(_RIGHTS)],
    ]
    if environ is not None:
        read = sorted(item for item in environ.items() if item[0].startswith(_READ_AT_START))
        facts += [sys.flags, sys.warnoptions, sorted(sys._xoptions.items()), read]  # noqa: SLF001 (documented)
    return repr(facts)


def soft_limits() -> dict[int, int]:
    """Of each resource, by the number that the resource module has for it."""
    return {number: resource.getrlimit(number)[0] for number in _LIMITS}


def umask() -> int:
    """That of this process, which only the kernel tells without a moment in which it is another. Raises OSError."""
    found = [line for line in _status() if line.startswith(_UMASK)]
    if not found:
        raise OSError("this kernel does not tell the umask")
    return int(found[0][len(_UMASK) :], 8)


def _status() -> list[str]:
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 (as above)
        return file.read().splitlines()
