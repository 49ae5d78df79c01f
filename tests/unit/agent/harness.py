"""An agent in a process of its own, driven through pipes as the driver would, and its processes counted."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from hvlaunch.agent.wire.frames import BY_AGENT, FRAME_COST, STREAMS, Decoder, encode
from hvlaunch.driver.links.agent_channel import PieceReader
from hvlaunch.driver.program import agent_command, bundle, rare_modules
from tests import pythons
from tests.testhosts.places import wait_until

if TYPE_CHECKING:
    from hvlaunch.agent.wire.frames import Frame

__all__ = ["PATIENCE", "AgentProcess", "Hunt", "cost", "has_ended", "interpreter", "python"]

PATIENCE = 60.0
"""Seconds after which a condition that a test waits for has failed."""


def python(code: str, *args: str) -> list[str]:
    """The command of a worker that runs `code`."""
    return [sys.executable, "-I", "-S", "-c", code, *args]


@cache
def interpreter(version: str) -> str:
    """The path of a Python of this version; the test is skipped where there is none."""
    path = pythons.find(version)
    if path is None:
        pytest.skip(f"no Python {version} here (`make pythons` fetches what can be had)")
    return path


def has_ended(process: psutil.Process) -> bool:
    """Whether it has ended, though its parent may not know yet."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


