"""The guardian of a container, with a stand-in for docker on this machine; tests/cluster/test_containers.py has podman itself."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hvlaunch.agent import container
from hvlaunch.agent.container import container_command
from hvlaunch.driver.links.host_ends import never_began
from hvlaunch.errors import ContainerFailed

DOCKER = """\
#!/bin/sh
echo "$*" >> calls
case "$1" in
info) echo '[name=seccomp]' ;;
image) [ -e pulled ] || { echo "Error: No such image: $3"; exit 1; } ;;
pull)
    echo "0123456789ab: Pulling fs layer"
    echo "ba9876543210: Pulling fs layer"
    echo "0123456789ab: Pull complete"
    [ "$2" = wrong ] && { echo "Error response from daemon: manifest unknown"; exit 1; }
    touch pulled ;;
run)
    # Until the entry point, all variables are set; then the program runs here.
    while [ "$1" != --entrypoint ]; do [ "$1" = -e ] && export "$2"; shift; done
    exec "$2" "$4" "$5" ;;
esac
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run hvlaunch in a directory where the stand-in keeps what it has done."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/docker").write_text(DOCKER)
    (tmp_path / "bin/docker").chmod(0o755)
    (tmp_path / "home").mkdir()

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "hvlaunch", *words],
            env={
                **os.environ,
                "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
                "HOME": f"{tmp_path}/home",
                "TMPDIR": str(tmp_path),
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def test_image_is_pulled_once_and_secrets_stay_off_the_command_line(run: Run, tmp_path: Path) -> None:
    show = "import os; print(os.environ['SECRET'], 'HVL_CONTAINER' in os.environ)"
    words = ["--container", "small", "-np", "2", "-x", "SECRET=token7", "python3", "-c", show]
    for _ in range(2):
        done = run(*words)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("token7 False") == 2
    calls = (tmp_path / "calls").read_text()
    assert calls.count("pull small") == 1
    assert "token7" not in calls
    assert f"type=bind,source={tmp_path},target={tmp_path}" in calls
    assert not list(tmp_path.glob("hvlaunch-*"))


def test_progress_of_the_image_is_told_by_layers(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    container._bring_image("docker", "small")
    assert f"{container.PROGRESS}image: 1 of 2 layers\n" in capfd.readouterr().out


def test_failed_pull_has_cause_and_next_step(run: Run) -> None:
    done = run("--container", "wrong", "true")
    assert done.returncode == 69
    assert "host localhost: image wrong can't be pulled: " in done.stderr
    assert "Error response from daemon: manifest unknown" in done.stderr
    assert "Try: docker pull wrong on that host" in done.stderr


def test_missing_mount_and_missing_runtime_are_errors_of_the_host(run: Run) -> None:
    done = run("--container", "small", "--mount", "/no/such", "true")
    assert (done.returncode, "--mount /no/such: no such file" in done.stderr) == (69, True), done.stderr
    done = run("--container", "small.sif", "true")
    assert done.returncode == 69
    assert "apptainer or singularity is not installed" in done.stderr


def test_exit_code_comes_out_of_the_container(run: Run) -> None:
    assert run("--container", "small", "-np", "2", "sh", "-c", "exit $((RANK * 7))").returncode == 7


def test_plan_has_the_command(run: Run, tmp_path: Path) -> None:
    done = run("--dry-run", "--container", "small", "--mount", "/data:ro", "-H", "a:1", "true")
    assert "docker run --rm -i --name hvlaunch-... " in done.stdout
    assert "--mount type=bind,source=/data,target=/data,readonly" in done.stdout
    assert not (tmp_path / "calls").exists()
    done = run("--dry-run", "--in-container", "box", "--runtime", "podman", "-H", "a:1", "true")
    assert "podman exec -i box ..." in done.stdout


def test_commands_of_the_runtimes() -> None:
    mounts = [("/a,b", "/c", True)]
    docker = container_command("docker", "i", "n", mounts, [], {"HOME": "/h"}, ["/bin/sh", "-c", "x"])
    assert docker[-7:] == [
        "--mount",
        'type=bind,"source=/a,b",target=/c,readonly',
        "--entrypoint",
        "/bin/sh",
        "i",
        "-c",
        "x",
    ]
    singularity = container_command("apptainer", "i.sif", "n", mounts, ["--nv"], {"HOME": "/h"}, ["/bin/sh"])
    assert singularity == ["apptainer", "exec", "--nv", "--bind", "/a,b:/c:ro", "i.sif", "/bin/sh"]


@pytest.mark.parametrize(
    ("runtime", "paths", "words"),
    [
        ("docker", [], []),
        ("docker", ["/dev/nvidiactl"], ["--gpus", "all"]),
        (
            "podman",
            ["/dev/nvidiactl", "/dev/infiniband"],
            ["--device", "nvidia.com/gpu=all", "--device", "/dev/infiniband"],
        ),
        ("podman", ["/dev/kfd", "/dev/dri"], ["--device", "/dev/kfd", "--device", "/dev/dri"]),
        ("apptainer", ["/dev/nvidiactl", "/dev/infiniband"], ["--nv"]),
    ],
)
def test_devices_of_the_host_are_passed_on(runtime: str, paths: list[str], words: list[str]) -> None:
    assert container._devices(runtime, paths.__contains__) == words


def test_user_and_limits_depend_on_the_rights_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "getgid", lambda: 100)
    monkeypatch.setattr(os, "getgroups", lambda: [100, 44])
    monkeypatch.setattr(container, "_may_lock_memory", lambda: False)
    assert container._identity("docker", is_rootless=False) == ["--user", "1000:100", "--group-add", "44"]
    assert container._identity("docker", is_rootless=True) == ["--user", "0:0"]
    assert container._identity("podman", is_rootless=True)[:2] == ["--userns", "keep-id"]
    unlimited = ["--ulimit", "memlock=-1:-1"]
    assert container._limits("docker", is_rootless=False, is_bound=False) == unlimited
    assert container._limits("docker", is_rootless=True, is_bound=True) == ["--cap-add", "SYS_NICE"]
    assert container._limits("podman", is_rootless=True, is_bound=False) == ["--pids-limit", "-1"]


def test_last_words_of_a_container_without_an_agent() -> None:
    failed = never_began(
        "a", 69, f"noise\n{container.CAUSE}it broke\n{container.HINT}mend it", None, b"", "small"
    )
    assert isinstance(failed, ContainerFailed)
    assert (failed.cause, failed.hint) == ("it broke", "mend it")
    stderr = (
        "docker: Error response from daemon: no such device\n\nRun 'docker run --help' for more information"
    )
    assert "printed: docker: Error response from daemon: no such device" in str(
        never_began("a", 125, stderr, None, b"", "small")
    )
