"""The report of --check-build."""

import pytest

from hvlaunch.cli.check_build import check_build, launcher_version, package_version, ssh_version


def test_installed_parts_are_marked():
    text = check_build(
        {"paramiko": "5.1", "torch": "2.13.0+cpu", "httptools": "0.9"}.get,
        lambda: "OpenSSH_9.2p1",
        {"mpirun": "Open MPI 4.1.4"}.get,
    )
    lines = {line.split()[1]: line for line in text.splitlines() if line.startswith("  [X]")}
    assert set(lines) == {"gloo", "mpirun", "paramiko", "ssh", "torch", "httptools"}
    assert "Open MPI 4.1.4" in lines["mpirun"]
    assert "  [ ] srun       not found" in text
    assert "5.1" in lines["paramiko"]
    assert "OpenSSH_9.2p1" in lines["ssh"]
    assert "  [ ] uvloop     not found" in text
    assert "Python 3." in text.splitlines()[0]


def test_missing_parts_are_not_marked():
    text = check_build(lambda name: None, lambda: None, lambda name: None)
    assert text.count("[X]") == 1
    assert text.count("[ ]") == 12


def test_this_installation():
    assert "[X] paramiko" in check_build()


def test_launchers_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launcher_version("mpirun") is None
    assert launcher_version("srun") is None
    for name, text in (("mpirun", 'echo "mpirun (Open MPI) 5.0.3"'), ("srun", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    assert launcher_version("mpirun") == "Open MPI 5.0.3"
    assert launcher_version("srun") == str(tmp_path / "srun")


def test_a_package_is_found_without_importing_it():
    assert package_version("pytest") == pytest.__version__
    assert package_version("no-such-package") is None


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'OpenSSH_9.2p1 Debian-2, OpenSSL 3.0' >&2", "OpenSSH_9.2p1"),
        ("echo 'OpenSSH_8.9p1, OpenSSL 3.0' >&2", "OpenSSH_8.9p1"),
        ("echo 'Sun_SSH_1.1'", "Sun_SSH_1.1"),
        ("echo 'unknown option' >&2; exit 255", None),
        ("true", None),
    ],
)
def test_the_ssh_binary_is_asked(tmp_path, script, expected):
    program = tmp_path / "ssh"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    assert ssh_version(str(program)) == expected


def test_no_ssh_binary(tmp_path):
    assert ssh_version(str(tmp_path / "none")) is None
