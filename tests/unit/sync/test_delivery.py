"""What the driver does with a host's answers about files, which may be anything."""

import json
import subprocess
import sys
import threading
from queue import SimpleQueue
from typing import Any, cast

import pytest

from hvlaunch.driver.links.errands import ErrandFailed
from hvlaunch.driver.links.host_link import in_thread
from hvlaunch.engine.events import HostFacts
from hvlaunch.errors import HostError
from hvlaunch.job import Host
from hvlaunch.rendezvous.serving.certificate import new_peer
from hvlaunch.sync.delivery import Delivery
from tests.testhosts.hosts import wait_until

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
    link = FakeLink(
        b'manifest\noffer 7\nparts 0-0,2-2\nprogress 1000\nready {"directory": "/x", "received": 0}\n'
    )
    assert outcome(link) == "/x/sub"
    part = (1000).to_bytes(4, "big")
    assert link.errand.written == (
        b"\x00\x00\x00\x04list" + b'{"from":[]}\n' + part + bytes(1000) + part + b"\x02" * 1000
    )
    assert link.stages == ["files", "files 00% of 2 kB", "files 50% of 2 kB"]


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
        b'ready {"directory": "/x"}\n',
        b'ready {"directory": "/x", "received": 1e999}\n',
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
    greedy = FakeLink(
        b'offer 8\nparts 0-2\nparts 0-2\nparts 0-2\nready {"directory": "/x", "received": 0}\n', "greedy"
    )
    outcome(greedy, delivery)
    assert greedy.errand.written.count(b'{"from":[["10.0.0.1",7]]}') == 1
    assert greedy.errand.written.count(b'{"from":[]}') == 2
    first.errand.wait = lambda _timeout: True  # type: ignore[method-assign]


class SteppedErrand(FakeErrand):
    """An errand that writes a line when the test hands it over, and ends when it is told."""

    def __init__(self) -> None:
        super().__init__(b"")
        self.lines: SimpleQueue[bytes] = SimpleQueue()
        self.ended = threading.Event()
        self.failure: str | None = None

    def read(self, _timeout: float) -> bytes:
        return self.lines.get(timeout=30.0)

    def wait(self, _timeout: float) -> bool:
        return self.ended.wait(0.01)

    def result(self) -> object:
        if self.failure is not None:
            raise ErrandFailed("sync", self.failure, "it was killed", host="a")
        return super().result()

    def close_input(self) -> None:
        super().close_input()
        self.ended.set()


class Stepped:
    """A host on its way to the files."""

    def __init__(self, delivery: Delivery, port: int) -> None:
        self.link = FakeLink(b"", f"host{port}")
        self.errand = self.link.errand = SteppedErrand()
        self.is_ready = threading.Event()
        self.errors: list[HostError] = []
        in_thread(delivery.deliver, "files")(
            cast("Any", self.link), FACTS, lambda _: self.is_ready.set(), self.errors.append
        )
        self.port = port

    def ask(self) -> str:
        """Ask for all parts; return the port of the host that has them, or `driver`."""
        before = len(self.errand.written)
        self.errand.lines.put(b"parts 0-2\n")
        wait_until(lambda: b"\n" in self.errand.written[before:], "an answer", 30.0)
        addresses = json.loads(self.errand.written[before:].split(b"\n")[0])["from"]
        return str(addresses[0][1]) if addresses else "driver"

    def begin(self) -> str:
        self.errand.lines.put(b"offer %d\n" % self.port)
        return self.ask()

    def end(self) -> None:
        self.errand.lines.put(b'ready {"directory": "/x", "received": 1}\n')
        assert self.is_ready.wait(30.0)


def test_after_the_death_of_its_source_a_host_fetches_from_another_host() -> None:
    """From the one before, or from a complete one, and at last from the driver; never from one that may wait for it."""
    delivery = Delivery(Tree(), "", peer=new_peer())
    a, b, c, d = (Stepped(delivery, port) for port in range(1, 5))
    assert [host.begin() for host in (a, b, c, d)] == ["driver", "1", "2", "3"]
    b.errand.ended.set()
    b.errand.lines.put(b"")
    wait_until(lambda: b.errors, "b fails", 30.0)
    assert c.ask() == "1"
    a.end()
    d.end()
    assert c.ask() == "4"
    assert c.ask() == "driver"
    assert not a.errand.is_closed
    c.end()
    wait_until(lambda: all(host.errand.is_closed for host in (a, c, d)), "all end when none needs them", 30.0)
    assert not a.errors + c.errors + d.errors


def test_a_complete_host_survives_the_end_of_its_errand() -> None:
    """A round of workers ends with all processes on the host: its files are there."""
    delivery = Delivery(Tree(), "", peer=new_peer())
    a, b = Stepped(delivery, 1), Stepped(delivery, 2)
    assert [a.begin(), b.begin()] == ["driver", "1"]
    a.end()
    a.errand.failure = "killed"
    a.errand.ended.set()
    wait_until(lambda: a.errand.is_stopped, "the end of a's part", 30.0)
    assert not a.errors
    assert b.ask() == "driver"
    b.end()


def test_the_driver_uses_the_time_of_the_first_host_once() -> None:
    """In a thread of its own: it would delay the host's files."""
    threads: SimpleQueue[threading.Thread] = SimpleQueue()
    delivery = Delivery(
        Tree(), "", peer=new_peer(), meanwhile=lambda: threads.put(threading.current_thread())
    )
    a, b = Stepped(delivery, 1), Stepped(delivery, 2)
    assert [a.begin(), b.begin()] == ["driver", "1"]
    assert threads.get(timeout=30.0).name == "meanwhile"
    assert threads.empty()
    a.end()
    b.end()


def test_keeping_an_ended_job_imports_no_further_module() -> None:
    """The modules that controller._keep() imports, of the driver alone."""
    code = """
import inspect, re, sys
from hvlaunch.gloo import controller, preparation, reporting
import hvlaunch.driver.loop, hvlaunch.outside
preparation.load_end_of_job()
methods = controller._keep, controller._run_record, reporting.Reporting.form, reporting.Reporting.report
text = "".join(map(inspect.getsource, methods))
modules = re.findall(r"from (hvlaunch[\\w.]*) import", text)
assert len(modules) >= 8, modules
print(*(module for module in modules if module not in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
