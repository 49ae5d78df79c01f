"""Stacks of workers, on request and before they are killed: hosts are asked, and their answers put together."""

import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hvlaunch.agent.wire.shapes import flag, or_null, plain, record, text
from hvlaunch.driver.observing.observers import Answer, Observers, Target
from hvlaunch.engine.actions import TakeStacks
from hvlaunch.engine.events import StacksTaken
from hvlaunch.engine.workers import Workers
from hvlaunch.telemetry.stack import STACKS, ProcessStack, as_json, process_stacks

__all__ = ["STACKS_FILE", "Stacks", "kept_stacks"]

STACKS_FILE = "stacks.jsonl"
"""In a job's directory: on each line what was taken before workers were killed."""
_MOST_KEPT = 64 << 20
_BEFORE_A_KILL = 0.35
"""Seconds that a host has for it, of the 0.45 that a kill may be later."""
_ON_REQUEST = 8.0
_NATIVE = 20.0
"""Debug symbols are read for that."""
_ON_THE_WAY = 4.0
_BRINGING = 15.0
"""So long one who asks waits for py-spy to come to a host; it may come later."""
_LONGEST_PROBLEM = 512
_ANSWER = record({**STACKS, "lacks": or_null(text(64)), "has": or_null(flag)}, optional=("has",))
"""`lacks` is the machine's architecture where it has no py-spy; `has` whether it has what was sought."""

Sought = tuple[str, str]
"""`module` or `file`, and its name."""
Done = Callable[[list[ProcessStack]], None]


class _Gathering:
    """What several hosts say. `heard` gets each that has answered, `done` what all have said."""

    def __init__(self, done: Done, heard: Callable[[Answer], None]) -> None:
        self._done = done
        self._heard = heard
        self._asked: dict[str, dict[int, int]] = {}
        self._found: dict[str, list[ProcessStack]] = {}
        self._lock = threading.Lock()
        self._is_begun = self._is_over = False

    def expect(self, host: str, pids: Mapping[int, int]) -> None:
        """The host will answer for these workers: pids by rank."""
        self._asked[host] = dict(pids)

    def begun(self) -> None:
        """All hosts have been asked."""
        self._is_begun = True
        self._end_if_whole()

    def give(self, answer: Answer) -> None:
        self._heard(answer)
        found = _stacks_of(answer, self._asked[answer.host])
        with self._lock:
            self._found[answer.host] = found
        self._end_if_whole()

    def _end_if_whole(self) -> None:
        with self._lock:
            is_whole = self._is_begun and not self._is_over and len(self._found) == len(self._asked)
            self._is_over = self._is_over or is_whole
        if is_whole:
            self._done(self.now())

    def now(self) -> list[ProcessStack]:
        """What is there, and who is missing."""
        with self._lock:
            found = dict(self._found)
        late = "its host has not answered in time"
        return [
            one
            for host, pids in self._asked.items()
            for one in found.get(host) or _stacks_of(Answer(host, problem=late), pids)
        ]


def _stacks_of(answer: Answer, pids: Mapping[int, int]) -> list[ProcessStack]:
    """Those of the workers that were asked for, and of no others; where one is missing it is said."""
    problem = answer.problem
    found: Sequence[ProcessStack] = ()
    if problem is None and _ANSWER(answer.found):
        found = process_stacks(answer.host, {name: answer.found[name] for name in STACKS}) or ()
    elif problem is None:
        problem = "its observer does not speak as one"
    known = [one for one in found if one.rank in pids]
    there = {one.rank for one in known}
    missing = [
        ProcessStack(
            answer.host, rank, pid, "?", False, (), "kernel", problem and plain(problem, _LONGEST_PROBLEM)
        )
        for rank, pid in pids.items()
        if rank not in there
    ]
    return known + missing


