"""The directory of leases, in which any user of a host may put anything."""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.agent.errands import leases as errand_module
from hvlaunch.agent.errands.leases import STATE
from hvlaunch.agent.leases import TICKET, AgentLeases, NotShared, open_directory
from hvlaunch.gloo.leasing import first_claim, offer_of

NOTE = '{"job":"mine","since":1}'
MALLORY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="another user's files need root")


@pytest.fixture
def place() -> Iterator[Path]:
    """The directory, in one that all users can get to, beside a file of ours."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        place = Path(folder) / "leases"
        os.close(open_directory(str(place)))
        (Path(folder) / "precious").write_text("precious")
        yield place
        assert (Path(folder) / "precious").read_text() == "precious"
        assert sorted(path.name for path in Path(folder).iterdir()) in (
            ["leases", "precious"],
            ["elsewhere", "leases", "precious"],
        )


def as_mallory(code: str, place: Path) -> None:
    """Run code as another user, in the directory."""
    script = f"import os, socket, fcntl\nos.setgroups([]); os.setgid({MALLORY}); os.setuid({MALLORY})\n{code}"
    subprocess.run([sys.executable, "-I", "-S", "-c", script], cwd=place, check=True)


def hold(place: Path, *names: str, note: str = NOTE) -> tuple[AgentLeases, list[str]]:
    mine = AgentLeases()
    began = time.monotonic()
    answer = mine.hold({"directory": str(place), "names": list(names), "note": note})
    assert time.monotonic() - began < 5.0
    return mine, answer["names"]


def look(place: Path) -> dict[str, Any]:
    state: dict[str, Any] = errand_module._LeaseLook(str(place), 2).state()
    assert STATE(state)
    return state


def holders(place: Path) -> list[str | None]:
    state = look(place)
    return [unit["holder"] and unit["holder"]["user"] for unit in state["units"]]


@pytest.mark.parametrize(
    "attack",
    [
        "os.symlink('../precious', 'slot-0')",
        "os.symlink('../nothing', 'slot-0')",
        "os.symlink('slot-1', 'slot-0')",
        "os.mkfifo('slot-0')",
        "os.mkdir('slot-0')",
        "socket.socket(socket.AF_UNIX).bind('slot-0')",
        "open('slot-0', 'w').close(); os.link('slot-0', 'slot-1')",
    ],
)
def test_a_planted_lock_is_refused_and_its_owner_is_named(place: Path, attack: str) -> None:
    as_mallory(attack, place)
    before = {path.name: path.lstat().st_mtime for path in place.iterdir()}
    _, names = hold(place, "slot-0")
    assert names == []
    assert holders(place)[0] == "nobody"
    after = {path.name: path.lstat().st_mtime for path in place.iterdir()}
    assert after == before
    if "slot-1" not in attack:
        _, names = hold(place, "slot-1")
        assert names == ["slot-1"]


@pytest.mark.parametrize(
    "attack",
    [
        "os.symlink('../../precious', '{name}')",
        "os.mkfifo('{name}')",
        "os.mkdir('{name}')",
        "open('{name}', 'w').write('theirs')",
        "open('x', 'w').write('theirs'); os.link('x', '{name}')",
    ],
)
@pytest.mark.parametrize("name", ["slot-0.0", TICKET + "mine"])
def test_a_planted_note_or_ticket_is_not_written_to(place: Path, attack: str, name: str) -> None:
    as_mallory(attack.replace("{name}", name).replace("../../", "../"), place)
    mine, names = hold(place, "slot-0")
    assert names == ["slot-0"]  # the job starts without a note
    assert holders(place) == ["root", None]
    if (place / name).is_file() and not (place / name).is_symlink() and name == "slot-0.0":
        assert (place / name).read_text() == "theirs"
    mine.hold({"directory": str(place), "names": ["slot-0", TICKET + "mine"], "note": NOTE})
    assert holders(place) == ["root", None]


def test_a_lock_held_for_ever_names_its_holder_and_costs_one_unit(place: Path) -> None:
    as_mallory("fd = os.open('slot-0', os.O_CREAT | os.O_RDONLY, 0o444)", place)
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        os.setgid(MALLORY)
        os.setuid(MALLORY)
        fd = os.open(place / "slot-0", os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(told, b"x")
        time.sleep(600)
        os._exit(0)
    try:
        os.read(ready, 1)
        assert hold(place, "slot-0")[1] == []
        assert holders(place) == ["nobody", None]
        assert hold(place, "slot-0", "slot-1")[1] == []
        assert hold(place, "slot-1")[1] == ["slot-1"]
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert hold(place, "slot-0")[1] == ["slot-0"]


def test_a_lying_note_is_not_shown_for_another_users_lease(place: Path) -> None:
    mine, _ = hold(place, "slot-0")
    lie = json.dumps({"job": "lie", "since": 5})
    as_mallory(f"open('slot-0.{MALLORY}', 'w').write({lie!r})", place)
    [first, _] = look(place)["units"]
    assert (first["holder"]["user"], first["holder"]["job"]) == ("root", "mine")
    mine.hold({"directory": str(place), "names": [], "note": NOTE})
    assert holders(place) == [None, None]  # a note alone is no lease


@pytest.mark.parametrize(
    "text",
    ["x" * 10_000_000, "{", "[" * 100_000, '{"job": "\\u001b[2J", "since": 1}', '{"job": 5, "since": "x"}'],
)
def test_a_note_of_any_size_and_content_is_harmless(place: Path, text: str) -> None:
    (place / "text").write_text(text)
    fd = os.open(place / "slot-0", os.O_CREAT | os.O_RDONLY, 0o444)
    fcntl.flock(fd, fcntl.LOCK_EX)
    (place / "text").rename(place / "slot-0.0")
    [first, _] = look(place)["units"]
    assert (first["holder"]["user"], first["holder"]["job"]) == ("root", "")
    os.close(fd)


def test_many_files_cost_little_time(place: Path) -> None:
    as_mallory(f"for n in range(20000): os.close(os.open('{TICKET}%d' % n, os.O_CREAT | os.O_WRONLY))", place)
    began = time.monotonic()
    assert hold(place, "slot-0")[1] == ["slot-0"]
    assert holders(place) == ["root", None]
    assert time.monotonic() - began < 5.0


def test_an_early_ticket_is_worth_an_hour_at_most_and_needs_a_living_job(place: Path) -> None:
    claim = json.dumps({"job": "first", "since": 0})
    as_mallory(f"open('{TICKET}first', 'w').write({claim!r})", place)
    assert look(place)["tickets"] == []
    fd = os.open(place / f"{TICKET}first", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    state = look(place)
    now = time.time()
    claimed = first_claim(offer_of("a", None, state), "mine", now - 4000, 600.0, now)
    assert claimed is None  # a job that has waited for longer is not kept away
    claimed = first_claim(offer_of("a", None, state), "mine", now, 600.0, now)
    assert claimed is not None
    assert claimed.user == "nobody"  # and others see who keeps them waiting
    os.close(fd)


def test_a_lock_that_is_replaced_while_it_is_taken_is_given_back(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_mallory("os.close(os.open('slot-0', os.O_CREAT | os.O_WRONLY, 0o644))", place)
    flock = fcntl.flock

    def replace(fd: int, operation: int) -> None:
        flock(fd, operation)
        as_mallory("os.unlink('slot-0'); os.close(os.open('slot-0', os.O_CREAT | os.O_WRONLY, 0o644))", place)

    monkeypatch.setattr(fcntl, "flock", replace)
    assert hold(place, "slot-0")[1] == []
    monkeypatch.undo()
    assert hold(place, "slot-0")[1] == ["slot-0"]


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        ("os.symlink('/', 'lab')", "it is no directory"),
        ("os.mkfifo('lab')", "it is no directory"),
        ("open('lab', 'w').close()", "it is no directory"),
        ("os.mkdir('lab', 0o755)", "its mode is 755 and must be 1777"),
        ("os.umask(0); os.mkdir('lab', 0o777)", "its mode is 777 and must be 1777"),
    ],
)
def test_a_planted_directory_is_refused(make: str, cause: str) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o1777)
        as_mallory(make, Path(folder))
        with pytest.raises(NotShared, match=cause):
            open_directory(f"{folder}/lab")
        _, names = hold(Path(folder) / "lab", "slot-0")
        assert names == []
        assert cause in str(errand_module._LeaseLook(f"{folder}/lab", 1).state()["cause"])


def test_another_users_directory_with_the_right_mode_is_used(tmp_path: Path) -> None:
    """Without an administrator the first job makes it; what its owner could do is in the guide."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o1777)
        as_mallory("os.umask(0); os.mkdir('lab', 0o1777)", Path(folder))
        assert hold(Path(folder) / "lab", "slot-0")[1] == ["slot-0"]
