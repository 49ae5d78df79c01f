"""Stacks of workers, on request and before a kill: hosts are asked, and their answers joined."""

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

from hvlaunch.agent.wire.frames import flag, or_null, plain, record, text
from hvlaunch.driver.observing import Answer, Observers, Target
from hvlaunch.engine.actions import TakeStacks
from hvlaunch.engine.events import StacksTaken
from hvlaunch.engine.workers import Workers
from hvlaunch.telemetry.stack import STACKS, ProcessStack, as_json, process_stacks

__all__ = ["STACKS_FILE", "Stacks", "kept_stacks"]

STACKS_FILE = "stacks.jsonl"
"""File in a job's directory with a line for each set of stacks taken before a kill."""
_MOST_KEPT = 64 << 20
_BEFORE_A_KILL = 0.35
"""Seconds that a host has for stacks before a kill, which may delay the kill by 0.45 s."""
_ON_REQUEST = 8.0
_NATIVE = 20.0
"""Seconds for native stacks: debug symbols have to be read."""
_ON_THE_WAY = 4.0
_BRINGING = 15.0
"""Seconds that a request waits for py-spy's way to a host. It may arrive later."""
_LONGEST_PROBLEM = 512
_ANSWER = record({**STACKS, "lacks": or_null(text(64)), "has": or_null(flag)}, optional=("has",))
"""`lacks` is the machine's architecture if the host has no py-spy; `has` tells if it has the file or module sought."""

Sought = tuple[str, str]
"""`module` or `file`, and its name."""
Done = Callable[[list[ProcessStack]], None]


class _Gathering:
    """Joins the answers of several hosts. `heard` gets each answer, `done` the joined stacks."""

    def __init__(self, done: Done, heard: Callable[[Answer], None]) -> None:
        self._done = done
        self._heard = heard
        self._asked: dict[str, dict[int, int]] = {}
        self._found: dict[str, list[ProcessStack]] = {}
        self._lock = threading.Lock()
        self._is_begun = self._is_over = False

    def expect(self, host: str, pids: Mapping[int, int]) -> None:
        """Expect an answer for these workers of a host: pids by rank."""
        self._asked[host] = dict(pids)

    def begun(self) -> None:
        """Note that every host has been asked."""
        self._is_begun = True
        self._end_if_whole()

    def give(self, answer: Answer) -> None:
        self._heard(answer)
        stacks = _stacks_of(answer, self._asked[answer.host])
        with self._lock:
            self._found[answer.host] = stacks
        self._end_if_whole()

    def _end_if_whole(self) -> None:
        with self._lock:
            # Answers may come while hosts are still being asked: the set is complete only after that.
            is_whole = self._is_begun and not self._is_over and len(self._found) == len(self._asked)
            self._is_over = self._is_over or is_whole
        if is_whole:
            self._done(self.now())

    def now(self) -> list[ProcessStack]:
        """Return the stacks so far, with a placeholder for each missing worker."""
        with self._lock:
            stacks_by_host = dict(self._found)
        # The report is written now: late hosts appear with this remark.
        late = "its host has not answered in time"
        return [
            stack
            for host, pids in self._asked.items()
            for stack in stacks_by_host.get(host) or _stacks_of(Answer(host, problem=late), pids)
        ]


def _stacks_of(answer: Answer, pids: Mapping[int, int]) -> list[ProcessStack]:
    """Keep the stacks of the requested workers, with a placeholder for each missing worker."""
    problem = answer.problem
    stacks: Sequence[ProcessStack] = ()
    if problem is None and _ANSWER(answer.value):
        stacks = process_stacks(answer.host, {name: answer.value[name] for name in STACKS}) or ()
    elif problem is None:
        problem = "its observer sent an invalid answer"
    requested = [stack for stack in stacks if stack.rank in pids]
    ranks_present = {stack.rank for stack in requested}
    missing = [
        ProcessStack(
            answer.host, rank, pid, "?", False, (), "kernel", problem and plain(problem, _LONGEST_PROBLEM)
        )
        for rank, pid in pids.items()
        if rank not in ranks_present
    ]
    return requested + missing


