"""The workers of this host: their start, stdin, output, signals at set times, and ends."""

from __future__ import annotations

import os
import time

from hvlaunch.agent import reaper
from hvlaunch.agent import workers as process
from hvlaunch.agent.quick import READ, WRITE, Selector, loads, signal
from hvlaunch.agent.wire.channel import PLAN, DriverChannel
from hvlaunch.agent.wire.frames import FRAME_COST, LAST_OUTPUT, LONGEST_TEXT, OUTPUT_CHUNK, BadFrame, plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

    from hvlaunch.agent.wire.rejoin import Spill
    from hvlaunch.agent.workers import WorkerProcess
    from hvlaunch.agent.workers.binding import Binder
    from hvlaunch.agent.workers.local_ranks import LocalRanks
    from hvlaunch.agent.workers.preload import Preload

    Step = Tuple[int, float]

__all__ = ["HostWorkers", "WorkerOutput", "WorkerSlot", "exit_of"]

_ERROR_FILE_LIMIT = 1 << 18
_F_GETPIPE_SZ = 1032  # fcntl(2); the module has the name since Python 3.10


class WorkerSlot:
    """A worker, and the agent's unfinished work for the worker; `about` is its name in frames: round, slot and start."""

    def __init__(self, about: Dict[str, int], worker: WorkerProcess, mark: str) -> None:
        self.about = about
        self.worker = worker
        self.mark = os.fsencode(mark)
        """NAME=VALUE in the environment of the worker, and usually of its children."""
        self.is_first = False
        """True for rank 0, which opens the store at MASTER_PORT."""
        self.master_port: Optional[int] = None
        self.may_be_alone: Optional[Sequence[str]] = None
        """The worker's command, if the worker may turn out to be a job of its own."""
        self.suspended_at: Optional[float] = None
        self.was_suspended = False
        self.is_paused = False
        """True if the user stopped the worker by `hvlaunch signal STOP`, on purpose: it is not reported."""
        self.steps: List[Step] = []
        self.end: Optional[Dict[str, Any]] = None
        self.is_reported = False
        """True once the driver has been sent the worker's end."""
        self.to_drain: Dict[str, int] = {}
        self.stdin_waiting = bytearray()
        self.stdin_ended = False


