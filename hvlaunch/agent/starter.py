"""A launcher's process for a rank, except the first on its host: starts and ends the rank's worker for the agent.

The worker thereby gets the launcher's gifts for this rank: variables, descriptors, processors, cgroup. Output, stdin and
decisions are the agent's, at the other end of the Unix socket at descriptor 0.
"""

from __future__ import annotations

import os
import select
import sys

from hvlaunch.agent import guardian, reaper
from hvlaunch.agent import workers as process
from hvlaunch.agent.quick import loads, signal, signal_name, socket
from hvlaunch.agent.wire.frames import LONGEST_TEXT, Decoder, encode, plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, NoReturn, Optional, Sequence

__all__ = ["main"]

_KILL_PATIENCE = 20.0
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_CANNOT_ENTER = 126


def main() -> NoReturn:
    """Serve the agent at descriptor 0 until its `bye` or its end. Never returns."""
    guardian.watch_over(b"hvl-starter", lambda alive: RankStarter(alive).run(), _KILL_PATIENCE)


class RankStarter:
    """Starts, signals and reaps the worker of a rank, by orders of the host's agent."""

    def __init__(self, guardian_fd: int) -> None:
        # Fork does not hand on the attribute of a subreaper, and the guardian may be killed.
        reaper.adopt_descendants()
        self._agent = socket.socket(fileno=0)
        self._guardian_fd = guardian_fd
        self._decoder = Decoder()
        self._worker: Optional[process.WorkerProcess] = None
        self._wake_read, wake = os.pipe()
        for fd in (self._wake_read, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        for number in (signal.SIGCHLD, *_ENDING):
            signal.signal(number, lambda *_: None)

    def run(self) -> NoReturn:
        """Carry out orders, and report events."""
        poll = select.poll()
        for fd in (0, self._guardian_fd, self._wake_read):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == 0:
                    self._receive()
                elif fd == self._guardian_fd:
                    poll.unregister(fd)
                    self._tell({"type": "parting", "cause": "its guardian was killed"})
                else:
                    self._woken()

    def _tell(self, header: Dict[str, Any], fds: Sequence[int] = ()) -> None:
        # The worker's pipes go to the agent, so output takes no way through this process.
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds))]
            if fds
            else []
        )
        try:
            self._agent.sendmsg([encode(header)], rights)
        except OSError:
            self._end()

    def _end(self) -> NoReturn:
        reaper.kill_descendants(_KILL_PATIENCE)
        os._exit(1)

    def _receive(self) -> None:
        try:
            data = self._agent.recv(1 << 16)
        except OSError:
            data = b""
        # Without its agent the worker has no driver: end it, as the agent itself would.
        if not data:
            self._end()
        for header, body in self._decoder.feed(data):
            if header["type"] == "start":
                self._start(header["slot"], loads(body.decode("ascii")))
            elif header["type"] == "signal" and self._worker is not None:
                self._worker.send_signal(header["signal"], group=header["group"])
            elif header["type"] == "bye":
                self._tell({"type": "bye", "left": len(reaper.kill_descendants(_KILL_PATIENCE))})
                os._exit(0)

    def _start(self, slot: int, plan: Dict[str, Any]) -> None:
        # The launcher's variables for this rank win over defaults, and the job's over both.
        env = {**plan["defaults"], **os.environ, "PWD": plan["cwd"], **plan["env"]}
        try:
            try:
                os.chdir(plan["cwd"])
            except OSError as error:
                cause = "%s: %s" % (plan["cwd"], os.strerror(error.errno or 0))
                raise process.CannotStart(_CANNOT_ENTER, cause) from None
            worker = process.start(slot, plan["argv"], env, plan["stdin"])
        except process.CannotStart as error:
            self._tell({"type": "not_started", "code": error.code, "cause": plain(error.cause, LONGEST_TEXT)})
            return
        self._worker = worker
        fds = [*worker.output.values(), *(() if worker.stdin is None else (worker.stdin,))]
        self._tell({"type": "started", "pid": worker.pid}, fds)
        for fd in fds:
            os.close(fd)

    def _woken(self) -> None:
        for number in os.read(self._wake_read, 512):
            if number in _ENDING:
                self._tell({"type": "parting", "cause": "got %s" % signal_name(number)})
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._worker is not None and pid == self._worker.pid:
                self._worker = None
                self._tell({"type": "ended", "status": status, "max_rss": usage.ru_maxrss})
