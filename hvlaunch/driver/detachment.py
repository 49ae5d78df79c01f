"""Leaving the terminal: afterwards the driver depends on no process of the user's session."""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from hvlaunch.console.printer import Printer
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.outside import JobDirectory
from hvlaunch.outside.minder import start_minder

__all__ = ["Detachment"]


class Detachment:
    """Detaches this process from its terminal, session, stdin, stdout and stderr, once. For the driver's loop."""

    def __init__(
        self, directory: JobDirectory, printer: Printer, on_detached: Callable[[str], None] | None
    ) -> None:
        """`on_detached` is called with the job's id afterwards."""
        self._directory = directory
        self._printer = printer
        self._on_detached = on_detached
        self._round, self._to_start = -1, 0
        self._is_done = False

    def leave_when_running(self, event: on.Event, actions: Sequence[do.Action], _now: float) -> None:
        """Leave when every worker of a round has started; a watcher."""
        for action in actions:
            if isinstance(action, do.Start):
                if action.round != self._round:
                    self._round, self._to_start = action.round, 0
                self._to_start += len(action.launches)
        if isinstance(event, on.WorkerStarted) and event.round == self._round:
            self._to_start -= 1
            if not self._to_start:
                self.leave()

    def leave(self) -> None:
        """Leave now. Further calls do nothing."""
        if self._is_done:
            return
        self._is_done = True
        self._directory.is_detached = True
        self._printer.go_headless()
        # A leader of a process group can't make a session; without its descriptors the terminal is gone all the same.
        with suppress(OSError):
            os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.close(null)
        if threading.current_thread() is threading.main_thread():
            # Not SIG_IGN: processes started by the driver would inherit that.
            signal.signal(signal.SIGHUP, lambda *_: None)
        start_minder(self._directory.path)
        if self._on_detached is not None:
            self._on_detached(self._directory.about["id"])
