"""Shows the GPUs or slots of this host: their leases, their processes, and the waiting jobs. Takes no lease."""

from __future__ import annotations

import json
import os
import pwd
import re
import time

from hvlaunch.agent.errands import write_line
from hvlaunch.agent.leases import (
    MOST_NAMES,
    TICKET,
    NotShared,
    is_locked,
    note_name,
    open_directory,
    open_lock,
    read_note,
    write_note,
)
from hvlaunch.agent.wire.frames import flag, number, or_null, plain, record, several, text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Tuple

    from hvlaunch.agent.errands import ErrandStream

__all__ = ["ARGUMENTS", "IDLE", "RESULT", "STATE", "run"]

ARGUMENTS = record(
    {
        "directory": text(4096, raw=True),
        "slots": or_null(whole(1, MOST_NAMES)),  # of a host without GPUs
        "watch": flag,  # each change, until the input ends
        "keep": or_null(
            number(0.05, 3600)
        ),  # then note, and tell, so often when the job's own GPUs were at work
        "every": or_null(number(0.1, 3600)),  # and their use at least this often
    }
)
RESULT = record({})

_NAME, _TIME = text(256), number(0, 1 << 40)
_HOLDER = record(
    {
        "user": _NAME,
        "pid": or_null(whole(1, 1 << 22)),  # the agent's, where visible
        "job": _NAME,  # these two are the holder's own words
        "since": or_null(_TIME),
        "busy_at": or_null(_TIME),  # when the holder has seen its GPU at work
    }
)
_PROCESS = record({"pid": whole(0, 1 << 32), "user": _NAME, "command": _NAME})
_UNIT = record(
    {
        "name": _NAME,
        "index": whole(0, MOST_NAMES),
        "model": _NAME,
        "holder": or_null(_HOLDER),
        "processes": several(_PROCESS, 256),
        "memory_used": whole(0, 1 << 53),
        "memory_total": whole(0, 1 << 53),
        "utilization": number(0, 100),
        "is_free": flag,
    }
)
_NOTE = record(
    {"job": _NAME, "since": _TIME, "busy_at": _TIME, "seen_at": _TIME}, optional=("busy_at", "seen_at")
)
_TICKET = record({"user": _NAME, "job": _NAME, "since": _TIME, "is_mine": flag})
STATE = record(
    {
        "units": several(_UNIT, MOST_NAMES),
        "tickets": several(_TICKET, MOST_NAMES),
        "cause": or_null(text(4096)),  # the reason for a lack of units
        "at": _TIME,
    }
)
"""A line of the stream."""
IDLE = record({"idle": number(0, 1 << 40)})
"""A line of the stream while the job runs: seconds for which none of its GPUs here was at work."""

_EVERY = 0.25
"""Seconds between two looks."""
_IN_USE = 1 << 30
"""Bytes: an idle GPU has a few hundred MB in use by its driver and a desktop."""
_MOST_FILES = 4096
_OLD = 3600.0
"""Seconds for which a ticket may be older than its file: more would be a claim without proof."""
_FRESH = 120.0
"""Seconds for which the holder's last look at its GPU counts."""
_LEFT = 60.0
"""Seconds after which an unlocked ticket is a killed agent's."""
_FORM = re.compile(r"[A-Za-z0-9-]{1,100}")


def run(arguments: Dict[str, Any], stream: ErrandStream) -> Dict[str, Any]:
    look = _LeaseLook(arguments["directory"], arguments["slots"])
    shown, shown_at = None, 0.0
    while True:
        state = look.state()
        # The facts for a waiting job; use and memory always change.
        essence = [
            [[unit["name"], unit["is_free"], _name_of(unit["holder"])] for unit in state["units"]],
            state["tickets"],
            state["cause"],
        ]
        every = arguments["every"]
        if essence != shown or (every is not None and time.monotonic() >= shown_at + every):
            shown, shown_at = essence, time.monotonic()
            write_line(stream, state)
        if not arguments["watch"] or stream.wait(_EVERY):
            break
    while arguments["keep"] is not None:
        idle = look.keep_notes()
        write_line(stream, {"idle": idle})
        time.sleep(arguments["keep"])
    return {}


