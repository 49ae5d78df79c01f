"""A session that goes on over another connection, and those that it does not go on for."""

import json
import os
import select
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.agent.wire.carrier import EXIT_NO_AGENT
from hvlaunch.agent.wire.frames import BY_AGENT, FRAME_COST, Decoder, encode
from hvlaunch.agent.wire.rejoin import session_proof
from hvlaunch.driver.links.agent_channel import PieceReader
from hvlaunch.driver.program import carrier
from tests.testhosts.places import wait_until
from tests.unit.agent.harness import PATIENCE, AgentProcess, has_ended, python

KEY = "the session's key"
COUNT = "import sys\nfor i in range(int(sys.argv[1])): print(i, flush=True)\n"
WAIT = "import time; time.sleep(86400)"

Launch = Callable[..., AgentProcess]


class Again:
    """A driver that comes to the agent's socket, by itself or through a carrier."""

    def __init__(self, scratch: str) -> None:
        self.link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.connect(f"{scratch}/agent")
        self.link.settimeout(PATIENCE)
        self._reader, self._decoder = PieceReader(lambda _: None), Decoder()
        self._frames: list[Any] = []
        self.have: list[int] = []

    def close(self) -> None:
        self.link.close()

    def next(self) -> Any:
        """The next frame; None at the end."""
        while not self._frames:
            data = self.link.recv(1 << 16)
            if not data:
                return None
            self._frames.extend(self._decoder.feed(self._reader.feed(data)))
        kind = self._frames[0][0]["type"]
        if kind in BY_AGENT:
            self.have[BY_AGENT[kind]] += 1
        return self._frames.pop(0)

    def send(self, kind: str, body: bytes = b"", **facts: Any) -> None:
        self.link.send(encode({"type": kind, **facts}, body))

    def resume(self, have: list[int], key: str = KEY, epoch: int = 1) -> Any:
        """The agent's answer; None where it hangs up."""
        self.have = list(have)
        asked = self.next()[0]["nonce"]
        proof = session_proof(key, "driver", asked, "mine", epoch, *have)
        self.send("resume", nonce="mine", epoch=epoch, have=have, proof=proof)
        answer = self.next()
        if answer is not None and answer[0]["type"] == "resumed":
            theirs = session_proof(key, "agent", asked, "mine", *answer[0]["have"])
            assert answer[0]["proof"] == theirs
        return answer

    def until(self, kind: str) -> list[Any]:
        """All frames up to one of this type, each of the output acknowledged, and all that came before a bye."""
        frames = []
        while (frame := self.next()) is not None:
            frames.append(frame)
            if frame[0]["type"] == "output" and frame[1]:
                self.send("ack", bytes=len(frame[1]) + FRAME_COST)
            if frame[0]["type"] == "bye":
                with suppress(BrokenPipeError):  # nothing was before it that we lacked
                    self.send("have", frames=self.have)
            if frame[0]["type"] == kind:
                return frames
        raise AssertionError(f"no {kind}: {frames}")


class Met:
    """An agent that has a session, and how many frames the driver has of it."""

    def __init__(self, agent: AgentProcess) -> None:
        self.agent = agent
        self.scratch = agent.hello(session=KEY)["scratch"]
        agent.settle()  # its socket is there
        self.have = [1, 0]

    def expect(self, kind: str) -> Any:
        self.have[0] += 1
        return self.agent.expect(kind)

    def hang_up(self) -> None:
        """As when the connection is reset."""
        for pipe in (self.agent.process.stdin, self.agent.process.stdout):
            assert pipe is not None
            pipe.close()
        self.agent.ended = True

    def again(self) -> Again:
        return Again(self.scratch)


@pytest.fixture
def meet(launch: Launch) -> Iterator[Callable[..., Met]]:
    yield lambda **options: Met(launch(**{"reconnect": PATIENCE, "lease": PATIENCE, **options}))


def text(frames: list[Any]) -> bytes:
    return b"".join(body for header, body in frames if header["type"] == "output")


def numbers(count: int) -> bytes:
    return b"".join(b"%d\n" % number for number in range(count))


def test_session_continues_over_another_connection(meet: Callable[..., Met]) -> None:
    met = meet(acks=False)
    met.agent.start(python(COUNT, "20"))
    met.expect("started")
    met.hang_up()
    with closing(met.again()) as driver:
        ready, _ = driver.resume(met.have)
        assert ready["have"] == [2, 0]  # hello and start
        frames = driver.until("exited")
        assert text(frames) == numbers(20)
        driver.send("bye")
        assert driver.until("bye")[-1][0]["left"] == 0


