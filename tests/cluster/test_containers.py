"""Workers in containers of podman, on real hosts: the promises of a job hold inside, and nothing is left outside."""

import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.cluster.jobs import PROGRAMS, Job
from tests.cluster.test_detached import User
from tests.testhosts.hosts import Host, TestHosts, wait_until

LIMIT = 60.0
LEASE, GRACE = 5, 1
IMAGE = "localhost/small"
PYTHON = "/usr/bin/python3"
TREES = "import sysconfig, sys; print(sys.executable, sysconfig.get_path('stdlib'), sysconfig.get_path('platstdlib'))"
RUN = ["--container", IMAGE, "--runtime", "podman", "--mount", f"{PROGRAMS}:ro"]


def make_root(root: Path) -> None:
    """Copy this system's Python, a shell and what both load."""
    program, *trees = subprocess.check_output([PYTHON, "-I", "-c", TREES], text=True).split()
    trees = list(dict.fromkeys(trees))
    unused = shutil.ignore_patterns("__pycache__", "test", "config-*", "dist-packages", "site-packages")
    for tree in trees:
        shutil.copytree(tree, root / tree[1:], ignore=unused, symlinks=True)
    modules = [str(path) for tree in trees for path in Path(tree, "lib-dynload").glob("*.so")]
    files = [str(Path(program).resolve()), "/bin/sh", "/bin/sleep", "/bin/cat"]
    loaded = subprocess.run(["ldd", *files, *modules], capture_output=True, text=True, check=False).stdout
    libraries = {word for line in loaded.splitlines() for word in line.split() if word.startswith("/")}
    for path in {*files, *(word for word in libraries if not word.endswith(":"))}:
        (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path[1:])
    (root / "usr/bin/python3").symlink_to(Path(program).resolve())
    for name in ("tmp", "proc", "sys", "dev", "etc", "run"):
        (root / name).mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)


def make_image(folder: Path) -> None:
    """Make the image in a store that all hosts read, and the configuration that names the store."""
    make_root(folder / "root")
    archive, store = folder / "root.tar", folder / "images"
    subprocess.run(["tar", "-C", folder / "root", "-cf", archive, "."], check=True)
    podman = ["podman", "--root", str(store), "--runroot", str(folder / "run")]
    subprocess.run([*podman, "import", archive, IMAGE], check=True, capture_output=True)
    etc = folder / "etc"
    shutil.copytree("/etc/containers", etc)
    files, processes = (
        resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
    )
    # crun refuses hosts with both versions of cgroups.
    runtime = 'runtime = "runc"' if shutil.which("runc") else ""
    (etc / "containers.conf").write_text(
        f'[engine]\n{runtime}\ncgroup_manager = "cgroupfs"\nevents_logger = "none"\n'
        f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc={min(processes, 32768)}:{min(processes, 32768)}"]\n'
    )
    (etc / "storage.conf").write_text(
        '[storage]\ndriver = "overlay"\nrunroot = "/run/containers/storage"\ngraphroot = "/var/lib/containers/storage"\n'
        f'[storage.options]\nadditionalimagestores = ["{store}"]\n'
    )


@pytest.fixture(scope="module")
def machines() -> Iterator[TestHosts]:
    if shutil.which("podman") is None or not Path("/etc/containers").is_dir():
        pytest.skip("needs podman")
    with TemporaryDirectory(dir="/var/tmp") as folder:
        make_image(Path(folder))
        hide = {name: ["/var/lib/containers"] for name in "ab"}
        with TestHosts(["a", "b"], hide=hide) as hosts:
            for host in hosts:
                host.run(["mount", "--bind", f"{folder}/etc", "/etc/containers"], check=True)
            trial = hosts["a"].run(["podman", "run", "--rm", "--network", "host", IMAGE, PYTHON, "-V"])
            if trial.returncode != 0:
                pytest.skip(f"needs a podman that works: {trial.stderr.strip()}")
            yield hosts
        subprocess.run(["umount", f"{folder}/images/overlay"], check=False, capture_output=True)


