"""Evidence of a failure: the traceback of a worker, or its last lines of stderr."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from hvlaunch.console.lines import LineSplitter
from hvlaunch.console.printer import TAIL
from hvlaunch.job import WorkerExit

__all__ = ["Evidence", "final_errors", "find_evidence"]

_LAST_LINES = 20
_MOST_LINES = 60
# The first lines of a long traceback have the script's own frame.
_FIRST_LINES = 3
_MOST_CHARACTERS = 1000
# An exception's message may have several lines; NCCL's do.
_LONGEST_MESSAGE = 8

_TRACEBACK = re.compile(r"\s*Traceback \(most recent call last\)")
_LINK = re.compile(
    r"The above exception was the direct cause|During handling of the above exception, another exception occurred"
    # torch.multiprocessing.spawn() writes this line.
    r"|-- Process \d+ terminated with the following error"
)
_CXX_FRAME = re.compile(r"\s*(frame #\d+: |#\d+ +0x)")
# torch.distributed puts this before every line of a traceback.
_TORCH_PREFIX = re.compile(r"\[rank\d+\]: ")
_LOG = re.compile(
    r"(?:\[rank\d+\]:\s?)?(?:\[[IWEF](?:\d{3,4})? |[IWEF]\d{4} |\d{4}-\d\d-\d\d [\d:.]+: [IWEF] )"
)
"""A line of a C++ program's log: glog, absl, c10 or TensorFlow."""
_HARMLESS_LOG = re.compile(_LOG.pattern.replace("[IWEF]", "[IW]"))
# Python prints the traceback of an exception in a destructor and continues, so it is not the cause.
_IGNORED = re.compile(r"Exception ignored in")
_NO_MESSAGE = re.compile(r"Exception ignored in|terminate called|Fatal Python error|\*\*\* ")
# One state of a progress bar; the next state overwrites it on a terminal.
_STATE = re.compile(rb"[^\r\n]*\r")
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Evidence:
    """Quoted lines and their kind: `traceback`, `error file` or `last lines of stderr`."""

    kind: str
    lines: tuple[str, ...]

    @property
    def has_traceback(self) -> bool:
        return bool(_tracebacks(self.lines))

    @property
    def verdict(self) -> tuple[str, ...]:
        """Return the lines that classify the failure: only the exception of a traceback, without its frames."""
        starts = _tracebacks(self.lines)
        return tuple(_message(self.lines[starts[-1] + 1 :])) if starts else self.lines


def find_evidence(worker: WorkerExit, tail: bytes) -> Evidence:
    """Return the evidence in the worker's error file, or else in `tail`, its last bytes of stderr.

    torchelastic writes the file: `{"message": {"message": …, "extraInfo": {"py_callstack": …}}}` or
    `{"message": …}` (torch.distributed.elastic.multiprocessing.errors.ErrorHandler). Any other content is
    quoted unchanged.
    """
    if worker.error_file and worker.error_file.strip():
        kind, text = _from_error_file(worker.error_file)
        return Evidence(kind, _bounded(_clean(text)))
    return Evidence("last lines of stderr", _last_lines(tail))


def final_errors(error_file: str | None, tail: bytes) -> tuple[list[list[str]], list[str]]:
    """Return the messages of the last traceback and its causes, the first cause first, and the lines after it.

    Without a traceback, return the last lines without warnings.
    """
    has_file = error_file is not None and error_file.strip()
    lines = _clean(_from_error_file(error_file or "")[1]) if has_file else _lines(tail)
    starts = _last_chain(lines)
    if not starts:
        return [], [line for line in lines[-_LAST_LINES:] if not _HARMLESS_LOG.match(line)]
    errors = [_message(lines[start + 1 : end]) for start, end in pairwise(starts)]
    last = lines[starts[-1] + 1 :]
    errors.append(_message(last))
    behind = [line for line in last if line and not line[0].isspace() and not _LOG.match(line)]
    return errors, behind[len(errors[-1]) :]


def _message(lines: Sequence[str]) -> list[str]:
    """Return the exception's message: the lines after the frames, up to other output."""
    message: list[str] = []
    for line in lines:
        is_other = _NO_MESSAGE.match(line) or _LINK.match(line) or _LOG.match(line)
        if len(message) == _LONGEST_MESSAGE or (message and is_other):
            break
        if line and not line[0].isspace() and not is_other:
            message.append(line)
    return message


