"""All workers of this host: output with credit, stdin, signals on time, ends."""

from __future__ import annotations

import fcntl
import os
import time

from hvlaunch.agent import reaper
from hvlaunch.agent import worker as process
from hvlaunch.agent.quick import READ, WRITE, Selector, loads, signal
from hvlaunch.agent.wire.channel import DriverChannel
from hvlaunch.agent.wire.frames import FRAME_COST, LAST_OUTPUT, LONGEST_TEXT, OUTPUT_CHUNK, BadFrame
from hvlaunch.agent.wire.orders import PLAN
from hvlaunch.agent.wire.shapes import plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

    from hvlaunch.agent.local_ranks import LocalRanks
    from hvlaunch.agent.wire.rejoin import Spill

    Step = Tuple[int, float]

__all__ = ["HostWorkers"]

_CLEARING = 2.0
_LAUNCHED = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_F_GETPIPE_SZ = 1032  # fcntl(2); the module has the name since Python 3.10


def _plan(body: bytes) -> Dict[str, Any]:
    """The workers of a `start` frame. Raises BadFrame."""
    try:
        plan = loads(body.decode("ascii"))
    except (ValueError, RecursionError):
        plan = None
    if not PLAN(plan):
        raise BadFrame("a start without a plan")
    found: Dict[str, Any] = plan
    return found


class _Slot:
    """A worker and what the agent still has to do for it. `about` names it in frames: round, slot and start."""

    def __init__(self, about: Dict[str, int], worker: process.WorkerProcess, mark: str) -> None:
        self.about = about
        self.worker = worker
        self.mark = os.fsencode(mark)
        """In the environment of the worker, and of its children unless they clear it."""
        self.store_port: Optional[int] = None
        """Where it is to open the store that all workers meet at: rank 0's MASTER_PORT."""
        self.may_be_alone: Optional[Sequence[str]] = None
        """The worker's command, if it may turn out that the worker was a job of its own."""
        self.master_port: Optional[int] = None
        self.suspended_at: Optional[float] = None
        self.was_suspended = False
        self.steps: List[Step] = []
        self.end: Optional[Dict[str, Any]] = None
        self.is_told = False
        self.to_drain: Dict[str, int] = {}
        self.stdin_waiting = bytearray()
        self.stdin_ended = False