def left(hosts: TestHosts) -> list[str]:
    """Return what a job has left: processes, containers and files. A killed guardian leaves empty directories."""
    traces = [str(process) for host in hosts for process in host.user_processes()]
    for host in hosts if not traces else ():
        traces += host.run(["podman", "ps", "-aq"]).stdout.split()
        traces += host.run(["sh", "-c", "find /tmp/hvlaunch-* -type f 2>/dev/null"]).stdout.split()
    return traces


def is_clean(hosts: TestHosts) -> None:
    try:
        wait_until(lambda: not left(hosts), "nothing is left", LIMIT)
    except TimeoutError:
        assert left(hosts) == []


@pytest.fixture
def hosts(machines: TestHosts) -> Iterator[TestHosts]:
    yield machines
    try:
        is_clean(machines)
    finally:
        for host in machines:
            host.run(["sh", "-c", "podman rm -af -t 0; rm -rf /tmp/hvlaunch-*"])


def detaching(hosts: TestHosts, *arguments: object, options: tuple[object, ...] = ()) -> Job:
    fixed = ["-H", "a:2,b:2", "--grace", GRACE, "--lease", LEASE, *RUN, *options]
    return Job(hosts, [*fixed, "python3", PROGRAMS / "detach.py", *arguments])


def pids_of(host: Host, word: str) -> list[str]:
    """Return the processes with this word in their command line, or as their name."""
    return [str(one.pid) for one in host.user_processes() if word in one.argv or one.comm == word]


def kill(host: Host, pids: list[str], number: int = signal.SIGKILL) -> None:
    assert pids
    host.run(["kill", f"-{int(number)}", *pids], check=True)


ABOUT = """
import os, pwd, sys, time
home = os.environ["HOME"]
open(home + "/cache", "w").close()
print("at", os.getuid(), os.getcwd(), home, os.environ["USER"], os.environ["SECRET"] == "tok" + "en7", os.getpid() < 100, flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), 9)
time.sleep(3600)
"""


def test_worker_has_its_user_and_directory_and_a_signal_is_reported(hosts: TestHosts) -> None:
    for host in hosts:
        host.run(["sh", "-c", "mkdir -p ~/p; rm -f ~/p/go; touch ~/p/kept"], check=True)
    options = ["-H", "a:1,b:1", *RUN, "--cwd", "/run/home/root/p", "-x", "SECRET=token7"]
    job = Job(hosts, [*options, "python3", "-c", ABOUT]).saw(
        "at 0 /run/home/root/p /run/home/root root True True", 2
    )
    host = hosts["a"]
    (name,) = host.run(["podman", "ps", "--format", "{{.Names}}"]).stdout.split()
    assert "token7" not in host.run(["podman", "inspect", name]).stdout
    assert not [one for one in host.user_processes() if "token7" in " ".join(one.argv)]
    hosts["b"].run(["touch", "/run/home/root/p/go"], check=True)
    assert job.code() == 137
    assert "SIGKILL" in job.stderr
    is_clean(hosts)
    # The home ends with the container, and the directories that were mounted in it do not.
    for host in hosts:
        assert host.run(["sh", "-c", "ls ~ ~/p; ls -d ~/.cache/hvlaunch"]).stdout.split()[-2:] == [
            "kept",
            "/run/home/root/.cache/hvlaunch",
        ]


def test_exit_code_is_the_first_failing_worker_s(hosts: TestHosts) -> None:
    job = detaching(hosts, "--exit", "3=7")
    assert job.code() == 7, job.stderr
    is_clean(hosts)


def agent_dies(hosts: TestHosts) -> None:
    kill(hosts["b"], pids_of(hosts["b"], "hvl-agent"))


def client_dies(hosts: TestHosts) -> None:
    kill(hosts["b"], pids_of(hosts["b"], "run"))


def outer_guardian_dies(hosts: TestHosts) -> None:
    outer = min(map(int, pids_of(hosts["b"], "hvl-guardian")))
    kill(hosts["b"], [str(outer)])


