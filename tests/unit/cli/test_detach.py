"""Jobs that go on without the terminal, or the program, that they were started from."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from hvlaunch.console.output_store import items, segment_path, segments
from hvlaunch.errors import EXIT_HOSTS
from hvlaunch.outside import KnownJob, known_jobs
from hvlaunch.watch.overview import PARTS
from tests.testhosts.places import wait_until
from tests.unit.cli.job_site import DEADLINE, Site

HVLAUNCH = [sys.executable, "-m", "hvlaunch"]
COUNTING = """\
import os, sys, time
print("ready", flush=True)
for number in range(int(sys.argv[1])):
    print("line", number, flush=True)
    while not os.path.exists(sys.argv[2]) and number == 10: time.sleep(0.01)
print("stdin:", sys.stdin.read(), flush=True)
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "state")
    yield site
    site.kill_jobs()


@pytest.fixture
def silent_host(tmp_path: Path) -> Iterator[list[str]]:
    """The option of a host that takes connections, and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        hostfile = tmp_path / "silent-host"
        hostfile.write_text(f"silent slots=1 address=127.0.0.1 port={server.getsockname()[1]}\n")
        yield ["--hostfile", str(hostfile)]


def worker(lines: int, go_on: Path) -> list[str]:
    """A worker that prints so many lines, and waits at the tenth for a file."""
    return [sys.executable, "-c", COUNTING, str(lines), str(go_on)]


def detach(site: Site, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [*HVLAUNCH, "--detach", *words],
        env=site.environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        **options,
    )


def start(site: Site, *words: str) -> "subprocess.Popen[bytes]":
    """With its stdout and stderr in pipes, which nobody need read."""
    return subprocess.Popen(
        [*HVLAUNCH, *words],
        env=site.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@contextmanager
def terminal(site: Site, *words: str) -> Iterator[tuple[int, int]]:
    """A program that leads the session of a terminal: its pid, and the terminal's other side."""
    pid, master = pty.fork()
    if not pid:
        os.execve(sys.executable, [*HVLAUNCH, *words], site.environ)
    try:
        yield pid, master
    finally:
        os.close(master)
        os.waitpid(pid, 0)


def read_until(master: int, text: bytes) -> None:
    seen = b""
    while text not in seen:
        seen += os.read(master, 1 << 16)


def only_job(site: Site) -> KnownJob:
    [job] = known_jobs(site.root)
    return job


def kept(job: KnownJob) -> dict[tuple[int, str], bytes]:
    """The output of each stream of each rank."""
    found: dict[tuple[int, str], bytes] = {}
    for number in segments(job.directory):
        segment = os.open(segment_path(job.directory, number), os.O_RDONLY)
        for item, _ in items(segment):
            if item.rank is not None:
                key = item.rank, item.kind
                found[key] = found.get(key, b"") + item.data
        os.close(segment)
    return found


def whole_output(lines: int) -> bytes:
    return b"ready\n" + b"".join(b"line %d\n" % number for number in range(lines)) + b"stdin: \n"


def listens(job: KnownJob) -> bool:
    return (job.directory / "control").exists()


def messages(stderr: str) -> list[str]:
    """But for the ports in them."""
    return [re.sub(r":\d{5}$", "", line) for line in stderr.splitlines()]


def test_stdout_gets_only_the_id_while_the_job_continues(site, tmp_path):
    started = detach(site, "-np", "2", *worker(500, tmp_path / "go"), input="for nobody")
    job = only_job(site)
    assert (started.stdout, started.returncode) == (f"{job.id}\n", 0)
    assert started.stderr.startswith("hvlaunch: 2 workers on host localhost")
    assert job.has_driver
    driver = psutil.Process(job.about["pid"])
    assert os.getsid(driver.pid) == driver.pid
    assert {Path(f"/proc/{driver.pid}/fd/{number}").readlink() for number in range(3)} == {Path(os.devnull)}
    (tmp_path / "go").touch()
    assert site.do("wait", job.id) == 0
    assert {key: data for key, data in kept(job).items() if data} == {
        (rank, "stdout"): whole_output(500) for rank in range(2)
    }


