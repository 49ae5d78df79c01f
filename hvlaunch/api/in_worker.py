"""The `__main__` of a call's archive (call_job.py): it calls the function in a worker, and sends the result to the agent.

Standard library only, in the syntax of Python 3.8: also a Python of the wrong version must run it far enough to say so.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, NoReturn

__all__ = ["MARK", "SIZE", "ResultNotPickled", "WrongPython", "main"]

_RESULT = 3
"""Descriptor of the pipe for the result."""
MARK = b"hvlaunch"
SIZE = struct.Struct(">I")
"""A result is the pickled value, facts about it as JSON, their size, and this mark: an incomplete result lacks the mark."""
_PROTOCOL = 5
_AT_ONCE = 1 << 20
_LONGEST = 1 << 20
"""Most characters of an error's text, and of its traceback."""
_NOT_HERE = "not on this host; try: install it there, or cloudpickle.register_pickle_by_value(MODULE)"


class WrongPython(Exception):
    """Another minor version of Python pickled the function; its byte code can't be read here. Only shown by `WorkerFailed`.

    Try: `python="/path/to/python3.11"`, the version of the caller.
    """


class ResultNotPickled(Exception):
    """The value of the function can't be pickled. Only shown by `WorkerFailed`.

    Try: return plain data or CPU tensors.
    """


def main(read: Callable[[str], bytes]) -> NoReturn:
    """Call the function and end the process. `read` returns a member of the archive by name."""
    # Programs that the function starts must not hold the pipe open.
    os.set_inheritable(_RESULT, False)
    call = json.loads(read("call.json").decode("ascii"))
    result = _Result(call["raises"])
    archive = sys.path[0]
    try:
        # Before the import: a Python of the wrong version may not be able to import cloudpickle at all.
        _check_python(call["python"])
        import cloudpickle  # noqa: PLC0415 (the one of the archive: the pickled call refers to its functions)

        # Only after cloudpickle: a module of the user could hide it.
        sys.path[:] = _path(call["path"], archive)
        value = _call(cloudpickle, read("call.pickle"))
    except BaseException as error:  # noqa: BLE001 (the caller gets any error)
        result.fail(error)
    result.give(value, cloudpickle)


def _call(cloudpickle: Any, pickled: bytes) -> Any:
    try:
        function, args, kwargs = cloudpickle.loads(pickled)
    except ImportError as error:
        # The message reaches the user without a traceback of this file.
        error.msg = f"{error.msg} ({_NOT_HERE})"
        raise
    return function(*args, **kwargs)


def _check_python(version: str) -> None:
    major, minor = sys.version_info[:2]
    if f"{major}.{minor}" != version:
        raise WrongPython(
            f"the function is of Python {version}, and {sys.executable} is Python {major}.{minor}; try: python=PATH"
        )


def _path(theirs: list[str], archive: str) -> list[str]:
    """Return the module path: that of the function's machine, ours, and the archive last."""
    ours, here = sys.path[1:], os.getcwd()  # noqa: PTH109 (as below)
    # Relative places are in this host's copy of the project: its modules win over an editable installation's.
    relative = [place for place in theirs if not place.startswith("/")]
    copied = [os.path.normpath(os.path.join(here, place)) for place in relative]  # noqa: PTH118 (texts)
    others = [place for place in theirs if place.startswith("/") and place not in ours]
    first = others[: theirs[:1] == others[:1]]
    # The archive is last: it stands in for modules that the host lacks.
    return [*copied, *first, *ours, *others[len(first) :], archive]


class _Result:
    """The pipe to the agent. give() and fail() end the process."""

    def __init__(self, raises: bool) -> None:
        self._raises = raises
        self._size = 0
        self._pid = os.getpid()

    def write(self, data: bytes) -> int:
        """Write all bytes; the pickler's interface."""
        view = memoryview(data).cast("B")
        size = len(view)
        while view:
            view = view[os.write(_RESULT, view[:_AT_ONCE]) :]
        self._size += size
        return size

    def give(self, value: Any, cloudpickle: Any) -> NoReturn:
        # A child that the function has forked must not write a second result.
        if os.getpid() != self._pid:
            sys.exit(0)
        try:
            cloudpickle.dump(value, self, protocol=_PROTOCOL)
        except Exception as error:  # noqa: BLE001 (the value's own code may raise anything)
            unsent = ResultNotPickled(f"its value can't be pickled: {type(error).__name__}: {_text(error)}")
            unsent.__cause__ = error
            self.fail(unsent)
        self._end({"kind": "value", "start": 0}, 0)

    def fail(self, error: BaseException) -> NoReturn:
        """Send the exception of the function."""
        story = "".join(traceback.format_exception(type(error), error, _of_function(error.__traceback__)))
        code: Any = error.code if isinstance(error, SystemExit) else 1
        if not isinstance(error, SystemExit):
            _print(story)
        elif not (code is None or isinstance(code, int)):
            # As Python does.
            _print(f"{code}\n")
            code = 1
        if os.getpid() != self._pid:
            sys.exit(code)
        # A part of a value may be in the pipe already, from a pickling that failed on its way.
        start = self._size
        # The traceback as text goes along: the exception may not be picklable.
        self.write(_pickled(error))
        facts = {
            "kind": "error",
            "type": type(error).__name__,
            "text": _cut(_text(error)),
            "traceback": _cut(story),
        }
        self._end({**facts, "start": start}, (code or 0) if self._raises else 0)

    def _end(self, facts: dict[str, Any], code: int) -> NoReturn:
        facts["size"] = self._size - facts["start"]
        tail = json.dumps(facts).encode("ascii")
        self.write(tail + SIZE.pack(len(tail)) + MARK)
        os.close(_RESULT)
        sys.exit(code)


def _of_function(trace: TracebackType | None) -> TracebackType | None:
    """Remove the frames of this module from the top of a traceback."""
    our_file = main.__code__.co_filename
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == our_file:
        trace = trace.tb_next
    return trace


def _print(text: str) -> None:
    """Print to stderr, if it is still usable."""
    try:
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        sys.stderr.write(text.encode(encoding, "backslashreplace").decode(encoding))
    except Exception:  # noqa: BLE001, S110 (the function may have closed or replaced it)
        pass


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 (the user's own class may raise anything)
        return "?"


def _cut(text: str) -> str:
    """Remove the middle of a very long text."""
    half = _LONGEST // 2
    left_out = len(text) - 2 * half
    return text if left_out <= 0 else f"{text[:half]}\n[{left_out} characters are left out]\n{text[-half:]}"


def _pickled(error: BaseException) -> bytes:
    """Pickle an exception; empty if that is impossible."""
    try:
        import cloudpickle  # noqa: PLC0415 (a Python of the wrong version may not be able to import it)

        pickled: bytes = cloudpickle.dumps(error, protocol=_PROTOCOL)
    except Exception:  # noqa: BLE001 (as above)
        return b""
    return pickled


if __name__ == "__main__":
    # Python runs a zip archive by a loader that can read the other members.
    loader: Any = globals()["__loader__"]
    main(lambda name: loader.get_data(f"{loader.archive}/{name}"))
