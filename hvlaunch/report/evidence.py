"""Evidence of a failure: a worker's traceback or its last lines of stderr, and whether they show a cause or a consequence.

The table of consequences quotes each framework's texts, with the source file. The search is in lower case and without
regular expressions, because the stderr of every failed worker is read before the others are stopped. Regular expressions
are strings here: `re` compiles each when a failure first needs it, and most failures need none.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, pairwise

from hvlaunch.console.lines import LineSplitter
from hvlaunch.console.printer import TAIL
from hvlaunch.job import Look, WorkerExit
from hvlaunch.named_tuples import NamedTuple

__all__ = ["CONSEQUENCES", "DOUBTFUL", "Evidence", "find_evidence", "look"]

_LAST_LINES = 20
_MOST_LINES = 60
# The first lines of a long traceback have the script's own frame.
_FIRST_LINES = 3
_MOST_CHARACTERS = 1000
# An exception's message may have several lines; NCCL's do.
_LONGEST_MESSAGE = 8

_TRACEBACK = r"\s*Traceback \(most recent call last\)"
_LINK = (
    r"The above exception was the direct cause|During handling of the above exception, another exception occurred"
    # torch.multiprocessing.spawn() writes this line.
    r"|-- Process \d+ terminated with the following error"
)
_CXX_FRAME = r"\s*(frame #\d+: |#\d+ +0x)"
# torch.distributed puts this before every line of a traceback.
_TORCH_PREFIX = r"\[rank\d+\]: "
_LOG = r"(?:\[rank\d+\]:\s?)?(?:\[[IWEF](?:\d{3,4})? |[IWEF]\d{4} |\d{4}-\d\d-\d\d [\d:.]+: [IWEF] )"
"""A line of a C++ program's log: glog, absl, c10 or TensorFlow."""
_HARMLESS_LOG = _LOG.replace("[IWEF]", "[IW]")
# Python prints the traceback of an exception in a destructor and continues, so it is not the cause.
_IGNORED = r"Exception ignored in"
_NO_MESSAGE = r"Exception ignored in|terminate called|Fatal Python error|\*\*\* "
# One state of a progress bar; the next state overwrites it on a terminal.
_STATE = rb"[^\r\n]*\r"
_CONTROL = r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]"


class Evidence(NamedTuple):
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

    @property
    def has_lost_connection(self) -> bool:
        """True if the worker failed because it lost or could not reach a peer: often a consequence."""
        words = "\n".join(self.verdict).lower()
        return any(text in words for text in (*_CLEAR, *_DOUBTFUL))


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


def _final_errors(error_file: str | None, tail: bytes) -> tuple[list[list[str]], list[str]]:
    """Return the messages of the last traceback and its causes, the first cause first, and the lines after it.

    Without a traceback, return the last lines without warnings.
    """
    has_file = error_file is not None and error_file.strip()
    lines = _clean(_from_error_file(error_file or "")[1]) if has_file else _lines(tail)
    starts = _last_chain(lines)
    if not starts:
        return [], [line for line in lines[-_LAST_LINES:] if not re.match(_HARMLESS_LOG, line)]
    errors = [_message(lines[start + 1 : end]) for start, end in pairwise(starts)]
    last = lines[starts[-1] + 1 :]
    errors.append(_message(last))
    behind = [line for line in last if line and not line[0].isspace() and not re.match(_LOG, line)]
    return errors, behind[len(errors[-1]) :]


def _message(lines: Sequence[str]) -> list[str]:
    """Return the exception's message: the lines after the frames, up to other output."""
    message: list[str] = []
    for line in lines:
        is_other = re.match(_NO_MESSAGE, line) or re.match(_LINK, line) or re.match(_LOG, line)
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
    return ("traceback" if re.search(_TRACEBACK, message) else "error file"), message


def _last_lines(tail: bytes) -> tuple[str, ...]:
    """Return the last 20 lines, or more if a traceback or its cause begins earlier."""
    lines = _lines(tail)
    starts = _last_chain(lines)
    if not starts:
        return _bounded(lines[-_LAST_LINES:])
    while re.match(_HARMLESS_LOG, lines[-1]) or not lines[-1].strip():
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
    return _clean(re.sub(_STATE, b"", whole).decode(errors="replace"))


def _last_chain(lines: Sequence[str]) -> list[int]:
    """Return the line numbers of the last traceback and of its causes, the first cause first."""
    starts = _tracebacks(lines)
    chain = starts[-1:]
    for start in reversed(starts[:-1]):
        if not any(re.match(_LINK, line) for line in lines[start : chain[0]]):
            break
        chain.insert(0, start)
    return chain


