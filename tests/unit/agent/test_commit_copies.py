"""The errand that copies commits, on a real agent: two hosts' directories, what travels, and what is refused."""

import hashlib
import os
import shutil
import ssl
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.agent import commits
from hvlaunch.agent.commits import PAGE, KeptCommit
from hvlaunch.agent.errands import commits as errand
from hvlaunch.agent.errands.commits import ANSWER
from hvlaunch.agent.quick import dumps, loads
from hvlaunch.agent.wire.peers import dial, exactly
from hvlaunch.driver.links.errands import Errand, Limits
from hvlaunch.rendezvous.serving.certificate import new_peer
from tests.unit.agent.errand_rig import ErrandRig
from tests.unit.agent.harness import AgentProcess

LENGTH = (1 << 22) + 99


class Host:
    """A directory of commits, and its errand."""

    def __init__(self, rig: ErrandRig, peer: Mapping[str, str], save_to: str = "") -> None:
        self.rig = rig
        self.scratch = f"/tmp/hvlaunch-{uuid.uuid4().hex}"
        self.folder = Path(commits.directory_of(self.scratch))
        arguments = {"scratch": self.scratch, "peer": dict(peer), "save_to": save_to}
        limits = Limits(seconds=None, memory=1 << 30, output=None)
        self.errand: Errand = rig.errands.start("commits", arguments, limits)
        self.data = b""
        self.port = self._line()["port"]

    def _line(self) -> Any:
        while b"\n" not in self.data:
            self.rig.pump()
            data = self.errand.read(0.0)
            assert data != b"", self.rig.failure(self.errand)
            self.data += data or b""
        line, _, self.data = self.data.partition(b"\n")
        return loads(line.decode())

    def order(self, **order: Any) -> Any:
        self.errand.write(dumps(order).encode() + b"\n")
        answer = self._line()
        assert ANSWER(answer), answer
        return answer

    def fetch(self, commit: KeptCommit, source: "Host", **more: Any) -> list[str]:
        item = {"commit": list(commit[:-1]), "addresses": [["127.0.0.1", 1], ["127.0.0.1", source.port]]}
        problems: list[str] = self.order(fetch=[item], **more)["problems"]
        return problems

    def write(self, step: int, name: str = "default.0", round_number: int = 0) -> KeptCommit:
        commit = KeptCommit(name, round_number, step, 2, 0, LENGTH)
        descriptor = commits.begin(str(self.folder), commit)
        os.pwrite(descriptor, os.urandom(LENGTH), PAGE)
        commits.seal(descriptor, commit)
        commits.release(descriptor)
        return next(item for item in commits.held(str(self.folder)) if item.version == commit.version)

    def copies(self) -> dict[int, bytes]:
        """Return the content of each whole copy by step."""
        return {
            commit.step: Path(commit.path).read_bytes()
            for commit in commits.held(str(self.folder))
            if Path(commit.path).parent.name == commits.COPIES
        }


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def hosts(agent: AgentProcess, disk: Path) -> Iterator[tuple[Host, Host]]:
    peer = new_peer()
    rig = ErrandRig(agent)
    pair = Host(rig, peer), Host(rig, peer, str(disk))
    yield pair
    for host in pair:
        shutil.rmtree(host.folder)


