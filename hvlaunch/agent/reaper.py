"""Leaving nothing behind: adopt every descendant, kill until waitpid says that there is none.

A child subreaper (prctl(2), PR_SET_CHILD_SUBREAPER) becomes the parent of its orphaned descendants,
those that called setsid or forked twice too, so that killing one's own children again and again
ends them all, and nobody else's.
"""

from __future__ import annotations

import errno
import os
import time

from hvlaunch.agent.quick import prctl, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Dict, List, Optional, Tuple

__all__ = ["adopt_descendants", "children", "kill_descendants", "stop_and_kill"]

_PR_SET_CHILD_SUBREAPER = 36
_FIRST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.05
_MOST_PIDS = 1 << 22
_MOST_REAPED = 1000


def adopt_descendants() -> Optional[str]:
    """Make this process the parent of its orphaned descendants; say why where the kernel can't."""
    trouble = prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return trouble and "PR_SET_CHILD_SUBREAPER: " + trouble


def children() -> List[int]:
    """The pids of this process's children, zombies included."""
    if os.path.exists("/proc/self/stat"):
        return _children_of(os.getpid())
    return _children_without_proc()


def _children_of(pid: int) -> List[int]:
    found: List[int] = []
    try:
        for thread in os.listdir("/proc/%d/task" % pid):
            with open("/proc/%d/task/%s/children" % (pid, thread)) as listing:
                found.extend(map(int, listing.read().split()))
    except OSError:
        return _children_by_parent(pid) if os.path.exists("/proc/%d/stat" % pid) else []
    return found


def _children_by_parent(parent: int) -> List[int]:
    """For kernels without CONFIG_PROC_CHILDREN: the processes whose parent is `parent`."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _parent_of(name) == parent]


def _children_without_proc() -> List[int]:
    """Where /proc is empty or not mounted: waitid tells of each number whether it is a child's."""
    try:
        newest = os.fork()  # whose number is the highest, where they have not begun again
        if newest == 0:
            os._exit(0)
        os.waitpid(newest, 0)
    except OSError:
        newest = _MOST_PIDS
    return _children_among(os.getpid() + 1, newest) or _children_among(2, _MOST_PIDS)


def _children_among(first: int, end: int) -> List[int]:
    found = []
    for pid in range(first, end):
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            continue
        found.append(pid)
    return found


def kill_descendants(patience: float) -> List[int]:
    """SIGKILL every descendant and reap it; those that could not be ended within `patience` seconds.

    What remains can't be killed by us (another user's, by sudo, or in a cgroup that is frozen) or sits in the kernel
    (state D).
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
        if reaped:
            pause = _FIRST_PAUSE
            continue
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)


def stop_and_kill(deadline: float, is_chosen: Callable[[int], bool] = lambda _: True) -> List[int]:
    """SIGSTOP every descendant that is chosen, and theirs, until no further one is found; then SIGKILL them: these.

    What is stopped forks no more, and keeps its place under a limit of processes: so who forks faster than we kill
    comes to its end. The last ones are killed first: when a parent ends, the kernel may wake its stopped children.
    """
    policy = _outrun()
    family: Dict[int, bool] = {}
    stopped: List[int] = []
    size = -1
    while size < len(family):
        size = len(family)
        found = [(pid, False) for pid in children()]
        for pid, is_heir in found:  # grows meanwhile
            if pid not in family:
                family[pid] = is_heir or is_chosen(pid)
                if family[pid]:
                    _kill(pid, signal.SIGSTOP)
            found.extend((child, family[pid]) for child in _children_of(pid))
        stopped = [pid for pid, chosen in family.items() if chosen]
        for pid in stopped:
            _kill(pid, signal.SIGSTOP)  # others may have woken it
        if time.monotonic() > deadline:
            break
    for pid in reversed(stopped):
        _kill(pid, signal.SIGKILL)
    if policy is not None:
        os.sched_setscheduler(0, *policy)
    return stopped


def _outrun() -> Optional[Tuple[int, os.sched_param]]:
    """Run before all others, if we may: they can be so many that a processor is ours once in a second.

    How we ran before, if that has changed.
    """
    try:
        policy = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except (OSError, AttributeError):
        return None
    return policy


def _parent_of(pid: str) -> Optional[int]:
    """None where the process is gone."""
    try:
        with open("/proc/%s/stat" % pid, "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1])
    except OSError:
        return None


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EPERM):
            raise


def _reap() -> Optional[int]:
    """Reap what has ended; how many, or None when there is no child at all.

    No more than some at a time: others may end faster than they are reaped.
    """
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