def test_acknowledged_frames_are_not_sent_again(meet: Callable[..., Met]) -> None:
    met = meet()
    met.agent.start(python("print('once')"))
    met.expect("started")
    while not any(header["type"] == "exited" for header, _ in met.agent.seen):
        met.agent.receive(PATIENCE)
    have = [met.have[0] + sum(header["type"] != "have" for header, _ in met.agent.seen), 0]
    met.hang_up()
    with closing(met.again()) as driver:
        driver.resume(have)
        driver.send("bye")
        assert [header["type"] for header, _ in driver.until("bye")] == ["bye"]


def test_newer_connection_replaces_a_half_open_connection(meet: Callable[..., Met]) -> None:
    met = meet()
    with closing(met.again()) as first, closing(met.again()) as second:
        assert first.resume(met.have)[0]["type"] == "resumed"
        assert second.resume(met.have)[0]["type"] == "resumed"
        assert first.next() is None
        second.send("ping")
        second.until("pong")
        second.send("bye")
        second.until("bye")


def test_connection_without_the_key_is_refused(meet: Callable[..., Met]) -> None:
    met = meet()
    with closing(met.again()) as stranger:
        assert stranger.resume(met.have, key="another") is None
    with closing(met.again()) as stranger:
        stranger.next()
        stranger.send("bye")
        assert stranger.next() is None
    met.agent.settle()  # the driver is heard as before
    assert met.agent.bye()[1] == 0


def test_former_driver_is_refused(meet: Callable[..., Met]) -> None:
    met = meet()
    with closing(met.again()) as newer, closing(met.again()) as older:
        assert newer.resume(met.have, epoch=2)[0]["type"] == "resumed"
        assert older.resume(met.have, epoch=1)[0]["type"] == "refused"
        newer.send("bye")
        newer.until("bye")


def test_count_beyond_the_sent_frames_is_refused(meet: Callable[..., Met]) -> None:
    met = meet()
    with closing(met.again()) as driver:
        assert driver.resume([99, 0])[0]["type"] == "refused"
    assert met.agent.bye()[1] == 0


# Each line may become a frame of its own, of 120 bytes.
@pytest.mark.parametrize("spill", [1 << 24, 0])
def test_output_waits_in_a_file_without_a_driver(meet: Callable[..., Met], tmp_path: Any, spill: int) -> None:
    """The worker gets to its end only where there may be a file; either way, all its lines come, in order."""
    mark = tmp_path / "done"
    met = meet(acks=False, window=4096, spill=spill)
    met.hang_up()
    with closing(met.again()) as driver:
        driver.resume(met.have)
        body = COUNT + f"open({str(mark)!r}, 'w')\n"
        plan: dict[str, Any] = {
            "argv": python(body, "60000"),
            "cwd": None,
            "defaults": {},
            "result": False,
            "env": {},
            "workers": [{"slot": 0, "start": 0, "env": {}, "stdin": False}],
        }
        driver.send("start", json.dumps(plan).encode(), round=0)
        driver.until("started")
    if spill:
        wait_until(mark.exists, "the worker's end")
    with closing(met.again()) as driver:
        driver.resume([2, 0])
        assert mark.exists() is bool(spill)
        assert text(driver.until("exited")) == numbers(60000)
        driver.send("bye")
        driver.until("bye")


def test_agent_waits_only_as_long_as_configured(launch: Launch) -> None:
    met = Met(launch(reconnect=0.3))
    met.agent.start(python(WAIT))
    met.expect("started")
    began = time.monotonic()
    met.hang_up()
    met.agent.process.wait(PATIENCE)
    assert time.monotonic() - began >= 0.3


def test_driver_can_change_how_long_the_agent_waits(meet: Callable[..., Met]) -> None:
    """For nobody can take the job over any more."""
    met = meet()  # which would wait for longer than this test
    met.agent.start(python(WAIT))
    met.expect("started")
    met.agent.send("patience", seconds=0.3)
    met.agent.send("ping")
    met.expect("pong")
    met.hang_up()
    assert met.agent.process.wait(PATIENCE / 2) == 0


def test_agent_does_not_wait_after_leave(meet: Callable[..., Met]) -> None:
    met = meet()
    met.agent.send("leave")
    met.agent.expect("parting", cause="the driver has left")
    assert met.agent.status() == 0


