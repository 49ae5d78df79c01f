"""Each bad input gives one clear line, and its exit code; nothing is started, nothing is lost."""

import os
import re
from pathlib import Path

import pytest

from tests.cluster.jobs import Job, without_progress
from tests.testhosts.hosts import TestHosts

ENDS = "  The job ends: no worker was started."


def complaint(job: Job, code: int) -> str:
    """The cause that it gave, on one line, without a traceback; what to try, and that no worker was started, may follow."""
    assert job.code() == code, job.stdout + job.stderr
    assert "Traceback" not in job.stderr
    lines = [line for line in without_progress(job.stderr) if line != ENDS]
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("  Try: ")), job.stderr
    assert lines[0].startswith("hvlaunch: ")
    return "; ".join(lines)


def test_unknown_host(cluster: TestHosts) -> None:
    line = complaint(Job(cluster, ["-H", "nosuch:1,a:1", "true"]), 69)
    assert "host nosuch" in line
    assert "can't be resolved to an address" in line


def test_refused(cluster: TestHosts) -> None:
    cluster["b"].stop_sshd()
    line = complaint(Job(cluster, ["-H", "a:1,b:1", "true"]), 69)
    assert "host b" in line
    assert "refused" in line
    assert cluster["b"].address in line


def test_silent_host(cluster: TestHosts) -> None:
    cluster["b"].cut()
    line = complaint(Job(cluster, ["-H", "a:1,b:1", "--start-timeout", 8, "true"]), 69)
    assert "host b" in line
    assert "8 s" in line


def test_wrong_key(cluster: TestHosts, tmp_path: Path) -> None:
    key = tmp_path / "id_other"
    assert os.system(f"ssh-keygen -q -t ed25519 -N '' -f {key}") == 0
    line = complaint(
        Job(cluster, ["-H", "a:1", "--ssh-config", "/dev/null", "-i", key, "true"], {"HOME": str(tmp_path)}),
        69,
    )
    assert "host a" in line


def test_key_that_the_host_does_not_accept(cluster: TestHosts, tmp_path: Path) -> None:
    key = tmp_path / "id_other"
    assert os.system(f"ssh-keygen -q -t ed25519 -N '' -f {key}") == 0
    config = tmp_path / "config"
    config.write_text(f"IdentitiesOnly yes\nIdentityFile {key}\n")
    line = complaint(Job(cluster, ["-H", "a:1", "--ssh-config", config, "true"]), 69)
    assert "host a: permission denied" in line
    assert str(key) in line


def test_unknown_host_key_shows_its_fingerprint(cluster: TestHosts, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f"UserKnownHostsFile {tmp_path}/none\nGlobalKnownHostsFile /dev/null\n")
    line = complaint(Job(cluster, ["-H", "a:1", "--ssh-config", config, "true"]), 69)
    assert "host a" in line
    assert re.search(r"SHA256:[A-Za-z0-9+/]{43}", line)
    assert "--host-keys accept-new" in line


def test_changed_host_key(cluster: TestHosts) -> None:
    cluster["a"].new_host_key()
    for policy in ("strict", "accept-new"):
        line = complaint(Job(cluster, ["-H", "a:1", "--host-keys", policy, "true"]), 69)
        assert "host a" in line
        assert "SHA256:" in line
        assert "known_hosts" in line
    job = Job(cluster, ["-H", "a:1", "--host-keys", "off", "true"])
    assert job.code() == 0, job.stderr


def test_no_python(cluster: TestHosts) -> None:
    line = complaint(Job(cluster, ["-H", "a:1", "--remote-python", "/no/python3", "true"]), 69)
    assert "host a: no Python >= 3.8" in line
    assert "/no/python3" in line


def test_wrong_working_directory(cluster: TestHosts) -> None:
    line = complaint(Job(cluster, ["-H", "a:1", "--cwd", "/no/such/place", "true"]), 2)
    assert "host a" in line
    assert "/no/such/place" in line


def test_the_same_on_many_hosts_is_one_line(cluster: TestHosts) -> None:
    line = complaint(Job(cluster, ["-H", "a:1,b:1,c:1,d:1", "--cwd", "/no/such/place", "true"]), 2)
    assert "hosts" in line
    assert line.count("/no/such/place") == 1


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        ("no-such-command", 127, "command not found"),
        ("/etc/passwd", 126, "permission denied"),
        ("/etc", 126, "is a directory"),
    ],
)
def test_a_command_that_cannot_be_started(cluster: TestHosts, command: str, code: int, text: str) -> None:
    line = complaint(Job(cluster, ["--quiet", "-H", "a:1,b:1", command]), code)
    assert f"{command}: {text}" in line


def test_bad_hostfile_line(cluster: TestHosts, tmp_path: Path) -> None:
    hostfile = tmp_path / "cluster"
    hostfile.write_text("a slots=2\n\nb slots=two\n")
    line = complaint(Job(cluster, ["--hostfile", hostfile, "true"]), 2)
    assert f"{hostfile}:3" in line
    assert "two" in line


def test_too_many_processes(cluster: TestHosts) -> None:
    line = complaint(Job(cluster, ["-np", 9, "-H", "a:4,b:4", "true"]), 2)
    assert "9" in line
    assert "8 slots" in line


def test_hosts_that_cannot_reach_each_other(cluster: TestHosts) -> None:
    block = ["iptables", "-A", "INPUT", "-s", cluster["b"].address, "-p", "tcp", "-j", "REJECT"]
    six = ["ip6tables", "-A", "INPUT", "-s", cluster["b"].address6, "-p", "tcp", "-j", "REJECT"]
    try:
        cluster["a"].run(block, check=True)
        cluster["a"].run(six)
        line = complaint(Job(cluster, ["-H", "a:1,b:1", "true"]), 69)
        assert "host b: can't connect to host a" in line
        assert cluster["a"].address in line
        assert cluster["a"].address6 in line
    finally:
        cluster["a"].run(["iptables", "-F"])
        cluster["a"].run(["ip6tables", "-F"])


def test_every_host_that_failed_is_named_with_its_cause(cluster: TestHosts) -> None:
    cluster["b"].stop_sshd()
    cluster["c"].new_host_key()
    job = Job(cluster, ["-H", "a:1,b:1,c:1,nosuch:1", "true"])
    assert job.code() == 69
    lines = without_progress(job.stderr)
    assert lines[0] == "hvlaunch: 3 hosts failed:"
    hosts = [line.split(":")[0].strip() for line in lines[1:-1] if "Try: " not in line]
    assert hosts == ["host b", "host c", "host nosuch"]
    assert lines[-1] == ENDS
