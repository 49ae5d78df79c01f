"""Quick replacements for `json`, `signal`, `socket`, `struct`, `selectors`, `collections`, `hmac` and `ctypes`.

Importing these modules takes 10 of the 25 ms for the start of Python and the agent on each host, because they build
enumerations and regular expressions. This module takes the C modules below them instead; a Python without these C
modules (not CPython) gets the modules themselves.
"""

from __future__ import annotations

import _thread
import os
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
    import struct
    from collections import deque
    from typing import Any, Callable, Dict, List, Optional, Protocol, Tuple, TypeVar, Union

    T = TypeVar("T")

    class HasFileno(Protocol):
        def fileno(self) -> int: ...

else:
    try:
        import _signal as signal
        import _socket as socket
        import _struct as struct
        from _collections import deque
    except ImportError:
        import signal
        import socket
        import struct
        from collections import deque

__all__ = [
    "READ",
    "WRITE",
    "Selector",
    "accept",
    "deque",
    "dumps",
    "has_own_proc",
    "in_time",
    "loads",
    "mac",
    "peer_uid",
    "prctl",
    "same",
    "signal",
    "signal_name",
    "socket",
    "struct",
]


# By number, because a driver on a system without epoll imports this module too.
READ, WRITE = 0x1, 0x4
"""EPOLLIN and EPOLLOUT, see epoll_ctl(2)."""


class Selector:
    """Waits for file descriptors and objects with fileno(), like selectors.EpollSelector."""

    # selectors would import enum, math and more: 2 ms on each host.

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._waiting: Dict[int, Tuple[Any, int]] = {}

    def register(self, file: Union[int, HasFileno], events: int, data: Any) -> None:
        """Wait for `events` (READ, WRITE or both); select() returns `data` with them."""
        fd = _fd(file)
        self._epoll.register(fd, events)
        self._waiting[fd] = data, events

    def modify(self, file: Union[int, HasFileno], events: int, data: Any) -> None:
        fd = _fd(file)
        self._epoll.modify(fd, events)
        self._waiting[fd] = data, events

    def unregister(self, file: Union[int, HasFileno]) -> None:
        fd = _fd(file)
        del self._waiting[fd]
        self._epoll.unregister(fd)

    def __contains__(self, fd: int) -> bool:
        return fd in self._waiting

    def select(self, timeout: Optional[float]) -> List[Tuple[Any, int]]:
        """Wait at most `timeout` seconds (None: for ever); return data and events of the ready files."""
        ready_events = []
        for fd, ready in self._epoll.poll(-1 if timeout is None else timeout, max(1, len(self._waiting))):
            data, awaited = self._waiting[fd]
            # EPOLLERR and EPOLLHUP alone stand for both: the next read or write then finds the error.
            ready_events.append((data, awaited & ready or awaited))
        return ready_events

    def close(self) -> None:
        self._epoll.close()


def _fd(file: Union[int, HasFileno]) -> int:
    return file if isinstance(file, int) else file.fileno()


def in_time(work: Callable[[], T], seconds: float, otherwise: T) -> T:
    """Return the result of `work`; `otherwise` after so many seconds, or if no thread can be started."""
    # /proc/PID/cmdline, environ and maps are read under the lock of the process's memory map. A process that forks holds
    # the lock for a while, one that is stuck in the kernel perhaps for ever. The thread is then left to wait.
    results: List[T] = []
    is_done = _thread.allocate_lock()
    is_done.acquire()

    def run() -> None:
        results.append(work())
        is_done.release()

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:
        return otherwise
    return results[0] if is_done.acquire(timeout=seconds) else otherwise


def has_own_proc() -> bool:
    """True if /proc shows the PID namespace of this process.

    `unshare --pid` alone leaves the /proc of the namespace around the new one: its numbers belong to other processes.
    """
    try:
        with open("/proc/self/status") as status:
            # The process's numbers in the namespace of this /proc, and in each one below it, down to its own.
            pids = status.read().partition("\nNSpid:")[2].partition("\n")[0].split()
        # Before Linux 4.1 there are none.
        return (pids or [os.readlink("/proc/self")]) == [str(os.getpid())]
    except OSError:
        return False


def accept(listener: socket.socket) -> socket.socket:
    """Return the next connection. Raises OSError."""
    fd, _ = listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001 (what socket.socket.accept calls)
    return socket.socket(fileno=fd)


