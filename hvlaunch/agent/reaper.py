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
    from typing import Dict, List, Optional, Sequence

__all__ = ["adopt_descendants", "children", "kill_descendants", "kill_marked"]

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
    found: List[int] = []
    try:
        for thread in os.listdir("/proc/self/task"):
            with open("/proc/self/task/%s/children" % thread) as listing:
                found.extend(int(pid) for pid in listing.read().split())
    except OSError:
        if os.path.exists("/proc/self/stat"):
            return _children_by_parent(os.getpid())
        return _children_without_proc()
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
        for pid in children():
            _kill(pid)
        reaped = _reap()
        if reaped is None:
            return []
        if time.monotonic() > deadline:
            return children()
        if reaped:
            pause = _FIRST_PAUSE
            continue
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)


def kill_marked(marks: Sequence[bytes]) -> None:
    """SIGKILL every descendant that has one of these NAME=VALUE in the environment that it was started with."""
    for pid in _descendants():
        try:
            with open("/proc/%d/environ" % pid, "rb") as environ:
                variables = environ.read().split(b"\0")
        except OSError:
            continue  # ended, or another user's
        if any(mark in variables for mark in marks):
            _kill(pid)


def _descendants() -> List[int]:
    parents: Dict[int, List[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            parent = _parent_of(name)
            if parent is not None:
                parents.setdefault(parent, []).append(int(name))
    found = list(parents.get(os.getpid(), ()))
    for pid in found:  # grows meanwhile
        found.extend(parents.get(pid, ()))
    return found


def _parent_of(pid: str) -> Optional[int]:
    """None where the process is gone."""
    try:
        with open("/proc/%s/stat" % pid, "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1])
    except OSError:
        return None


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
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
