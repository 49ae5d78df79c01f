"""--setup and --env on real hosts with nothing but sshd and a Python: they train, build once, and fail alone."""

import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs import Job
from tests.testhosts.hosts import CHECKOUT, TestHosts, wait_until

LIMIT = 120.0
# Fits a line by gradient descent, on two ranks that share nothing but their hosts' Python.
TRAIN = """
import os, sys, tiny, hvlaunch.rendezvous.client, hvlaunch.torchrun
from importlib.metadata import entry_points
weight = 0.0
for step in range(60):
    weight -= tiny.gradient(weight)
(found,) = entry_points(group="torchrun.handlers")
print("rank", os.environ["RANK"], "weight %.3f" % weight, "in", sys.prefix, found.value, hvlaunch.__file__, flush=True)
"""
TINY = "def gradient(weight):\n    return 0.2 * (weight - 3)\n"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that hosts share, for uv."""
    path = Path("/tmp") / f"tools-{tmp_path_factory.getbasetemp().parent.name}-{time.time_ns():x}"
    path.mkdir(mode=0o755)
    return path


@pytest.fixture(scope="module")
def all_bare(tools: Path) -> Iterator[TestHosts]:
    """Hosts without this checkout, its Python, and its packages."""
    if sys.base_prefix == "/usr" or not Path("/usr/bin/python3").exists():
        pytest.skip("no other Python here")
    hidden = [str(CHECKOUT), sys.base_prefix]
    hidden += [] if Path(sys.prefix).is_relative_to(CHECKOUT) else [sys.prefix]
    with TestHosts(["a", "b", "c"], hide=dict.fromkeys("abc", hidden), share=[str(tools)]) as hosts:
        yield hosts
    shutil.rmtree(tools)


@pytest.fixture
def bare(all_bare: TestHosts) -> TestHosts:
    for host in all_bare:
        host.run(["sh", "-c", "rm -rf ~/.cache"])
    return all_bare


def wheel(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Hosts can't see it, since their /tmp is their own; its packages are in a folder of its own, and need no network."""
    path = tmp_path / "proj"
    path.mkdir()
    (path / "train.py").write_text(TRAIN)
    wheel(path / "wheels", "tiny", TINY)
    (path / "requirements.txt").write_text("--no-index\n--find-links wheels\ntiny\n")
    subprocess.run(["git", "init", "-q", path], check=True)
    return path


def start(hosts: TestHosts, project: Path, *words: object) -> Job:
    # The driver's PATH would lead to a Python that hosts do not have.
    job_words = ["--sync", "--cwd", project, "-x", "PATH=/usr/bin:/bin", *words]
    return Job(hosts, job_words, {"PWD": str(project)})


def trained(job: Job, count: int) -> float:
    """Check the output of a job; return how long it took."""
    began = time.monotonic()
    assert job.code(LIMIT) == 0, job.stderr
    assert job.stdout.count("weight 3.000") == count, job.stdout
    # The environment is the host's own, and hvlaunch's modules came along.
    assert job.stdout.count("/.cache/hvlaunch/environments/") == count
    assert job.stdout.count("hvlaunch.torchrun:handler") == count
    assert job.stdout.count("/.cache/hvlaunch/library/") == count
    return time.monotonic() - began


def test_pip_builds_once_on_each_bare_host(bare: TestHosts, project: Path) -> None:
    words = ("--env", "pip", "-H", "a:1,b:1", "python", "train.py")
    job = start(bare, project, *words)
    first = trained(job, 2)
    assert "hvlaunch: setup on " in job.stderr
    assert "Successfully installed tiny-1.0" in job.stderr
    job = start(bare, project, *words)
    second = trained(job, 2)
    assert "setup on" not in job.stderr
    assert second < first
    # Another file of the key asks for another environment.
    (project / "requirements.txt").write_text("--no-index\n--find-links wheels\ntiny\n# more\n")
    job = start(bare, project, "--env", "pip", "-H", "a:1", "python", "train.py")
    trained(job, 1)
    assert "Successfully installed tiny-1.0" in job.stderr


