"""Discovery: real scripts that answer, fail, hang and leave things behind; changes told once."""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hvlaunch.errors import BadHost, BadUsage, DiscoveryFailed, HvlaunchError
from hvlaunch.hosts import discovery as discovery_module
from hvlaunch.hosts.discovery import Discovery, HostFile, HostScript, host_source
from hvlaunch.job import ElasticOptions, Host

LONG = 60.0


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "discover it.sh"

    def write(text: str, limit: float = LONG) -> HostScript:
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return HostScript(str(path), limit)

    return write


def pid_in(file: Path) -> int | None:
    """None where the script was killed before it wrote, as on a starved machine."""
    text = file.read_text() if file.exists() else ""
    return int(text) if text else None


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("printed", "hosts"),
    [
        ("a:4\\nb:2\\n", [Host("a", 4), Host("b", 2)]),
        ("b\\na slots=3\\n", [Host("b"), Host("a", 3)]),
        ("gpu[1-2]:8  # rack 1\\n", [Host("gpu1", 8), Host("gpu2", 8)]),
        ("", []),
    ],
)
def test_lines_of_any_dialect_in_the_order_printed(script, printed, hosts):
    assert script(f"printf '{printed}'").read_hosts() == hosts


def test_a_command_with_arguments(tmp_path):
    assert HostScript("/bin/echo 'a:4'", LONG).read_hosts() == [Host("a", 4)]


@pytest.mark.parametrize("arguments", ["", " 'a:1'"])
def test_a_script_beside_us_needs_no_path(arguments, tmp_path, monkeypatch):
    (tmp_path / "discover.sh").write_text("#!/bin/sh\necho ${1:-a:1}\n")
    (tmp_path / "discover.sh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert HostScript(f"discover.sh{arguments}", LONG).read_hosts() == [Host("a", 1)]


@pytest.mark.parametrize("text", ["echo a", "#!/bin/sh\r\necho a"])
def test_a_file_that_is_not_a_program_is_refused(text, tmp_path):
    path = tmp_path / "script"
    path.write_text(text)
    path.chmod(0o755)
    with pytest.raises(BadUsage, match="check its first line, #!PROGRAM"):
        HostScript(str(path), LONG).read_hosts()


def test_the_script_gets_no_input_and_its_stderr_is_ignored(script):
    assert script("cat; echo noise >&2; echo a:1").read_hosts() == [Host("a", 1)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo the cloud is closed >&2; exit 3", "ended with status 3:\n  | the cloud is closed"),
        ("kill -9 $$", "was killed by SIGKILL"),
        ("printf '\\377\\n'", "not UTF-8"),
    ],
)
def test_a_failure_says_what_the_script_said(script, text, said):
    with pytest.raises(DiscoveryFailed) as caught:
        script(text).read_hosts()
    assert said in str(caught.value)
    assert "discover it.sh" in str(caught.value)
    assert caught.value.exit_code == 69


def test_a_bad_line_is_named(script):
    with pytest.raises(BadHost) as caught:
        script("echo a:1; echo b:none").read_hosts()
    assert caught.value.line == 2


def test_no_such_program_and_no_permission(tmp_path):
    with pytest.raises(BadUsage, match="no such file"):
        HostScript(str(tmp_path / "nowhere"), LONG).read_hosts()
    path = tmp_path / "script"
    path.write_text("#!/bin/sh\n")
    with pytest.raises(BadUsage, match="chmod"):
        HostScript(str(path), LONG).read_hosts()
    with pytest.raises(BadUsage, match="does not name a program"):
        HostScript("'", LONG)


def test_a_script_that_hangs_is_killed_with_its_children(script, tmp_path):
    pid_file = tmp_path / "pid"
    source = script(f"sleep 1000 & echo $! > {str(pid_file)!r}; echo why >&2; wait", limit=0.3)
    with pytest.raises(DiscoveryFailed, match=r"longer than 0\.3 s"):
        source.read_hosts()
    child = pid_in(pid_file)
    wait_for(lambda: child is None or is_gone(child))


def test_a_daemon_that_holds_the_pipes_does_not_hang_us(script, tmp_path):
    pid_file = tmp_path / "pid"
    source = script(f"setsid sh -c 'echo $$ > {pid_file}; exec sleep 100' & echo a:1")
    assert source.read_hosts() == [Host("a", 1)]
    daemon = pid_in(pid_file)
    if daemon is not None:
        os.kill(daemon, 9)


@pytest.mark.timeout(60)
def test_a_script_that_prints_without_end(script):
    with pytest.raises(DiscoveryFailed, match="printed more than 256 KiB"):
        script("exec yes host:1").read_hosts()