def peer_uid(connection: socket.socket) -> int:
    """Return the user of the program at the other end of a Unix socket. Raises OSError."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(peer[4:8], sys.byteorder)


def prctl(option: int, value: Union[int, bytes]) -> Optional[str]:
    """Set an attribute of this process; return the error, None for success."""
    try:
        import _ctypes  # noqa: PLC0415 (the module above it takes 2 ms more on each host)

        call = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]  # None is this program
        if _ctypes.call_function(call, (option, value, 0, 0, 0)) == 0:
            return None
    except (ImportError, AttributeError, TypeError, OSError):
        pass
    try:
        import ctypes  # noqa: PLC0415 (some builds of Python lack it)

        libc = ctypes.CDLL(None, use_errno=True)
    except (ImportError, OSError) as error:
        return "no ctypes: %s" % error
    if libc.prctl(option, value, 0, 0, 0) == 0:
        return None
    return "prctl: " + os.strerror(ctypes.get_errno())


_BLOCK = 64  # bytes of SHA-256
_INNER, _OUTER = (bytes(number ^ pad for number in range(256)) for pad in (0x36, 0x5C))


def mac(key: bytes, message: bytes) -> bytes:
    """HMAC-SHA256 (RFC 2104)."""
    # Not by hmac, hashlib or _hashlib: these load OpenSSL, which takes 2.5 ms of CPU on each host.
    try:
        from _sha256 import sha256  # type: ignore[import-not-found]  # noqa: PLC0415 (as below)
    except ImportError:
        try:
            from _sha2 import sha256  # type: ignore[import-not-found]  # noqa: PLC0415 (since Python 3.12)
        except ImportError:
            from hashlib import sha256  # noqa: PLC0415 (a Python that was built without them)
    key = (key if len(key) <= _BLOCK else sha256(key).digest()).ljust(_BLOCK, b"\0")
    digest: bytes = sha256(key.translate(_OUTER) + sha256(key.translate(_INNER) + message).digest()).digest()
    return digest


def fingerprint(data: bytes, size: int) -> str:
    """Return the BLAKE2b hash of the data: `size` bytes, in hexadecimal."""
    # As above. SHA-256 without OpenSSL takes three times as long.
    try:
        from _blake2 import blake2b  # noqa: PLC0415 (as above)
    except ImportError:
        from hashlib import blake2b  # noqa: PLC0415 (as above)
    return blake2b(data, digest_size=size).hexdigest()


def same(first: bytes, second: bytes) -> bool:
    """Compare two secrets in a time that does not depend on the first difference."""
    try:
        from _operator import _compare_digest  # noqa: PLC0415 (as above)
    except ImportError:
        import hmac  # noqa: PLC0415 (as above)

        return hmac.compare_digest(first, second)
    return _compare_digest(first, second)


def signal_name(number: int) -> str:
    from signal import Signals  # noqa: PLC0415 (slow to import, and needed after a failure only)

    try:
        return Signals(number).name
    except ValueError:
        return "signal %d" % number


def _no_number(name: str) -> None:
    # Python's json would take NaN and Infinity, which compare in ways that no shape expects.
    raise ValueError("%s is not a number in JSON" % name)


class _Settings:
    """The default settings of json, except that NaN is an error."""

    strict = True
    object_hook = object_pairs_hook = array_hook = None
    parse_float, parse_int, parse_constant = float, int, staticmethod(_no_number)
    memo: Dict[str, str] = {}  # noqa: RUF012 (there is one reader)


def _refuse(value: Any) -> None:
    raise TypeError("no JSON for %r" % (value,))


try:
    from _json import encode_basestring_ascii, make_encoder, make_scanner

    _read = make_scanner(_Settings)  # type: ignore[arg-type]  # an object with these attributes is enough
    _write = make_encoder(None, _refuse, encode_basestring_ascii, None, ":", ",", False, False, True)
    # A Python whose private functions have changed shows it here, not in the middle of a job.
    _read("".join(_write({"a": [None]}, 0)), 0)
except (ImportError, AttributeError, TypeError):  # a Python with other private names
    import json

    def loads(text: str) -> Any:
        """Parse JSON. Raises ValueError, RecursionError."""
        return json.loads(text, parse_constant=_no_number)

    def dumps(value: Any) -> str:
        """Return the value as JSON, in ASCII and without spaces."""
        return json.dumps(value, separators=(",", ":"))

else:

    def loads(text: str) -> Any:
        """Parse JSON. Raises ValueError, RecursionError."""
        try:
            value, end = _read(text, 0)
        except StopIteration:
            raise ValueError("there is no value") from None
        except SystemError:
            # CPython's scanner would raise json.decoder's own error, which is not imported.
            raise ValueError("a text that does not end, or is not escaped") from None
        if end != len(text):
            raise ValueError("there is more after the value")
        return value

    def dumps(value: Any) -> str:
        """Return the value as JSON, in ASCII and without spaces."""
        return "".join(_write(value, 0))
