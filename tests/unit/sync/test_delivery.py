"""What the driver does with a host's answers about files, which may be anything."""

import threading
from typing import Any, cast

import pytest

from hvlaunch.driver.links.host_link import in_thread
from hvlaunch.engine.events import HostFacts
from hvlaunch.errors import HostError
from hvlaunch.job import Host
from hvlaunch.sync.delivery import Delivery, new_peer

FACTS = HostFacts({"eth0": ("10.0.0.1",)}, 1, None, "/s", 1, 2, None)


class Tree:
    """Content of three parts."""

    hash = "0" * 64
    manifest = b"list"
    numbered = ("a", "b", "c")

    def size_of(self, _number: int) -> int:
        return 1000

    def read(self, number: int) -> bytes:
        return bytes([number]) * 1000


class FakeErrand:
    """An errand that writes `lines`, and takes all it is sent."""

    has_ended = False

    def __init__(self, lines: bytes) -> None:
        self._lines = lines
        self.written = b""
        self.is_stopped = self.is_closed = False

    def read(self, _timeout: float) -> bytes:
        lines, self._lines = self._lines, b""
        return lines

    def write(self, data: bytes) -> None:
        self.written += data

    def drain(self, _timeout: float) -> bool:
        return True

    def wait(self, _timeout: float) -> bool:
        return True

    def result(self) -> object:
        return {"received": 0}

    def close_input(self) -> None:
        self.is_closed = True

    def stop(self) -> None:
        self.is_stopped = True


class FakeLink:
    """A link to a host whose errand writes `lines`."""

    def __init__(self, lines: bytes, name: str = "a") -> None:
        self.host = Host(name, 1)
        self.errand = FakeErrand(lines)
        self.errands = self
        self.stages: list[str] = []

    def start(self, *_: object) -> FakeErrand:
        return self.errand

    def tell_preparing(self, stage: str) -> None:
        self.stages.append(stage)


def outcome(link: FakeLink, delivery: Delivery | None = None) -> "str | None":
    """The directory of a host that became ready; raises what it failed for."""
    ended = threading.Event()
    facts: list[HostFacts] = []
    errors: list[HostError] = []

    def ready(now: HostFacts) -> None:
        facts.append(now)
        ended.set()

    def failed(error: HostError) -> None:
        errors.append(error)
        ended.set()

    delivery = delivery or Delivery(Tree(), "sub", peer=new_peer())
    in_thread(delivery.deliver, "files")(cast("Any", link), FACTS, ready, failed)
    assert ended.wait(30.0)
    if errors:
        raise errors[0]
    [only] = facts
    return only.directory


def test_a_host_gets_what_it_asks_for_and_is_ready() -> None:
    link = FakeLink(b'manifest\noffer 7\nparts 0-0,2-2\nprogress 1000\nready {"directory": "/x"}\n')
    assert outcome(link) == "/x/sub"
    part = (1000).to_bytes(4, "big")
    assert link.errand.written == (
        b"\x00\x00\x00\x04list" + b'{"from":[]}\n' + part + bytes(1000) + part + b"\x02" * 1000
    )
    assert link.stages == ["files", "files 00% of 0.0 MB", "files 50% of 0.0 MB"]


@pytest.mark.parametrize(
    "lines",
    [
        b"offer 0\n",
        b"offer -1\n",
        b"offer 65536\n",
        b"offer x\n",
        b"parts 0-3\n",
        b"parts 0-99999999999999\n",
        b"progress x\n",
        b"ready []\n",
        b"ready 1\n",
        b'ready {"directory": 1}\n',
        b'ready {"directory": "relative"}\n',
        b"ready {}\n",
        b"ready {\n",
        b"\xff\n",
        b"x" * (1 << 23),
    ],
)
def test_a_hostile_answer_fails_its_host_alone(lines: bytes) -> None:
    link = FakeLink(lines)
    with pytest.raises(HostError, match="a"):
        outcome(link)
    assert link.errand.is_stopped


def test_a_host_that_asks_again_gets_the_driver_and_no_second_source() -> None:
    """A host can't take all offers away from the others."""
    delivery = Delivery(Tree(), "", peer=new_peer())
    first = FakeLink(b"offer 7\nparts 0-2\n", "first")
    first.errand.wait = lambda _timeout: threading.Event().wait(0.05)  # type: ignore[method-assign]
    failures: list[HostError] = []
    in_thread(delivery.deliver, "files")(cast("Any", first), FACTS, lambda _: None, failures.append)
    while not delivery._offers:
        pass
    greedy = FakeLink(b'offer 8\nparts 0-2\nparts 0-2\nparts 0-2\nready {"directory": "/x"}\n', "greedy")
    outcome(greedy, delivery)
    assert greedy.errand.written.count(b'{"from":[["10.0.0.1",7]]}') == 1
    assert greedy.errand.written.count(b'{"from":[]}') == 2
    first.errand.wait = lambda _timeout: True  # type: ignore[method-assign]