def test_uv_builds_once_on_each_bare_host(bare: TestHosts, project: Path, tools: Path) -> None:
    uv = shutil.which("uv") or shutil.which("uv", path=sysconfig.get_path("scripts"))
    if uv is None:
        pytest.skip("no uv here")
    shutil.copy(uv, tools / "uv")
    (project / "pyproject.toml").write_text(
        '[project]\nname = "proj"\nversion = "1"\nrequires-python = ">=3.8"\ndependencies = ["tiny"]\n'
        '[tool.uv]\nno-index = true\nfind-links = ["wheels"]\npackage = false\n'
    )
    subprocess.run([uv, "lock", "-q", "--offline", "--directory", project], check=True)
    words = ("-x", f"PATH={tools}:/usr/bin:/bin", "--env", "uv", "-H", "a:1,b:1,c:1", "python", "train.py")
    job = start(bare, project, *words)
    trained(job, 3)
    assert "setup on [a-c]: Installed 1 package" in job.stderr or "Installed 1 package" in job.stderr
    job = start(bare, project, *words)
    trained(job, 3)
    assert "setup on" not in job.stderr


def test_a_setup_that_fails_on_one_host_of_three(bare: TestHosts, project: Path) -> None:
    command = 'echo working; [ "$(hostname)" != b ] || { echo the cause; exit 7; }'
    words = ("--setup", command, "-H", "a:1,b:1,c:1", "sh", "-c", "echo ran in $(hostname)")
    job = start(bare, project, *words)
    assert job.code(LIMIT) == 69
    assert "host b: the setup ended with exit code 7: working | the cause" in job.stderr
    assert "ran in" not in job.stdout
    job = start(bare, project, "--skip-bad-hosts", "-np", 2, *words)
    assert job.code(LIMIT) == 0, job.stderr
    assert sorted(line.split(": ")[1] for line in job.stdout.splitlines()) == ["ran in a", "ran in c"]
    assert "host b is skipped: the setup ended with exit code 7" in job.stderr


def test_an_interrupted_setup_leaves_nothing(bare: TestHosts, project: Path) -> None:
    words = ("--setup", 'mkdir "$VIRTUAL_ENV" && echo begun && sleep 1000', "-H", "a:1,b:1", "true")
    job = start(bare, project, *words)
    job.saw("begun")
    job.send(signal.SIGINT)
    assert job.code(LIMIT) == 128 + signal.SIGINT
    for host in "ab":
        wait_until(lambda host=host: not bare[host].user_processes(), "nothing runs there", LIMIT)  # type: ignore[misc]
    # What was half built does not count.
    job = start(bare, project, "--setup", words[1].replace("1000", "0"), "-H", "a:1,b:1", "true")
    assert job.code(LIMIT) == 0, job.stderr
    assert "begun" in job.stderr


def test_workers_import_the_copy_of_an_editable_install(bare: TestHosts, project: Path) -> None:
    """The host has an environment whose path file leads to the launcher's directory, with older sources there."""
    (project / "src").mkdir()
    (project / "src/mine.py").write_text("VERSION = 'of the copy'\n")
    (project / "train.py").write_text("import mine; print('mine is', mine.VERSION)\n")
    venv = "/run/home/root/venv"
    script = (
        f"python3 -m venv --without-pip {venv} && mkdir -p {project}/src && "
        f"echo \"VERSION = 'old'\" > {project}/src/mine.py && "
        f"echo {project}/src > $(echo {venv}/lib/python3*/site-packages)/mine.pth"
    )
    bare["a"].run(["sh", "-c", script], check=True)
    job = start(bare, project, "-x", f"PATH={venv}/bin:/usr/bin:/bin", "-H", "a:1", "python", "train.py")
    assert job.code(LIMIT) == 0, job.stderr
    assert "mine is of the copy" in job.stdout
    assert "hvlaunch: host a: the project is installed there as editable" in job.stderr