DRIVER = """if True:
    import sys
    from hvlaunch.hosts.discovery import HostScript
    HostScript(sys.argv[1], 1000.0).read_hosts()
"""


def test_a_script_ends_with_a_driver_that_is_killed(script, tmp_path):
    pids = tmp_path / "pids"
    source = script(f"sleep 1000 & echo $$ $! > {str(pids)!r}.new; mv {str(pids)!r}.new {str(pids)!r}; wait")
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, source.command])
    wait_for(pids.exists)

    def sweepers():
        children = psutil.Process(driver.pid).children()
        return [child for child in children if "kill -9" in "".join(child.cmdline()[-1:])]

    wait_for(sweepers)  # it may still be a fork of Python
    [sweeper] = sweepers()
    driver.kill()
    driver.wait()
    for pid in (*map(int, pids.read_text().split()), sweeper.pid):
        wait_for(lambda pid=pid: is_gone(pid))


def test_an_exception_does_not_end_discovery():
    class Odd:
        def __init__(self):
            self.looks = 0

        def read_hosts(self):
            self.looks += 1
            if self.looks == 1:
                raise MemoryError("no room")
            return [Host("a", 1)]

        def stop(self):
            pass

    told: queue.Queue[Sequence[Host] | HvlaunchError] = queue.Queue()
    discovery = Discovery(Odd(), told.put, told.put, interval=0.01)
    discovery.start()
    assert str(told.get(timeout=LONG)) == "the hosts could not be read: MemoryError: no room"
    assert told.get(timeout=LONG) == [Host("a", 1)]
    discovery.stop()


def test_changes_are_reported_once_and_failures_each_time(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("a:1\n")
    told: queue.Queue[Sequence[Host] | HvlaunchError] = queue.Queue()
    discovery = Discovery(HostFile(path, is_named=True), told.put, told.put, interval=0.01)
    discovery.start()
    assert told.get(timeout=LONG) == [Host("a", 1)]
    path.write_text("a:1\nb:1\n")
    while (now := told.get(timeout=LONG)) != [Host("a", 1), Host("b", 1)]:
        assert isinstance(now, BadUsage)  # seen while it was written
    path.unlink()
    assert isinstance(told.get(timeout=LONG), BadUsage)
    assert isinstance(told.get(timeout=LONG), BadUsage)
    new = tmp_path / "new"
    new.write_text("b:1\na:1\n")
    new.rename(path)
    while (now := told.get(timeout=LONG)) != [Host("b", 1), Host("a", 1)]:
        assert isinstance(now, BadUsage)
    discovery.stop()
    assert told.empty()


def test_hosts_and_slots_beyond_the_limits_are_not_used(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("a:4\nb:2\nc:1\n")
    options = ElasticOptions(min_np=1, hostfile=path)
    source = host_source(replace(options, most_hosts=2, per_host=2))
    assert source is not None
    assert source.read_hosts() == [Host("a", 2), Host("b", 2)]
    source = host_source(replace(options, per_host=0))
    assert source is not None
    assert source.read_hosts() == [Host("a"), Host("b"), Host("c")]
    source = host_source(replace(options, per_host=2))
    assert source is not None
    with pytest.raises(BadUsage, match="--nproc-per-node 2: host c has only 1 slot"):
        source.read_hosts()
    assert host_source(ElasticOptions(min_np=1)) is None


def test_stop_does_not_wait_for_a_look_that_is_stuck_in_the_kernel(monkeypatch):
    class Stuck:
        def __init__(self) -> None:
            self.began, self.goes_on = threading.Event(), threading.Event()

        def read_hosts(self) -> list[Host]:
            self.began.set()
            self.goes_on.wait(LONG)
            return [Host("a")]

        def stop(self) -> None:
            """Nothing ends it."""

    monkeypatch.setattr(discovery_module, "_STOPPING_TIME", 0.01)
    source = Stuck()
    told: queue.SimpleQueue[object] = queue.SimpleQueue()
    discovery = Discovery(source, told.put, told.put, interval=1000.0)
    discovery.start()
    source.began.wait(LONG)
    discovery.stop()
    source.goes_on.set()
    discovery._thread.join(LONG)
    assert told.empty()


def test_stop_ends_a_slow_look_without_a_callback(script, tmp_path):
    began = Path(tmp_path / "began")
    told: list[object] = []
    discovery = Discovery(script(f"touch {began}; sleep 1000"), told.append, told.append, interval=1000.0)
    discovery.start()
    wait_for(began.exists)
    stopper = threading.Thread(target=discovery.stop)
    stopper.start()
    stopper.join(LONG)
    assert not stopper.is_alive()
    assert told == []


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
