"""The errand on a host: its parts, its answers, and parts that hang or fail."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.agent.errands import ErrandStream, check, pairs
from hvlaunch.agent.proc import commit_room

ARGUMENTS: dict[str, Any] = {
    "program": None,
    "script": None,
    "address": None,
    "env": {},
    "compares_files": True,
    "pairs": None,
}


def run(tmp_path: Path, questions: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], bytes]:
    """Run the errand on these lines; return its result and its answers."""
    ours, theirs = os.pipe(), os.pipe()
    os.write(ours[1], questions)
    os.close(ours[1])
    directory = str(tmp_path)
    result = check.run(
        {"directory": directory, "scratch": directory, **ARGUMENTS, **arguments},
        ErrandStream(ours[0], theirs[1]),
    )
    os.close(theirs[1])
    with os.fdopen(theirs[0], "rb") as answers:
        return result, answers.read()


def test_its_result_fits_its_schema(tmp_path: Path) -> None:
    result, _ = run(tmp_path)
    assert check.RESULT(result), result
    assert result["problems"] == {}


def test_it_answers_the_time_and_the_seconds_of_opening(tmp_path: Path) -> None:
    _, answers = run(tmp_path, b"clock\nopen\nclock\n")
    first, opened, last = map(float, answers.split())
    assert first <= last
    assert 0 <= opened < 10


def test_it_measures_pairs_in_the_same_process(tmp_path: Path) -> None:
    before = threading.stack_size()
    try:
        arguments: dict[str, Any] = {"key": "k", "name": "a", "address": None, "ports": []}
        result, answers = run(tmp_path, b"clock\npairs\n[]\n", pairs=arguments)
    finally:
        threading.stack_size(before)
    _, values, listening, measures = map(json.loads, answers.splitlines())
    assert values == result
    assert check.RESULT(values)
    assert pairs.PORTS(listening)
    assert measures == []


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="GPUs need more modules")
def test_no_slow_module_is_imported_without_gpus() -> None:
    """With re, subprocess, ctypes and socket the errand took 12 ms more on each host."""
    arguments = {**ARGUMENTS, "directory": "/", "scratch": "/tmp", "compares_files": False}
    arguments |= {"program": sys.executable, "pairs": {"key": "k", "name": "a", "address": None, "ports": []}}
    code = (
        "import os, sys; before = {*sys.modules}\n"
        "from hvlaunch.agent.errands import ErrandStream\n"
        "from hvlaunch.agent.errands import check\n"
        f"check.run({arguments!r}, ErrandStream(0, 1))\n"
        "os.write(2, ' '.join({*sys.modules} - before).encode())"
    )
    root = Path(__file__).parents[3]
    words = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{code}"]
    done = subprocess.run(words, input=b"pairs\n", capture_output=True, check=True)
    values = json.loads(done.stdout.splitlines()[0])
    assert values["software"]["python"] == ".".join(map(str, sys.version_info[:3]))
    slow = {"re", "subprocess", "ctypes", "socket", "threading", "json", "enum", "signal", "hashlib"}
    assert slow.isdisjoint(done.stderr.decode().split())


def test_a_part_that_hangs_or_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(check, "_SECONDS", 0.5)
    parts: dict[str, Any] = {"files": released.wait, "gpus": lambda: 1 // 0, "software": lambda: None}
    for name, read in parts.items():
        monkeypatch.setitem(check._PARTS, name, (lambda _, read=read: read(), None))
    result, _ = run(tmp_path)
    released.set()
    assert (result["files"], result["gpus"]) == (None, None)
    assert result["problems"].keys() == {"files", "gpus"}
    assert result["problems"]["gpus"].startswith("ZeroDivisionError: ")
    assert result["network"] is not None
    assert check.RESULT(result)


def code_of(directory: Path) -> tuple[Any, Any]:
    part = check.read_files({"directory": str(directory), "scratch": str(directory), **ARGUMENTS})
    return part["code"], part["code_files"]


def test_equal_trees_have_equal_fingerprints_and_others_not(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "lib").mkdir(parents=True)
        (tmp_path / name / "lib/x.py").write_text("x = 1\n")
        (tmp_path / name / ".venv").mkdir()
        (tmp_path / name / ".venv/y.py").write_text(name)
        (tmp_path / name / "env").mkdir()
        (tmp_path / name / "env/pyvenv.cfg").write_text("")
        (tmp_path / name / "env/z.py").write_text(name)
        (tmp_path / name / "gone.py").symlink_to("nothing")
    assert code_of(tmp_path / "a") == code_of(tmp_path / "b")
    assert code_of(tmp_path / "a")[1] == 2
    (tmp_path / "b/lib/x.py").write_text("x = 2\n")
    assert code_of(tmp_path / "a")[0] != code_of(tmp_path / "b")[0]


def test_a_tree_that_is_too_large_has_no_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.py").write_text("x" * 30)
    (tmp_path / "y.py").write_text("y" * 30)
    with monkeypatch.context() as patch:
        patch.setattr(check, "_MOST_BYTES", 50)
        assert code_of(tmp_path) == (None, None)
    assert code_of(tmp_path)[1] == 2
    for number in range(3):
        (tmp_path / str(number)).mkdir()
    monkeypatch.setattr(check, "_MOST_DIRECTORIES", 2)
    assert code_of(tmp_path) == (None, None)


def test_the_commit_is_read_without_git(tmp_path: Path) -> None:
    git = tmp_path / ".git"
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs\n1234567890abcdef refs/heads/main\n")
    (tmp_path / "sub").mkdir()
    arguments = {"directory": str(tmp_path / "sub"), "scratch": str(tmp_path), **ARGUMENTS}
    assert check.read_files(arguments)["commit"] == "1234567890ab"
    (git / "refs/heads/main").write_text("fedcba0987654321\n")
    assert check.read_files(arguments)["commit"] == "fedcba098765"


def test_a_fifo_as_script_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.py")
    arguments = {"directory": str(tmp_path), "scratch": str(tmp_path), **ARGUMENTS, "script": "train.py"}
    assert check.read_files(arguments)["script_problem"] is None


@pytest.mark.parametrize(
    ("tree", "quota", "limit"),
    [
        ({}, None, None),
        ({"cpu.max": "50000 100000"}, 0.5, None),
        ({"cpu.max": "max 100000"}, None, None),
        ({"a/cpu.max": "400000 100000", "cpu.max": "150000 100000"}, 1.5, None),
        (
            {
                "memory.max": "1073741824",
                "memory.current": "1000000000",
                "memory.stat": "anon 1\ninactive_file 900000000\n",
            },
            None,
            1 << 30,
        ),
        ({"a/memory.max": "max", "memory.max": "1073741824"}, None, 1 << 30),
    ],
)
def test_limits_of_cgroups_hold_from_the_root_on(
    tmp_path: Path, tree: dict[str, str], quota: float | None, limit: int | None
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    (tmp_path / "sys/fs/cgroup/a").mkdir(parents=True)
    for name, text in tree.items():
        (tmp_path / "sys/fs/cgroup" / name).write_text(text)
    part = check.read_machine({}, str(tmp_path))
    assert part["cpu_quota"] == quota
    assert part["memory"] == (8 << 30 if limit is None else limit)
    if "memory.stat" in tree:
        assert part["memory_available"] == (1 << 30) - 100_000_000
    # The rule of commits, whatever /dev/shm of this machine has.
    assert part["commit_room"] == commit_room(str(tmp_path)).size <= part["memory_available"] // 2


def test_a_proxy_is_shown_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://me:secret@proxy:3128")
    part = check.read_network(ARGUMENTS)
    assert part["proxies"]["https_proxy"] == "http://proxy:3128"


def test_xid_errors_belong_to_the_gpu_on_their_bus(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(
        "4,1,2,-;NVRM: Xid (PCI:0000:17:00): 79, pid=1, GPU has fallen off the bus.\n"
        "4,2,2,-;NVRM: Xid (PCI:0000:17:00): 13, pid=1\n"
        "4,3,2,-;NVRM: Xid (PCI:0000:AF:00): 31, pid=1\n"
    )

    class Library:
        def driver_cuda(self) -> str:
            return "12.8"

        def health(self) -> list[dict[str, Any]]:
            common = {"name": "H100", "pids": [1 << 30]}
            return [{**common, "pci": "00000000:17:00.0"}, {**common, "pci": "00000000:af:00.0"}]

    first, second = check.read_gpus({}, Library(), str(log))["gpus"]
    assert (first["xids"], second["xids"]) == ([13, 79], [31])
    assert first["users"] == [f"pid {1 << 30}, which this host does not show"]
    assert check.read_gpus({}, Library(), str(tmp_path / "none"))["gpus"][0]["xids"] == []