class Stacks:
    """Takes stacks. `directory` is the job's, if it has one.

    Methods may be called from one thread alone; what comes of them is told from any.
    """

    def __init__(self, observers: Observers, directory: Path | None) -> None:
        self._observers = observers
        self._file = None if directory is None else directory / STACKS_FILE
        self._last: _Gathering | None = None
        self.has: dict[str, bool] = {}
        """By host, whether it has what the cause of the last failure did not find; of those that have told."""
        self._bringing: set[str] = set()
        """Hosts that have been brought py-spy, or can't have it."""

    def take(self, ranks: Sequence[range] | None, done: Done, *, native: bool = False) -> None:
        """Somebody wants to know. `done` gets the stacks of these workers and their children, once."""
        seconds = _NATIVE if native else _ON_REQUEST

        def wanted(_host: str, pids: Mapping[int, int]) -> Mapping[int, int]:
            if ranks is None:
                return pids
            return {rank: pid for rank, pid in pids.items() if any(rank in part for part in ranks)}

        self._gather("stacks", wanted, seconds, done, native=native, brings=True)

    def take_before_kill(
        self,
        takes: Sequence[TakeStacks],
        workers: Workers,
        post: Callable[[StacksTaken], None],
        done: Done,
        sought: Sought | None = None,
    ) -> None:
        """Workers are about to be killed for a failure. `post` gets an answer to each of `takes` as soon as its host has one.

        `sought` is what the cause of it did not find: `has` tells then which hosts have it.
        """
        self.has = {}
        began = time.time()
        ranks: dict[str, set[int]] = {}
        for take in takes:
            found = (workers.at((take.host, slot)) for slot in take.slots)
            ranks.setdefault(take.host, set()).update(worker.rank for worker in found if worker is not None)

        def note(answer: Answer) -> None:
            if _ANSWER(answer.found) and answer.found.get("has") is not None:
                self.has[answer.host] = answer.found["has"]
            heard(answer.host)

        def heard(host: str) -> None:
            for take in takes:
                if take.host == host:
                    post(StacksTaken(host, take.number))

        def end(found: list[ProcessStack]) -> None:
            self._keep(began, found)
            done(found)

        def wanted(host: str, pids: Mapping[int, int]) -> Mapping[int, int]:
            return {rank: pid for rank, pid in pids.items() if rank in ranks.get(host, ())}

        self._last, asked = self._gather(
            "stacks_before_kill", wanted, _BEFORE_A_KILL, end, note, sought=sought
        )
        for host in ranks.keys() - asked:
            heard(host)

    def before_kill(self) -> list[ProcessStack]:
        """What those were doing that were killed last; nobody who comes later is waited for."""
        return [] if self._last is None else self._last.now()

    def prepare(self) -> None:
        """Bring py-spy to hosts that lack it, if this installation has it: there is no time for that before a kill."""
        if own_py_spy() is not None:
            self._gather(
                "stacks", lambda _host, _pids: {}, _ON_REQUEST, lambda _: None, is_empty=True, brings=True
            )

    def _gather(
        self,
        kind: str,
        wanted: Callable[[str, Mapping[int, int]], Mapping[int, int]],
        seconds: float,
        done: Done,
        heard: Callable[[Answer], None] = lambda _: None,
        *,
        native: bool = False,
        is_empty: bool = False,
        brings: bool = False,
        sought: Sought | None = None,
    ) -> tuple[_Gathering, list[str]]:
        gathering = _Gathering(done, heard)
        more = {} if sought is None else {"sought": sought}

        def question(target: Target) -> Mapping[str, Any] | None:
            chosen = wanted(target.host, target.workers)
            if not (target.scratch and (chosen or is_empty)):
                return None
            gathering.expect(target.host, chosen)
            workers = sorted(chosen.items())
            return {
                "workers": workers,
                "seconds": seconds,
                "native": native,
                "scratch": target.scratch,
                **more,
            }

        def answered(answer: Answer) -> None:
            if not (brings and self._bring(answer, lambda: again(answer))):
                gathering.give(answer)

        def again(answer: Answer) -> None:
            def of_this(target: Target) -> Mapping[str, Any] | None:
                return question(target) if target.host == answer.host else None

            if not self._observers.ask(kind, of_this, seconds + _ON_THE_WAY, gathering.give):
                gathering.give(answer)  # the host has gone meanwhile

        asked = self._observers.ask(kind, question, seconds + _ON_THE_WAY, answered)
        gathering.begun()
        return gathering, asked

    def _bring(self, answer: Answer, then: Callable[[], None]) -> bool:
        """py-spy to a host that lacks it, once: only where that has the architecture of this machine.

        Returns whether it is brought; `then` is called when it is there, or late.
        """
        host = answer.host
        if not _ANSWER(answer.found) or answer.found["lacks"] is None or host in self._bringing:
            return False
        self._bringing.add(host)
        program = own_py_spy()
        if program is None or answer.found["lacks"] != os.uname().machine:
            return False

        def question(target: Target) -> Mapping[str, Any] | None:
            return {"scratch": target.scratch, "data": _packed(program)} if target.host == host else None

        return bool(self._observers.ask("py_spy", question, _BRINGING, lambda _answer: then()))

    def _keep(self, began: float, found: Sequence[ProcessStack]) -> None:
        if self._file is None or not found:
            return
        line = json.dumps({"time": began, **as_json(found)}).encode() + b"\n"
        with suppress(OSError):  # a full disk: the report has the essence
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "ab") as file:
                if file.tell() + len(line) <= _MOST_KEPT:
                    file.write(line)


def own_py_spy() -> Path | None:
    """That of hvlaunch[stacks], in this installation."""
    from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415 (when it is needed)

    try:
        files = distribution("py-spy").files or ()
    except PackageNotFoundError:
        return None
    found = (Path(str(file.locate())).resolve() for file in files if file.name == "py-spy")
    return next((path for path in found if path.is_file()), None)


@cache
def _packed(program: Path) -> bytes:
    # 9 takes a second, in which the host's answers wait, for 7 % less.
    return zlib.compress(program.read_bytes(), 3)


def kept_stacks(directory: Path) -> Iterator[Mapping[str, Any]]:
    """What was taken before workers of the job were killed, the oldest first. Raises OSError."""
    with suppress(FileNotFoundError), open(directory / STACKS_FILE, encoding="utf-8") as file:  # noqa: PTH123
        for line in file:
            with suppress(ValueError):
                yield json.loads(line)