def _tracebacks(lines: Sequence[str]) -> list[int]:
    """Return the line numbers where tracebacks begin, except tracebacks of ignored exceptions."""
    return [
        number
        for number, line in enumerate(lines)
        if re.match(_TRACEBACK, line) and not (number and re.match(_IGNORED, lines[number - 1]))
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
    kept = _counted(lines, lambda line: re.match(_CXX_FRAME, line) is not None, "({} C++ frames)")
    while kept and not kept[-1]:
        kept.pop()
    return kept


def _plain(line: str) -> str:
    line = re.sub(_CONTROL, "", line).rstrip()
    prefix = re.match(_TORCH_PREFIX, line)
    return line[prefix.end() :] if prefix else line


def _bounded(lines: Sequence[str], first: int = _FIRST_LINES) -> tuple[str, ...]:
    """Keep the first `first` lines and the last lines of a long text, and shorten long lines."""
    if len(lines) > _MOST_LINES:
        left_out = len(lines) - _MOST_LINES + 1
        lines = [*lines[:first], f"({left_out} lines left out)", *lines[first + left_out :]]
    return tuple(line if len(line) <= _MOST_CHARACTERS else line[:_MOST_CHARACTERS] + "…" for line in lines)


CONSEQUENCES: Mapping[str, tuple[str, ...]] = {
    # gloo/transport/tcp/pair.cc, buffer.cc, unbound_buffer.cc, gloo/rendezvous/context.cc
    "gloo": (
        "gloo/transport",
        "connectfullmesh",
        "timed out waiting",
        "application timeout caused pair closure",
    ),
    # torch/csrc/distributed/c10d: ProcessGroupNCCL.cpp, NCCLUtils.hpp, nccl2/ProcessGroupNCCL.cpp; nccl: src/misc/socket.cc
    "nccl": (
        "ncclremoteerror",
        "remote process exited",
        "remote process has terminated",
        "watchdog caught collective operation timeout",
        "nccl communicator was aborted",
        "nccl communicator encountered error",
        "connection closed by remote peer",
        "process group watchdog thread terminated with exception",
        "nccl operation timed out",
        "failed timed out after",
        "work timed out during finalize",
        "nccl async error",
        "aborting process on rank ",
    ),
    # torch/csrc/distributed/c10d: TCPStore.cpp, socket.cpp, Utils.cpp; torch/distributed/elastic
    "torch": (
        "distnetworkerror",
        "failed to recv, got",
        "socket timeout",
        "connection was likely closed",
        "the client socket has timed out",
        "the client socket has failed to connect",
        "wait timeout",
        "waiting for clients",
        "barrier timed out",
        "failed to pass monitoredbarrier",
    ),
    # horovod/common/exceptions.py, horovod/common/common.h
    "horovod": ("horovodinternalerror", "horovod has been shut down"),
    # Open MPI: opal/mca/btl/tcp, ompi/mpi/help-mpi-btl-tcp.txt; MPICH: src/mpid/ch3; the standard: MPI 4.0, 9.4
    "mpi": (
        "mpi_err_proc_failed",
        "mca_btl_tcp",
        "communication peer process has unexpectedly disconnected",
        "event returned by mpidu_sock_wait",
    ),
    # jaxlib: xla/pjrt/distributed/client.h, xla/tsl/distributed_runtime/coordination
    "jax": (
        "jax distributed service detected fatal errors",
        "coordination service",
        "coordinationservice",
        "failed to connect to distributed service",
        "gloo all",
        "gloo context initialization failed",
    ),
}

_STOPPED = (
    "signalexception",
    "keyboardinterrupt",
    "got signal: 15",
    "killed by signal: terminated",
    "sigterm",
)
"""Texts that programs print when a signal ends them: hvlaunch sends these signals after another failure."""

DOUBTFUL: Mapping[str, tuple[str, ...]] = {
    # nccl2/ProcessGroupNCCL.cpp: also for two ranks with one GPU
    "nccl": ("failed to initialize nccl communicator",),
    # grpc, under TensorFlow, Ray and JAX
    "grpc": ("socket closed", "failed to connect to all addresses", "error received from peer"),
    # errno(3), as the C library and Python name them
    "system": (
        "connection closed",
        "connection reset",
        "connection refused",
        "connection aborted",
        "connection was closed",
        "connection was reset",
        "connection was refused",
        "connection was aborted",
        "broken pipe",
        "no route to host",
    ),
}
"""Texts about a lost connection that may not be to another worker."""

_CLEAR = tuple(text for texts in CONSEQUENCES.values() for text in texts)
_DOUBTFUL = tuple(text for texts in DOUBTFUL.values() for text in texts)
_BYTES = tuple(text.encode() for text in (*_CLEAR, *_STOPPED, *_DOUBTFUL))
_HEADER = b"Traceback (most recent call last)"
_LINES_BEHIND = 20
"""Lines after a traceback that still belong to the worker's end."""


def look(tail: bytes, error_file: str | None, *, is_urgent: bool) -> Look:
    """Classify the end of a worker that failed or was stopped; `tail` is its last stderr.

    If `is_urgent`, a traceback anywhere in the tail counts as the last word unless a consequence is mentioned.
    """
    words = error_file.encode(errors="replace") if error_file and error_file.strip() else tail
    if not _mentions(words):
        if _HEADER not in words:
            return "silent"
        if is_urgent:
            return "cause"

    errors, behind = _final_errors(error_file, tail)
    if not errors:
        verdict = _look_of(behind)
        return "silent" if verdict == "cause" else verdict
    # The traceback was handled if much output follows, so the lines after it decide.
    if len(behind) > _LINES_BEHIND:
        verdict = _look_of(behind)
        return "silent" if verdict == "cause" else verdict
    # Errors of one chain may disagree, and then nothing is certain.
    looks = {_look_of(error) for error in errors}
    return looks.pop() if len(looks) == 1 else "unclear"


def _mentions(words: bytes) -> bool:
    words = words.lower()
    return any(text in words for text in _BYTES)


def _look_of(lines: Iterable[str]) -> Look:
    """Classify the lines of one error."""
    words = "\n".join(lines).lower()
    if any(text in words for text in (*_CLEAR, *_STOPPED)):
        return "consequence"
    return "unclear" if any(text in words for text in _DOUBTFUL) else "cause"