def _from_error_file(text: str) -> tuple[str, str]:
    try:
        message = json.loads(text)["message"]
        if isinstance(message, dict):
            extra = message.get("extraInfo")
            stack = extra.get("py_callstack") if isinstance(extra, dict) else None
            message = stack or message["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "error file", text
    if not isinstance(message, str):
        return "error file", text
    # The message itself may contain the traceback.
    return ("traceback" if _TRACEBACK.search(message) else "error file"), message


def _last_lines(tail: bytes) -> tuple[str, ...]:
    """Return the last 20 lines, or more if a traceback or its cause begins earlier."""
    lines = _lines(tail)
    starts = _last_chain(lines)
    if not starts:
        return _bounded(lines[-_LAST_LINES:])
    while _HARMLESS_LOG.match(lines[-1]) or not lines[-1].strip():
        # Libraries warn while the process ends; such warnings would push the traceback out.
        lines.pop()
    first = max(0, len(lines) - _LAST_LINES)
    if len(starts) == 1 or len(lines) - starts[0] <= _MOST_LINES:
        return _bounded(lines[min(first, starts[0]) :])
    causes = _without_frames(lines[starts[0] : starts[-1]])[: _MOST_LINES // 2]
    return _bounded([*causes, *lines[starts[-1] :]], first=len(causes) + _FIRST_LINES)


def _lines(tail: bytes) -> list[str]:
    """Return cleaned lines from the end of stderr."""
    splitter = LineSplitter()
    whole = splitter.feed(tail) + splitter.finish()
    # A full tail was probably cut inside its first line.
    if len(tail) >= TAIL:
        whole = whole.partition(b"\n")[2] or whole
    return _clean(_STATE.sub(b"", whole).decode(errors="replace"))


def _last_chain(lines: Sequence[str]) -> list[int]:
    """Return the line numbers of the last traceback and of its causes, the first cause first."""
    starts = _tracebacks(lines)
    chain = starts[-1:]
    for start in reversed(starts[:-1]):
        if not any(_LINK.match(line) for line in lines[start : chain[0]]):
            break
        chain.insert(0, start)
    return chain


def _tracebacks(lines: Sequence[str]) -> list[int]:
    """Return the line numbers where tracebacks begin, except tracebacks of ignored exceptions."""
    return [
        number
        for number, line in enumerate(lines)
        if _TRACEBACK.match(line) and not (number and _IGNORED.match(lines[number - 1]))
    ]


def _without_frames(lines: Sequence[str]) -> list[str]:
    """Return tracebacks with only their exceptions; a count replaces the frames."""
    return _counted(lines, lambda line: line.startswith(" "), "  ({} lines left out)")


def _counted(lines: Sequence[str], is_frame: Callable[[str], bool], note: str) -> list[str]:
    """Return the lines, with each run of frames replaced by its count."""
    kept: list[str] = []
    for are_frames, group in groupby(lines, is_frame):
        run = list(group)
        kept += [note.format(len(run))] if are_frames else run
    return kept


def _clean(text: str) -> list[str]:
    """Return lines without colours, control characters, C++ frames, and empty lines at both ends."""
    lines = [_plain(line) for line in text.strip("\r\n").split("\n")]
    kept = _counted(lines, lambda line: _CXX_FRAME.match(line) is not None, "({} C++ frames)")
    while kept and not kept[-1]:
        kept.pop()
    return kept


def _plain(line: str) -> str:
    line = _CONTROL.sub("", line).rstrip()
    prefix = _TORCH_PREFIX.match(line)
    return line[prefix.end() :] if prefix else line


def _bounded(lines: Sequence[str], first: int = _FIRST_LINES) -> tuple[str, ...]:
    """Keep the first `first` lines and the last lines of a long text, and shorten long lines."""
    if len(lines) > _MOST_LINES:
        left_out = len(lines) - _MOST_LINES + 1
        lines = [*lines[:first], f"({left_out} lines left out)", *lines[first + left_out :]]
    return tuple(line if len(line) <= _MOST_CHARACTERS else line[:_MOST_CHARACTERS] + "…" for line in lines)