class WorkerOutput:
    """Sends the output of `slots`, the owner's list; at most `window` bytes are on their way at a time."""

    def __init__(
        self,
        slots: List[WorkerSlot],
        channel: DriverChannel,
        selector: Selector,
        window: int,
        scratch: str,
        spill: int,
    ) -> None:
        """At most `spill` bytes go into a file in the `scratch` directory while the connection is lost."""
        self._slots = slots
        self._channel = channel
        self._selector = selector
        self._window = self._credit = window
        self._scratch = scratch
        self._may_spill = spill
        self._spill: Optional[Spill] = None
        self._is_discarding = False

    @property
    def _may_read(self) -> bool:
        if self._spill is not None:
            return self._is_discarding or (self._channel.is_away and self._spill.has_room)
        return self._is_discarding or self._credit > 0 or (self._channel.is_away and self._may_spill > 0)

    def watch(self, slot: WorkerSlot) -> None:
        """Read the streams of a new worker."""
        for stream in slot.worker.output:
            self._watch_stream(slot, stream)

    def _watch_stream(self, slot: WorkerSlot, stream: str) -> None:
        if self._may_read:
            fd = slot.worker.output[stream]
            self._selector.register(fd, READ, lambda: self._read(slot, stream))

    def _read(self, slot: WorkerSlot, stream: str, *, is_last: bool = False) -> int:
        """Pass one chunk on and return its size, 0 if the pipe is empty or closed. The last output needs no credit."""
        fd = slot.worker.output.get(stream)
        if fd is None or not (self._may_read or is_last):
            return 0
        try:
            data = os.read(fd, OUTPUT_CHUNK)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            if fd in self._selector:
                self._selector.unregister(fd)
            os.close(fd)
            del slot.worker.output[stream]
        if not self._is_discarding:
            self._pass_on({"type": "output", "stream": stream, **slot.about}, data)
            if not self._may_read:
                self._pause()
        return len(data)

    def finish(self, slot: WorkerSlot) -> None:
        """Read the pipes of an ended worker, then send its end."""
        # Descendants may hold the pipes open and print for ever, so no more is read than the pipes can hold now, and
        # the end of each stream behind it.
        for stream, fd in slot.worker.output.items():
            import fcntl  # noqa: PLC0415 (most pipes end with their worker)

            slot.to_drain[stream] = min(fcntl.fcntl(fd, _F_GETPIPE_SZ), LAST_OUTPUT) + 1
        for stream in list(slot.worker.output):
            while slot.to_drain[stream] > 0:
                size = self._read(slot, stream, is_last=True)
                slot.to_drain[stream] = slot.to_drain[stream] - size if size else 0
        # The end waits for no credit: other workers' ends may depend on it, and the driver's reader may be stuck.
        if not slot.is_reported and slot.end is not None:
            slot.is_reported = True
            error = (
                "" if slot.end["code"] == 0 else process.start_of(slot.worker.error_file, _ERROR_FILE_LIMIT)
            )
            self._pass_on({"type": "exited", **slot.about, **slot.end}, error.encode())

    def _pass_on(self, header: Dict[str, Any], body: bytes) -> None:
        """Send a worker's output or end, or append the frame to the file."""
        if self._spill is None and self._credit <= 0 and self._channel.is_away and self._may_spill:
            from hvlaunch.agent.wire.rejoin import Spill  # noqa: PLC0415 (few connections are lost for long)

            self._spill = Spill(self._scratch, self._may_spill)
        if self._spill is not None:
            self._spill.put(header, body)
            return
        self._channel.send(header, body)
        if body and header["type"] == "output":
            self._credit -= len(body) + FRAME_COST

    def _send_spilled(self, *, is_final: bool = False) -> None:
        """Send frames from the file; final frames, and frames before a worker's end, need no credit."""
        while self._spill is not None and (self._credit > 0 or is_final or self._spill.has_end):
            header, body = self._spill.take()
            if self._spill.is_empty:
                self._spill.close()
                self._spill = None
            self._channel.send(header, body)
            if header["type"] == "output":
                self._credit -= len(body) + FRAME_COST if body else 0

    def resume(self, *, with_new_driver: bool) -> None:
        """Continue over another connection; a new driver grants the whole window anew."""
        if with_new_driver:
            self._credit = self._window
        self._send_spilled()
        if not self._may_read:
            self._pause()

    def _pause(self) -> None:
        """Stop reading for want of credit."""
        # The workers then block in write(), as on any full pipe: that is the only way to slow them down.
        for slot in self._slots:
            for fd in slot.worker.output.values():
                if fd in self._selector:
                    self._selector.unregister(fd)

    def add_credit(self, size: int) -> None:
        """Let the workers print this many bytes more."""
        could_read = self._may_read
        self._credit += size
        self._send_spilled()
        if not could_read and self._may_read:
            self.read_on()

    def read_on(self) -> None:
        """Read each stream with permission to read now."""
        for slot in list(self._slots):
            for stream in list(slot.worker.output):
                if self._may_read and slot.worker.output[stream] not in self._selector:
                    self._watch_stream(slot, stream)

    def discard(self) -> None:
        """Read and drop further output, without a driver to send to."""
        # Unread pipes would block workers in write(), and a blocked worker may not react to SIGTERM.
        self._is_discarding = True
        if self._spill is not None:
            self._spill.close()
            self._spill = None
        self.read_on()

    def finish_all(self) -> None:
        """Send the remaining output, after the death of each writing process."""
        for slot in self._slots:
            self.finish(slot)
        self._send_spilled(is_final=True)


