"""Kill every descendant of this process: adopt orphans, and kill children until waitpid reports no more.

A child subreaper (prctl(2), PR_SET_CHILD_SUBREAPER) becomes the parent of its orphaned descendants, even after setsid or
a double fork. Killing its own children again and again therefore ends all descendants, and no other process.
"""

from __future__ import annotations

import errno
import os
import time

from hvlaunch.agent.quick import has_own_proc, prctl, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Dict, List, Optional, Tuple

__all__ = ["adopt_descendants", "children", "kill_descendants", "send_signal", "stop_and_kill"]

_PR_SET_CHILD_SUBREAPER = 36
_FIRST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.05
_MOST_PIDS = 1 << 22
_MOST_REAPED = 1000


def adopt_descendants() -> Optional[str]:
    """Make this process the parent of its orphaned descendants; return the error of a kernel that can't."""
    trouble = prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return trouble and (
        "processes that a worker detaches on it may outlive the job (PR_SET_CHILD_SUBREAPER: %s)" % trouble
    )


def children() -> List[int]:
    """Return the pids of this process's children, including zombies."""
    return _children_of(os.getpid()) if has_own_proc() else _children_without_proc()


def _children_of(pid: int) -> List[int]:
    """Return the children of a process, by a /proc of this namespace."""
    pids: List[int] = []
    try:
        for thread in os.listdir("/proc/%d/task" % pid):
            with open("/proc/%d/task/%s/children" % (pid, thread)) as listing:
                pids.extend(map(int, listing.read().split()))
    except OSError:
        return _children_by_parent(pid) if os.path.exists("/proc/%d/stat" % pid) else []
    return pids


def _children_by_parent(parent: int) -> List[int]:
    """Return the children of a process, on a kernel without CONFIG_PROC_CHILDREN."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _parent_of(name) == parent]


def _children_without_proc() -> List[int]:
    """Find this process's children without /proc: ask waitid about each number."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []
    try:
        # The newest process has the highest number, unless numbers have started over.
        newest = os.fork()
        if newest == 0:
            os._exit(0)
        os.waitpid(newest, 0)
    except OSError:
        newest = _MOST_PIDS
    return _children_among(os.getpid() + 1, newest) or _children_among(2, _MOST_PIDS)


def _children_among(first: int, end: int) -> List[int]:
    pids = []
    for pid in range(first, end):
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            continue
        pids.append(pid)
    return pids


def kill_descendants(patience: float) -> List[int]:
    """Kill and reap every descendant; return those still alive after `patience` seconds.

    These belong to another user (sudo), are in a frozen cgroup, or are stuck in the kernel (state D).
    """
    deadline = time.monotonic() + patience
    pause = _FIRST_PAUSE
    while True:
        if _reap() is None:
            return []
        stop_and_kill(deadline)
        reaped = _reap()
        if reaped is None:
            return []
        if time.monotonic() > deadline:
            return stop_and_kill(deadline)
        # Progress: more may end at once. Without it, wait longer each time rather than burn a processor.
        if reaped:
            pause = _FIRST_PAUSE
            continue
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)


def stop_and_kill(deadline: float, is_chosen: Callable[[int], bool] = lambda _: True) -> List[int]:
    """Stop the chosen descendants and their families until no new one appears; then kill and return them."""
    # A stopped process does not fork, and keeps its place under a limit of processes. So even a program that forks faster
    # than anyone can kill comes to an end.
    policy = _outrun()
    # Without a /proc of its own, it finds grandchildren only once the death of their parents makes them children.
    sees_families = has_own_proc()
    family: Dict[int, bool] = {}
    stopped: List[int] = []
    size = -1
    while size < len(family):
        size = len(family)
        queue = [(pid, False) for pid in children()]
        for pid, is_heir in queue:  # the list grows meanwhile
            if pid not in family:
                family[pid] = is_heir or is_chosen(pid)
                if family[pid]:
                    send_signal(pid, signal.SIGSTOP)
            if sees_families:
                queue.extend((child, family[pid]) for child in _children_of(pid))
        stopped = [pid for pid, chosen in family.items() if chosen]
        for pid in stopped:
            send_signal(pid, signal.SIGSTOP)  # another process may have sent SIGCONT
        if time.monotonic() > deadline:
            break
    # Children before parents: when a parent ends, the kernel may wake its stopped children.
    for pid in reversed(stopped):
        send_signal(pid, signal.SIGKILL)
    if policy is not None:
        os.sched_setscheduler(0, *policy)
    return stopped


def _outrun() -> Optional[Tuple[int, os.sched_param]]:
    """Run before all other processes, if permitted; return the previous policy if it was changed."""
    # A fork bomb has so many processes that this one would get a processor once a second.
    try:
        policy = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except (OSError, AttributeError):
        return None
    return policy


def _parent_of(pid: str) -> Optional[int]:
    """Return the parent's pid; None if the process is gone."""
    try:
        with open("/proc/%s/stat" % pid, "rb") as stat:
            # The name in parentheses may contain anything, so the fields count from the last parenthesis.
            return int(stat.read().rpartition(b")")[2].split()[1])
    except OSError:
        return None


def send_signal(pid: int, number: int) -> None:
    """Send a signal; a process that is gone, or another user's, gets none. Raises OSError."""
    try:
        os.kill(pid, number)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EPERM):
            raise


def _reap() -> Optional[int]:
    """Reap ended children; return their number, or None if this process has no child."""
    # With a limit, because children of a fork bomb end faster than they can be reaped.
    reaped = 0
    while reaped < _MOST_REAPED:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == 0:
            return reaped
        reaped += 1
    return reaped
