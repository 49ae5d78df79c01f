"""Values of this host for the comparison with other hosts. Nothing of the user's is started.

The driver sends lines while the values are read: `clock` is answered with the time of this host, `open` with the seconds
for opening the script. The end of the input asks for the result; a line `pairs` for the same, and for measures of the
network to other hosts from then on: another errand would take 10 ms more on each host.
"""

from __future__ import annotations

import _thread
import os
import time

from hvlaunch.agent.errands import pairs, write_line
from hvlaunch.agent.errands.check import files, gpus, machine, network, software
from hvlaunch.agent.quick import in_time
from hvlaunch.agent.wire.frames import flag, mapping, or_null, plain, record, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Mapping

    from hvlaunch.agent.errands import ErrandStream

__all__ = ["ARGUMENTS", "RESULT", "run"]

_PATH = text(4096, raw=True)
ARGUMENTS = record(
    {
        "directory": _PATH,  # where workers would start
        "scratch": _PATH,
        "program": or_null(_PATH),  # the job's Python; None for a command without one
        "script": or_null(_PATH),  # from the directory on
        "address": or_null(text(64)),  # of this host, as the driver reached it
        "env": mapping(text(1 << 16, raw=True), text(1 << 20, raw=True), 1 << 16),
        "compares_files": flag,  # a job with a copy of the project has the same files everywhere
        "pairs": or_null(pairs.ARGUMENTS),  # None for a driver that won't ask for measures
    }
)
_PARTS: Mapping[str, Any] = {
    "machine": machine,
    "software": software,
    "gpus": gpus,
    "files": files,
    "network": network,
}
"""A module for each part: `read(arguments)` returns it, and `SHAPE` is its form. To add values, add a module here."""
RESULT = record(
    {
        **{name: or_null(module.SHAPE) for name, module in _PARTS.items()},
        "problems": mapping(text(64), text(300), len(_PARTS)),  # why a part is null
    }
)
_SECONDS = 15.0
"""Seconds for each part: a file system or a driver's library may hang."""


def run(arguments: Dict[str, Any], stream: ErrandStream) -> Dict[str, Any]:
    """Answer the driver's lines, and return the parts."""
    deadline = time.monotonic() + _SECONDS
    result: Dict[str, Any] = {"problems": {}}
    waits = {name: _begin(name, module.read, arguments, result) for name, module in _PARTS.items()}
    measures_pairs = _answer(arguments, stream)
    for name, is_done in waits.items():
        if not is_done.acquire(timeout=max(0.0, deadline - time.monotonic())):
            result["problems"][name] = "no answer within %d s" % _SECONDS
    # A copy: a part that is late must not change what is being sent.
    values = {"problems": dict(result["problems"]), **{name: result.get(name) for name in _PARTS}}
    if measures_pairs:
        write_line(stream, values)
        pairs.run(arguments["pairs"], stream)
    return values


def _begin(
    name: str, read: Callable[[Dict[str, Any]], Any], arguments: Dict[str, Any], result: Dict[str, Any]
) -> _thread.LockType:
    """Read a part in a thread; return a lock that is released at its end."""
    is_done = _thread.allocate_lock()
    is_done.acquire()

    def work() -> None:
        try:
            result[name] = read(arguments)
        except Exception as error:  # noqa: BLE001 (one part must not hide the others)
            result["problems"][name] = plain("%s: %s" % (type(error).__name__, error), 300)
        is_done.release()

    try:
        _thread.start_new_thread(work, ())
    except RuntimeError as error:
        result["problems"][name] = plain("it can't start a thread: %s" % error, 300)
        is_done.release()
    return is_done


def _answer(arguments: Dict[str, Any], stream: ErrandStream) -> bool:
    """Answer the driver's lines; return True if it asks for the pairs."""
    script = os.path.join(arguments["directory"], arguments["script"] or "")
    while True:
        try:
            line = stream.read_line()
        except EOFError:
            return False
        if line == b"pairs\n":
            return True
        answer = time.time() if line == b"clock\n" else in_time(lambda: _open(script), _SECONDS, None)
        write_line(stream, answer)


def _open(path: str) -> float:
    """Return the seconds that opening and reading the beginning of a file took; of listing, for a directory."""
    begin = time.monotonic()
    try:
        if os.path.isdir(path):
            os.listdir(path)
        else:
            with open(path, "rb", buffering=0) as file:
                file.read(1 << 16)
    except OSError:
        pass  # a missing file is a value of its own
    return time.monotonic() - begin
