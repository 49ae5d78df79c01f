"""Workers' bindings in the kernel: masks of processors, memory policies and variables, from /proc."""

from __future__ import annotations

import os

from hvlaunch.agent.proc import descendants, parents, read_text
from hvlaunch.agent.quick import loads
from hvlaunch.agent.wire.frames import plain
from hvlaunch.agent.workers.binding import LEDGER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional

__all__ = ["answer"]

_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_LONGEST = 4096
_MOST_NOTES = 16


def answer(question: Dict[str, Any]) -> List[Dict[str, Any]]:
    """Return a row for each living worker of the question: `workers` are pairs of rank and pid."""
    orders = _orders(question["scratch"])
    ranks = {pid: rank for rank, pid in question["workers"]}
    trees = descendants(ranks, parents())
    rows = []
    for pid in sorted(trees):
        mask = _mask(pid)
        if mask is not None:
            order = orders.get(pid, {})
            rows.append(_row(ranks[pid], pid, mask, order, trees[pid][1:]))
    return rows


def _row(rank: int, pid: int, mask: str, order: Dict[str, Any], children: List[int]) -> Dict[str, Any]:
    variables = dict(
        line.split("=", 1) for line in (read_text("/proc/%d/environ" % pid) or "").split("\0") if "=" in line
    )
    gpus = next((variables[name] for name in _GPUS if name in variables), None)
    ordered: Optional[str] = order.get("cpus")
    # The first process with another mask than the worker's order: some other program binds too.
    other = None
    for process in [pid, *children] if ordered else ():
        theirs = _mask(process)
        if theirs not in (ordered, None):
            name = (read_text("/proc/%d/comm" % process) or "?").strip()
            other = {"pid": process, "name": plain(name, 64), "cpus": plain(theirs or "", _LONGEST)}
            break
    return {
        "rank": rank,
        "ordered": ordered,
        "cpus": plain(mask, _LONGEST),
        "memory": _policy(pid),
        "threads": plain(variables.get("OMP_NUM_THREADS", ""), 64),
        "gpus": None if gpus is None else plain(gpus, _LONGEST),
        "other": other,
        "notes": [[plain(word, 16), plain(detail, 256)] for word, detail in order.get("notes", ())][
            :_MOST_NOTES
        ],
    }


def _orders(scratch: str) -> Dict[int, Dict[str, Any]]:
    """Return the agent's orders by pid."""
    orders = {}
    for line in (read_text(os.path.join(scratch, LEDGER)) or "").splitlines():
        try:
            order = loads(line)
            orders[order["pid"]] = order
        except (ValueError, KeyError, TypeError):  # noqa: PERF203 (a line that is being written)
            continue
    return orders


def _mask(pid: int) -> Optional[str]:
    """Return the processors of the process's first thread; None for a dead process."""
    text = (read_text("/proc/%d/status" % pid) or "").partition("Cpus_allowed_list:")[2]
    return text.partition("\n")[0].strip() or None


def _policy(pid: int) -> str:
    """Return the memory policy in the kernel's words, such as `prefer:0`; empty if the kernel shows no policy."""
    line = (read_text("/proc/%d/numa_maps" % pid) or "").partition("\n")[0]
    policy = line.partition(" ")[2].replace(" (many)", "").partition(" ")[0]
    return plain(policy, 256)
