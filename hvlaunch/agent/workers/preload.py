"""Standbys, for --preload: for each slot a process that has imported modules and waits to become the slot's next worker.

A standby is the worker's own command, in the same directory, with the same variables, pipes and processors as any start;
agent/workers/standby.py, its first `sitecustomize`, makes it wait before the script. So the script sees a fresh interpreter, and
nothing is forked from a process that has threads. The first worker of a slot goes the same way without waiting: it shows
that the command takes the file, and that the imports succeed.
"""

from __future__ import annotations

import marshal
import os
import time

from hvlaunch.agent import reaper
from hvlaunch.agent import workers as process
from hvlaunch.agent.quick import READ, Selector, signal, signal_name, socket
from hvlaunch.agent.wire.frames import LONGEST_TEXT, plain
from hvlaunch.agent.workers.family import kill_others

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Collection, Dict, List, Optional, Sequence, Set, Tuple

    from hvlaunch.agent.workers import WorkerProcess

    Within = Callable[[Callable[[], WorkerProcess]], WorkerProcess]
    Program = Tuple[Optional[str], Optional[str]]

__all__ = ["Preload", "program_of"]

_MARSHAL = 2
"""A version that each Python >= 3.8 reads."""
_CANNOT = 126
_FD = 3
_PATIENCE = 1.0  # seconds
_LONGEST_PAUSE = 10.0
_LONGEST_IMPORT = 600.0
_MOST_LOSSES = 1
_LONGEST_REPORT = 1 << 13
_VARIES = ("HVLAUNCH_", "HOROVOD_", "TORCHELASTIC_", "MASTER_ADDR", "MASTER_PORT")
_PLACES = ("RANK", "SIZE")  # as in agent/workers/standby.py
_FLAGS = "bBdOPqRsuv"
_FLAGS_WITH_VALUE = "WX"


class _Start:
    """Everything of a worker's start that the next start in the slot may share."""

    def __init__(self, slot: int, argv: Sequence[str], env: Dict[str, str], within: Within) -> None:
        self.slot = slot
        self.argv = list(argv)
        self.env = env
        self.cwd = os.getcwd()
        self.within = within


class _Standby:
    """A process on its way to the script; `waits` unless it is a worker already."""

    def __init__(
        self, start: _Start, worker: WorkerProcess, connection: socket.socket, *, waits: bool
    ) -> None:
        self.start = start
        self.worker = worker
        self.connection = connection
        self.waits = waits
        self.reads: Optional[Set[str]] = None
        """Variables with a worker's place that its imports have read; None before its report."""
        self.late_at = time.monotonic() + _LONGEST_IMPORT

    def order(self, start: _Start) -> Optional[Dict[str, Any]]:
        """Return the order that makes it this worker; None if a fresh process would differ."""
        old, new = self.start, start
        if self.reads is None or (old.argv, old.cwd) != (new.argv, new.cwd):
            return None
        try:
            if os.sched_getaffinity(self.worker.pid) != os.sched_getaffinity(0):
                return None
        except OSError:
            return None
        names = {name for name in {*old.env, *new.env} if old.env.get(name) != new.env.get(name)}
        if any(name in self.reads or not _may_vary(name) for name in names):
            return None
        return {"env": {name: new.env.get(name) for name in names}, "cwd": new.cwd}

    def close(self) -> None:
        """Kill it, and close its pipes."""
        self.connection.close()
        self.worker.send_signal(signal.SIGKILL, group=True)
        for fd in self.worker.output.values():
            os.close(fd)


def _may_vary(name: str) -> bool:
    """True for variables that hvlaunch sets anew at each start. Modules may read any other one at their import."""
    return name.startswith(_VARIES) or name.endswith(_PLACES)