def _name_of(holder: Optional[Dict[str, Any]]) -> Any:
    return holder and [holder["user"], holder["job"]]


class _LeaseLook:
    """Looks at the host again and again."""

    def __init__(self, directory: str, slots: Optional[int]) -> None:
        self._directory = directory
        self._slots = slots
        self._nvml: Any = None
        self._busy_at: Dict[str, float] = {}

    def keep_notes(self) -> float:
        """Write into the notes of this job's leases when their GPUs were last at work; return for how long none was.

        Raises NotShared, OSError, NvmlError.
        """
        folder, now = open_directory(self._directory), time.time()
        try:
            for unit in [self._unit(folder, unit) for unit in self._units()]:
                holder, name = unit["holder"], unit["name"]
                if holder is None or holder["pid"] != os.getppid():
                    continue
                if unit["utilization"] > 0:
                    self._busy_at[name] = now
                words = {"job": holder["job"], "since": holder["since"], "seen_at": now}
                note = dict(words, busy_at=self._busy_at.setdefault(name, now))
                write_note(folder, note_name(name, os.geteuid()), json.dumps(note))
        finally:
            os.close(folder)
        # A clock that was set back must not make the time negative.
        return max(0.0, now - max(self._busy_at.values(), default=now))

    def state(self) -> Dict[str, Any]:
        state: Dict[str, Any] = {"units": [], "tickets": [], "cause": None, "at": time.time()}
        try:
            folder = open_directory(self._directory)
        except NotShared as error:
            state["cause"] = plain(str(error), 4096)
            return state
        try:
            from hvlaunch.agent.errands.observer.nvml import NoGpus, NvmlError  # noqa: PLC0415 (needs ctypes)

            try:
                # The locks first: a holder ends its processes before its lease.
                state["units"] = [self._unit(folder, unit) for unit in self._units()]
            except (NoGpus, NvmlError) as error:
                state["cause"] = plain("no GPUs: %s" % error, 4096)
            state["tickets"] = _tickets(folder)
        finally:
            os.close(folder)
        return state

    def _units(self) -> List[Dict[str, Any]]:
        """Return all units, without their use. Raises NoGpus, NvmlError."""
        if self._slots is not None:
            return [{"name": "slot-%d" % index, "index": index, "model": ""} for index in range(self._slots)]
        if self._nvml is None:
            from hvlaunch.agent.errands.observer.nvml import Library, NoGpus  # noqa: PLC0415 (needs ctypes)

            self._nvml = Library()
            self._names = self._nvml.uuids()
            if not all(_FORM.fullmatch(name) for name in self._names):
                raise NoGpus("NVML's names of the GPUs make no sense")
        return [{"name": name, "index": index, "model": ""} for index, name in enumerate(self._names)]

    def _unit(self, folder: int, unit: Dict[str, Any]) -> Dict[str, Any]:
        unit["holder"] = _holder(folder, unit["name"])
        unit.update(processes=[], memory_used=0, memory_total=0, utilization=0.0)
        if self._nvml is not None:
            figures = self._nvml.read_one(unit["index"])
            unit["model"] = plain(figures["name"], 256)
            unit["processes"] = [_process(pid) for pid in figures["pids"]]
            for name in ("memory_used", "memory_total", "utilization"):
                unit[name] = figures[name]
        unit["is_free"] = unit["holder"] is None and not unit["processes"] and unit["memory_used"] <= _IN_USE
        return unit


def _process(pid: int) -> Dict[str, Any]:
    try:
        uid = os.stat("/proc/%d" % pid).st_uid
        with open("/proc/%d/comm" % pid, errors="replace") as file:  # cmdline can block for ever
            return {"pid": pid, "user": _user(uid), "command": plain(file.read().strip(), 256)}
    except OSError:
        return {"pid": pid, "user": "?", "command": "?"}  # in a container, or gone


def _user(uid: int) -> str:
    try:
        return plain(pwd.getpwuid(uid).pw_name, 256)
    except KeyError:
        return "uid %d" % uid


