"""Twenty real failures on real hosts, and what their reports say: tests/cluster/golden.

HVLAUNCH_GOLDEN=write pytest tests/cluster/test_failures.py writes those files; then read them.
"""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cgroups import Group
from tests.cluster.failures import CASES, Case, golden, write_files
from tests.cluster.jobs import Job
from tests.testhosts.hosts import TestHosts

GOLDEN = Path(__file__).parent / "golden"
LIMIT = 240.0
AT_ONCE = 4


@pytest.fixture
def shared() -> Iterator[Path]:
    """All hosts and the driver's place see it."""
    with tempfile.TemporaryDirectory(prefix="failures-", dir="/var/tmp") as path:
        yield Path(path)


@pytest.fixture
def disk(cluster: TestHosts, tmp_path: Path) -> Iterator[Path]:
    """A small one, in the driver's place."""
    cluster.driver.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True)
    yield tmp_path
    cluster.driver.run(["umount", "-l", str(tmp_path)], check=True)


def check(report: dict[str, Any], name: str, replaced: dict[str, str]) -> str | None:
    """What is wrong with it, if anything is."""
    path, found = GOLDEN / f"{name}.txt", golden(report, replaced)
    if os.environ.get("HVLAUNCH_GOLDEN") == "write":
        path.write_text("\n".join(found) + "\n")
    certain, late = parts(found)
    expected, may_be_late = parts(path.read_text().splitlines())
    return None if certain == expected and late <= may_be_late else "\n".join([f"{name}:", *found])


def parts(lines: list[str]) -> tuple[list[str], set[str]]:
    """What must be there, and what a host that is quick enough tells; the others need not all be."""
    late = {line.partition("; ")[0] for line in lines if line.startswith("? ")}
    return [line for line in lines if not line.startswith("? ")], late


def test_each_failure_is_told_as_it_was(cluster: TestHosts, shared: Path, disk: Path) -> None:
    for name in "ac":
        cluster[name].run(["touch", "/run/only-elsewhere.npy", "/run/only_elsewhere.py"], check=True)
    replaced = {str(shared): "SHARED", sys.executable: "PYTHON", str(disk): "DISK"}
    with Group("memory") as group:
        group.set(
            "memory.limit_in_bytes" if (group.path / "memory.limit_in_bytes").exists() else "memory.max",
            1 << 28,
        )
        write_files(shared, str(group.path))

        def run(case: Case) -> str | None:
            known = {"shared": str(shared), "python": sys.executable, "disk": str(disk)}

            def made(words: tuple[str, ...]) -> list[str]:
                return [word.format(**known) if "{" in word else word for word in words]

            path = shared / f"{case.name}.json"
            options = [
                "--hostfile",
                shared / case.hosts,
                "--report",
                path,
                "-x",
                "PYTHONPATH=/run",
                "--hang-timeout",
                "0",
            ]
            job = Job(cluster, [*options, "--grace", "2", *made(case.options), *made(case.command)])
            code = job.code(LIMIT)
            assert path.exists(), f"{case.name}: {job.stderr}"
            report = json.loads(path.read_text())
            assert report["exit_code"] == code, case.name
            return check(report, case.name, replaced)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            wrong = [text for text in pool.map(run, CASES) if text is not None]
    assert not wrong, "\n\n".join(wrong)


def test_a_lost_host_and_an_interrupt_are_told_as_they_were(cluster: TestHosts, shared: Path) -> None:
    lost = Job(
        cluster,
        [
            "-H",
            "a,d",
            "--lease",
            "3",
            "--report",
            shared / "lost.json",
            "sh",
            "-c",
            "echo up; exec sleep 600",
        ],
    )
    stopped = Job(
        cluster, ["-H", "b,c", "--report", shared / "stopped.json", "sh", "-c", "echo up; exec sleep 600"]
    )
    # The label too: the records of hosts that failed in earlier tests have many words.
    lost.saw("<stdout>: up", 2)
    cluster["d"].kill()
    stopped.saw("<stdout>: up", 2).send(signal.SIGTERM)
    assert (lost.code(), stopped.code()) == (69, 143)
    names = {"lost": "host-lost", "stopped": "interrupted"}
    told = [
        check(json.loads((shared / f"{file}.json").read_text()), name, {}) for file, name in names.items()
    ]
    assert told == [None, None]