def test_copy_is_the_commit_with_its_checksums(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    commit = a.write(1)
    assert b.fetch(commit, a) == []
    assert b.copies() == {1: Path(commit.path).read_bytes()}
    answer = b.order()
    assert (answer["own"], answer["copies"]) == ([], [list(commit[:-1])])
    assert a.order()["own"] == [list(commit[:-1])]


def test_corrupt_commit_does_not_become_a_copy(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    commit = a.write(1)
    with Path(commit.path).open("r+b") as file:
        file.seek(PAGE + 5)
        file.write(b"corrupt")
    (problem,) = b.fetch(commit, a)
    assert "checksums of default.0 do not fit" in problem
    assert b.copies() == {}


def test_overwritten_commit_and_a_silent_host_are_problems_and_no_end(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    commit = a.write(1)
    for step in (2, 3, 4):
        a.write(step)
    assert b.fetch(commit, a) == ["step 1: its host has a newer commit by now"]
    a.errand.stop()
    a.rig.failure(a.errand)
    (problem,) = b.fetch(commits.held(str(a.folder))[0], a)
    assert problem.startswith("step 4: its host does not answer at 127.0.0.1")


def test_another_secret_gets_nothing(hosts: tuple[Host, Host]) -> None:
    a, _ = hosts
    commit = a.write(1)
    # The certificate is the job's, and the secret is not.
    certificate = ssl.get_server_certificate(("127.0.0.1", a.port))
    fingerprint = "sha256:" + hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest()
    peer = dial([("127.0.0.1", a.port)], "0" * 64, fingerprint)
    assert peer is not None
    words = dumps(list(commit[:-1])).encode()
    with peer, pytest.raises((EOFError, OSError)):
        peer.sendall(len(words).to_bytes(4, "big") + words)
        exactly(peer, 4)


def test_pins_reach_the_writers_and_old_rounds_are_forgotten(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    a.order(pins=[[0, 1]], hold=True)
    assert commits.pins(str(a.folder)) == ([(0, 1)], True)
    old, new = a.write(1, "default.1"), a.write(2, round_number=1)
    b.fetch(old, a)
    b.fetch(new, a)
    for host in hosts:
        host.order(pins=[[1, 2]], hold=False, first=1)
    assert [commit.version for commit in commits.held(str(a.folder))] == [(1, 2)]
    assert list(b.copies()) == [2]


def settled(host: Host) -> str:
    """Return the trouble of the saves once they have ended."""
    while (answer := host.order())["is_saving"]:
        time.sleep(0.01)
    return str(answer["trouble"])


def test_commit_is_saved_and_only_two_complete_versions_stay(hosts: tuple[Host, Host], disk: Path) -> None:
    _, host = hosts
    for step in range(1, 5):
        pair = [host.write(step, f"default.{rank}") for rank in range(2)]
        host.order(save=[list(commit[:-1]) for commit in pair], generation=7)
        assert settled(host) == ""
        for commit in pair:
            assert (disk / f"{commit.name}.7-0-{step}").read_bytes() == Path(commit.path).read_bytes()
    versions = [item.name.partition(".7-")[2] for item in disk.glob("default.*")]
    assert sorted(versions) == ["0-3", "0-3", "0-4", "0-4"]


def test_corrupt_or_overwritten_commit_is_not_saved(hosts: tuple[Host, Host], disk: Path) -> None:
    _, host = hosts
    commit = host.write(1)
    with Path(commit.path).open("r+b") as file:
        file.seek(PAGE + 5)
        file.write(b"corrupt")
    host.order(save=[list(commit[:-1])], generation=7)
    assert settled(host) == "its checksums in memory differ"
    for step in (2, 3, 4):
        host.write(step)
    host.order(save=[list(commit[:-1])], generation=7)
    assert settled(host) == "step 1: the workers have a newer commit by now"
    assert [path.name for path in disk.iterdir()] == [".hvlaunch-directory"]


def test_hung_disk_delays_neither_answers_nor_commits(hosts: tuple[Host, Host], disk: Path) -> None:
    _, host = hosts
    commit = host.write(1)
    assert settled(host) == ""
    # The open() of a pipe without a reader lasts as long as that of a dead server.
    part = disk / ".default.0.7-0-1.part"
    os.mkfifo(part)
    assert host.order(save=[list(commit[:-1])], generation=7)["is_saving"]
    for step in range(2, 9):
        kept = commits.begin(
            str(host.folder), commit._replace(step=step), lambda: ([(0, 1), (0, 2)], False), is_saved=True
        )
        commits.seal(kept, commit._replace(step=step))
        commits.release(kept)
        assert host.order()["is_saving"]
    os.close(os.open(part, os.O_RDONLY | os.O_NONBLOCK))
    assert settled(host) != ""
    host.order(save=[list(commits.held(str(host.folder))[0][:-1])], generation=7)
    assert settled(host) == ""
    assert (disk / "default.0.7-0-8").exists()


@pytest.mark.parametrize(
    ("directory", "cause"),
    [("/nowhere/disk", "No such file or directory"), ("/proc/disk", "No such file or directory")],
)
def test_directory_that_cannot_be_written_is_named_at_once(
    hosts: tuple[Host, Host], directory: str, cause: str
) -> None:
    host = Host(hosts[0].rig, new_peer(), directory)
    try:
        assert settled(host) == cause
        assert not Path("/nowhere").exists()
    finally:
        shutil.rmtree(host.folder)


def test_copies_that_do_not_fit_together_are_not_begun(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = hosts
    items = [a.write(1, f"default.{rank}") for rank in range(2)]
    assert b.fetch(items[0], a) == []
    others = [items[0]._replace(step=2), items[1]._replace(step=2)]
    calls: list[int] = []

    def fetch(*arguments: Any) -> None:
        calls.append(arguments[-1])
        raise commits.NoRoom("those of 3 workers need more")

    monkeypatch.setattr(errand, "_fetch", fetch)
    more = items[0]._replace(name="default.2", step=2)
    wanted = [{"commit": list(item[:-1]), "addresses": []} for item in (others[1], more)]
    answer = errand._obey(str(b.folder), {"fetch": wanted}, {}, lambda: None)
    # The copy that is here already is one of the three.
    assert (calls, answer["problems"]) == ([3], ["those of 3 workers need more"])