class Preload:
    """Starts workers, from standbys where possible. `send` takes a frame with the reason, once, if there will be none."""

    def __init__(
        self, order: Dict[str, Any], selector: Selector, scratch: str, send: Callable[[Dict[str, Any]], None]
    ) -> None:
        self._modules: List[str] = order["modules"]
        self._selector = selector
        self._report = send
        self._standbys: Dict[int, _Standby] = {}
        self._due: Dict[int, Tuple[float, _Start]] = {}
        """When to start a standby, by slot."""
        self._pause = 0.0
        self._losses = 0
        self._count = 0
        self._is_off = False
        self._directory = os.path.join(scratch, "standby")
        try:
            os.mkdir(self._directory, 0o700)
            with open(os.path.join(self._directory, "sitecustomize.py"), "w") as file:
                file.write(order["program"])
        except OSError as error:
            self._stop("%s: %s" % (self._directory, os.strerror(error.errno or 0)))

    def kill_others(self, patience: float) -> None:
        """Kill and reap every descendant that is not of a standby, within `patience` seconds."""
        # Each standby leads a session.
        sessions = {standby.worker.pid for standby in self._standbys.values()}
        kill_others(sessions, patience) if sessions else reaper.kill_descendants(patience)

    def start(
        self,
        within: Within,
        slot: int,
        argv: Sequence[str],
        env: Dict[str, str],
        with_stdin: bool,
        with_result: bool,
    ) -> WorkerProcess:
        """Make the slot's standby a worker, or start one. Raises CannotStart.

        `within` calls a function with this thread bound as the slot's workers are, as it is now.
        """
        start = _Start(slot, argv, env, within)
        self._due.pop(slot, None)
        standby = self._standbys.get(slot)
        # One that still imports waits for another start, or is given up as hanging.
        if standby is not None and (standby.reads is not None or time.monotonic() > standby.late_at):
            del self._standbys[slot]
            order = None if with_stdin else standby.order(start)
            worker = standby.worker
            if order is not None and not _is_stopped(worker.pid) and _send(standby.connection, order):
                worker.error_file = env.get("TORCHELASTIC_ERROR_FILE", "")
                standby.connection.close()
                self._plan(start)
                return worker
            self._forget(standby.connection)
            standby.close()
            if order is not None or standby.reads is None:
                self._lose("was stopped or hung")
        # A call's command is a shell's, and descriptor 3 is its result.
        program = None if with_result else program_of(argv)
        if program is None and not self._is_off:
            self._stop("the command is not `python [OPTIONS] SCRIPT` or `python [OPTIONS] -m MODULE`")
        if self._is_off or program is None:
            return process.start(slot, argv, env, with_stdin, with_result)
        return self._begin(start, program, with_stdin=with_stdin, waits=False).worker

    def _begin(self, start: _Start, program: Program, *, with_stdin: bool, waits: bool) -> _Standby:
        """Start a process with the file. Raises CannotStart."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise process.CannotStart(_CANNOT, "socketpair: %s" % os.strerror(error.errno or 0)) from None
        path = start.env.get("PYTHONPATH")
        script, module = program
        plan = {
            "fd": _FD,
            "socket": os.fstat(theirs.fileno()).st_ino,
            "path": path,
            "modules": self._modules,
            "script": script,
            "module": module,
            "waits": waits,
        }
        env = dict(start.env)
        env["HVL_STANDBY"] = marshal.dumps(plan, _MARSHAL).hex()
        # No empty part: it would mean the working directory.
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (self._directory, path)))
        if waits:
            # The mark of the worker that runs now would have it killed with that worker's leftovers.
            self._count += 1
            mark = env["HVLAUNCH_WORKER"] = "standby/%d/%d" % (start.slot, self._count)
        try:
            worker = process.start(start.slot, start.argv, env, with_stdin, more=[theirs.fileno()])
        except process.CannotStart:
            ours.close()
            raise
        finally:
            theirs.close()
        standby = _Standby(start, worker, ours, waits=waits)
        if waits:
            worker.marks = [os.fsencode("HVLAUNCH_WORKER=" + mark)]
        else:
            _send(ours, {})
        ours.setblocking(False)
        self._selector.register(ours, READ, lambda: self._hear(standby))
        return standby

    def _hear(self, standby: _Standby) -> None:
        """Take the report of a process about its imports."""
        connection, slot = standby.connection, standby.start.slot
        if not self._forget(connection):
            return  # closed in the same turn
        try:
            report = connection.recv(_LONGEST_REPORT).decode("utf-8", "replace")
        except OSError:
            report = ""
        if not standby.waits:
            connection.close()
        if not report:
            return  # it has ended, or is about to
        seconds, reads, cause = (report + "\n\n").split("\n")[:3]
        if cause:
            self._stop(cause)
            return
        standby.reads = set(reads.split(","))
        if not standby.waits and slot not in self._standbys and not self._is_off:
            try:
                self._pause = max(0.0, min(_LONGEST_PAUSE, float(seconds)))
            except ValueError:
                self._pause = _LONGEST_PAUSE
            self._plan(standby.start)

    def _plan(self, start: _Start) -> None:
        """Start a standby after a pause as long as the imports take: the worker has things to do first."""
        self._due[start.slot] = time.monotonic() + self._pause, start

    def deadline(self) -> float:
        """Return when start_due() has something to do."""
        return min((at for at, _ in self._due.values()), default=float("inf"))

    def start_due(self, now: float, living: Collection[int]) -> None:
        """Start standbys; only for slots with `living` workers."""
        for slot, (at, start) in list(self._due.items()):
            if at > now:
                continue
            self._due.pop(slot, None)
            program = program_of(start.argv)
            if slot not in living or self._is_off or program is None:
                continue
            try:
                start.within(self._starter(start, program))
            except process.CannotStart as error:
                self._stop(error.cause)

    def _starter(self, start: _Start, program: Program) -> Callable[[], WorkerProcess]:
        def begin() -> WorkerProcess:
            standby = self._standbys[start.slot] = self._begin(start, program, with_stdin=False, waits=True)
            return standby.worker

        return begin

    def _forget(self, connection: socket.socket) -> bool:
        """Stop waiting for a report; return False if nothing waits."""
        is_registered = connection.fileno() in self._selector
        if is_registered:
            self._selector.unregister(connection)
        return is_registered

    def reaped(self, pid: int, status: int) -> None:
        """Note the end of a child, which may be a standby."""
        standby = next((standby for standby in self._standbys.values() if standby.worker.pid == pid), None)
        if standby is None:
            return
        self._forget(standby.connection)
        del self._standbys[standby.start.slot]
        standby.close()
        how = "ended with code %d" % os.WEXITSTATUS(status)
        if os.WIFSIGNALED(status):
            how = "was killed by %s" % signal_name(os.WTERMSIG(status))
        if self._lose(how):
            self._plan(standby.start)

    def _lose(self, how: str) -> bool:
        """Count a standby that is lost; return True if there may be another one."""
        self._losses += 1
        if self._losses > _MOST_LOSSES:
            self._stop("two processes that waited are lost; the last one %s" % how)
        return not self._is_off

    def _stop(self, cause: str) -> None:
        """Start workers as usual from now on."""
        if not self._is_off:
            self._is_off = True
            self._report({"type": "no_preload", "cause": plain(cause, LONGEST_TEXT)})
        self._due.clear()
        for standby in self._standbys.values():
            self._forget(standby.connection)
            standby.close()
        self._standbys.clear()


def _send(connection: socket.socket, order: Dict[str, Any]) -> bool:
    """Send an order, whose end is the end of the stream; return False if the process is gone or hangs."""
    connection.settimeout(_PATIENCE)
    try:
        connection.sendall(marshal.dumps(order, _MARSHAL))
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        return False
    return True


def _is_stopped(pid: int) -> bool:
    """True for a process that can't take an order: a signal or debugger has stopped it, or it has ended."""
    # No answer is waited for: on a busy machine, the process might be late, and so would be the agent.
    try:
        with open("/proc/%d/stat" % pid, "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] in (b"T", b"t", b"Z", b"X")
    except OSError:
        return True


def program_of(argv: Sequence[str]) -> Optional[Program]:
    """Return script and module, one of which is None, of a command of Python; None for other commands.

    Options that would leave agent/workers/standby.py out (-I, -E, -S) make it another command: the script would begin at once.
    """
    name = os.path.basename(argv[0]).rstrip("t") if argv else ""
    if name.rstrip("0123456789.") != "python":
        return None
    words = iter(argv[1:])
    for word in words:
        if not word.startswith("-"):
            return word, None
        letters = word[1:]
        while letters or word == "-":
            letter, letters = letters[:1], letters[1:]
            if letter == "m":
                return None, letters or next(words, "")
            if letter and letter in _FLAGS_WITH_VALUE:
                if not letters:
                    next(words, None)
                break
            if not letter or letter not in _FLAGS:
                return None
    return None