@pytest.mark.parametrize(
    "harm",
    [
        client_dies,
        *(pytest.param(harm, marks=pytest.mark.long) for harm in (agent_dies, outer_guardian_dies)),
    ],
)
def test_killing_one_part_leaves_nothing(hosts: TestHosts, harm: Callable[[TestHosts], None]) -> None:
    job = detaching(hosts).saw("ready", 4)
    harm(hosts)
    assert job.code() == 69, job.stderr
    assert "host b" in job.stderr


@pytest.mark.long
def test_job_survives_the_monitor_of_a_container(hosts: TestHosts) -> None:
    """It held the agent's pipes: the driver connects again."""
    job = detaching(hosts).saw("ready", 4)
    kill(hosts["b"], pids_of(hosts["b"], "conmon"))
    job.saw("host b: connected again after", 1)
    assert job.interrupt().code() == 130


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_if_the_driver_ends(hosts: TestHosts, number: int) -> None:
    job = detaching(hosts, "--ignore-term").saw("ready", 4).send(number)
    assert job.code() == (130 if number == signal.SIGINT else -number)


@pytest.mark.long
def test_nothing_is_left_of_a_cut_host(hosts: TestHosts) -> None:
    job = detaching(hosts).saw("ready", 4)
    hosts["b"].cut()
    assert job.code() == 69
    is_clean(hosts)
    hosts["b"].heal()


@pytest.mark.long
def test_guardian_ends_a_paused_container(hosts: TestHosts) -> None:
    """The agent can't act on its lease."""
    job = detaching(hosts).saw("ready", 4)
    inner = sorted(map(int, pids_of(hosts["b"], "hvl-guardian")))[1:]
    kill(hosts["b"], [*map(str, inner), *pids_of(hosts["b"], "hvl-agent")], signal.SIGSTOP)
    assert job.send(signal.SIGKILL).code() == -signal.SIGKILL


LINES = "import time\nfor number in range(100): print('line', number, flush=True); time.sleep(0.05)"


def outlives(hosts: TestHosts, *options: str) -> None:
    """Run a job whose connection is lost."""
    job = Job(hosts, ["-H", "b:1", *options, "python3", "-c", LINES]).saw("line 10\n")
    kill(hosts["b"], [str(one.pid) for one in hosts["b"].processes() if one.comm.startswith("sshd")])
    job.saw("host b: connected again after", 1)
    assert job.code() == 0, job.stderr
    assert [line.split()[-1] for line in job.stdout.splitlines()] == [str(number) for number in range(100)]


@pytest.mark.long
def test_session_outlives_its_connection(hosts: TestHosts) -> None:
    outlives(hosts, *RUN)


@pytest.mark.long
def test_detached_job_has_stacks_and_a_successor(hosts: TestHosts, tmp_path: Path) -> None:
    user = User(hosts, tmp_path)
    done = user.do("--detach", "-H", "a:1,b:1", "--grace", GRACE, *RUN, "python3", PROGRAMS / "detach.py")
    assert done.returncode == 0, done.stderr
    job, driver = done.stdout.strip(), user.driver
    assert user.do("stacks", job).stdout.count("detach.py") >= 2
    os.kill(driver, signal.SIGKILL)
    wait_until(lambda: user.driver != driver, "a successor has the job", LIMIT)
    wait_until(lambda: user.do("stacks", job).stdout.count("detach.py") >= 2, "its hosts answer", LIMIT)
    assert user.do("stop", job).returncode == 0