def part(met: Met) -> None:
    """A worker has printed, and the agent has said bye."""
    met.agent.start(python("print('once')"))
    met.expect("started")
    met.agent.expect("exited")
    met.agent.send("bye")
    met.agent.expect("bye")
    met.agent.seen.clear()


def test_ending_agent_waits_until_the_driver_has_the_output(
    meet: Callable[..., Met],
) -> None:
    met = meet(acks=False)
    part(met)
    met.hang_up()  # and no byte of it was dealt with
    with closing(met.again()) as driver:
        assert driver.resume(met.have, epoch=2)[0]["have"] == [3, 0]
        frames = driver.until("bye")
        assert text(frames) == b"once\n"
        assert driver.next() is None
    assert met.agent.process.wait(PATIENCE) == 0


def test_agent_with_all_frames_acknowledged_ends_at_once(meet: Callable[..., Met]) -> None:
    met = meet(acks=False)
    met.agent.send("have", frames=met.have)
    met.agent.send("bye")
    met.agent.expect("bye")
    # Half of the lease is the next time at which the agent would look around.
    assert met.agent.process.wait(PATIENCE / 4) == 0


@pytest.mark.parametrize("ending", ["leave", "end of file", "guardian"])
def test_ending_agent_waits_no_longer_than_the_lease(launch: Launch, ending: str) -> None:
    met = Met(launch(acks=False, reconnect=0.3))
    part(met)
    agent = met.agent.agent
    if ending == "leave":
        met.agent.send("leave")
    elif ending == "guardian":
        met.agent.guardian.kill()
    else:
        met.hang_up()
    wait_until(lambda: has_ended(agent), "the agent's end")
    assert list(met.agent.frames()) == []


def run_carrier(scratch: str) -> "subprocess.Popen[bytes]":
    program = zlib.decompress(carrier(scratch)).decode()
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )


def test_carrier_joins_a_connection_and_ends_with_the_agent(
    meet: Callable[..., Met],
) -> None:
    met = meet()
    met.hang_up()
    with run_carrier(met.scratch) as process:
        assert process.stdout is not None and process.stdin is not None
        reader, decoder = PieceReader(lambda _: None), Decoder()
        [(asked, _)] = decoder.feed(reader.feed(process.stdout.read(1 << 16)))
        proof = session_proof(KEY, "driver", asked["nonce"], "mine", 1, *met.have)
        process.stdin.write(
            encode({"type": "resume", "nonce": "mine", "epoch": 1, "have": met.have, "proof": proof})
        )
        assert next(decoder.feed(reader.feed(process.stdout.read(1 << 16))))[0]["type"] == "resumed"
        process.stdin.write(encode({"type": "have", "frames": met.have}) + encode({"type": "bye"}))
        said = b""
        while select.select([process.stdout], [], [], PATIENCE)[0] and (data := process.stdout.read(1 << 16)):
            said += data
        assert b'"bye"' in said
        assert not Path(met.scratch).exists()  # so its guardian has done all that there was to do
        assert process.wait(PATIENCE) == 0


def test_carrier_reports_a_missing_agent(tmp_path: Any) -> None:
    with run_carrier(str(tmp_path)) as process:
        assert process.wait(PATIENCE) == EXIT_NO_AGENT
        assert process.stderr is not None
        assert b"no agent" in process.stderr.read()


def test_guardian_ends_a_stopped_agent_after_its_second_connection(
    meet: Callable[..., Met],
) -> None:
    met = meet(lease=1.0, reconnect=1.0, grace=0.1)
    with closing(met.again()) as driver:
        driver.resume(met.have)
        met.hang_up()
        driver.send("ping")
        driver.until("pong")
        met.agent.agent.suspend()
    met.agent.process.wait(PATIENCE)


def test_carrier_finds_an_agent_in_a_long_directory(meet: Callable[..., Met], tmp_path: Path) -> None:
    base = tmp_path / ("x" * 100) / ("y" * 100)
    base.mkdir(parents=True)
    met = meet(env={**os.environ, "TMPDIR": str(base)})
    assert met.scratch.startswith(str(base))
    with run_carrier(met.scratch) as process:
        assert process.stdout is not None
        assert b'"challenge"' in process.stdout.read(1 << 16)
    assert met.agent.bye()[1] == 0
    assert not any(base.iterdir())