def test_the_job_holds_no_descriptor_of_its_starter(site, tmp_path):
    """Else $(hvlaunch --detach ...) would wait for the job, and so would who holds a lock on a file."""
    read_end, write_end = os.pipe()
    detach(site, *worker(100, tmp_path / "go"), stdin=subprocess.DEVNULL, pass_fds=(write_end,))
    os.close(write_end)
    assert os.read(read_end, 1) == b""
    os.close(read_end)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["-np", "2", "/no/such/program"], 127, "/no/such/program"),
        (["-H", "no-such-host.invalid:1", "true"], 69, "no-such-host.invalid"),
        (["--ranks", "x", "true"], 2, "--ranks"),
    ],
)
def test_errors_before_the_start_are_reported_as_usual(site, words, code, message):
    started = detach(site, *words, stdin=subprocess.DEVNULL)
    alone = subprocess.run([*HVLAUNCH, *words], env=site.environ, capture_output=True, text=True, check=False)
    assert (started.stdout, started.returncode) == ("", code)
    assert alone.returncode == code
    assert message in started.stderr
    assert messages(started.stderr) == messages(alone.stderr)


def test_a_missing_job_directory_is_an_error(site, tmp_path):
    site.environ["XDG_STATE_HOME"] = "/proc/nothing"
    started = detach(site, "true", stdin=subprocess.DEVNULL)
    assert started.returncode == 2
    assert "--detach needs a directory for the job" in started.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_workers_run_is_for_the_job(site, silent_host, number):
    words = ["--ssh-client", "paramiko", *silent_host, "--start-timeout", "60", "true"]
    job = subprocess.Popen([*HVLAUNCH, "--detach", *words], env=site.environ, stderr=subprocess.DEVNULL)
    wait_until(lambda: known_jobs(site.root), "it begins")
    wait_until(lambda: listens(only_job(site)), "it listens")
    job.send_signal(number)
    assert job.wait(DEADLINE) == 128 + number


def test_ctrl_c_before_the_workers_run_ends_the_job(site, silent_host):
    with terminal(site, "--detach", "--ssh-client", "paramiko", *silent_host, "true") as (pid, master):
        wait_until(lambda: known_jobs(site.root), "it begins")
        wait_until(lambda: listens(only_job(site)), "it listens")
        os.write(master, b"\x03")
        read_until(master, b"interrupted")
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        assert ended.si_status == 130


def test_the_terminal_may_be_closed(site, tmp_path):
    with terminal(site, "--detach", "-np", "2", *worker(300, tmp_path / "go")) as (pid, _):
        wait_until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT), "it has detached")
    job = only_job(site)
    (tmp_path / "go").touch()
    assert site.do("wait", job.id) == 0
    assert kept(job)[0, "stdout"] == whole_output(300)


def test_the_job_survives_a_hangup_without_losing_a_line(site, tmp_path):
    words = ["--detach-on-hangup", "-np", "2", *worker(300, tmp_path / "go")]
    pid, master = pty.fork()
    if not pid:
        os.execve(sys.executable, [*HVLAUNCH, *words], site.environ)
    read_until(master, b"line 10\r\n")
    os.close(master)
    job = only_job(site)
    wait_until(lambda: Path(f"/proc/{pid}/fd/1").readlink() == Path(os.devnull), "it leaves")
    (tmp_path / "go").touch()
    os.waitpid(pid, 0)
    assert json.loads((job.directory / "result.json").read_text())["exit_code"] == 0
    output = kept(job)
    assert output[0, "stdout"] == whole_output(300)
    assert output[1, "stdout"] == whole_output(300)


