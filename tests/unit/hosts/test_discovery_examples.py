"""The discovery scripts of hostfiles/, with stand-ins for what they ask."""

import os
from pathlib import Path

import pytest

from hvlaunch.errors import DiscoveryFailed
from hvlaunch.hosts.discovery import HostScript

HOSTFILES = Path(__file__).parents[3] / "hostfiles"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """program(name, text) puts a shell script before all others of that name."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def make(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    return make


def found(command: str) -> list[tuple[str, int | None]]:
    return [(host.name, host.slots) for host in HostScript(command, 30.0).read_hosts()]


def test_hosts_of_a_hostfile_that_answer(program, tmp_path):
    program("ping", 'for last; do :; done; case "$last" in down*) exit 1;; esac')
    hosts = tmp_path / "hosts"
    hosts.write_text("# ours\nlate slots=4\ndown1:2\n\nalice@early:8  # fast\ndown2\nbare\n")
    script = HOSTFILES / "discover.sh"
    assert found(f"{script} {hosts}") == [("late", 4), ("early", 8), ("bare", None)]
    with pytest.raises(DiscoveryFailed, match="usage"):
        found(str(script))


def test_without_ping_no_host_is_taken_for_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DiscoveryFailed, match="there is no ping on this machine"):
        found(f"/bin/sh {HOSTFILES / 'discover.sh'} {tmp_path}")


def test_nodes_of_slurm_jobs(program):
    program("squeue", r'printf "gpu[01-02]\ncpu7\n\ngpu[01-02]\n"')
    script = HOSTFILES / "discover-slurm.sh"
    assert found(f"{script} pool 8") == [("gpu01", 8), ("gpu02", 8), ("cpu7", 8)]
    assert found(f"{script} pool") == [("gpu01", None), ("gpu02", None), ("cpu7", None)]
