"""What a worker runs that calls a function: the `__main__` of the archive that has come to its host (archive.py).

The standard library alone, and text that any Python from 3.8 on reads: a wrong one must be able to say so.
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
"""The descriptor that what the function returns goes to."""
MARK = b"hvlaunch"
SIZE = struct.Struct(">I")
"""The end of a result: facts about it as JSON, their size, and the mark. Before them is what was pickled."""
_PROTOCOL = 5
_AT_ONCE = 1 << 20
_LONGEST = 1 << 20
"""Characters of an error's text, and of its traceback."""
_NOT_HERE = "not on this host; try: install it there, or cloudpickle.register_pickle_by_value(MODULE)"


class WrongPython(Exception):
    """The function was pickled by another version of Python, whose code this one can't read."""


class ResultNotPickled(Exception):
    """What the function has returned can't be sent."""


def main(read: Callable[[str], bytes]) -> NoReturn:
    """Call the function and end; `read` gives what has a name in the archive."""
    os.set_inheritable(_RESULT, False)
    call = json.loads(read("call.json").decode("ascii"))
    result = _Result(call["raises"])
    archive = sys.path[0]
    try:
        _check_python(call["python"])
        import cloudpickle  # noqa: PLC0415 (the archive's, whose functions are in what was pickled)

        sys.path[:] = _path(call["path"], archive)
        value = _call(cloudpickle, read("call.pickle"))
    except BaseException as error:  # noqa: BLE001 (whatever it is, the caller hears of it)
        result.fail(error)
    result.give(value, cloudpickle)


def _call(cloudpickle: Any, pickled: bytes) -> Any:
    try:
        function, args, kwargs = cloudpickle.loads(pickled)
    except ImportError as error:
        error.msg = f"{error.msg} ({_NOT_HERE})"
        raise
    return function(*args, **kwargs)


def _check_python(wanted: str) -> None:
    major, minor = sys.version_info[:2]
    if f"{major}.{minor}" != wanted:
        raise WrongPython(
            f"the function is of Python {wanted}, and {sys.executable} is Python {major}.{minor}; try: python=PATH"
        )


def _path(theirs: list[str], archive: str) -> list[str]:
    """Where modules are looked for: as where the function comes from, as far as that is here, then in the archive."""
    ours = sys.path[1:]
    first = [place for place in theirs[:1] if place not in ours]
    rest = [place for place in theirs[1:] if place not in ours]
    return [*first, *ours, *rest, archive]


class _Result:
    """The pipe to the agent. Both give() and fail() end the process."""

    def __init__(self, raises: bool) -> None:
        self._raises = raises
        self._size = 0
        self._pid = os.getpid()

    def write(self, data: bytes) -> int:
        """For a pickler: all of it."""
        view = memoryview(data).cast("B")
        size = len(view)
        while view:
            view = view[os.write(_RESULT, view[:_AT_ONCE]) :]
        self._size += size
        return size

    def give(self, value: Any, cloudpickle: Any) -> NoReturn:
        if os.getpid() != self._pid:  # the function has forked, and this is the child
            sys.exit(0)
        try:
            cloudpickle.dump(value, self, protocol=_PROTOCOL)
        except Exception as error:  # noqa: BLE001 (of any kind: the value's own code may raise it)
            unsent = ResultNotPickled(
                f"what it returned can't be pickled: {type(error).__name__}: {_text(error)}"
            )
            unsent.__cause__ = error
            self.fail(unsent)
        self._end({"kind": "value", "start": 0}, 0)

    def fail(self, error: BaseException) -> NoReturn:
        """The function has raised this."""
        story = "".join(traceback.format_exception(type(error), error, _of_function(error.__traceback__)))
        code: Any = error.code if isinstance(error, SystemExit) else 1
        if not isinstance(error, SystemExit):
            _print(story)
        elif not (code is None or isinstance(code, int)):
            _print(f"{code}\n")  # as Python does
            code = 1
        if os.getpid() != self._pid:
            sys.exit(code)
        start = self._size
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
    """Without the frames of this module."""
    own = main.__code__.co_filename
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == own:
        trace = trace.tb_next
    return trace


def _print(text: str) -> None:
    """To stderr, as far as the function has left it so that it takes this."""
    try:
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        sys.stderr.write(text.encode(encoding, "backslashreplace").decode(encoding))
    except Exception:  # noqa: BLE001, S110 (of any kind: it may be None, closed, or the function's own)
        pass


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 (it is the user's own class)
        return "?"


def _cut(text: str) -> str:
    """Without its middle, where it is very long."""
    half = _LONGEST // 2
    left_out = len(text) - 2 * half
    return text if left_out <= 0 else f"{text[:half]}\n[{left_out} characters are left out]\n{text[-half:]}"


def _pickled(error: BaseException) -> bytes:
    """Empty where it can't be pickled."""
    try:
        import cloudpickle  # noqa: PLC0415 (where Python is the wrong one it may be none of its modules)

        pickled: bytes = cloudpickle.dumps(error, protocol=_PROTOCOL)
    except Exception:  # noqa: BLE001 (as above)
        return b""
    return pickled


if __name__ == "__main__":
    loader: Any = globals()["__loader__"]  # of a zip archive
    main(lambda name: loader.get_data(f"{loader.archive}/{name}"))