def test_the_job_survives_the_end_of_its_outputs_reader(site, tmp_path):
    """As after `ssh machine hvlaunch ...` without a terminal, when ssh is gone: nobody sends SIGHUP."""
    words = [*HVLAUNCH, "--detach-on-hangup", *worker(300, tmp_path / "go")]
    job = subprocess.Popen(words, env=site.environ, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert job.stdout is not None
    job.stdout.readline()
    job.stdout.close()
    (tmp_path / "go").touch()
    known = only_job(site)
    assert job.wait(DEADLINE) == 0
    assert kept(known)[0, "stdout"] == whole_output(300)


def test_without_it_a_closed_terminal_ends_the_job(site, tmp_path):
    with terminal(site, *worker(300, tmp_path / "go")) as (_, master):
        read_until(master, b"line 10\r\n")
    result = only_job(site).result
    assert result is not None
    assert result["interrupted"] == "SIGHUP"


def test_a_second_hangup_changes_nothing(site, tmp_path):
    job = only_job_of(detach(site, *worker(100, tmp_path / "go"), stdin=subprocess.DEVNULL), site)
    for _ in range(3):
        os.kill(job.about["pid"], signal.SIGHUP)
    (tmp_path / "go").touch()
    assert site.do("wait", job.id) == 0


def test_a_successor_continues_the_job_of_a_killed_driver(site, tmp_path):
    job = only_job_of(detach(site, "-np", "2", *worker(300, tmp_path / "go"), stdin=subprocess.DEVNULL), site)
    waiting = subprocess.Popen([*HVLAUNCH, "wait", job.id], env=site.environ)
    for _ in range(2):
        killed = driver_pid(site)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda killed=killed: driver_pid(site) != killed, "another driver takes it over")  # type: ignore[misc]
    assert site.do("signal", "CONT", job.id) == 0
    assert waiting.poll() is None
    (tmp_path / "go").touch()
    assert site.do("wait", job.id) == 0
    assert {key: data for key, data in kept(job).items() if data} == {
        (rank, "stdout"): whole_output(300) for rank in range(2)
    }
    # The bill counts the time of the killed drivers too.
    result = json.loads((job.directory / "result.json").read_text())
    bill = result["bill"]
    assert bill["wall_seconds"] >= result["elapsed"] - 0.01
    assert sum(bill[f"{part}_seconds"] for part in PARTS) == pytest.approx(bill["wall_seconds"], abs=0.01)
    assert bill["training_seconds"] > 0


def test_the_exit_code_survives_a_driver_killed_at_its_last_lines(site):
    """Nobody reads what it prints; the engine has finished, and the agent has ended."""
    script = "import sys; print('x' * 1_500_000); sys.exit(3)"
    words = ["--detach-on-hangup", "--grace", "600", sys.executable, "-c", script]
    driver = start(site, *words)
    wait_until(lambda: b"HostClosed" in journal_bytes(site), "it is over")
    driver.kill()
    driver.communicate()
    assert site_code(site, "attach") == 3
    [result] = [job.result for job in known_jobs(site.root)]
    assert result is not None
    assert result["exit_code"] == 3


def journal_bytes(site: Site) -> bytes:
    """What the job's journal has so far."""
    return b"".join(file.read_bytes() for file in site.root.glob("*/journal"))


def without_keys(job: KnownJob) -> None:
    """As where the disk was full: each successor finds the same."""
    (job.directory / "keys.json").unlink()


def of_a_launcher(job: KnownJob) -> None:
    path = job.directory / "about.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "launcher": "mpirun"}))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [(without_keys, "no other can take it over"), (of_a_launcher, "no other can take over a job of mpirun")],
)
def test_a_viewer_learns_once_that_no_takeover_is_possible(site, tmp_path, spoil, told):
    words = ["--detach-on-hangup", *worker(100, tmp_path / "go")]
    driver = start(site, *words)
    assert driver.stdout is not None
    driver.stdout.readline()
    spoil(only_job(site))
    looking = start(site, "attach")
    assert looking.stdout is not None
    assert looking.stdout.read(1)
    driver.kill()
    _, said = looking.communicate(timeout=DEADLINE)
    driver.communicate()
    assert looking.returncode == EXIT_HOSTS
    assert said.decode().count(told) == 1


def driver_pid(site: Site) -> int:
    return int(only_job(site).about["pid"])


def test_a_driver_that_keeps_dying_is_not_replaced_for_ever(site, tmp_path):
    job = only_job_of(
        detach(site, "--lease", "4", *worker(300, tmp_path / "go"), stdin=subprocess.DEVNULL), site
    )
    for _ in range(3):
        killed = driver_pid(site)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda killed=killed: driver_pid(site) != killed, "another driver takes it over")  # type: ignore[misc]
    workers = [process for process in psutil.process_iter() if str(tmp_path / "go") in _words(process)]
    assert workers
    os.kill(driver_pid(site), signal.SIGKILL)
    _, alive = psutil.wait_procs(workers, DEADLINE)
    assert not alive
    assert not only_job(site).has_driver
    assert site_code(site, "wait", job.id) == 69


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def site_code(site: Site, *words: str) -> int:
    return subprocess.run([*HVLAUNCH, *words], env=site.environ, capture_output=True, check=False).returncode


def only_job_of(started: subprocess.CompletedProcess[str], site: Site) -> KnownJob:
    assert started.returncode == 0, started.stderr
    return only_job(site)
