"""Files of `--bring` for hosts that join later: from a source that has changed, or from other hosts, which may be anything."""

import os
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from hvlaunch.agent.errands.sync.content import PART
from hvlaunch.driver.links.errands import ErrandFailed
from hvlaunch.job import BringOptions, Host
from hvlaunch.sync.bringing import Bringing
from hvlaunch.sync.files import LocalFiles

BOTH = [os.urandom(PART), b"end"]


class ServingErrand:
    """The errand `offer` on a host with `parts`, by number; other parts are missing."""

    def __init__(self, parts: dict[int, bytes]) -> None:
        self._parts = parts
        self._answers = b"manifest\n"
        self._has_list = False
        self.has_ended = False
        self.is_stopped = False

    def write(self, data: bytes) -> None:
        if not self._has_list:
            self._has_list = True
            return
        first, last = map(int, data.decode().split("-"))
        for number in range(first, last + 1):
            part = self._parts.get(number, b"")
            self._answers += len(part).to_bytes(4, "big") + part

    def read(self, _timeout: float) -> bytes:
        answers, self._answers = self._answers, b""
        return answers

    def result(self) -> object:
        return {"sent": 0}

    def stop(self) -> None:
        self.is_stopped = True


class NeighborLink:
    """A link to a host that serves `parts`; without parts it can't start the errand."""

    number = 0

    def __init__(self, name: str, parts: dict[int, bytes] | None = None) -> None:
        self.host = Host(name, 1)
        self.errands = self
        self.others: list[NeighborLink] = []
        self.served: list[ServingErrand] = []
        self._parts = parts

    def start(self, name: str, arguments: dict[str, Any], _limits: object) -> ServingErrand:
        if self._parts is None:
            raise ErrandFailed(name, "start", "it can't", host=self.host.name)
        assert arguments["path"] == "/data/model"
        self.served.append(ServingErrand(self._parts))
        return self.served[-1]

    def neighbors(self) -> "list[NeighborLink]":
        return self.others


@pytest.fixture
def bringing(tmp_path: Path) -> Bringing:
    """A successor's: its predecessor has listed a file that has another end now."""
    source = tmp_path / "model"
    source.write_bytes(b"".join(BOTH))
    options = BringOptions(None, str(source), "/data/")
    first = Bringing(options, has_peers=False, record=tmp_path / "bring-0")
    assert isinstance(first.files, LocalFiles)
    source.write_bytes(BOTH[0] + b"eno")
    later = Bringing(options, has_peers=False, record=tmp_path / "bring-0")
    assert later.files is not None
    assert later.files.hash == first.files.hash
    return later


def joined_by(bringing: Bringing, *others: NeighborLink) -> Any:
    """Let a host join a job with other hosts; return the files for it."""
    link = NeighborLink("new", {})
    for number, other in enumerate(others, 1):
        other.number = number
    link.others = list(others)
    bringing._link = cast("Any", link)
    return bringing._kept


def test_a_changed_part_comes_from_a_host_that_tells_the_truth(bringing: Bringing) -> None:
    dead, liar, good = NeighborLink("a"), NeighborLink("b", {1: b"eNd"}), NeighborLink("c", {1: b"end"})
    files = joined_by(bringing, dead, liar, good)
    assert [files.read(number) for number in (0, 1, 1)] == [*BOTH, b"end"]
    assert len(good.served) == 1
    # Workers of a new round end the processes of the one before.
    good.served[0].has_ended = True
    assert files.read(1) == b"end"
    assert len(good.served) == 2
    files.end_errands()
    assert good.served[1].is_stopped


@pytest.mark.parametrize("parts", [None, {}, {1: b"too long"}])
def test_a_part_without_a_host_is_an_error_with_the_source(
    bringing: Bringing, parts: dict[int, bytes] | None
) -> None:
    files = joined_by(bringing, NeighborLink("a", parts))
    with pytest.raises(OSError, match="model has changed since the job's start, and no host has the files"):
        files.read(1)


def test_readers_take_turns(bringing: Bringing) -> None:
    good = NeighborLink("a", {1: b"end"})
    files = joined_by(bringing, good)
    data: list[bytes] = []
    threads = [threading.Thread(target=lambda: data.append(files.read(1))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert data == [b"end"] * 8
    assert len(good.served) == 1
