"""Test hosts come and go as they say: nothing is left of them, repairs, fixtures, and the command line."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.testhosts import hosts as testhosts
from tests.testhosts.hosts import TestHosts, TestHostsError, missing, wait_until
from tests.testhosts.keeper_client import KeeperClient
from tests.testhosts.test_hosts import CHECKOUT, connect, gone, namespaces, users_of


class TestTakingDown:
    def test_nothing_is_left(self, tmp_path: Path) -> None:
        mounts = Path("/proc/self/mountinfo").read_text()
        shared = namespaces(os.getpid())
        with contextlib.ExitStack() as held:
            with TestHosts(["a", "b"]) as hosts:
                hosts["b"].delay(5)
                hosts["b"].popen(["setsid", "sleep", "1000"])
                daemon = hosts.driver.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"]).stdout
                used = set()
                for place in (hosts.keeper, hosts.driver, *hosts):
                    used |= namespaces(place.pid) - shared
                    # A namespace that is gone leaves its number to the next, which may be another test's.
                    for kind in Path(f"/proc/{place.pid}/ns").iterdir():
                        held.enter_context(kind.open())
                assert int(daemon) in users_of(used)
                state = hosts.state
                assert state.exists()
            assert users_of(used) == set()
        assert gone(int(daemon))
        assert not state.exists()
        assert Path("/proc/self/mountinfo").read_text() == mounts

    def test_nor_after_a_failure_within(self) -> None:
        with pytest.raises(KeyboardInterrupt), TestHosts(["a"]) as hosts:
            raise KeyboardInterrupt
        assert gone(hosts.keeper.pid)
        assert gone(hosts["a"].pid)
        assert not hosts.state.exists()

    def test_nor_after_hosts_that_could_not_be_made(self) -> None:
        hosts = TestHosts(["a", "b"], hide={"b": ["/nowhere/at/all"]})
        with pytest.raises(TestHostsError, match="b did not start"), hosts:
            pytest.fail("there should be no hosts")
        assert gone(hosts.keeper.pid)
        assert not hosts.state.exists()

    @pytest.mark.parametrize("victim", ["owner", "keeper"])
    def test_nor_after_a_kill(self, victim: str, tmp_path: Path) -> None:
        script = f"""
            import json, time
            from tests.testhosts.hosts import TestHosts
            with TestHosts(["a", "b"]) as hosts:
                hosts["b"].delay(5)
                sleeps = [hosts["a"].popen(["sleep", "1000"]), hosts.driver.popen(["sleep", "1000"])]
                while not any("sleep" in process.argv for process in hosts.driver.processes()):
                    time.sleep(0.01)  # it is still on its way into the place
                pids = [hosts.driver.pid, hosts["a"].pid, hosts["b"].pid, *(sleep.pid for sleep in sleeps)]
                print(json.dumps([hosts.keeper.pid, pids, str(hosts.state)]), flush=True)
                sleeps[0].wait() if {victim == "keeper"} else time.sleep(1000)
        """
        owner = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
        )
        with owner:
            assert owner.stdout is not None
            keeper, pids, state = json.loads(owner.stdout.readline())
            os.kill(owner.pid if victim == "owner" else keeper, signal.SIGKILL)
            owner.wait(60)
        for pid in (keeper, *pids):
            wait_until(partial(gone, pid), f"process {pid} is gone")
        wait_until(lambda: not Path(state).exists(), "the files are gone")

    def test_instances_run_side_by_side(
        self, cluster: TestHosts, new_hosts: Callable[..., TestHosts]
    ) -> None:
        others = new_hosts(["a", "x"])
        assert others["a"].address == cluster["a"].address
        others["a"].kill()
        assert connect(cluster.driver, "a", 10) == "connected"
        assert connect(others.driver, "a", 0.5) == "TimeoutError"
        assert connect(others.driver, "x", 10) == "connected"

    def test_four_hosts_cost_little(self) -> None:
        begin = time.process_time()
        with TestHosts(4):
            pass
        assert time.process_time() - begin < 1


class TestRepair:
    def test_an_untouched_host_is_left_alone(self, cluster: TestHosts) -> None:
        pids = [host.pid for host in cluster]
        cluster.repair()
        assert [host.pid for host in cluster] == pids

    def test_all_that_was_done_is_undone(self, cluster: TestHosts) -> None:
        cluster["a"].cut()
        cluster["b"].delay(1000)
        cluster["c"].kill()
        cluster["d"].start_sshd(["Port 2222"])
        cluster.repair()
        for host in cluster:
            assert connect(cluster.driver, host.name, 5) == "connected"
            assert not host.touched


class TestFixtures:
    def run(self, folder: Path, text: str) -> str:
        """What pytest says of a test file that uses the fixtures of conftest.py."""
        (folder / "conftest.py").write_text("from tests.cluster.conftest import *\n")
        (folder / "test_it.py").write_text(textwrap.dedent(text))
        command = [sys.executable, "-m", "pytest", "-q", "-rsE", "-p", "no:cacheprovider", str(folder)]
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
        return subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=folder, env=environment
        ).stdout

    def test_a_test_that_leaves_a_process_fails_and_the_next_one_is_clean(self, tmp_path: Path) -> None:
        said = self.run(
            tmp_path,
            """
            import tests.cluster.conftest
            tests.cluster.conftest.SETTLE = 0.3

            def test_leaves(cluster):
                cluster["c"].cut()
                cluster["a"].popen(["setsid", "sleep", "1234"])
                assert tests.cluster.conftest.wait_until(cluster["a"].user_processes, "it runs")

            def test_next(cluster):
                assert cluster["a"].processes() == []
                assert cluster.driver.run(["ssh", "c", "hostname"]).stdout == "c\\n"
            """,
        )
        assert "2 passed, 1 error" in said
        assert "the test left running:" in said
        assert "sleep 1234" in said

    def test_where_hosts_cannot_be_made_tests_are_skipped_with_a_line(self, tmp_path: Path) -> None:
        said = self.run(
            tmp_path,
            """
            import pathlib
            import tests.cluster.conftest
            tests.cluster.conftest.HERE = pathlib.Path(__file__).parent
            tests.cluster.conftest.missing = lambda: "needs root, iproute2 and sshd: not root"

            def test_it(cluster):
                raise AssertionError
            """,
        )
        assert "1 skipped" in said
        assert "needs root, iproute2 and sshd: not root" in said


class TestKeeper:
    def test_a_request_that_fails_is_told_and_the_next_one_works(self, tmp_path: Path) -> None:
        state = tmp_path / "state"
        state.mkdir()
        keeper = KeeperClient(state)
        with pytest.raises(TestHostsError, match="KeyError: 'nobody'"):
            keeper.ask("members", "nobody")
        assert keeper.ask("start", []) == {}
        keeper.close()
        assert not state.exists()
        with pytest.raises((TestHostsError, ValueError)):
            keeper.ask("start", [])


class TestCommandLine:
    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.testhosts.hosts", *arguments]
        return subprocess.run(command, check=False, capture_output=True, text=True, cwd=CHECKOUT, timeout=60)

    def test_a_command_among_hosts(self) -> None:
        done = self.run("up", "2", "--user", "bob", "--", "sh", "-c", "ssh bob@b 'hostname; id -un'; exit 7")
        assert (done.stdout, done.stderr, done.returncode) == ("b\nbob\n", "", 7)

    def test_a_shell_among_hosts(self) -> None:
        command = [sys.executable, "-m", "tests.testhosts.hosts", "up", "n1"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=CHECKOUT, timeout=60,
                              input="ssh n1 hostname\n", env={**os.environ, "SHELL": "/bin/sh"})  # fmt: skip
        assert done.stdout == "n1\n"
        assert "try: ssh n1" in done.stderr

    def test_help_has_examples(self) -> None:
        assert "up a b" in self.run("up", "--help").stdout

    def test_a_bad_name_is_one_line(self) -> None:
        done = self.run("up", "B&B")
        assert (done.stderr, done.returncode) == ("testhosts: not a name for one more test host: B&B\n", 1)

    def test_ctrl_c_is_for_the_command_and_all_is_taken_down(self) -> None:
        script = "trap 'echo stopped; exit 5' INT; ssh a true; ls -d $HOME/../..; while :; do sleep 0.1; done"
        command = [sys.executable, "-m", "tests.testhosts.hosts", "up", "1", "--", "bash", "-c", script]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT, start_new_session=True
        ) as tool:
            assert tool.stdout is not None
            state = Path(tool.stdout.readline().strip())
            os.killpg(tool.pid, signal.SIGINT)
            assert tool.stdout.read() == "stopped\n"
            assert tool.wait(60) == 5
        assert not state.exists()


class TestMissing:
    def test_here_nothing_is(self) -> None:
        assert missing() is None

    def test_not_root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert missing() == "needs root, iproute2 and sshd: not root"

    def test_no_programs(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(testhosts, "PATH", str(tmp_path))
        assert (missing() or "").startswith("needs root, iproute2 and sshd: not installed: ip, nsenter")

    def test_a_condition_that_never_comes_is_named(self) -> None:
        with pytest.raises(TimeoutError, match="the moon is blue"):
            wait_until(lambda: False, "the moon is blue", timeout=0.01)
