"""The newest collective of each group, from torch's flight recorder, for the host's agent.

The recorder of Gloo's groups (torch 2.13 and newer) numbers a group's collectives alike on all ranks. A group's own
sequence number does not serve: with Gloo it also counts messages between two ranks. The agent asks over a socket in the
job's private directory, only while the job is silent; a process whose Python is stuck does not answer.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import distributed as dist

from hvlaunch.torch.backends import gpu_backends

__all__ = ["answer_agent", "newest"]

_dump: Callable[[bool, bool], bytes] | None = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)  # noqa: SLF001
_MOST_GROUPS = 32
_SEND_WITHIN = 1.0
"""Seconds for the agent to take an answer."""
_PAUSE = 1.0
"""Seconds to wait when the process has no descriptor left for a connection."""


def newest(since: float) -> list[dict[str, str | int]]:
    """Return the name of each living group, and number and kind of its newest collective since this time (time.time()).

    Returns nothing if torch has no recorder, or a group is on GPUs: torch has other recorders for those, and NCCL tells its counts
    itself. Returns nothing with TORCH_DISTRIBUTED_DEBUG=DETAIL, whose records have no names of groups.
    """
    if _dump is None or gpu_backends():
        return []
    records = json.loads(_dump(True, False)).get(
        "entries", ()
    )  # every collective, not the running ones alone
    # A process may live through many rounds, whose groups have the same names.
    living = set(dist.distributed_c10d._world.pg_names.values())  # noqa: SLF001
    by_group: dict[str, dict[str, str | int]] = {}
    for record in records:
        group = record["process_group"][0]
        if group in living and record["time_created_ns"] >= since * 1e9:
            kind = record["profiling_name"].rpartition(":")[2]
            # Groups stay in the order of their newest collectives: the last are the ones that matter.
            by_group.pop(group, None)
            by_group[group] = {"group": group, "number": record["collective_seq_id"], "kind": kind}
    return list(by_group.values())[-_MOST_GROUPS:]


class _Answers:
    """Answers the agent, each time that it connects, with newest() as JSON."""

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self.pid = os.getpid()
        self.since = 0.0
        # The pid may have been another worker's.
        with suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108 (as cheap as can be)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        # An agent that got no answer comes again: its earlier connections must not pile up.
        self._socket.listen(1)
        threading.Thread(target=self._run, name="hvlaunch collectives", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection = self._socket.accept()[0]
            except OSError:
                time.sleep(_PAUSE)
                continue
            # Torch's record is no stable interface: whatever is wrong with it, the agent gets no answer.
            with connection, suppress(Exception):
                connection.settimeout(_SEND_WITHIN)
                connection.sendall(json.dumps(newest(self.since)).encode("ascii"))


_answers: _Answers | None = None


def answer_agent() -> None:
    """Answer the host's agent about collectives from now on, if this process is a worker."""
    global _answers  # noqa: PLW0603 (a process has one)
    scratch = os.environ.get("HVLAUNCH_SCRATCH")
    if scratch is None:
        return
    # A forked child has the variable, and not the thread.
    if _answers is None or _answers.pid != os.getpid():
        # The directory is gone, or its path is too long for a socket.
        try:
            _answers = _Answers(os.path.join(scratch, f"collectives.{os.getpid()}"))  # noqa: PTH118 (as above)
        except OSError:
            return
    _answers.since = time.time()
