"""The hosts that other tests stand on are what they say."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.cluster.conftest import clear, running
from tests.testhosts.hosts import TestHosts, TestHostsError, wait_until
from tests.testhosts.places import Place

T = TypeVar("T", str, bytes)

CHECKOUT = Path(__file__).parents[2]
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")

CONNECT = """
import socket, sys, time
try:
    socket.create_connection((sys.argv[1], 22), timeout=float(sys.argv[2])).close()
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""

# Leaves its parent, session and terminal behind, as a daemon does, and says when that is done.
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("/tmp/daemon", "w").write(str(os.getpid()))
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        time.sleep(1000)
    os._exit(0)
os.wait()
"""


def ssh(hosts: TestHosts, name: str, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return hosts.driver.run([*SSH, name, *command], **options)


def connect(place: Place, address: str, timeout: float) -> str:
    """What a TCP connection to port 22 comes to: connected, or the name of the error."""
    return place.run([sys.executable, "-c", CONNECT, address, str(timeout)], check=True).stdout.strip()


def namespaces(pid: int) -> set[str]:
    return {str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in ("net", "mnt", "pid", "uts", "ipc")}


def users_of(names: set[str]) -> set[int]:
    """Processes of this machine that are in one of these namespaces."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/*"):
        with contextlib.suppress(OSError):
            if str(link.readlink()) in names:
                found.add(int(link.parts[2]))
    return found


