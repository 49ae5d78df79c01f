"""`hvlaunch check` on real hosts: each kind of fault is named with its host and what to do, and good hosts have none."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cgroups import Group, outside_pid
from tests.cluster.host_faults import FAULTS, WORK, Fault, make_fault, make_libraries, prepare_host
from tests.cluster.jobs import HVLAUNCH, Job
from tests.testhosts.hosts import TestHosts

LIMIT = 90.0
NAMES = ["a", "b", "c", "d", "e", "f", "g", "h"]
FAULTY = NAMES[2:]
"""Hosts with faults: the others are most of the hosts with any value."""
CGROUPS = {
    "half a CPU": ("cpu", {"cpu.cfs_quota_us": 50000}),
    "little memory": ("memory", {"memory.limit_in_bytes": 300 << 20}),
}


class Checks:
    """Eight hosts, with at most one fault each at a time; a check of several faults at once."""

    def __init__(self, hosts: TestHosts, libraries: Path) -> None:
        self.hosts = hosts
        self.libraries = libraries
        self._answers: dict[str, tuple[str, dict[str, Any]]] = {}

    def check(self, *words: str) -> tuple[int, dict[str, Any]]:
        line = ["check", "--json", "-H", ",".join(f"{name}:2" for name in NAMES), "--cwd", WORK, *words]
        line += ["-x", "PYTHONPATH=/run/home/lib", "./python", "train.py"]
        done = self.hosts.driver.run([*HVLAUNCH, *line], timeout=LIMIT)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def make_good(self) -> None:
        """Make all hosts anew, without faults."""
        self.hosts.repair()
        for name in NAMES:
            prepare_host(self.hosts, name, self.libraries)

    def findings_with(self, fault: Fault) -> tuple[str, list[dict[str, Any]]]:
        """Return the host with the fault, and all findings of the check."""
        if fault.name not in self._answers:
            start = FAULTS.index(fault) // len(FAULTY) * len(FAULTY)
            self._answers |= self._check_together(FAULTS[start : start + len(FAULTY)])
        host, answer = self._answers[fault.name]
        return host, answer["findings"]

    def _check_together(self, faults: Sequence[Fault]) -> dict[str, tuple[str, dict[str, Any]]]:
        self.hosts.repair()
        with ExitStack() as groups:
            for name, fault in zip(FAULTY, faults, strict=False):
                make_fault(self.hosts, name, self.libraries, fault)
                if fault.name in CGROUPS:
                    controller, settings = CGROUPS[fault.name]
                    group = groups.enter_context(Group(controller))
                    for key, value in settings.items():
                        group.set(key, value)
                    listener = self.hosts[name].run(["cat", "/run/sshd/sshd.pid"], check=True).stdout
                    group.set("cgroup.procs", outside_pid(self.hosts[name].pid, int(listener)))
            for name in (*NAMES[:2], *FAULTY[len(faults) :]):
                prepare_host(self.hosts, name, self.libraries)
            code, answer = self.check()
            assert code == 69
            self.hosts.repair()
        return {fault.name: (name, answer) for name, fault in zip(FAULTY, faults, strict=False)}


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checks]:
    libraries = tmp_path_factory.mktemp("libraries")
    make_libraries(libraries)
    with TestHosts(NAMES, share=[str(libraries)]) as hosts:
        yield Checks(hosts, libraries)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_a_fault_is_named_with_its_host_and_a_remedy(checks: Checks, fault: Fault) -> None:
    host, findings = checks.findings_with(fault)
    assert [
        finding["remedy"]
        for finding in findings
        if (finding["host"], finding["subject"], finding["level"]) == (host, fault.subject, fault.level)
        and fault.text in finding["text"]
    ] != [], [finding for finding in findings if finding["host"] == host]
    assert [finding for finding in findings if finding["host"] in NAMES[:2]] == []


def test_good_hosts_have_no_findings(checks: Checks) -> None:
    checks.make_good()
    code, answer = checks.check()
    assert (code, [finding for finding in answer["findings"] if finding["level"] != "note"]) == (0, [])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_hundred_checks_of_good_hosts_raise_no_alarm(checks: Checks) -> None:
    checks.make_good()
    alarms = []
    for _ in range(100):
        _, answer = checks.check()
        alarms += [finding for finding in answer["findings"] if finding["level"] != "note"]
    assert alarms == []


SMALL = "mount -t tmpfs -o size=1m none /dev/shm"


def test_a_job_leaves_out_a_host_with_a_fault(checks: Checks) -> None:
    """One host has no shared memory: with --skip-bad-hosts the others run, and without it nobody does."""
    checks.make_good()
    checks.hosts["b"].run(["sh", "-c", SMALL], check=True)
    words = ["--check", "-H", "a,b,c", "--cwd", WORK, "-np", "2"]
    job = Job(checks.hosts, [*words, "--skip-bad-hosts", "sh", "-c", "echo on $HVLAUNCH_HOST"])
    assert job.code() == 0, job.stderr
    assert sorted(line.split()[-1] for line in job.stdout.splitlines()) == ["a", "c"]
    job = Job(checks.hosts, [*words, "sh", "-c", "echo on $HVLAUNCH_HOST"])
    assert job.code() == 69
    assert "host b: shm: 1.05 MB of shared memory are free" in job.stderr
    assert job.stdout == ""


def test_an_elastic_job_lets_a_host_in_when_its_fault_is_gone(checks: Checks) -> None:
    checks.make_good()
    checks.hosts["b"].run(["sh", "-c", SMALL], check=True)
    words = [
        "--check",
        "-H",
        "a,b",
        "--min-np",
        "1",
        "--blacklist-cooldown-range",
        "0.2",
        "0.5",
        "--grace",
        "1",
    ]
    job = Job(checks.hosts, [*words, "--cwd", WORK, "sh", "-c", "echo $SIZE of $HVLAUNCH_HOST; sleep 600"])
    job.saw("shared memory are free", times=2).saw("of a")
    assert "of b" not in job.stdout
    checks.hosts["b"].run(["umount", "/dev/shm"], check=True)
    job.saw("of b")
    job.interrupt()
    job.code()
