"""benchmarks/faults.py on real hosts: some of its jobs, and one that must be found wrong."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import pytest

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # for benchmarks, which is no package that is installed

from benchmarks.faulty.kind import FORMS, Kind, Must
from benchmarks.faulty.kinds import KINDS
from benchmarks.faulty.trial import Result, Trial, hosts_for
from tests.testhosts.hosts import TestHosts

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Outside /tmp, of which hosts have their own."""
    with TemporaryDirectory(prefix="faults-", dir="/var/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def hosts(folder: Path) -> Iterator[TestHosts]:
    with hosts_for(folder) as hosts:
        yield hosts


def play(hosts: TestHosts, folder: Path, kind: Kind, form: str) -> Result:
    return Trial(
        hosts, replace(kind, moments=("running",)), 1, Path(mkdtemp(dir=folder)) / "1", FORMS[form]
    ).run()


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("an agent gets SIGKILL", "static"),
        ("a worker gets SIGKILL", "in the process"),
        ("hvlaunch gets SIGTERM", "jump host"),
        ("the whole host is frozen for less than the lease", "by restarts"),
    ],
)
def test_a_job_under_a_fault(hosts: TestHosts, folder: Path, name: str, form: str) -> None:
    result = play(hosts, folder, KINDS[name], form)
    assert (result.missed, result.problems) == (False, [])


def test_a_wrong_result_is_detected(hosts: TestHosts, folder: Path) -> None:
    kind = replace(KINDS["a worker gets SIGKILL"], static=Must((69,), "host {host}: lost"), loses="nobody")
    result = play(hosts, folder, kind, "static")
    assert result.problems == ["its code is 137, not 69"]
