"""Files that a host sends back: no list and no content makes the driver write outside of the host's directory, or without end."""

import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.agent.errands.sync.content import PART, Manifest
from hvlaunch.job import CollectOptions
from hvlaunch.sync.collection import Collection
from hvlaunch.sync.files import check_list

GB = 1 << 30
HASH = "a" * 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def listed(*entries: Any) -> bytes:
    return json.dumps(list(entries)).encode()


ATTACKS = {
    "a name above": listed(["f", "../x", 0o644, 0, []]),
    "an absolute name": listed(["f", "/etc/x", 0o644, 0, []]),
    "a name through a link": listed(["l", "d", "e"], ["f", "d/x", 0o644, 0, []]),
    "a directory and a link of one name": listed(["d", "d"], ["l", "d", "e"]),
    "a link out": listed(["l", "l", "../x"]),
    "an absolute link": listed(["l", "l", "/etc/passwd"]),
    "a link that turns back": listed(["d", "a"], ["l", "l", "a/../../x"]),
    "a terminal's control in a name": listed(["f", "a\x1b[2J", 0o644, 0, []]),
    "a control of 8 bits": listed(["f", "a\x9b2J", 0o644, 0, []]),
    "a null byte": listed(["f", "a\0b", 0o644, 0, []]),
    "a name of 300 letters": listed(["f", "a" * 300, 0o644, 0, []]),
    "a path of 5000 letters": listed(["f", "a/" * 2500, 0o644, 0, []]),
    "a setuid bit": listed(["f", "a", 0o4755, 0, []]),
    "a negative size": listed(["f", "a", 0o644, -1, []]),
    "a size that is true": listed(["f", "a", 0o644, True, [HASH]]),
    "no parts": listed(["f", "a", 0o644, 5, []]),
    "too many parts": listed(["f", "a", 0o644, 5, [HASH] * 2]),
    "a part that is no text": listed(["f", "a", 0o644, 5, [7]]),
    "more than the limit": listed(["f", "a", 0o644, 2 * GB, [HASH] * (2 * GB // PART)]),
    "too many files": listed(*(["d", f"{number:05}"] for number in range(2001))),
    "a device": listed(["c", "a", 1, 3]),
    "an entry without a kind": listed([]),
    "no list": b'{"a": 1}',
    "no JSON": b"[",
    "deep nesting": b"[" * 100_000,
    "not in order": listed(["d", "b"], ["d", "a"]),
    "one name twice": listed(["d", "a"], ["d", "a"]),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hosts_list_is_refused(attack: str) -> None:
    """tests/security/ATTACKS.md has a row for each."""
    words = ATTACKS[attack]
    with pytest.raises(ValueError, match=r"its|a path that leads out"):
        check_list(words, GB, 1000, is_file=False)
        Manifest(words, sha(words))


class FakeHost:
    """A host that answers as an errand would, with any bytes."""

    def __init__(self, head: bytes, parts: bytes = b"", *, name: str = "a") -> None:
        self.host = type("Host", (), {"name": name})
        self.errands = self
        self._data = iter([head, parts])
        self.is_stopped = False
        self.asked = b""

    def start(self, *_: object) -> "FakeHost":
        return self

    def tell_preparing(self, _stage: str) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.asked += data

    def read(self, _timeout: float) -> bytes:
        return next(self._data, b"")

    def result(self) -> None:
        pass

    def stop(self) -> None:
        self.is_stopped = True


def head(words: bytes, **more: Any) -> bytes:
    data = zlib.compress(words)
    values = {"is_file": False, "size": len(data), "port": 0, "skipped": [], **more}
    return b"list " + json.dumps(values).encode() + b"\n" + data


def collect(host: FakeHost, target: Path, limit: int = GB) -> Any:
    collection = Collection(limit)
    return collection.collect(host, "/work", [CollectOptions("**", str(target))])  # type: ignore[arg-type]


def files_below(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def part(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_files_are_below_the_hosts_name(tmp_path: Path) -> None:
    words = listed(["d", "out"], ["f", "out/a", 0o600, 2, [sha(b"hi")]], ["f", "z", 0o755, 0, []])
    result = collect(FakeHost(head(words), part(b"hi")), tmp_path / "res")
    assert (result.problem, result.files, result.received) == (None, 2, 2)
    assert files_below(tmp_path / "res") == ["a/out/a", "a/z"]
    assert (tmp_path / "res/a/out/a").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (part(b"no"), "a part of its files was damaged on its way"),
        (part(b"long"), "a part of its files has another size than it should"),
        (b"\xff\xff\xff\xff", "a part of its files has another size than it should"),
        (b"", "it ended before it had sent all"),
    ],
)
def test_a_host_that_lies_about_content_is_named(tmp_path: Path, parts: bytes, problem: str) -> None:
    words = listed(["f", "a", 0o600, 2, [sha(b"hi")]])
    host = FakeHost(head(words), parts)
    result = collect(host, tmp_path / "res")
    assert result.problem == problem
    assert host.is_stopped
    assert not (tmp_path / "res/a/a").exists()


@pytest.mark.parametrize(
    "first",
    [
        b"list {}\n",
        b"nothing\n",
        b"\xff\n",
        b"list " + b"[" * 5000 + b"\n",
        b"x" * (2 << 20),
        head(b"[]", size=1 << 40),
        head(b"[]", skipped=[["a"]]),
        b'list {"is_file": false, "size": 4, "port": 0, "skipped": []}\nabcd',
        head(b"0" * (65 << 20)),  # a bomb: more than any list has
    ],
    ids=["empty", "word", "bytes", "nesting", "no end", "size", "skipped", "not compressed", "bomb"],
)
def test_a_host_that_sends_nonsense_is_named(tmp_path: Path, first: bytes) -> None:
    result = collect(FakeHost(first), tmp_path / "res")
    assert result.problem
    assert not (tmp_path / "res").exists()


def test_a_part_of_two_sizes_is_refused(tmp_path: Path) -> None:
    words = listed(["f", "a", 0o600, 2, [sha(b"hi")]], ["f", "b", 0o600, 1, [sha(b"hi")]])
    assert collect(FakeHost(head(words)), tmp_path).problem == "a part of its files has two sizes"


@pytest.mark.parametrize("name", ["..", ".", "a/b", "../x", ".ssh"])
def test_a_hosts_name_can_not_lead_elsewhere(tmp_path: Path, name: str) -> None:
    words = listed(["f", "z", 0o644, 0, []])
    assert collect(FakeHost(head(words), name=name), tmp_path / "res").problem is None
    assert len(list((tmp_path / "res").iterdir())) == 1
    assert len(files_below(tmp_path / "res")) == 1
    assert not (tmp_path / "z").exists()


def test_an_earlier_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "res/a").mkdir(parents=True)
    (tmp_path / "res/a/out").symlink_to(tmp_path / "elsewhere")
    words = listed(["d", "out"], ["f", "out/z", 0o644, 0, []])
    assert collect(FakeHost(head(words)), tmp_path / "res").problem is None
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "res/a/out/z").exists()


def test_all_hosts_together_have_the_limit(tmp_path: Path) -> None:
    collection = Collection(3)
    words = listed(["f", "a", 0o600, 2, [sha(b"hi")]])
    for name, problem in (("a", None), ("b", "the files of the hosts have more than the limit of 3 B")):
        host: Any = FakeHost(head(words), part(b"hi"), name=name)
        assert collection.collect(host, "/work", [CollectOptions("**", str(tmp_path))]).problem == problem


def test_whole_files_stay_when_a_host_is_lost_and_only_the_others_come_later(tmp_path: Path) -> None:
    entries = [["f", name, 0o600, 2, [sha(name.encode() * 2)]] for name in "abc"]
    host = FakeHost(head(listed(*entries)), part(b"aa") + part(b"bb") + b"\0\0")
    assert collect(host, tmp_path / "res").problem == "it ended before it had sent all"
    assert files_below(tmp_path / "res/a") == ["a", "b"]
    host = FakeHost(head(listed(*entries)), part(b"cc"))
    result = collect(host, tmp_path / "res")
    assert (host.asked, result.received, result.files) == (b"2-2\n", 2, 3)
    assert files_below(tmp_path / "res") == ["a/a", "a/b", "a/c"]


def test_a_full_disk_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(os, "pwrite", full)
    host = FakeHost(head(listed(["f", "a", 0o600, 2, [sha(b"hi")]])), part(b"hi"))
    problem = collect(host, tmp_path / "res").problem
    assert "no space left on device (here; nothing was removed on the host)" in problem