@pytest.mark.long
def test_elastic_job_has_a_copy_and_a_setup_of_its_container(hosts: TestHosts, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("import os\nprint(open('built').read(), os.environ['container'])\n")
    setup = 'test "$container" = podman && echo in-$container > built'
    options = ["--min-np", 2, "-H", "a:1,b:1", "--sync-dir", tmp_path, "--setup", setup, *RUN]
    job = Job(hosts, [*options, "python3", "code.py"])
    assert job.code() == 0, job.stderr
    assert job.stdout.count("in-podman") == 2


@pytest.fixture
def box(hosts: TestHosts) -> Iterator[str]:
    """A container that runs on both hosts, and has to go on."""
    command = ["podman", "run", "-d", "--name", "box", "--network", "host", "--log-driver", "none"]
    for host in hosts:
        host.run([*command, "-v", f"{PROGRAMS}:{PROGRAMS}", IMAGE, "sleep", "3600"], check=True)
    before = [{one.pid for one in host.user_processes()} for host in hosts]
    yield "box"

    def rest() -> list[str]:
        return [
            str(one)
            for host, known in zip(hosts, before, strict=True)
            for one in host.user_processes()
            if one.pid not in known
        ]

    try:
        wait_until(lambda: not rest(), "nothing but the container is left", LIMIT)
        for host in hosts:
            names = host.run(["podman", "ps", "--format", "{{.Names}}"]).stdout.split()
            assert names == ["box"]
    finally:
        for host in hosts:
            host.run(["podman", "rm", "-f", "-t", "0", "box"])


def in_box(hosts: TestHosts, *arguments: object) -> Job:
    fixed = ["-H", "a:2,b:2", "--grace", GRACE, "--lease", LEASE, "--in-container", "box", "--cwd", "/tmp"]
    return Job(hosts, [*fixed, "python3", PROGRAMS / "detach.py", *arguments])


def exec_client_dies(hosts: TestHosts) -> None:
    kill(hosts["b"], pids_of(hosts["b"], "exec"))


def both_inner_processes_die(hosts: TestHosts) -> None:
    inner = sorted(map(int, pids_of(hosts["b"], "hvl-guardian")))[1:]
    kill(hosts["b"], [*map(str, inner), *pids_of(hosts["b"], "hvl-agent")])


@pytest.mark.parametrize(
    "harm",
    [
        both_inner_processes_die,
        *(pytest.param(harm, marks=pytest.mark.long) for harm in (exec_client_dies, agent_dies)),
    ],
)
def test_running_container_survives_the_job(
    hosts: TestHosts, box: str, harm: Callable[[TestHosts], None]
) -> None:
    job = in_box(hosts).saw("ready", 4)
    harm(hosts)
    assert job.code() == 69, job.stderr


@pytest.mark.long
def test_running_container_survives_the_driver(hosts: TestHosts, box: str) -> None:
    job = in_box(hosts, "--ignore-term").saw("ready", 4).send(signal.SIGKILL)
    assert job.code() == -signal.SIGKILL


@pytest.mark.long
def test_session_in_a_running_container_outlives_its_connection(hosts: TestHosts, box: str) -> None:
    outlives(hosts, "--in-container", box, "--cwd", "/tmp")


def test_missing_image_is_an_error_of_the_host(hosts: TestHosts) -> None:
    job = Job(hosts, ["-H", "a:1", "--runtime", "podman", "--container", "localhost:1/none", "true"])
    assert job.code() == 69
    assert "host a: image localhost:1/none can't be pulled: " in job.stderr
    assert "podman pull localhost:1/none on that host" in job.stderr


PRELOADED = """
import os, pathlib, signal, time
waiting = pathlib.Path("waiting")
if os.environ["HVLAUNCH_ROUND"] == "0":
    while not waiting.exists():
        for pid in open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split():
            if pathlib.Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\\n":
                waiting.write_text(pid)
        time.sleep(0.02)
    os.kill(os.getpid(), 9)
print("preloaded", str(os.getpid()) == waiting.read_text())
"""


@pytest.mark.long
def test_worker_in_a_container_restarts_without_its_imports(hosts: TestHosts) -> None:
    hosts["a"].run(
        ["sh", "-c", f"mkdir -p ~/q; rm -f ~/q/*; cat > ~/q/train.py <<'X'{PRELOADED}X"], check=True
    )
    options = ["-H", "a:1", "--min-np", 1, "--preload", "json", *RUN, "--cwd", "/run/home/root/q"]
    job = Job(hosts, [*options, "python3", "train.py"])
    assert job.code() == 0, job.stderr
    assert "preloaded True" in job.stdout
