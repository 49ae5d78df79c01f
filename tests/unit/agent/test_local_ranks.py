"""How an agent takes what a launcher's other processes on its host say: silence, nonsense and lies among it."""

import os
import socket
from collections.abc import Callable, Iterator
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import pytest

from hvlaunch.agent.quick import Selector
from hvlaunch.agent.wire.frames import encode
from hvlaunch.agent.workers import CannotStart, WorkerProcess, local_ranks
from hvlaunch.agent.workers.local_ranks import LocalRanks

STARTED = {"type": "started", "pid": 7}
MODULES = {f"hvlaunch.agent.{name}": "" for name in local_ranks._STARTERS}


class Meeting:
    """An agent that waits for `count` other processes."""

    def __init__(self, count: int) -> None:
        self.name = f"\0hvlaunch test {os.urandom(8).hex()}"
        self.selector = Selector()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.name)
        self.listener.listen()
        self.parted: list[str] = []
        self.ended: list[tuple[int, int, int]] = []
        self.is_complete = False
        self.processes: list[socket.socket] = []
        meeting = self.listener, MODULES
        self.ranks = LocalRanks(
            meeting, self.selector, lambda *end: self.ended.append(end), self.parted.append
        )
        self.ranks.meet(count, self.complete)

    def complete(self) -> None:
        self.is_complete = True

    def come(self, hello: bytes) -> socket.socket:
        """A process comes and says this."""
        process = socket.socket(socket.AF_UNIX)
        process.connect(self.name)
        process.sendall(hello)
        self.processes.append(process)
        self.turn()
        return process

    def turn(self) -> None:
        """The agent does all that there is to do."""
        while ready := self.selector.select(0.0):
            for call, _ in ready:
                call()

    def order(self, *, with_stdin: bool = False) -> None:
        self.ranks.order(1, ["x"], {}, {}, with_stdin)

    def close(self) -> None:
        self.listener.close()
        for process in self.processes:
            process.close()
        for rank in self.ranks._ranks.values():
            rank.connection.close()
        self.selector.close()


@pytest.fixture
def meet() -> Iterator[Callable[[int], Meeting]]:
    made: list[Meeting] = []

    def make(count: int) -> Meeting:
        made.append(Meeting(count))
        return made[-1]

    yield make
    for meeting in made:
        meeting.close()


def hello(rank: int) -> bytes:
    return b"%8d%8d" % (rank, rank) + MAGIC_NUMBER


@pytest.fixture
def met(meet: Callable[[int], Meeting]) -> Meeting:
    """With a process of slot 1."""
    meeting = meet(1)
    meeting.come(hello(1))
    assert meeting.is_complete
    return meeting


def start(process: socket.socket, count: int = 2) -> list[int]:
    """It says that its worker runs; our ends of the worker's pipes, stdout's first."""
    pipes = [os.pipe() for _ in range(count)]
    socket.send_fds(process, [encode(STARTED)], [read for read, _ in pipes])
    for read, _ in pipes:
        os.close(read)
    return [write for _, write in pipes]


def close(worker: WorkerProcess, writes: list[int]) -> None:
    for fd in (*worker.output.values(), *writes):
        os.close(fd)


@pytest.mark.parametrize("words", [b"", b"%8d" % 1, b"GET / HTTP/1.1\r\n\r\n\r\n"])
def test_silent_or_broken_process_delays_no_other(meet: Callable[[int], Meeting], words: bytes) -> None:
    meeting = meet(2)
    meeting.come(words)
    meeting.come(hello(1))
    meeting.come(hello(2))
    assert meeting.is_complete
    assert 1 in meeting.ranks
    assert 2 in meeting.ranks
    assert meeting.parted == []


def test_ended_process_is_not_counted(meet: Callable[[int], Meeting]) -> None:
    meeting = meet(1)
    for words in (b"", hello(1)[:5]):
        with socket.socket(socket.AF_UNIX) as process:
            process.connect(meeting.name)
            process.sendall(words)
        meeting.turn()
    assert not meeting.is_complete
    meeting.come(hello(1))
    assert meeting.is_complete


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (hello(1), "one process too many on this host, for slot 1"),
        (hello(3), "one process too many on this host, for slot 3"),
        (hello(2)[:16] + b"\0\0\0\0", "a process that runs another Python than the first of this host"),
    ],
)
def test_impossible_process_ends_the_host_with_a_cause(
    meet: Callable[[int], Meeting], words: bytes, cause: str
) -> None:
    meeting = meet(2)
    meeting.come(hello(1))
    meeting.come(words)
    assert meeting.parted == [cause]
    assert not meeting.is_complete