_LONGEST_NAME = 256
_CLEARING = 2.0  # seconds to end the processes that earlier workers left
_LAUNCHED = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def _plan(body: bytes) -> Dict[str, Any]:
    """Return the workers of a `start` frame. Raises BadFrame."""
    try:
        plan = loads(body.decode("ascii"))
    except (ValueError, RecursionError):
        plan = None
    if not PLAN(plan):
        raise BadFrame("a start without a plan")
    checked: Dict[str, Any] = plan
    return checked


def _argv(item: Dict[str, Any], plan: Dict[str, Any]) -> Sequence[str]:
    """Return the worker's command: its own if words depend on its place."""
    argv: Sequence[str] = item.get("argv", plan["argv"])
    return argv


class HostWorkers:
    """Starts, signals and reaps workers; `output` sends their output."""

    def __init__(
        self, channel: DriverChannel, selector: Selector, window: int, scratch: str, spill: int
    ) -> None:
        """`window`, `scratch` and `spill` are for WorkerOutput."""
        self._channel = channel
        self._selector = selector
        self._scratch = scratch
        self._slots: List[WorkerSlot] = []
        self.output = WorkerOutput(self._slots, channel, selector, window, scratch, spill)
        self._oom = _OomWatch()
        self.suspension: Optional[float] = None
        """Seconds of suspension (SIGSTOP) before a report to the driver; None: no report."""
        self.reaped_other: Callable[[int, int], None] = lambda _pid, _status: None
        """Gets pid and wait status of other children."""
        self._binder: Optional[Binder] = None
        self._preload: Optional[Preload] = None
        self.ranks: Optional[LocalRanks] = None
        """A launcher's other processes on this host, each the parent of its slot's worker."""

    @property
    def all_ended(self) -> bool:
        return all(slot.end is not None for slot in self._slots)

    def start(self, header: Dict[str, Any], body: bytes) -> None:
        """Start the workers of a `start` frame; send `started` or `not_started` for each. Raises BadFrame."""
        plan = _plan(body)
        self._clear([item["slot"] for item in plan["workers"]])
        # Before the orders, which name it.
        trouble = plan["cwd"] and process.enter(plan["cwd"])
        if "bind" in plan:
            from hvlaunch.agent.workers.binding import Binder  # noqa: PLC0415 (few jobs bind their workers)

            self._binder = Binder(plan["bind"], plan["env"])
        if "preload" in plan and self._preload is None:
            from hvlaunch.agent.workers.preload import Preload  # noqa: PLC0415 (few jobs preload modules)

            self._preload = Preload(plan["preload"], self._selector, self._scratch, self._channel.send)
        # All orders go out first, so that the launcher's processes start their workers at the same time.
        for item in plan["workers"]:
            if self.ranks is not None and item["slot"] in self.ranks:
                env = _with_paths(plan, {**plan["env"], **item["env"]})
                self.ranks.order(item["slot"], _argv(item, plan), plan["defaults"], env, item["stdin"])
        for item in plan["workers"]:
            job_env = _with_paths(plan, {**plan["env"], **item["env"]})
            about = {"round": header["round"], "slot": item["slot"], "start": item["start"]}
            try:
                worker = self._begin(item, plan, job_env, trouble)
            except process.CannotStart as error:
                end = {"code": error.code, "cause": plain(error.cause, LONGEST_TEXT)}
                self._channel.send({"type": "not_started", **end, **about})
                continue
            slot = WorkerSlot(about, worker, "HVLAUNCH_WORKER=%s" % job_env.get("HVLAUNCH_WORKER"))
            slot.is_first = job_env.get("HVLAUNCH_RANK") == "0"
            slot.master_port = _master_port(job_env)
            # With places in the command the program does not need MASTER_PORT.
            is_usual = self.suspension is None and "argv" not in item
            if is_usual and job_env.get("HVLAUNCH_SIZE") != "1" and not _is_launched():
                slot.may_be_alone = _argv(item, plan)
            self._slots.append(slot)
            self.output.watch(slot)
            self._channel.send({"type": "started", "pid": worker.pid, "at": time.monotonic(), **about})
        if self.ranks is not None:
            self.ranks.catch_up()

    def _begin(
        self, item: Dict[str, Any], plan: Dict[str, Any], job_env: Dict[str, str], trouble: Optional[str]
    ) -> process.WorkerProcess:
        """Start a worker, or wait for a launcher's process to start the worker. Raises CannotStart, as for `trouble`."""
        number: int = item["slot"]
        if trouble is not None:
            raise process.CannotStart(126, "%s: %s" % (plan["cwd"], trouble))
        if self.ranks is not None and number in self.ranks:
            return self.ranks.started(number, job_env.get("TORCHELASTIC_ERROR_FILE", ""))
        # The host's own variables win over hvlaunch's defaults, and the job's over the host's.
        env = {**plan["defaults"], **os.environ, **job_env}

        binder = self._binder

        def within(begin: Callable[[], WorkerProcess]) -> WorkerProcess:
            """Call `begin` with this thread bound as the slot's workers are."""
            return begin() if binder is None else binder.start(number, env, job_env, begin)

        def begin() -> WorkerProcess:
            order = number, _argv(item, plan), env, item["stdin"], plan["result"]
            return process.start(*order) if self._preload is None else self._preload.start(within, *order)

        return within(begin)

    def _clear(self, numbers: Sequence[int]) -> None:
        """End leftover processes of earlier workers in these slots: some may hold GPUs and ports."""
        if not self._slots:
            return
        if self.all_ended:
            # No worker lives, so every descendant is a leftover, except processes that wait for --preload.
            (reaper.kill_descendants if self._preload is None else self._preload.kill_others)(_CLEARING)
        else:
            gone = [slot for slot in self._slots if slot.end is not None and slot.worker.slot in numbers]
            from hvlaunch.agent.workers.family import kill_marked  # noqa: PLC0415 (few workers are replaced beside others)

            kill_marked([mark for slot in gone for mark in (slot.mark, *slot.worker.marks)], _CLEARING)
        # In place, because WorkerOutput has the same list.
        self._slots[:] = [
            slot for slot in self._slots if slot.end is None or slot.worker.output or not slot.is_reported
        ]

    def obey(self, header: Dict[str, Any], body: bytes) -> None:
        """Carry out a frame about running workers."""
        kind = header["type"]
        if kind == "ack":
            self.output.add_credit(header["bytes"])
        elif kind == "stop":
            self.stop(header["slots"], [(number, after) for number, after in header["steps"]])
        elif kind == "signal":
            for slot in self._alive(header["slots"]):
                # SIGCONT counts when it is sent: wait4() reports a stop alone if one follows at once.
                slot.is_paused = header["signal"] == signal.SIGSTOP or (
                    slot.is_paused and header["signal"] != signal.SIGCONT
                )
                slot.worker.send_signal(header["signal"], group=False)
        elif kind == "stdin":
            self._feed(header["slot"], body)

    def stop(self, slots: Optional[Sequence[int]], steps: Sequence[Step]) -> None:
        """Send the signals of `steps` (number, seconds from now) to the slots (None: each) while their workers live."""
        now = time.monotonic()
        for slot in self._alive(slots):
            slot.steps = [(number, now + after) for number, after in steps]
        self.take_due_steps(now)

    def _alive(self, numbers: Optional[Sequence[int]]) -> List[WorkerSlot]:
        """Return the slots with these numbers (None: any) and a live worker."""
        return [
            slot
            for slot in self._slots
            if slot.end is None and (numbers is None or slot.worker.slot in numbers)
        ]

    def deadlines(self) -> Iterator[float]:
        """Yield the times of the next signals, and of reports about stopped workers."""
        for slot in self._slots:
            if slot.steps:
                yield slot.steps[0][1]
            if slot.suspended_at is not None and self.suspension is not None:
                yield slot.suspended_at + self.suspension
        if self._preload is not None:
            yield self._preload.deadline()

    def take_due_steps(self, now: float) -> None:
        """Send due signals, and report workers with a long suspension."""
        for slot in self._slots:
            while slot.steps and slot.steps[0][1] <= now:
                number, _ = slot.steps.pop(0)
                slot.worker.send_signal(number, group=True)
            since = slot.suspended_at
            if since is not None and self.suspension is not None and now >= since + self.suspension:
                slot.suspended_at = None
                # Once for each worker: the driver kills it.
                if not slot.was_suspended:
                    slot.was_suspended = True
                    self._channel.send({"type": "suspended", **slot.about})
        if self._preload is not None:
            self._preload.start_due(now, [slot.worker.slot for slot in self._alive(None)])

    def reap(self) -> None:
        """Collect ended processes: workers, and orphans from the kernel."""
        by_pid = {slot.worker.pid: slot for slot in self._slots if slot.end is None}
        # Several children may have ended: the kernel merges their SIGCHLD into one.
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in by_pid:
                if not (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
                    self.reaped_other(pid, status)
                    if self._preload is not None:
                        self._preload.reaped(pid, status)
                continue
            if os.WIFSTOPPED(status):
                # The kernel reports stops by signals alone: a debugger's and py-spy's stops (ptrace) are not seen here.
                if not by_pid[pid].is_paused:
                    by_pid[pid].suspended_at = time.monotonic()
            elif os.WIFCONTINUED(status):
                by_pid[pid].suspended_at = None
                by_pid[pid].is_paused = False
            else:
                self._finish(by_pid[pid], status, usage.ru_maxrss)

    def record_exit(self, number: int, status: int, max_rss: int) -> None:
        """Record the end of a worker of a launcher's process."""
        for slot in self._alive([number]):
            self._finish(slot, status, max_rss)

    def _finish(self, slot: WorkerSlot, status: int, max_rss: int) -> None:
        slot.end = exit_of(status, max_rss)
        # The counter is read at once: the next victim of the kernel would count for this worker.
        slot.end["oom_killed"] = (
            slot.end["signal"] == signal.SIGKILL and not slot.worker.killed and self._oom.struck()
        )
        slot.end["port_taken_by"] = None
        if (
            slot.end["code"] != 0
            and not slot.worker.killed
            and slot.is_first
            and slot.master_port is not None
        ):
            from hvlaunch.agent.workers.diagnosis import other_user_at  # noqa: PLC0415 (few workers fail)

            holder = other_user_at(slot.master_port)
            if holder is not None:
                for name in ("user", "program"):
                    holder[name] = holder[name] and plain(holder[name], _LONGEST_NAME)
            slot.end["port_taken_by"] = holder
        elif slot.end["code"] == 0:
            library = _library_if_alone(slot)
            if library is not None:
                self._channel.send({"type": "alone", "library": library, **slot.about})
        slot.steps = []
        slot.suspended_at = None
        self._drop_stdin(slot)
        self.output.finish(slot)

    def find_driver(self, *, is_new: bool) -> None:
        """Continue over another connection, to the same driver or to a new one."""
        if is_new:
            # The terminal or file behind stdin was the old driver's: nothing more comes from there.
            for slot in self._slots:
                slot.stdin_ended = True
                if not slot.stdin_waiting:
                    self._drop_stdin(slot)
        self.output.resume(with_new_driver=is_new)

    def _feed(self, number: int, data: bytes) -> None:
        """Write to a worker's stdin as fast as the worker reads; empty data is the end."""
        slot = next(iter(self._alive([number])), None)
        if slot is None or slot.worker.stdin is None:
            self._report_taken(number, len(data))
            return
        if not slot.stdin_waiting and not slot.stdin_ended:
            self._selector.register(slot.worker.stdin, WRITE, lambda: self._write_stdin(slot))
        slot.stdin_waiting += data
        slot.stdin_ended = slot.stdin_ended or not data

    def _write_stdin(self, slot: WorkerSlot) -> None:
        if slot.worker.stdin is None:
            return
        written = 0
        try:
            if slot.stdin_waiting:
                written = os.write(slot.worker.stdin, slot.stdin_waiting[:OUTPUT_CHUNK])
        except BlockingIOError:
            return
        except OSError:
            self._drop_stdin(slot)
            return
        del slot.stdin_waiting[:written]
        self._report_taken(slot.worker.slot, written)
        if not slot.stdin_waiting:
            if slot.stdin_ended:
                self._drop_stdin(slot)
            else:
                self._selector.unregister(slot.worker.stdin)

    def _report_taken(self, slot: int, size: int) -> None:
        """Permit the driver to send more: the worker has read so many bytes of stdin, or never will."""
        if size:
            self._channel.send({"type": "stdin_taken", "slot": slot, "bytes": size})

    def _drop_stdin(self, slot: WorkerSlot) -> None:
        fd, slot.worker.stdin = slot.worker.stdin, None
        if fd is None:
            return
        self._report_taken(slot.worker.slot, len(slot.stdin_waiting))
        slot.stdin_waiting.clear()
        if fd in self._selector:
            self._selector.unregister(fd)
        os.close(fd)


def _with_paths(plan: Dict[str, Any], job_env: Dict[str, str]) -> Dict[str, str]:
    """Return the job's variables with the plan's paths before and behind those that the workers have anyway."""
    for key, is_first in (("first", True), ("last", False)):
        for name, path in plan.get(key, {}).items():
            others = job_env.get(name) or os.environ.get(name)
            both = [path, others] if is_first else [others, path]
            # No empty part: it would mean the working directory.
            job_env[name] = os.pathsep.join(part for part in both if part)
    return job_env


def _is_launched() -> bool:
    """True for an agent below MPI's own launcher."""
    return any(name in os.environ for name in _LAUNCHED)


def _library_if_alone(slot: WorkerSlot) -> Optional[str]:
    """Return the library for parallel jobs of a worker without a trace of another worker; None for other workers."""
    # Commands other than Python are spared the import below, which takes 2 ms on every host.
    if slot.may_be_alone is None or not _is_python(slot.may_be_alone):
        return None
    from hvlaunch.agent.workers import diagnosis  # noqa: PLC0415 (see above)

    library = diagnosis.library_of(slot.may_be_alone)
    if library is None or (slot.master_port is not None and diagnosis.was_used(slot.master_port)):
        return None
    return library


def _is_python(argv: Sequence[str]) -> bool:
    return "python" in os.path.basename(argv[0]) or any(word.endswith(".py") for word in argv)


def _master_port(env: Dict[str, str]) -> Optional[int]:
    port = env.get("MASTER_PORT", "")
    return int(port) if port.isdigit() else None


def exit_of(status: int, max_rss_kib: int) -> Dict[str, Any]:
    """Return the facts of an `exited` frame, from a wait status and ru_maxrss."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    return {"code": code, "signal": number, "max_rss": max_rss_kib * 1024, "at": time.monotonic()}


class _OomWatch:
    """Watches the counter of the kernel's out-of-memory killer."""

    def __init__(self) -> None:
        self._path = next((path for path in _oom_counters() if _oom_kills(path) is not None), "")
        self._seen = _oom_kills(self._path) or 0

    def struck(self) -> bool:
        """Return True once for each kill since the start."""
        if (_oom_kills(self._path) or 0) <= self._seen:
            return False
        self._seen += 1
        return True


def _oom_counters() -> Iterator[str]:
    """Yield files that may have the counter: for this cgroup (version 2 or 1), then for the whole machine."""
    try:
        with open("/proc/self/cgroup") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        groups = []
    for _, controllers, path in groups:
        if not controllers:
            yield "/sys/fs/cgroup%s/memory.events" % path.rstrip("/")
        elif "memory" in controllers.split(","):
            yield "/sys/fs/cgroup/memory%s/memory.oom_control" % path.rstrip("/")
            yield "/sys/fs/cgroup/memory/memory.oom_control"  # a container's own group
    yield "/proc/vmstat"


def _oom_kills(path: str) -> Optional[int]:
    try:
        with open(path) as file:
            for line in file:
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    except (OSError, ValueError):
        pass
    return None
