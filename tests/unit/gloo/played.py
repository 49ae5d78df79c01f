"""An agent that is only played, behind a connection of its own: under the real driver, with nothing started anywhere."""

import json
import re
import zlib
from binascii import b2a_base64
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from queue import SimpleQueue
from threading import Event
from typing import Any

from hvlaunch.agent.wire.frames import ERRAND_CHUNK, ERRAND_WINDOW, PROTOCOL, Decoder, PieceWriter, encode
from tests.unit.gloo.fakes import FACTS
from tests.unit.telemetry.samples import SAMPLE_OF_A_HOST

__all__ = ["PlayedAgent"]

_BUNDLE_SIZE = re.compile(r"read\((\d+)\)")
_STREAMS = ("stdout", "stderr")
_PLAIN = 4096
"""Bytes of an answer that are not compressed."""
_FIRST = {"round": 0, "start": 0}


@cache
def _sample(ranks: tuple[int, ...]) -> str:
    """As JSON, with a worker for each rank."""
    [worker] = SAMPLE_OF_A_HOST["workers"]
    return json.dumps({**SAMPLE_OF_A_HOST, "workers": [{**worker, "rank": rank} for rank in ranks]})


class PlayedAgent:
    """A connection, its one channel, and the agent behind it, which answers at once. The host has `address`.

    `note_start` is called for each worker that is started. Workers run until end_worker(), or a stop.
    """

    local_address: str | None = "10.0.0.1"
    is_near = False

    def __init__(self, address: str, note_start: Callable[[], None] = lambda: None) -> None:
        self.remote_address: str | None = address
        self.slots: list[int] = []
        """Those that have workers."""
        self.questions = 0
        """How many its observer was asked."""
        self._to_observer = b""
        self._read = 0
        self.answers: dict[str, Callable[[tuple[int, ...]], str]] = {}
        """What its observer says of these ranks, as JSON, by the question's kind; a sample to all others."""
        self.got: Counter[str] = Counter()
        """How many frames of each type came."""
        self.is_silent = False
        """Whether it answers nothing from now on."""
        self.unanswered: set[str] = set()
        """The types of frames that it does not answer."""
        self.refusal: tuple[int, bytes] | None = None
        """The exit status and the words of a login shell that starts no agent."""
        self.closed = Event()
        self.last: Callable[[], None] = lambda: None
        """Called as the connection closes: what was on its way then."""
        self._note_start = note_start
        self._incoming: SimpleQueue[bytes] = SimpleQueue()
        self._decoder = Decoder()
        self._writer = PieceWriter()
        self._bundle_left = 0

    # The connection and its channel

    def silence(self) -> None:
        return None

    def run(self, command: str) -> "PlayedAgent":
        found = _BUNDLE_SIZE.search(command)
        self._bundle_left = int(found[1]) if found else 0
        if self.refusal is not None:
            self._incoming.put(b"")
        return self

    def read(self) -> bytes:
        return self._incoming.get()

    def write(self, data: bytes) -> None:
        if self.refusal is not None:
            return
        skipped = min(self._bundle_left, len(data))
        self._bundle_left -= skipped
        for header, body in self._decoder.feed(data[skipped:]):
            self.got[header["type"]] += 1
            answer = getattr(self, "_" + header["type"], None)
            if answer is not None and not self.is_silent and header["type"] not in self.unanswered:
                answer(header, body)

    def stderr(self) -> bytes:
        return b"" if self.refusal is None else self.refusal[1]

    def exit_status(self, timeout: float) -> int | None:
        return 0 if self.refusal is None else self.refusal[0]

    def close(self) -> None:
        if not self.closed.is_set():
            self.closed.set()
            self.last()
            self._incoming.put(b"")

    # The agent

    def say(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        self._incoming.put(b"".join(self._writer.cut(encode(dict(header), body))))

    def end_worker(self, slot: int, code: int | None = 0, signal: int | None = None) -> None:
        for stream in _STREAMS:
            self.say({"type": "output", "slot": slot, "stream": stream, **_FIRST})
        how = {
            "code": code,
            "signal": signal,
            "max_rss": 1 << 20,
            "oom_killed": False,
            "port_taken_by": None,
            "at": 1.0,
        }
        self.say({"type": "exited", "slot": slot, **_FIRST, **how})

    def _hello(self, header: Mapping[str, Any], _: bytes) -> None:
        addresses = {"lo": ["127.0.0.1"], "eth0": [self.remote_address]}
        self.say(
            {
                "type": "hello",
                "protocol": PROTOCOL,
                "facts": FACTS | {"addresses": addresses, "cpus": 8, "boot_id": None},
                "scratch": "/tmp/hvlaunch-played",
                "beacon_port": 1,
                "master_port": 2,
                "cwd_error": None,
                "trouble": None,
            }
        )
        if header["rendezvous"]:
            address = header["rendezvous"]["candidates"][0][0]
            self.say({"type": "reached", "address": address, "tried": [address], "relay_port": None})

    def _probe(self, header: Mapping[str, Any], _: bytes) -> None:
        for address in (*header["addresses"], None):
            self.say(
                {"type": "probed", "target": header["target"], "agent": header["agent"], "address": address}
            )

    def _start(self, _: Mapping[str, Any], body: bytes) -> None:
        for worker in json.loads(body)["workers"]:
            slot = worker["slot"]
            self.slots.append(slot)
            self.say({"type": "started", "slot": slot, "pid": 1, "at": 1.0, **_FIRST})
            self.say({"type": "output", "slot": slot, "stream": "stdout", **_FIRST}, b"one line\n")
            self._note_start()

    def _stop(self, header: Mapping[str, Any], _: bytes) -> None:
        while self.slots:
            self.end_worker(self.slots.pop(), None, header["steps"][0][0])

    def _errand(self, header: Mapping[str, Any], body: bytes) -> None:
        """Answer as an observer does that always measures the same."""
        if header["what"] != "data":
            return
        self._to_observer += body
        *lines, self._to_observer = self._to_observer.split(b"\n")
        for line in lines:
            self.questions += 1
            question = json.loads(line)
            ranks = tuple(rank for rank, _ in question["workers"])
            answer = self.answers.get(question["kind"], _sample)(ranks)
            said = f'{{"id":{question["id"]},"answer":{answer}}}'.encode()
            if len(said) > _PLAIN:
                said = b2a_base64(zlib.compress(said, 1), newline=False)
            said += b"\n"
            for at in range(0, len(said), ERRAND_CHUNK):
                about = {"type": "errand", "what": "data", "id": header["id"]}
                self.say(about, said[at : at + ERRAND_CHUNK])
        self._read += len(body)
        if self._read >= ERRAND_WINDOW // 4:
            self.say({"type": "errand", "what": "credit", "id": header["id"], "bytes": self._read})
            self._read = 0

    def _ping(self, *_: object) -> None:
        self.say({"type": "pong", "at": 1.0})

    def _bye(self, *_: object) -> None:
        self.say({"type": "bye", "left": 0, "pids": []})
        self.close()
