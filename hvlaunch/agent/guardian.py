"""The process above the agent: whatever happens to the agent, nothing of the job survives it."""

import os
import select
import signal
from typing import Any, Dict, Optional, Tuple

from hvlaunch.agent import reaper

__all__ = ["main", "remove_scratch"]

_STUCK_AGENT_MARGIN = 10.0
"""Seconds beyond the grace that an agent whose driver is gone may take to end its workers."""
_KILL_PATIENCE = 20.0


def main(config: Dict[str, Any]) -> None:
    """Start the agent as a child, wait for its end, kill what it left, exit with its status.

    `config` has `grace` and `lease` in seconds. Never returns.
    """
    scratch = _make_scratch()
    reaper.adopt_descendants()
    alive_read, alive_write = os.pipe()
    agent = os.fork()
    if agent == 0:
        os.close(alive_write)
        from hvlaunch.agent import main as agent_main  # noqa: PLC0415 (the guardian stays small)

        agent_main.main(config, scratch, alive_read)
    os.close(alive_read)
    status = _wait(agent, float(config["grace"]))
    left = reaper.kill_descendants(_KILL_PATIENCE)
    remove_scratch(scratch)
    _exit_as(status, left)


def _make_scratch() -> str:
    """A private directory for the workers' error files, removed at the end."""
    base = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108
    path = os.path.join(base, "hvlaunch-" + os.urandom(8).hex())
    os.mkdir(path, 0o700)
    return path


def remove_scratch(path: str) -> None:
    """Remove the directory and what is in it, as far as it goes."""
    try:
        os.rmdir(path)
    except OSError:
        import shutil  # noqa: PLC0415 (costs 8 ms, and is needed only where a worker left a file)

        shutil.rmtree(path, ignore_errors=True)


def _wait(agent: int, grace: float) -> int:
    """The agent's wait status. An agent that outlives its channel by too much is killed."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, _: _forward(agent, number))
    poll = select.poll()
    poll.register(wake_read, select.POLLIN)
    poll.register(0, select.POLLHUP | select.POLLRDHUP)
    timeout: Optional[float] = None
    while True:
        ended, status = os.waitpid(agent, os.WNOHANG)
        if ended:
            return status
        events = poll.poll(timeout)
        if not events:
            os.kill(agent, signal.SIGKILL)
            timeout = None
        for fd, _ in events:
            if fd == wake_read:
                os.read(wake_read, 512)
            else:
                poll.unregister(0)
                timeout = (grace + _STUCK_AGENT_MARGIN) * 1000


def _forward(agent: int, number: int) -> None:
    try:
        os.kill(agent, number)
    except ProcessLookupError:
        pass


def _exit_as(status: int, left: int) -> None:
    code, cause = _explain(status)
    if left:
        cause = "%d processes can't be killed (another user's, or stuck in the kernel)" % left
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
        return 128 + number, "killed by %s" % signal.Signals(number).name
    code = os.WEXITSTATUS(status)
    return code, "" if code == 0 else "ended with code %d" % code
