"""The process above the agent: whatever happens to the agent, nothing of the job survives it."""

from __future__ import annotations

import os
import select
import sys
import time

from hvlaunch.agent import reaper, scratch
from hvlaunch.agent.quick import prctl, signal, signal_name, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, NoReturn, Optional, Tuple

    from hvlaunch.agent.local_ranks import Meeting
    from hvlaunch.agent.wire.caller import Sealed

__all__ = ["main", "watch_over"]

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_KILL_PATIENCE = 7.0  # the agent takes this time twice, and the driver waits for 25 s
_MORE = 2.0  # seconds that the agent, which has the same lease, is late
_PR_SET_DUMPABLE, _PR_SET_NAME = 4, 15  # prctl(2)


def main(
    config: Dict[str, Any],
    sealed: Optional[Sealed] = None,
    meeting: Optional[Meeting] = None,
    prepare: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Start the agent as a child, wait for its end, kill what it left, exit with its status. Never returns.

    `config` has `grace` and `lease` in seconds; `sealed` encrypts the channel, where ssh does not; `meeting` is where
    a launcher's other processes on this host meet the agent. The agent calls `prepare` first.
    """
    if not sys.platform.startswith("linux"):
        sys.exit("hvlaunch agent: workers need Linux, and this host runs " + sys.platform)
    directory = scratch.make()

    def be_agent(alive: int) -> NoReturn:
        from hvlaunch.agent import main as agent_main  # noqa: PLC0415 (the guardian stays small)

        prepare()
        agent_main.main(config, directory, alive, sealed, meeting)

    patience = float(config["grace"]) + float(config["lease"]) + _MORE
    watch_over(b"hvl-agent", be_agent, patience, lambda: scratch.remove(directory))


def watch_over(
    name: bytes,
    work: Callable[[int], NoReturn],
    patience: float,
    clean_up: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Do `work` in a child, with a descriptor that ends with us; when the child ends, kill what it left, and exit as it did.

    `name` is the child's in lists of processes. Neither it nor ours has `python` or `hvlaunch` in it: killall or
    pkill of these would end both of us at once, and nobody would be left to end the workers.

    Neither of the two can be opened by other processes of their user, workers above all: whoever writes into the
    agent's channel or memory could speak in its name. exec makes workers what all processes are.
    """
    prctl(_PR_SET_DUMPABLE, 0)
    prctl(_PR_SET_NAME, name)
    reaper.adopt_descendants()
    ours, theirs = (end.detach() for end in socket.socketpair())
    for fd in (ours, theirs):
        os.set_blocking(fd, False)
    try:
        child = os.fork()
    except OSError as error:
        clean_up()
        sys.exit("hvlaunch agent: it can't start a process: %s" % os.strerror(error.errno or 0))
    if child == 0:
        os.close(ours)
        os.setsid()  # who kills the guardian's process group, as Hydra does, must not kill both
        work(theirs)
    os.close(theirs)
    prctl(_PR_SET_NAME, b"hvl-guardian")
    signal.setitimer(signal.ITIMER_REAL, 0)  # that of the start, which fork did not hand on
    status = _wait(child, ours, patience)
    left = len(reaper.kill_descendants(min(_KILL_PATIENCE, patience)))
    clean_up()
    _exit_as(status, left)


def _wait(agent: int, life: int, patience: float) -> int:
    """The agent's wait status. One that once spoke at `life`, or whose channel has ended, is killed when it says nothing for `patience`."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in _ENDING:
        signal.signal(number, lambda number, _: _forward(agent, number))
    poll = select.poll()
    poll.register(wake_read, select.POLLIN)
    poll.register(0, select.POLLHUP | select.POLLRDHUP)
    poll.register(life, select.POLLIN)
    deadline: Optional[float] = None
    more = 2 * _KILL_PATIENCE  # it may be ending its workers in order
    while True:
        ended, status = os.waitpid(agent, os.WNOHANG)
        if ended:
            for number in _ENDING:
                signal.signal(number, signal.SIG_IGN)  # its number may be another's by now
            return status
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        for fd, _ in poll.poll(timeout):
            if fd == wake_read:
                os.read(wake_read, 512)
            elif fd == life and not os.read(life, 512):
                poll.unregister(life)
            else:
                if fd == 0:
                    poll.unregister(0)
                    more = 0.0
                deadline = time.monotonic() + patience + more
        if deadline is not None and time.monotonic() >= deadline:
            os.kill(agent, signal.SIGKILL)
            deadline = None


def _forward(agent: int, number: int) -> None:
    try:
        os.kill(agent, number)
    except ProcessLookupError:
        pass


def _exit_as(status: int, left: int) -> NoReturn:
    code, cause = _explain(status)
    if left:
        cause = "%d processes can't be killed (another user's, frozen, or stuck in the kernel)" % left
        code = code or 1
    if cause:
        try:
            os.write(2, ("hvlaunch agent: %s\n" % cause).encode())
        except OSError:
            pass
    os._exit(code)


def _explain(status: int) -> Tuple[int, str]:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return 128 + number, "killed by %s" % signal_name(number)
    code = os.WEXITSTATUS(status)
    return code, "" if code == 0 else "ended with code %d" % code