class HostWorkers:
    """Starts and watches workers. At most `window` bytes of output are on their way to the driver at a time."""

    def __init__(
        self, channel: DriverChannel, selector: Selector, window: int, scratch: str, spill: int
    ) -> None:
        """So many bytes may `spill` into a file in the `scratch` directory while the connection is lost."""
        self._channel = channel
        self._selector = selector
        self._window = self._credit = window
        self._scratch = scratch
        self._may_spill = spill
        self._spill: Optional[Spill] = None
        self._discard = False
        self._slots: List[_Slot] = []
        self._oom = process.OomWatch()
        self.suspension: Optional[float] = None
        """Seconds that a worker may be stopped (SIGSTOP) before the driver is told; None: it never is."""
        self.reaped_other: Callable[[int, int], None] = lambda _pid, _status: None
        """Gets the pid and the wait status of a child that is no worker."""
        self.ranks: Optional[LocalRanks] = None
        """A launcher's other processes, which start the workers of their slots."""

    @property
    def all_ended(self) -> bool:
        return all(slot.end is not None for slot in self._slots)

    def start(self, header: Dict[str, Any], body: bytes) -> None:
        """Start the workers of a `start` frame; `started` or `not_started` for each. Raises BadFrame."""
        plan = _plan(body)
        self._clear([item["slot"] for item in plan["workers"]])
        for item in plan["workers"]:
            if self.ranks is not None and item["slot"] in self.ranks:
                env = {**plan["env"], **item["env"]}
                self.ranks.order(item["slot"], plan["argv"], plan["defaults"], env, item["stdin"])
        for item in plan["workers"]:
            own = {**plan["env"], **item["env"]}
            about = {"round": header["round"], "slot": item["slot"], "start": item["start"]}
            try:
                worker = self._begin(item, plan, own)
            except process.CannotStart as error:
                why = {"code": error.code, "cause": plain(error.cause, LONGEST_TEXT)}
                self._channel.send({"type": "not_started", **why, **about})
                continue
            slot = _Slot(about, worker, "HVLAUNCH_WORKER=%s" % own.get("HVLAUNCH_WORKER"))
            slot.master_port = _port(own)
            slot.store_port = slot.master_port if own.get("HVLAUNCH_RANK") == "0" else None
            self._slots.append(slot)
            for stream in worker.output:
                self._watch(slot, stream)
            self._channel.send({"type": "started", "pid": worker.pid, "at": time.monotonic(), **about})
            if self.suspension is None and own.get("HVLAUNCH_SIZE") != "1" and not _is_launched():
                slot.may_be_alone = plan["argv"]
        if self.ranks is not None:
            self.ranks.catch_up()

    def _begin(
        self, item: Dict[str, Any], plan: Dict[str, Any], own: Dict[str, str]
    ) -> process.WorkerProcess:
        """Raises CannotStart."""
        slot: int = item["slot"]
        if self.ranks is not None and slot in self.ranks:
            return self.ranks.started(slot, own.get("TORCHELASTIC_ERROR_FILE", ""))
        env = {**plan["defaults"], **os.environ, **own}
        return process.start(slot, plan["argv"], env, item["stdin"], plan["result"])

    def _clear(self, numbers: Sequence[int]) -> None:
        """Before workers start again: end what earlier ones left behind, which may hold their GPUs and ports.

        Where no worker lives, that is every process of the job. Else it is those that have the name of an earlier
        worker of these slots in their environment.
        """
        if not self._slots:
            return
        if self.all_ended:
            reaper.kill_descendants(_CLEARING)
        else:
            gone = [slot for slot in self._slots if slot.end is not None and slot.worker.slot in numbers]
            from hvlaunch.agent.family import kill_marked  # noqa: PLC0415 (few workers are replaced beside others)

            kill_marked([slot.mark for slot in gone], _CLEARING)
        self._slots = [
            slot for slot in self._slots if slot.end is None or slot.worker.output or not slot.is_told
        ]

    def obey(self, header: Dict[str, Any], body: bytes) -> None:
        """Carry out a frame about running workers."""
        kind = header["type"]
        if kind == "ack":
            self._resume(header["bytes"])
        elif kind == "stop":
            self.stop(header["slots"], [(number, after) for number, after in header["steps"]])
        elif kind == "signal":
            for slot in self._chosen(header["slots"]):
                slot.worker.send_signal(header["signal"], group=False)
        elif kind == "stdin":
            self._feed(header["slot"], body)

    def stop(self, slots: Optional[Sequence[int]], steps: Sequence[Step]) -> None:
        """Send the signals of `steps` (number, seconds from now) to the slots (None: all) while they live."""
        now = time.monotonic()
        for slot in self._chosen(slots):
            slot.steps = [(number, now + after) for number, after in steps]
        self.take_due_steps(now)

    def _chosen(self, slots: Optional[Sequence[int]]) -> List[_Slot]:
        return [
            slot for slot in self._slots if slot.end is None and (slots is None or slot.worker.slot in slots)
        ]

    def deadlines(self) -> Iterator[float]:
        """When the next signals, and words about stopped workers, are due."""
        for slot in self._slots:
            if slot.steps:
                yield slot.steps[0][1]
            if slot.suspended_at is not None and self.suspension is not None:
                yield slot.suspended_at + self.suspension

    def take_due_steps(self, now: float) -> None:
        """Send the signals that are due, and tell of workers that have been stopped for long."""
        for slot in self._slots:
            while slot.steps and slot.steps[0][1] <= now:
                number, _ = slot.steps.pop(0)
                slot.worker.send_signal(number, group=True)
            since = slot.suspended_at
            if since is not None and self.suspension is not None and now >= since + self.suspension:
                slot.suspended_at = None
                if not slot.was_suspended:
                    slot.was_suspended = True
                    self._channel.send({"type": "suspended", **slot.about})

    def reap(self) -> None:
        """Collect who has ended: workers, and orphans that were handed to the agent."""
        by_pid = {slot.worker.pid: slot for slot in self._slots if slot.end is None}
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
                continue
            if os.WIFSTOPPED(status):
                by_pid[pid].suspended_at = time.monotonic()
            elif os.WIFCONTINUED(status):
                by_pid[pid].suspended_at = None
            else:
                self._ended(by_pid[pid], status, usage.ru_maxrss)

    def end_of(self, number: int, status: int, max_rss: int) -> None:
        """The worker of a slot, another's child, has ended."""
        for slot in self._chosen([number]):
            self._ended(slot, status, max_rss)

    def _ended(self, slot: _Slot, status: int, max_rss: int) -> None:
        slot.end = process.exit_of(status, max_rss)
        slot.end["oom_killed"] = (
            slot.end["signal"] == signal.SIGKILL and not slot.worker.killed and self._oom.struck()
        )
        slot.end["port_taken_by"] = None
        if slot.end["code"] != 0 and not slot.worker.killed and slot.store_port is not None:
            from hvlaunch.agent.diagnosis import other_user_at  # noqa: PLC0415 (hopefully never)

            slot.end["port_taken_by"] = other_user_at(slot.store_port)
        elif slot.end["code"] == 0:
            library = _library_if_alone(slot)
            if library is not None:
                self._channel.send({"type": "alone", "library": library, **slot.about})
        slot.steps = []
        slot.suspended_at = None
        self._drop_stdin(slot)
        self._measure(slot)
        self._drain(slot)

    @staticmethod
    def _measure(slot: _Slot) -> None:
        """All that the pipes can hold is to be drained, and the end of the stream behind it."""
        for stream, fd in slot.worker.output.items():
            slot.to_drain[stream] = min(fcntl.fcntl(fd, _F_GETPIPE_SZ), LAST_OUTPUT) + 1

    def _drain(self, slot: _Slot) -> None:
        """Read what the ended worker left in its pipes, then tell of its end.

        Its descendants may hold the pipes open: no more is read than a pipe can hold. The end waits for no credit:
        the others' may depend on it, and nobody may be reading.
        """
        for stream in list(slot.worker.output):
            while slot.to_drain[stream] > 0:
                size = self._read(slot, stream, is_last=True)
                slot.to_drain[stream] = slot.to_drain[stream] - size if size else 0
        if not slot.is_told and slot.end is not None:
            slot.is_told = True
            error = "" if slot.end["code"] == 0 else slot.worker.error_text()
            self._pass_on({"type": "exited", **slot.about, **slot.end}, error.encode())

    @property
    def _may_read(self) -> bool:
        if self._spill is not None:
            return self._discard or (self._channel.is_away and self._spill.has_room)
        return self._discard or self._credit > 0 or (self._channel.is_away and self._may_spill > 0)

    def _watch(self, slot: _Slot, stream: str) -> None:
        if self._may_read:
            fd = slot.worker.output[stream]
            self._selector.register(fd, READ, lambda: self._read(slot, stream))

    def _read(self, slot: _Slot, stream: str, *, is_last: bool = False) -> int:
        """Pass one chunk on; its size, 0 where there is none now or no more. What `is_last` needs no credit."""
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
        if not self._discard:
            self._pass_on({"type": "output", "stream": stream, **slot.about}, data)
            if not self._may_read:
                self._pause()
        return len(data)

    def _pass_on(self, header: Dict[str, Any], body: bytes) -> None:
        """Send a worker's output, or its end, or keep it behind what waits already."""
        if self._spill is None and self._credit <= 0 and self._channel.is_away and self._may_spill:
            from hvlaunch.agent.wire.rejoin import Spill  # noqa: PLC0415 (few connections are lost for long)

            self._spill = Spill(self._scratch, self._may_spill)
        if self._spill is not None:
            self._spill.put(header, body)
            return
        self._channel.send(header, body)
        if body and header["type"] == "output":
            self._credit -= len(body) + FRAME_COST

    def _send_spilled(self, *, all_of_it: bool = False) -> None:
        """Send what waits. What comes before a worker's end needs no credit, as the end does not."""
        while self._spill is not None and (self._credit > 0 or all_of_it or self._spill.has_end):
            header, body = self._spill.take()
            if self._spill.is_empty:
                self._spill.close()
                self._spill = None
            self._channel.send(header, body)
            if header["type"] == "output":
                self._credit -= len(body) + FRAME_COST if body else 0

    def lose_driver(self) -> None:
        """The connection is lost: read on, where output may wait in a file."""
        self._read_on()

    def find_driver(self, *, is_new: bool) -> None:
        """There is a connection again, to the same driver or to one that takes its place."""
        if is_new:
            self._credit = self._window
            for slot in self._slots:
                slot.stdin_ended = True
                if not slot.stdin_waiting:
                    self._drop_stdin(slot)
        self._send_spilled()
        if not self._may_read:
            self._pause()

    def _pause(self) -> None:
        """No credit: stop reading, so that the workers block in write(), as on a full pipe."""
        for slot in self._slots:
            for fd in slot.worker.output.values():
                if fd in self._selector:
                    self._selector.unregister(fd)

    def _resume(self, credit: int) -> None:
        had = self._may_read
        self._credit += credit
        self._send_spilled()
        if not had and self._may_read:
            self._read_on()

    def _read_on(self) -> None:
        for slot in list(self._slots):
            for stream in list(slot.worker.output):
                if self._may_read and slot.worker.output[stream] not in self._selector:
                    self._watch(slot, stream)

    def discard_output(self) -> None:
        """Nobody wants it any more; the workers must still not block in write()."""
        self._discard = True
        if self._spill is not None:
            self._spill.close()
            self._spill = None
        self._read_on()

    def read_the_rest(self) -> None:
        """At the end, when no process is left that could write: pass on what the pipes still hold, and what waits."""
        for slot in self._slots:
            self._measure(slot)
            self._drain(slot)
        self._send_spilled(all_of_it=True)

    def _feed(self, number: int, data: bytes) -> None:
        slot = next(iter(self._chosen([number])), None)
        if slot is None or slot.worker.stdin is None:
            self._tell_taken(number, len(data))
            return
        if not slot.stdin_waiting and not slot.stdin_ended:
            self._selector.register(slot.worker.stdin, WRITE, lambda: self._write_stdin(slot))
        slot.stdin_waiting += data
        slot.stdin_ended = slot.stdin_ended or not data

    def _write_stdin(self, slot: _Slot) -> None:
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
        self._tell_taken(slot.worker.slot, written)
        if not slot.stdin_waiting:
            if slot.stdin_ended:
                self._drop_stdin(slot)
            else:
                self._selector.unregister(slot.worker.stdin)

    def _tell_taken(self, slot: int, size: int) -> None:
        """The worker has taken this much of its stdin, or never will: the driver may send on."""
        if size:
            self._channel.send({"type": "stdin_taken", "slot": slot, "bytes": size})

    def _drop_stdin(self, slot: _Slot) -> None:
        fd, slot.worker.stdin = slot.worker.stdin, None
        if fd is None:
            return
        self._tell_taken(slot.worker.slot, len(slot.stdin_waiting))
        slot.stdin_waiting.clear()
        if fd in self._selector:
            self._selector.unregister(fd)
        os.close(fd)


def _is_launched() -> bool:
    """Whether MPI's own launcher is around us."""
    return any(name in os.environ for name in _LAUNCHED)


def _library_if_alone(slot: _Slot) -> Optional[str]:
    """The library for jobs of several processes of a worker that has ended, if it seems that it never met another."""
    # Commands other than Python are spared the import below, which takes 2 ms on every host.
    if slot.may_be_alone is None or not _is_python(slot.may_be_alone):
        return None
    from hvlaunch.agent import diagnosis  # noqa: PLC0415 (see above)

    library = diagnosis.library_of(slot.may_be_alone)
    # Workers with MPI alone would not have met at MASTER_PORT.
    if library is None or (slot.master_port is not None and diagnosis.was_used(slot.master_port)):
        return None
    return library


def _is_python(argv: Sequence[str]) -> bool:
    return "python" in os.path.basename(argv[0]) or any(word.endswith(".py") for word in argv)


def _port(env: Dict[str, str]) -> Optional[int]:
    port = env.get("MASTER_PORT", "")
    return int(port) if port.isdigit() else None
