"""What is told of a worker's end."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.agent.harness import AgentProcess, python

Launch = Callable[..., AgentProcess]


@pytest.mark.parametrize("code", [0, 1, 7, 127, 255])
def test_the_exit_code(agent: AgentProcess, code: int) -> None:
    before = time.monotonic()
    header, _, _ = agent.run(["/bin/sh", "-c", f"exit {code}"], round_number=2)
    assert (header["code"], header["signal"], header["round"]) == (code, None, 2)
    assert before < header["at"] < time.monotonic()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGRTMIN + 1])
def test_the_signal(agent: AgentProcess, number: int) -> None:
    header, _, _ = agent.run(["/bin/sh", "-c", f"ulimit -c 0; kill -{number:d} $$"])
    assert (header["code"], header["signal"]) == (None, number)
    assert header["oom_killed"] is False


def test_the_largest_resident_size(agent: AgentProcess) -> None:
    header, _, _ = agent.run(python("b'x' * (100 << 20)"))
    assert 100 << 20 <= header["max_rss"] < 160 << 20
    header, _, _ = agent.run(["true"])
    assert header["max_rss"] < 60 << 20


class TestErrorFile:
    def test_what_a_failing_worker_wrote_is_told(self, agent: AgentProcess, tmp_path: Path) -> None:
        path, text = tmp_path / "error.json", json.dumps({"message": {"message": "é ☃"}}, ensure_ascii=False)
        agent.start(
            ["/bin/sh", "-c", 'printf %s "$TEXT" > "$TORCHELASTIC_ERROR_FILE"; exit 1'],
            own={"TORCHELASTIC_ERROR_FILE": str(path), "TEXT": text},
        )
        _, body = agent.expect("exited", code=1)
        assert body.decode() == text

    def test_no_file_is_no_text(self, agent: AgentProcess, tmp_path: Path) -> None:
        agent.start(["false"], own={"TORCHELASTIC_ERROR_FILE": str(tmp_path / "none")})
        assert agent.expect("exited", code=1)[1] == b""

    def test_a_worker_that_did_well_has_no_error(self, agent: AgentProcess, tmp_path: Path) -> None:
        path = tmp_path / "old"
        path.write_text("of an earlier attempt")
        agent.start(["true"], own={"TORCHELASTIC_ERROR_FILE": str(path)})
        assert agent.expect("exited", code=0)[1] == b""

    def test_only_the_first_part_of_a_huge_or_broken_file_is_sent(
        self, agent: AgentProcess, tmp_path: Path
    ) -> None:
        path = tmp_path / "huge"
        path.write_bytes(b"\xff" + b"x" * 5_000_000)
        agent.start(["false"], own={"TORCHELASTIC_ERROR_FILE": str(path)})
        _, body = agent.expect("exited", code=1)
        assert body.decode()[:5] == "\N{REPLACEMENT CHARACTER}xxxx"
        assert len(body) <= (1 << 18) + 2

    @pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
    def test_a_file_that_is_none_blocks_nobody(
        self, agent: AgentProcess, tmp_path: Path, make: Callable[[Path], None]
    ) -> None:
        make(tmp_path / "odd")
        agent.start(["false"], own={"TORCHELASTIC_ERROR_FILE": str(tmp_path / "odd")})
        assert agent.expect("exited", code=1)[1] == b""


def memory_cgroup() -> tuple[Path, str]:
    """A directory in which groups with a memory limit can be made, and the name of the limit."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if controllers == "memory":
            return Path("/sys/fs/cgroup/memory" + path), "memory.limit_in_bytes"
        if controllers == "":
            parent = Path("/sys/fs/cgroup" + path)
            if (parent / "memory.max").exists() or path == "/":
                return parent, "memory.max"
    pytest.skip("no memory cgroup here")


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup of 64 MiB."""
    parent, limit = memory_cgroup()
    group = parent / f"hvlaunch-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"may not make a memory cgroup: {error}")
    try:
        try:
            (group / limit).write_text(str(64 << 20))
        except OSError as error:
            pytest.skip(f"no memory limit in a cgroup here: {error}")
        for swap in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
            if (group / swap).exists():
                (group / swap).write_text(str(64 << 20) if swap.startswith("memory.memsw") else "0")
        yield group
    finally:
        for _ in range(500):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.01)


class TestOutOfMemory:
    EATER = python("b = []\nwhile True: b.append(b'x' * (1 << 20))")

    def test_a_worker_that_the_kernel_killed_for_memory_is_told_apart(
        self, small_group: Path, launch: Launch
    ) -> None:
        agent = launch(before=f"echo $$ > {small_group}/cgroup.procs; ")
        agent.hello()
        header, _, _ = agent.run(["/bin/sh", "-c", "kill -9 $$"])
        assert (header["signal"], header["oom_killed"]) == (signal.SIGKILL, False)
        header, _, _ = agent.run(self.EATER)
        assert (header["signal"], header["oom_killed"]) == (signal.SIGKILL, True)
        header, _, _ = agent.run(["/bin/sh", "-c", "kill -9 $$"])
        assert (header["signal"], header["oom_killed"]) == (signal.SIGKILL, False)
        agent.bye()

    def test_another_jobs_worker_killed_for_memory_is_not_ours(
        self, small_group: Path, launch: Launch, agent: AgentProcess
    ) -> None:
        other = launch(before=f"echo $$ > {small_group}/cgroup.procs; ")
        other.hello()
        assert other.run(self.EATER)[0]["oom_killed"] is True
        header, _, _ = agent.run(["/bin/sh", "-c", "kill -9 $$"])
        assert (header["signal"], header["oom_killed"]) == (signal.SIGKILL, False)
        other.bye()
