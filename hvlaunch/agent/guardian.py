"""The process above the agent: however the agent ends, its guardian kills the processes of the job."""

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

    from hvlaunch.agent.wire.caller import Sealed
    from hvlaunch.agent.workers.local_ranks import Meeting

__all__ = ["MORE", "main", "wait_for", "watch_over"]

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_KILL_PATIENCE = 7.0  # seconds; the agent takes this time twice, and the driver waits for 25 s
MORE = 2.0
"""Seconds by which the agent, with the same lease, may be late."""
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

    patience = float(config["grace"]) + float(config["lease"]) + MORE
    watch_over(b"hvl-agent", be_agent, patience, lambda: scratch.remove(directory))


def watch_over(
    name: bytes,
    work: Callable[[int], NoReturn],
    patience: float,
    clean_up: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Run `work` in a child; when the child ends, kill its leftover processes, and exit with its status.

    The child gets a descriptor that closes with this process. `name` is the child's name in lists of processes.
    """
    # Neither name contains `python` or `hvlaunch`: killall or pkill of these would end both processes at once, and no
    # process would be left to end the workers.
    # Without the dumpable flag, other processes of this user, above all workers, can't open the agent's descriptors or
    # memory, and so can't send frames in its name. exec makes workers dumpable again.
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
        sys.exit("hvlaunch agent: can't start a process: %s" % os.strerror(error.errno or 0))
    if child == 0:
        os.close(ours)
        # Hydra kills the guardian's process group, which must not include the agent.
        os.setsid()
        work(theirs)
    os.close(theirs)
    prctl(_PR_SET_NAME, b"hvl-guardian")
    signal.setitimer(signal.ITIMER_REAL, 0)  # the timer of the start; a child does not inherit it
    status = wait_for(child, ours, patience)
    left = len(reaper.kill_descendants(min(_KILL_PATIENCE, patience)))
    clean_up()
    _exit_as(status, left)


def wait_for(agent: int, life: int, patience: float, shows_life: Callable[[], bool] = lambda: False) -> int:
    """Return the agent's wait status. After the end of its channel, or a sign of life, kill it if silent for `patience`.

    Signs of life come over `life`; `shows_life` returns True for others since its last call.
    """
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in _ENDING:
        signal.signal(number, lambda number, _: _forward(agent, number))
    poll = select.poll()
    poll.register(wake_read, select.POLLIN)
    # Not POLLIN: the agent reads the channel, and the guardian only watches for its end.
    poll.register(0, select.POLLHUP | select.POLLRDHUP)
    poll.register(life, select.POLLIN)
    deadline: Optional[float] = None
    more = 2 * _KILL_PATIENCE  # the agent may be ending its workers in order
    while True:
        ended, status = os.waitpid(agent, os.WNOHANG)
        if ended:
            for number in _ENDING:
                signal.signal(number, signal.SIG_IGN)  # the pid may belong to another process by now
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
            if shows_life():
                deadline = time.monotonic() + patience
            else:
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
