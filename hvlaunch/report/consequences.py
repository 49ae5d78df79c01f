"""Tell consequences from causes: a worker that ends because another worker has gone, judged by its last words.

The table quotes each framework's texts, with the source file. The search is in lower case and without regular
expressions, because the stderr of every failed worker is read before the others are stopped.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from hvlaunch.job import Look

if TYPE_CHECKING:
    from hvlaunch.report.evidence import Evidence

__all__ = ["CONSEQUENCES", "DOUBTFUL", "look", "lost_connection"]

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
_LAST_LINES = 20
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
    from hvlaunch.report.evidence import final_errors  # noqa: PLC0415 (10 ms, and not for most failures)

    errors, behind = final_errors(error_file, tail)
    if not errors:
        verdict = _look_of(behind)
        return "silent" if verdict == "cause" else verdict
    # The traceback was handled if much output follows, so the lines after it decide.
    if len(behind) > _LAST_LINES:
        verdict = _look_of(behind)
        return "silent" if verdict == "cause" else verdict
    # Errors of one chain may disagree, and then nothing is certain.
    looks = {_look_of(error) for error in errors}
    return looks.pop() if len(looks) == 1 else "unclear"


def lost_connection(evidence: "Evidence") -> bool:
    """Return True if the worker failed because it lost or could not reach a peer: often a consequence."""
    words = "\n".join(evidence.verdict).lower()
    return any(text in words for text in (*_CLEAR, *_DOUBTFUL))


def _mentions(words: bytes) -> bool:
    words = words.lower()
    return any(text in words for text in _BYTES)


def _look_of(lines: Iterable[str]) -> Look:
    """Classify the lines of one error."""
    words = "\n".join(lines).lower()
    if any(text in words for text in (*_CLEAR, *_STOPPED)):
        return "consequence"
    return "unclear" if any(text in words for text in _DOUBTFUL) else "cause"