def test_each_worker_of_a_slot_has_its_own_pipes(met: Meeting) -> None:
    for text in (b"first", b"second"):
        met.order()
        writes = start(met.processes[0])
        worker = met.ranks.started(1, "")
        os.write(writes[0], text)
        assert os.read(worker.output["stdout"], 100) == text
        assert not any(os.get_inheritable(fd) for fd in worker.output.values())  # by workers that start later
        met.processes[0].sendall(encode({"type": "ended", "status": 0, "max_rss": 1}))
        met.turn()
        close(worker, writes)
    assert met.ended == [(1, 0, 1)] * 2


LIES = {
    "no pid": {"type": "started"},
    "no number": {**STARTED, "pid": "7"},
    "an end of no worker": {"type": "ended", "status": 0, "max_rss": 1},
    "a code that is none": {"type": "not_started", "code": 0, "cause": "x"},
    "a forged line": {"type": "not_started", "code": 127, "cause": "x\nhvlaunch: all is well"},
    "unheard of": {"type": "output"},
}


@pytest.mark.parametrize("header", LIES.values(), ids=LIES)
def test_a_process_that_lies_is_lost_by_name(met: Meeting, header: dict[str, object]) -> None:
    met.order()
    met.processes[0].sendall(encode(header))
    for _ in range(2):  # as often as its worker is to start
        with pytest.raises(CannotStart, match="the launcher's process for slot 1 sent") as caught:
            met.ranks.started(1, "")
        assert caught.value.cause.isprintable()
    assert met.parted == [caught.value.cause]
    assert met.ended == []
    assert met.ranks.finish() == 0


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_worker_without_its_pipes(met: Meeting, count: int) -> None:
    met.order()
    for fd in start(met.processes[0], count):
        os.close(fd)
    with pytest.raises(
        CannotStart, match=r"sent (a worker without its pipes|descriptors that nobody asked for)"
    ):
        met.ranks.started(1, "")


def test_worker_with_descriptors_that_are_not_pipes(met: Meeting) -> None:
    met.order()
    with Path(os.devnull).open() as file:
        socket.send_fds(met.processes[0], [encode(STARTED)], [file.fileno()] * 2)
    with pytest.raises(CannotStart, match="sent a worker without its pipes"):
        met.ranks.started(1, "")


BREACHES = {
    "descriptors": (encode({"type": "parting", "cause": "x"}), 1, "sent descriptors that nobody asked for"),
    "a status of a stop": (encode({"type": "ended", "status": 0x137F, "max_rss": 1}), 0, "sent a frame of"),
    "a body": (encode({"type": "parting", "cause": "x"}, b"x"), 0, "+ 1 bytes"),
    "an end": (b"", 0, "is gone"),
}


@pytest.mark.parametrize(("data", "count", "trouble"), BREACHES.values(), ids=BREACHES)
def test_unexpected_frame_of_a_process_with_a_worker(
    met: Meeting, data: bytes, count: int, trouble: str
) -> None:
    met.order()
    writes = start(met.processes[0])
    worker = met.ranks.started(1, "")
    if data:
        socket.send_fds(met.processes[0], [data], writes[:count])
    else:
        met.processes[0].close()
    met.turn()
    (cause,) = met.parted
    assert cause.startswith("the launcher's process for slot 1 ")
    assert trouble in cause
    assert met.ended == [(1, 9, 0)]
    close(worker, writes)


def test_silent_process_is_given_up(met: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "_PATIENCE", 0.05)
    met.order()
    for _ in range(50):
        met.processes[0].sendall(encode({"type": "parting", "cause": "x"}))
    with pytest.raises(CannotStart, match=r"for slot 1 (does not answer|is gone)"):
        met.ranks.started(1, "")
    met.processes[0].settimeout(10)
    while met.processes[0].recv(1 << 16):
        """It is hung up on, whereby its worker ends."""