def _holder(folder: int, name: str) -> Optional[Dict[str, Any]]:
    """Return the holder of the lock, if any. An unusable lock counts as its file's owner's."""
    holder: Dict[str, Any] = {"user": "?", "pid": None, "job": "", "since": None, "busy_at": None}
    try:
        fd = open_lock(folder, name, make=False)
    except FileNotFoundError:
        return None  # a lock without a first holder
    except (NotShared, OSError) as error:
        try:
            owner = os.stat(name, dir_fd=folder, follow_symlinks=False).st_uid
        except OSError:
            return None
        cause = str(error) if isinstance(error, NotShared) else os.strerror(error.errno or 0)
        return dict(holder, user=_user(owner), job=plain("(the lock can't be used: %s)" % cause, 256))
    try:
        if not is_locked(fd):
            return None
        holder["pid"], uid = _locker(os.fstat(fd).st_ino)
    finally:
        os.close(fd)
    if uid is None:
        uid = _newest_note(folder, name)
    if uid is not None:
        note = note_name(name, uid)
        words = _words(read_note(folder, note, uid))
        # An old look is worthless: the job may have another driver by now, without looks.
        if words.get("seen_at", 0.0) < time.time() - _FRESH:
            words["busy_at"] = None
        for key in ("job", "since", "busy_at"):
            holder[key] = words.get(key, holder[key])
        holder["user"] = _user(uid)
    return holder


def _words(note: str) -> Dict[str, Any]:
    """Return the words of a note, if their types are right."""
    try:
        words = json.loads(note)
    except (ValueError, RecursionError):
        return {}
    return words if _NOTE(words) else {}


def _locker(inode: int) -> Tuple[Optional[int], Optional[int]]:
    """Return pid and uid of the process with a lock on this file, as far as the kernel shows the process."""
    try:
        with open("/proc/locks") as file:
            lines = [line.split() for line in file]
        pids = [
            int(words[4])
            for words in lines
            if words[1:4] == ["FLOCK", "ADVISORY", "WRITE"] and words[5].endswith(":%d" % inode)
        ]
        with open("/proc/%d/status" % pids[0]) as file:  # an agent's directory in /proc is root's
            uids = [int(line.split()[1]) for line in file if line.startswith("Uid:")]
        return pids[0], uids[0]
    except (OSError, ValueError, IndexError):
        return None, None


def _files(folder: int) -> List[str]:
    """Return names in the directory; of too many only some, since any user may make any number."""
    names: List[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) >= _MOST_FILES:
                break
    return names


def _newest_note(folder: int, name: str) -> Optional[int]:
    """Return the user with the newest note about a lock: the holder wrote its own after it had locked."""
    newest = None
    for file in _files(folder):
        if file.startswith(name + "."):
            try:
                facts = os.stat(file, dir_fd=folder, follow_symlinks=False)
            except OSError:
                continue
            if file == note_name(name, facts.st_uid) and (newest is None or newest[0] < facts.st_mtime):
                newest = facts.st_mtime, facts.st_uid
    return None if newest is None else newest[1]


def _tickets(folder: int) -> List[Dict[str, Any]]:
    """Return the tickets of waiting jobs. A ticket without a lock is of a job that has ended."""
    tickets = []
    for file in _files(folder):
        if not file.startswith(TICKET):
            continue
        try:
            facts = os.stat(file, dir_fd=folder, follow_symlinks=False)
            fd = open_lock(folder, file, make=False)
        except (NotShared, OSError):
            continue
        try:
            is_waiting = is_locked(fd)
        finally:
            os.close(fd)
        words = _words(read_note(folder, file, facts.st_uid))
        is_mine = facts.st_uid == os.geteuid()
        if not is_waiting and is_mine and time.time() > facts.st_mtime + _LEFT:
            os.unlink(file, dir_fd=folder)  # of a killed agent
        if is_waiting and words:
            # No user can make the kernel's time of a file's last change older than the change. A later time only harms the
            # job itself, and hosts' clocks differ: cut to the file's, two jobs would have another order on another host.
            since = max(words["since"], facts.st_ctime - _OLD)
            ticket = {"user": _user(facts.st_uid), "job": words["job"], "since": since, "is_mine": is_mine}
            tickets.append(ticket)
    return sorted(tickets[:MOST_NAMES], key=lambda ticket: (ticket["since"], ticket["job"]))