class Stacks:
    """Takes stacks, for one thread; callbacks come on any thread.

    `directory` is the job's directory, or None.
    """

    def __init__(self, observers: Observers, directory: Path | None) -> None:
        self._observers = observers
        self._file = None if directory is None else directory / STACKS_FILE
        self._last: _Gathering | None = None
        self.has: dict[str, bool] = {}
        """True or false by host: the host has the missing file of the last failure. Hosts without an answer are absent."""
        self._bringing: set[str] = set()
        """Hosts that were sent py-spy, or can't use ours."""

    def take(self, ranks: Sequence[range] | None, done: Done, *, native: bool = False) -> None:
        """Take the stacks of these ranks and their children on request. `done` gets them once."""
        seconds = _NATIVE if native else _ON_REQUEST

        def choose(_host: str, pids: Mapping[int, int]) -> Mapping[int, int]:
            if ranks is None:
                return pids
            return {rank: pid for rank, pid in pids.items() if any(rank in part for part in ranks)}

        self._gather("stacks", choose, seconds, done, native=native, brings=True)

    def take_before_kill(
        self,
        takes: Sequence[TakeStacks],
        workers: Workers,
        post: Callable[[StacksTaken], None],
        done: Done,
        sought: Sought | None = None,
    ) -> None:
        """Take stacks before workers are killed for a failure. `post` gets an answer to each of `takes` as its host answers.

        `sought` is the module or file that the cause lacked: hosts look for it as well, and `has` gets the answers.
        """
        self.has = {}
        began = time.time()
        ranks: dict[str, set[int]] = {}
        for take in takes:
            placed = (workers.at((take.host, slot)) for slot in take.slots)
            ranks.setdefault(take.host, set()).update(worker.rank for worker in placed if worker is not None)

        def note(answer: Answer) -> None:
            if _ANSWER(answer.value) and answer.value.get("has") is not None:
                self.has[answer.host] = answer.value["has"]
            heard(answer.host)

        def heard(host: str) -> None:
            for take in takes:
                if take.host == host:
                    post(StacksTaken(host, take.number))

        def end(placed: list[ProcessStack]) -> None:
            self._keep(began, placed)
            done(placed)

        def choose(host: str, pids: Mapping[int, int]) -> Mapping[int, int]:
            return {rank: pid for rank, pid in pids.items() if rank in ranks.get(host, ())}

        self._last, asked = self._gather(
            "stacks_before_kill", choose, _BEFORE_A_KILL, end, note, sought=sought
        )
        # A host that could not be asked must not delay its kill.
        for host in ranks.keys() - asked:
            heard(host)

    def before_kill(self) -> list[ProcessStack]:
        """Return the stacks of the last kill so far; late hosts are not waited for."""
        return [] if self._last is None else self._last.now()

    def prepare(self) -> None:
        """Send py-spy ahead of time to hosts without py-spy: a kill leaves no time for it."""
        if own_py_spy() is not None:
            self._gather(
                "stacks", lambda _host, _pids: {}, _ON_REQUEST, lambda _: None, is_empty=True, brings=True
            )

    def _gather(
        self,
        kind: str,
        choose: Callable[[str, Mapping[int, int]], Mapping[int, int]],
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
            chosen = choose(target.host, target.workers)
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

            # The stacks without py-spy are better than nothing.
            if not self._observers.ask(kind, of_this, seconds + _ON_THE_WAY, gathering.give):
                gathering.give(answer)  # the host has gone meanwhile

        asked = self._observers.ask(kind, question, seconds + _ON_THE_WAY, answered)
        gathering.begun()
        return gathering, asked

    def _bring(self, answer: Answer, then: Callable[[], None]) -> bool:
        """Send py-spy once to a host without py-spy, if its architecture is this machine's.

        Returns True if the program is on its way. `then` is called when it has arrived, or is late.
        """
        host = answer.host
        if not _ANSWER(answer.value) or answer.value["lacks"] is None or host in self._bringing:
            return False
        # Once per host, whatever comes of it: a host that can't run it would be sent it with each request.
        self._bringing.add(host)
        program = own_py_spy()
        if program is None or answer.value["lacks"] != os.uname().machine:
            return False

        def question(target: Target) -> Mapping[str, Any] | None:
            return {"scratch": target.scratch, "data": _packed(program)} if target.host == host else None

        return bool(self._observers.ask("py_spy", question, _BRINGING, lambda _answer: then()))

    def _keep(self, began: float, stacks: Sequence[ProcessStack]) -> None:
        if self._file is None or not stacks:
            return
        line = json.dumps({"time": began, **as_json(stacks)}).encode() + b"\n"
        with suppress(OSError):  # a full disk: the report has the essence
            # Private: command lines and paths may be confidential.
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "ab") as file:
                # A job that fails again and again must not fill the disk.
                if file.tell() + len(line) <= _MOST_KEPT:
                    file.write(line)


def own_py_spy() -> Path | None:
    """Return the path of this installation's py-spy, from hvlaunch[stacks]."""
    from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415 (when it is needed)

    try:
        files = distribution("py-spy").files or ()
    except PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())).resolve() for file in files if file.name == "py-spy")
    return next((path for path in paths if path.is_file()), None)


@cache
def _packed(program: Path) -> bytes:
    # 9 takes a second, in which the host's answers wait, for 7 % less.
    return zlib.compress(program.read_bytes(), 3)


def kept_stacks(directory: Path) -> Iterator[Mapping[str, Any]]:
    """Read the stacks taken before kills of a job, oldest first. Raises OSError."""
    with suppress(FileNotFoundError), open(directory / STACKS_FILE, encoding="utf-8") as file:  # noqa: PTH123
        for line in file:
            with suppress(ValueError):
                yield json.loads(line)