@contextlib.contextmanager
def killed_after(process: subprocess.Popen[T]) -> Iterator[subprocess.Popen[T]]:
    """So that a test that fails does not wait for the process."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


class TestNames:
    def test_each_host_has_its_own_name_and_address(self, cluster: TestHosts) -> None:
        for host in cluster:
            told = ssh(cluster, host.name, "hostname; hostname -I; ip -o -4 route get 10.77.0.1").stdout
            assert told.split()[0] == host.name
            assert host.address in told
            assert host.address6 in told
        assert len({host.address for host in cluster} | {host.address6 for host in cluster}) == 8

    def test_hosts_know_each_other_by_name(self, cluster: TestHosts) -> None:
        for host in cluster:
            for other in cluster:
                assert connect(host, other.name, 10) == "connected"

    @pytest.mark.parametrize("way", ["name", "address", "address6"])
    def test_a_host_is_reached_by(self, cluster: TestHosts, way: str) -> None:
        assert ssh(cluster, getattr(cluster["c"], way), "hostname", check=True).stdout == "c\n"

    def test_an_unknown_name_fails_at_once(self, cluster: TestHosts) -> None:
        begin = time.monotonic()
        assert connect(cluster.driver, "nowhere.example", 30) == "gaierror"
        assert time.monotonic() - begin < 25

    def test_nothing_gets_out(self, cluster: TestHosts) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        script = f"import socket; socket.create_connection(('127.0.0.1', {listening.getsockname()[1]}), 5)"
        with listening:
            assert "refused" in cluster.driver.run([sys.executable, "-c", script]).stderr
            assert "refused" in cluster["a"].run([sys.executable, "-c", script]).stderr
        assert cluster["a"].run(["ip", "route", "get", "192.0.2.1"]).returncode != 0

    def test_the_network_devices_in_sysfs_are_the_hosts_own(self, cluster: TestHosts) -> None:
        assert cluster["a"].run(["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]

    @pytest.mark.parametrize("names", [["A b"], ["driver"], ["a", "a"], ["-x"]])
    def test_names_that_cannot_be(self, names: list[str]) -> None:
        with pytest.raises(TestHostsError, match="not a name"):
            TestHosts(names)

    def test_a_number_is_a_count(self) -> None:
        assert TestHosts(3).names == ["a", "b", "c"]
        assert len(set(TestHosts(300).names)) == 300


class TestFiles:
    def test_tmp_and_run_and_shm_are_private(self, cluster: TestHosts, tmp_path: Path) -> None:
        for folder in ("/tmp", "/run", "/dev/shm"):
            cluster["a"].run(["touch", f"{folder}/only-here"], check=True)
            assert cluster["b"].run(["test", "-e", f"{folder}/only-here"]).returncode == 1
            assert not Path(folder, "only-here").exists()
            cluster["a"].run(["rm", f"{folder}/only-here"], check=True)

    def test_the_checkout_and_this_python_are_there(self, cluster: TestHosts) -> None:
        done = ssh(
            cluster, "a", f"cd {CHECKOUT} && {sys.executable} -c 'import tests.cluster, pytest; print(5)'"
        )
        assert (done.stdout, done.stderr) == ("5\n", "")

    def test_homes_are_the_hosts_own(self, cluster: TestHosts) -> None:
        ssh(cluster, "a", "echo 5 > ~/note", check=True)
        assert (cluster["a"].home / "root" / "note").read_text() == "5\n"
        assert ssh(cluster, "b", "cat ~/note").returncode == 1
        (cluster["a"].home / "root" / "note").unlink()

    def test_read_sees_what_the_host_sees(self, cluster: TestHosts) -> None:
        assert cluster["a"].read("/etc/hosts") == cluster.driver.run(["cat", "/etc/hosts"]).stdout
        with pytest.raises(subprocess.CalledProcessError):
            cluster["a"].read("/nothing")

    def test_hidden_paths_are_missing_on_that_host_only(self, new_hosts: Callable[..., TestHosts]) -> None:
        hosts = new_hosts(["a", "b"], hide={"b": [str(CHECKOUT / "tests"), "/usr/bin/head", "/usr/bin/tail"]})
        look = ["sh", "-c", f"ls {CHECKOUT}/tests/testhosts; command -v head; command -v tail"]
        on_a = hosts["a"].run(look).stdout.split()
        assert "hosts.py" in on_a
        assert on_a[-2:] == ["/usr/bin/head", "/usr/bin/tail"]
        assert hosts["b"].run(look).stdout == ""
        assert hosts["b"].run(["head", "/etc/hosts"]).returncode == 127
        assert Path("/usr/bin/head").exists()

    def test_hide_names_a_host(self) -> None:
        with pytest.raises(TestHostsError, match="no host of these: z"):
            TestHosts(["a"], hide={"z": ["/srv"]})

    def test_a_shared_directory_below_tmp(self, new_hosts: Callable[..., TestHosts], tmp_path: Path) -> None:
        (tmp_path / "word").write_text("five")
        assert new_hosts(["a"], share=[str(tmp_path)])["a"].read(str(tmp_path / "word")) == "five"


class TestUsers:
    def test_root_has_the_given_shell_and_others_log_in_too(
        self, new_hosts: Callable[..., TestHosts]
    ) -> None:
        hosts = new_hosts(["a"], users=["bob", "root:/bin/sh"])
        assert ssh(hosts, "bob@a", "id -un; pwd; echo $SHELL; touch ~/x").stdout.split() == [
            "bob",
            "/run/home/bob",
            "/bin/bash",
        ]
        assert ssh(hosts, "a", "id -un; echo $SHELL").stdout.split() == ["root", "/bin/sh"]
        assert (hosts["a"].home / "bob" / "x").stat().st_uid == 2001

    def test_a_stranger_is_denied(self, cluster: TestHosts) -> None:
        assert "Permission denied (publickey)" in ssh(cluster, "nobody-here@a", "true").stderr


class TestDriver:
    def test_a_command_is_the_process_that_was_started(self, cluster: TestHosts, tmp_path: Path) -> None:
        command = ["sh", "-c", "echo $$ $PWD $X; read _"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started = cluster.driver.popen(command, cwd=tmp_path, env={**cluster.driver.env, "X": "5"}, **pipes)
        with killed_after(started) as shell:
            assert shell.stdout is not None
            assert shell.stdout.readline().split() == [str(shell.pid), str(tmp_path), "5"]
            assert [process.pid for process in cluster.driver.processes()] == [shell.pid]
            shell.send_signal(signal.SIGTERM)
            assert shell.wait(60) == -signal.SIGTERM

    def test_home_is_empty_but_for_ssh(self, cluster: TestHosts) -> None:
        assert sorted(cluster.driver.run(["ls", "-A", cluster.driver.env["HOME"]]).stdout.split()) == [".ssh"]
        files = cluster.driver.run(["sh", "-c", "ls ~/.ssh"]).stdout.split()
        assert {"id_ed25519", "id_ed25519.pub", "known_hosts"} <= set(files) <= {*files, "known_hosts.old"}

    @pytest.mark.parametrize("where", ["driver", "a"])
    def test_a_command_past_its_time_is_killed_with_its_children(
        self, cluster: TestHosts, where: str
    ) -> None:
        place = cluster.driver if where == "driver" else cluster["a"]
        with pytest.raises(subprocess.TimeoutExpired):
            place.run(["sh", "-c", "sleep 1000 & sleep 1000"], timeout=0.3)
        wait_until(lambda: not running(cluster), "nothing is left")

    def test_exit_codes_and_input_pass_through(self, cluster: TestHosts) -> None:
        for place in (cluster.driver, cluster["b"]):
            assert place.run(["sh", "-c", "cat; exit 7"], input="five").returncode == 7
            assert place.run(["cat"], input="five").stdout == "five"
            assert place.run(["no-such-command"]).returncode == 127


class TestProcesses:
    def test_an_idle_host_has_none(self, cluster: TestHosts) -> None:
        wait_until(lambda: not any(host.processes() for host in cluster), "earlier sessions are gone")

    def test_pids_are_the_hosts_own(self, cluster: TestHosts) -> None:
        with killed_after(cluster["a"].popen(["sleep", "1000"])) as enter:
            command = ("sleep", "1000")
            wait_until(lambda: [p.argv for p in cluster["a"].user_processes()] == [command], "sleep runs")
            (sleep,) = cluster["a"].user_processes()
            assert cluster["a"].run(["cat", f"/proc/{sleep.pid}/comm"]).stdout == "sleep\n"
            assert cluster["b"].user_processes() == []
            cluster["a"].run(["kill", str(sleep.pid)])
            enter.wait(60)
        assert cluster["a"].user_processes() == []

    def test_an_ssh_session_is_sshd_and_the_command(self, cluster: TestHosts) -> None:
        opened = cluster.driver.popen([*SSH, "a", "exec cat"], stdin=-1, stdout=-1, bufsize=0)
        with killed_after(opened) as session:
            assert echo(session, b"hello\n") == b"hello\n"
            assert [process.argv for process in cluster["a"].user_processes()] == [("cat",)]
            assert len(cluster["a"].processes()) > 1
            session.communicate(timeout=60)
        wait_until(lambda: cluster["a"].processes() == [], "the session is gone")

    def test_a_daemon_is_seen_and_belongs_to_the_first_process(self, cluster: TestHosts) -> None:
        ssh(cluster, "a", f"{sys.executable} -c '{DAEMON}'".replace('"', '\\"').replace("'", '"'), check=True)
        wait_until(lambda: cluster["a"].run(["cat", "/tmp/daemon"]).stdout, "the daemon has said its pid")
        (daemon,) = wait_until(
            lambda: [process for process in cluster["a"].user_processes() if process.ppid == 1],
            "it is an orphan",
        )
        assert len(cluster["a"].user_processes()) == 1
        assert daemon.pid == int(cluster["a"].read("/tmp/daemon"))
        clear(cluster)
        assert cluster["a"].user_processes() == []

    def test_orphans_are_reaped(self, cluster: TestHosts) -> None:
        for _ in range(20):
            cluster["a"].run(["sh", "-c", "(sleep 0.01 &) ; true"], check=True)
        wait_until(lambda: len(list(Path(f"/proc/{cluster['a'].pid}/root/proc").glob("[0-9]*"))) == 2,
                   "only the first process and sshd are left, and no zombie")  # fmt: skip

    def test_what_a_test_leaves_is_told_and_cleared(self, new_hosts: Callable[..., TestHosts]) -> None:
        hosts = new_hosts(["a", "b"])
        on_host, at_driver = hosts["b"].popen(["sleep", "1001"]), hosts.driver.popen(["sleep", "1002"])
        wait_until(lambda: len(running(hosts)) == 2, "both run")
        assert [line.split()[0] for line in running(hosts)] == ["driver:", "b:"]
        clear(hosts)
        assert on_host.wait(60) != 0
        assert at_driver.wait(60) == -signal.SIGKILL
        assert running(hosts) == []
        hosts.repair()
        assert ssh(hosts, "b", "hostname").stdout == "b\n"


@pytest.fixture
def session(cluster: TestHosts) -> Iterator[subprocess.Popen[bytes]]:
    """An open `ssh b cat`, which echoes."""
    command = [*SSH, "-o", "ServerAliveInterval=0", "b", "exec cat"]
    with killed_after(cluster.driver.popen(command, stdin=-1, stdout=-1, bufsize=0)) as process:
        assert echo(process, b"hello\n") == b"hello\n"
        yield process


def echo(session: subprocess.Popen[bytes], line: bytes) -> bytes:
    assert session.stdin is not None
    assert session.stdout is not None
    session.stdin.write(line)
    return session.stdout.readline()


def later(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


class TestCut:
    def test_connecting_meets_silence_and_works_again_when_healed(self, cluster: TestHosts) -> None:
        a, b, driver = cluster["a"], cluster["b"], cluster.driver
        ways = [
            (driver, b.address),
            (driver, b.address6),
            (a, b.address),
            (b, a.address),
            (b, driver.address),
        ]
        b.cut()
        with ThreadPoolExecutor() as pool:  # longer than 3 s, when an ARP that gives up would say so
            assert list(pool.map(lambda way: connect(way[0], way[1], 4), ways)) == ["TimeoutError"] * 5
        assert connect(a, cluster["c"].address, 10) == "connected"
        b.heal()
        assert [connect(*way, 10) for way in ways[:4]] == ["connected"] * 4
        assert connect(*ways[4], 10) == "ConnectionRefusedError"

    def test_an_open_session_hears_nothing_and_goes_on_when_healed(
        self, cluster: TestHosts, session: subprocess.Popen[bytes]
    ) -> None:
        cluster["b"].cut()
        heard: list[bytes] = []
        reader = later(lambda: heard.append(echo(session, b"anyone\n")))
        reader.join(1)
        assert reader.is_alive()
        assert session.poll() is None
        cluster["b"].heal()
        reader.join(30)
        assert heard == [b"anyone\n"]

    def test_the_host_does_not_see_that_it_is_cut(self, cluster: TestHosts) -> None:
        cluster["b"].cut()
        assert cluster["b"].read("/sys/class/net/eth0/carrier") == "1\n"


class TestKill:
    def test_everything_is_gone_and_nobody_is_told(
        self, cluster: TestHosts, session: subprocess.Popen[bytes]
    ) -> None:
        host = cluster["b"]
        used = namespaces(host.pid) - namespaces(os.getpid())
        with contextlib.ExitStack() as held:
            # A namespace that is gone leaves its number to the next, which may be another test's.
            for kind in Path(f"/proc/{host.pid}/ns").iterdir():
                held.enter_context(kind.open())
            host.kill()
            assert users_of(used) == set()
        assert host.pid == 0
        assert host.processes() == []
        assert connect(cluster.driver, host.address, 1) == "TimeoutError"
        reader = later(lambda: echo(session, b"anyone\n"))
        reader.join(1)
        assert reader.is_alive()
        with pytest.raises(TestHostsError, match="host b is off"):
            host.run(["true"])
        session.kill()
        reader.join(60)

    def test_restored_it_is_the_same_host_after_a_boot(
        self, cluster: TestHosts, session: subprocess.Popen[bytes]
    ) -> None:
        host = cluster["b"]
        host.run(["touch", "/tmp/before"], check=True)
        boot_id, address = host.read("/proc/sys/kernel/random/boot_id"), host.address
        host.kill()
        host.restore()
        assert ssh(cluster, "b", "hostname; cat /proc/sys/kernel/random/boot_id").stdout != f"b\n{boot_id}"
        assert host.address == address
        assert host.run(["test", "-e", "/tmp/before"]).returncode == 1
        assert session.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it may know already
            session.stdin.write(b"anyone\n")
        assert session.wait(30) == 255  # the new kernel knows nothing of the old connection, and resets it

    def test_a_host_that_was_cut_and_late_can_be_killed(self, cluster: TestHosts) -> None:
        host = cluster["c"]
        host.delay(5)
        host.cut()
        host.kill()
        host.kill()
        host.restore()
        assert ssh(cluster, "c", "hostname").stdout == "c\n"


class TestDelay:
    def round_trip(self, cluster: TestHosts) -> float:
        """The shortest of three TCP handshakes with b, in seconds, as the driver place sees it."""
        script = (
            "import socket, sys, time\n"
            "def once():\n"
            "    begin = time.monotonic()\n"
            "    socket.create_connection((sys.argv[1], 22)).close()\n"
            "    return time.monotonic() - begin\n"
            "once()\n"
            "print(min(once() for _ in range(3)))\n"
        )
        return float(
            cluster.driver.run([sys.executable, "-c", script, cluster["b"].address], check=True).stdout
        )

    def test_it_is_added_in_both_directions_and_taken_away(self, cluster: TestHosts) -> None:
        def takes(least: float, most: float) -> bool:
            """A busy machine makes it longer, never shorter."""
            measured = self.round_trip(cluster)
            assert measured >= least
            return measured < most

        wait_until(lambda: takes(0, 0.1), "no delay")
        cluster["b"].delay(100)
        wait_until(lambda: takes(0.2, 0.3), "100 ms each way")
        cluster["b"].delay(150)
        wait_until(lambda: takes(0.3, 0.4), "150 ms each way")
        cluster["b"].delay(0)
        wait_until(lambda: takes(0, 0.1), "no delay")

    def test_bytes_arrive_whole_and_an_open_session_lives_on(
        self, cluster: TestHosts, session: subprocess.Popen[bytes]
    ) -> None:
        cluster["b"].delay(10)
        assert echo(session, b"late\n") == b"late\n"
        done = ssh(
            cluster, "b", "head -c 3000000 /dev/zero | tee /dev/stderr | sha256sum", check=True, timeout=60
        )
        here = subprocess.run(
            "head -c 3000000 /dev/zero | sha256sum", shell=True, check=True, capture_output=True, text=True
        )
        assert (done.stdout, len(done.stderr)) == (here.stdout, 3_000_000)

    def test_a_late_host_can_be_cut_and_stays_late(self, cluster: TestHosts) -> None:
        cluster["b"].delay(100)
        cluster["b"].cut()
        assert connect(cluster.driver, "b", 1) == "TimeoutError"
        cluster["b"].delay(110)
        assert connect(cluster.driver, "b", 1) == "TimeoutError"
        cluster["b"].heal()
        assert self.round_trip(cluster) >= 0.22


class TestSshd:
    def test_a_changed_host_key_is_noticed_until_repaired(self, cluster: TestHosts) -> None:
        before = cluster["d"].host_key
        cluster["d"].new_host_key()
        assert cluster["d"].host_key != before
        refused = ssh(cluster, "d", "true")
        assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in refused.stderr
        cluster["d"].kill()
        cluster["d"].restore()
        assert ssh(cluster, "d", "true").returncode == 255
        cluster.repair()
        assert cluster["d"].host_key == before
        assert ssh(cluster, "d", "true").returncode == 0

    def test_stopped_it_refuses_at_once_and_open_sessions_stay(
        self, cluster: TestHosts, session: subprocess.Popen[bytes]
    ) -> None:
        cluster["b"].stop_sshd()
        assert connect(cluster.driver, "b", 30) == "ConnectionRefusedError"
        assert echo(session, b"still here\n") == b"still here\n"
        cluster["b"].start_sshd()
        assert connect(cluster.driver, "b", 30) == "connected"

    def test_extra_settings_win(self, cluster: TestHosts) -> None:
        cluster["a"].start_sshd(["PubkeyAuthentication no", "PasswordAuthentication yes"])
        assert "Permission denied (password)" in ssh(cluster, "a", "true").stderr
        cluster["a"].start_sshd(["Port 2222"])
        assert connect(cluster.driver, "a", 30) == "ConnectionRefusedError"
        assert ssh(cluster, "a", "-p2222", "-o", "HostKeyAlias=a", "true").returncode == 0

    def test_bad_settings_are_told(self, cluster: TestHosts) -> None:
        with pytest.raises(
            TestHostsError, match=r"^sshd of a does not start: .*line 1: Bad .*option: NoSuchSetting"
        ):
            cluster["a"].start_sshd(["NoSuchSetting yes"])

    def test_the_log_names_who_came(self, cluster: TestHosts) -> None:
        ssh(cluster, "a", "true", check=True)
        assert f"Accepted publickey for root from {cluster.driver.address}" in cluster["a"].sshd_log()