class Hunt:
    """Finds this test's processes on the whole machine by a word of their command lines.

    `mark` is a number of seconds that no other process sleeps: `sleep MARK` is found wherever it
    hides from sessions, groups, parents and environments.
    """

    def __init__(self) -> None:
        self.mark = f"86400.{int.from_bytes(os.urandom(6), 'big'):015d}"

    def _found(self) -> dict[int, str]:
        """The living processes with the mark, and what they run; one in the middle of exec may be missing.

        Both come from one reading: until exec is over, /proc shows the old command line, or none.
        """
        word = self.mark.encode()
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if word in words:
                    found[int(process.name)] = Path(words[0].decode()).name
        return found

    def pids(self) -> list[int]:
        return list(self._found())

    def programs(self) -> list[str]:
        return sorted(self._found().values())

    def wait_for(self, *programs: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Until these run and no other: a count alone would also count forks on their way to an exec."""

        def are_there() -> bool:
            meanwhile()
            return self.programs() == sorted(programs)

        wait_until(are_there, f"processes of {programs}")

    def end(self) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def cost(bodies: Sequence[bytes]) -> int:
    """How much of a window these take, each in a frame of its own."""
    return sum(len(body) + FRAME_COST for body in bodies)


class AgentProcess:
    """Guardian and agent, and the driver's end of their channel.

    Every output frame is acknowledged unless `acks` is False. `before` are shell commands that the
    login shell runs first.
    """

    def __init__(
        self,
        *,
        grace: float = 0.2,
        lease: float = 60.0,
        window: int = 1 << 20,
        reconnect: float = 1.0,
        spill: int = 1 << 20,
        acks: bool = True,
        shell: Sequence[str] = ("/bin/sh", "-c"),
        before: str = "",
        candidates: Sequence[str] = (sys.executable,),
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> None:
        self.acks = acks
        self.noise = b""
        self.seen: list[Frame] = []
        """Frames that came and that no test asked for yet."""
        self.ended = False
        """Whether the agent's stdout has ended."""
        self._have = [0] * STREAMS
        self._decoder = Decoder()
        self._reader = PieceReader(self._hear)
        self._bundle = bundle(
            {"grace": grace, "lease": lease, "window": window, "reconnect": reconnect, "spill": spill},
            is_near=True,
        )
        command = before + agent_command(candidates, len(self._bundle), PATIENCE)
        self.process = subprocess.Popen(
            [*shell, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd=cwd,
            start_new_session=True,
            bufsize=0,
        )
        self.write(self._bundle)

    @property
    def guardian(self) -> psutil.Process:
        """The shells exec, so the guardian has the pid of the first."""
        return psutil.Process(self.process.pid)

    @property
    def agent(self) -> psutil.Process:
        [agent] = self.guardian.children()
        return agent

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self.process.stdin.write(view) :]

    def send(self, kind: str, body: bytes = b"", **facts: Any) -> None:
        self.write(encode({"type": kind, **facts}, body))

    def greet(self, **facts: Any) -> None:
        """Send it a hello, and nothing of what follows one."""
        asked = {
            "name": "a",
            "key": "agent-key",
            "known_as": None,
            "cwd": "/",
            "gpus": False,
            "ports": None,
            "elastic": None,
            "processes": 1,
            "rendezvous": None,
            "session": None,
            **facts,
        }
        self.send("hello", protocol=1, **asked)

    def hello(self, **facts: Any) -> dict[str, Any]:
        """Greet the agent; its answer."""
        self.greet(**facts)
        self.send("modules", rare_modules(("leases", "workers/preload")))
        return self.expect("hello")[0]

    def start(
        self,
        argv: Sequence[str],
        *,
        workers: int = 1,
        stdin: bool = False,
        env: Mapping[str, str] | None = None,
        defaults: Mapping[str, str] | None = None,
        own: Mapping[str, str] | None = None,
        round_number: int = 0,
        slots: Sequence[int] | None = None,
        result: bool = False,
        cwd: str | None = None,
        **more: Any,
    ) -> None:
        """Start workers in slots 0, 1, …, or in those of `slots`; `own` is each worker's own environment."""
        body = {
            "argv": list(argv),
            "cwd": cwd,
            "defaults": dict(defaults or {}),
            "result": result,
            "env": dict(env or {}),
            "workers": [
                {
                    "slot": slot,
                    "start": round_number,
                    "env": {"HVLAUNCH_WORKER": f"h/{slot}/{round_number}", **(own or {})},
                    "stdin": stdin,
                }
                for slot in (range(workers) if slots is None else slots)
            ],
            **more,
        }
        self.send("start", json.dumps(body).encode("ascii"), round=round_number)

    def run(self, argv: Sequence[str], **options: Any) -> tuple[dict[str, Any], bytes, bytes]:
        """Start one worker and wait for its end: how it ended, its stdout and stderr."""
        self.start(argv, **options)
        header, _ = self.expect("exited", slot=0)
        return header, self.output("stdout"), self.output("stderr")

    def expect(self, kind: str, **facts: Any) -> "Frame":
        """The next frame of this kind that has the facts."""
        for frame in self.frames():
            header, _ = frame
            if header["type"] == kind and all(header[name] == value for name, value in facts.items()):
                self.seen.remove(frame)
                return frame
            assert header["type"] != "fault" or kind == "fault", header["cause"]
        raise AssertionError(f"the agent ended without {kind} {facts}; it sent {self.seen}; {self.stderr()}")

    def frames(self) -> Iterator["Frame"]:
        """What came and was not asked for, then what comes, until the agent's stdout ends."""
        index = 0
        deadline = time.monotonic() + PATIENCE
        while True:
            while index < len(self.seen):
                yield self.seen[index]
                index += 1
            if self.ended:
                return
            self.receive(max(0.0, deadline - time.monotonic()))
            assert time.monotonic() < deadline, f"no such frame in {PATIENCE:g} s; there were {self.seen}"

    def _hear(self, noise: bytes) -> None:
        self.noise += noise

    def receive(self, timeout: float) -> None:
        """Take in what the agent sends within the time."""
        assert self.process.stdout is not None and self.process.stdin is not None
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            return
        data = self.process.stdout.read(1 << 16)
        self.ended = not data
        for header, body in self._decoder.feed(self._reader.feed(data)):
            if header["type"] == "have":
                continue
            self.seen.append((header, body))
            if header["type"] in BY_AGENT:
                self._have[BY_AGENT[header["type"]]] += 1
            if self.process.stdin.closed:
                continue
            with suppress(BrokenPipeError):  # it may have ended since
                if self.acks and header["type"] == "output" and body:
                    self.send("ack", bytes=len(body) + FRAME_COST)
                if self.acks and header["type"] in ("output", "bye"):
                    self.send("have", frames=self._have)

    def read_window(self, size: int) -> list[bytes]:
        """What comes of stdout, by frames, until these are `size` bytes with what each costs."""
        got = self.outputs()
        deadline = time.monotonic() + PATIENCE
        while cost(got) < size:
            assert time.monotonic() < deadline, cost(got)
            assert not self.ended, self.stderr()
            self.receive(PATIENCE)
            got += self.outputs()
        return got

    def output(self, stream: str = "stdout", slot: int = 0) -> bytes:
        """What came so far of one stream; it is then forgotten."""
        return b"".join(self.outputs(stream, slot))

    def outputs(self, stream: str = "stdout", slot: int = 0) -> list[bytes]:
        """The same, by frames."""
        mine: list[Frame] = []
        others: list[Frame] = []
        for header, body in self.seen:
            is_mine = header["type"] == "output" and (header["stream"], header["slot"]) == (stream, slot)
            (mine if is_mine else others).append((header, body))
        self.seen = others
        return [body for _, body in mine]

    def read_output(self, size: int, stream: str = "stdout", slot: int = 0) -> bytes:
        """At least `size` bytes of a stream, waited for."""
        got = self.output(stream, slot)
        deadline = time.monotonic() + PATIENCE
        while len(got) < size:
            assert time.monotonic() < deadline
            assert not self.ended, (got, self.seen, self.stderr())
            assert not any(self._tells_end_of(slot, header) for header, _ in self.seen), (got, self.seen)
            self.receive(PATIENCE)
            got += self.output(stream, slot)
        return got

    @staticmethod
    def _tells_end_of(slot: int, header: Mapping[str, Any]) -> bool:
        return (header["type"], header.get("slot")) == ("exited", slot)

    def settle(self) -> None:
        """Take in all that the agent has sent before it answers."""
        self.send("ping")
        self.expect("pong")

    def bye(self) -> tuple[dict[str, Any], int]:
        """Part as the driver does; the agent's last frame and exit status."""
        self.send("bye")
        header, _ = self.expect("bye")
        return header, self.status()

    def hang_up(self) -> None:
        """As when the driver is gone."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def status(self) -> int:
        """The exit status of the guardian, waited for; its stdout is read on meanwhile."""
        deadline = time.monotonic() + PATIENCE
        while not self.ended:
            assert time.monotonic() < deadline, "the agent does not end"
            self.receive(0.1)
        return self.process.wait(PATIENCE)

    def stderr(self) -> str:
        """What guardian and agent said, once they have ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode() if self.process.poll() is not None else ""

    def end(self) -> None:
        """For a test's end, however it went: the agent ends itself, or the test fails."""
        stdin, stdout, stderr = self.process.stdin, self.process.stdout, self.process.stderr
        assert stdin is not None and stdout is not None and stderr is not None
        try:
            self._part()
        finally:
            self.process.kill()
            for pipe in (stdin, stdout, stderr):
                pipe.close()

    def _part(self) -> None:
        if self.process.poll() is not None:
            return
        with suppress(OSError, ValueError):  # it may be closed
            self.send("bye")
            self.send("leave")
        self.hang_up()
        self.status()
