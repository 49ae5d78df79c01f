"""Files that the user names: to all hosts by `hvlaunch cp` and `--bring`, and results back by `--collect`."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.heirs import Heir
from tests.cluster.jobs import HVLAUNCH, Job
from tests.cluster.test_sessions import kill_sshd
from tests.testhosts.hosts import TestHosts, wait_until

LIMIT = 90.0
MB = 1 << 20
PLACE = "/run/home/root/data"


class Copy:
    """A running `hvlaunch cp --json`."""

    def __init__(self, cluster: TestHosts, *words: object) -> None:
        self.process = cluster.driver.popen(
            [*HVLAUNCH, "cp", "--json", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, Any, str]:
        """Exit code, answer and messages."""
        stdout, stderr = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, json.loads(stdout) if stdout else None, stderr


@pytest.fixture
def model(tmp_path: Path, cluster: TestHosts) -> Path:
    for host in cluster:
        host.run(["sh", "-c", f"rm -rf {PLACE} ~/.cache/hvlaunch"])
    path = tmp_path / "model"
    (path / "sub").mkdir(parents=True)
    (path / "weights").write_bytes(os.urandom(48 * MB))
    (path / "sub/config").write_text("{}")
    (path / "sub/config").chmod(0o600)
    (path / "run").write_text("#!/bin/sh\n")
    (path / "run").chmod(0o755)
    (path / "link").symlink_to("sub/config")
    return path


def on_host(cluster: TestHosts, host: str, command: str) -> str:
    return str(cluster[host].run(["sh", "-c", command], check=True).stdout)


def sums(cluster: TestHosts, host: str) -> list[str]:
    return on_host(cluster, host, f"cd {PLACE}/model && find . -type f | sort | xargs sha256sum").split()


def sums_here(path: Path) -> list[str]:
    words = ["sh", "-c", "find . -type f | sort | xargs sha256sum"]
    return subprocess.run(words, cwd=path, capture_output=True, text=True, check=True).stdout.split()


def sent(cluster: TestHosts) -> int:
    """Bytes that the driver's place has sent, by its kernel's count."""
    words = ["sh", "-c", "cat /sys/class/net/*/statistics/tx_bytes | sort -n | tail -1"]
    return int(cluster.driver.run(words, check=True).stdout)


def test_a_directory_reaches_all_hosts_and_is_not_sent_again(cluster: TestHosts, model: Path) -> None:
    """The hosts pass it on; a link, a mode and nothing else are there; the second call sends only a changed file."""
    before = sent(cluster)
    code, answer, stderr = Copy(cluster, "-H", "a,b,c,d", model, f"{PLACE}/").end()
    assert code == 0, stderr
    size = sum(path.stat().st_size for path in model.rglob("*") if path.is_file() and not path.is_symlink())
    assert {host["received"] for host in answer["hosts"].values()} == {size}
    assert sent(cluster) - before < 1.3 * size
    for host in "abcd":
        assert sums(cluster, host) == sums_here(model)
    assert on_host(cluster, "a", f"ls -A {PLACE}; readlink {PLACE}/model/link").split() == [
        "model",
        "sub/config",
    ]
    assert on_host(cluster, "a", f"cd {PLACE}/model && stat -c %a run sub/config").split() == ["755", "600"]
    (model / "sub/config").write_text("{1}")
    on_host(cluster, "b", f"echo mine > {PLACE}/model/other; echo x >> {PLACE}/model/run")
    code, answer, stderr = Copy(cluster, "-H", "a,b", model, f"{PLACE}/model").end()
    assert code == 0, stderr
    assert [answer["hosts"][host]["received"] for host in "ab"] == [3, 3 + len("#!/bin/sh\n")]
    assert on_host(cluster, "b", f"cat {PLACE}/model/other {PLACE}/model/sub/config") == "mine\n{1}"


def test_a_host_is_the_source_until_it_is_killed(cluster: TestHosts, model: Path) -> None:
    """The source dies on the way: an error names it, what has come stays, and the next call sends only the other parts."""
    code, _, stderr = Copy(cluster, "-H", "a", model, f"{PLACE}/").end()
    assert code == 0, stderr
    words = ("--lease", 6, "-H", "b,c", f"a:{PLACE}/model", f"{PLACE}/model")
    copy = Copy(cluster, *words)
    # Slow enough that it is killed on the way.
    wait_until(
        lambda: not cluster["b"].run(["sh", "-c", f"ls {PLACE}/.model.hvlaunch/*.part"]).returncode,
        "content comes to b",
        LIMIT,
    )
    cluster["a"].kill()
    code, answer, stderr = copy.end()
    assert code == 69
    assert "host a" in stderr
    assert "the same command" in stderr
    whole = [host for host in "bc" if answer["hosts"][host]["received"]]
    for host in "bc":
        assert (
            (sums(cluster, host) == sums_here(model))
            if host in whole
            else on_host(cluster, host, f"ls {PLACE}") == ""
        )
    cluster["a"].restore()
    code, answer, stderr = Copy(cluster, *words).end()
    assert code == 0, stderr
    for host in "bc":
        assert sums(cluster, host) == sums_here(model)
    # The parts that had come were not sent again.
    assert any(answer["hosts"][host]["received"] < 48 * MB for host in "bc")


def test_what_can_not_be_copied_is_named(cluster: TestHosts, model: Path) -> None:
    code, _, stderr = Copy(cluster, "-H", "b", f"a:{PLACE}/nothing", PLACE).end()
    assert code == 69
    assert "host a: No such file or directory" in stderr
    on_host(cluster, "a", f"mkdir -p {PLACE}/model/run/x")
    code, _, stderr = Copy(cluster, "-H", "a,b", model, f"{PLACE}/model").end()
    assert code == 69
    assert f"host a: {PLACE}/model/run is a directory, and a file would replace it" in stderr
    assert sums(cluster, "b") == sums_here(model)


def test_workers_have_the_files_that_were_brought(cluster: TestHosts, model: Path) -> None:
    on_host(cluster, "b", f"mkdir -p {PLACE} && echo 1 > {PLACE}/of-b")
    words = ["--bring", f"{model}:{PLACE}/model", "--bring", f"b:{PLACE}/of-b:{PLACE}/copy-of-b"]
    job = Job(cluster, [*words, "-H", "a:1,b:1,c:1", "cat", f"{PLACE}/copy-of-b", f"{PLACE}/model/link"])
    assert job.code(LIMIT) == 0, job.stderr
    assert job.stdout.count("1\n") == 3
    assert job.stdout.count("{}") == 3


def test_a_host_that_joins_later_gets_the_files_of_the_start_from_another_host(
    cluster: TestHosts, model: Path, tmp_path: Path
) -> None:
    """Meanwhile the driver was killed, and neither source has its files."""
    on_host(cluster, "a", f"mkdir -p {PLACE} && echo 1 > {PLACE}/of-a")
    pool = tmp_path / "pool"
    pool.write_text("a:1\n")
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {pool}\n")
    script.chmod(0o755)
    words = ["--bring", f"{model}:{PLACE}/model", "--bring", f"a:{PLACE}/of-a:{PLACE}/copy"]
    elastic = ["-np", 1, "--min-np", 1, "--max-np", 2, "--host-discovery-script", script]
    alive = ["--reconnect-timeout", 30, "--lease", 30]
    worker = f"cat {PLACE}/model/link {PLACE}/copy; [ $WORLD_SIZE = 2 ] || sleep 1000"
    job = Job(cluster, [*map(str, [*words, *elastic, *alive]), "sh", "-c", worker])
    job.saw("{}1")
    before = sums_here(model)
    heir = Heir(cluster, job.process)
    heir.kill()
    shutil.rmtree(model)
    on_host(cluster, "a", f"rm {PLACE}/of-a")
    successor = heir.succeed()
    pool.write_text("a:1\nb:1\n")
    assert successor.wait(LIMIT) == 0, heir.stored
    assert sums(cluster, "b") == before
    assert on_host(cluster, "b", f"cat {PLACE}/copy") == "1\n"


def results(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


WORK = "/run/home/root/work"


def test_files_of_a_failed_job_come_back_by_host(cluster: TestHosts, tmp_path: Path) -> None:
    """100 files of each host, of a job that fails; links and devices stay there. Later the other files come on request."""
    script = "mkdir -p out; for n in $(seq 100); do echo $RANK.$n > out/$n.txt; done; mkfifo out/pipe; ln -s /etc/passwd out/evil; exit 3"
    for host in cluster:
        host.run(["sh", "-c", f"rm -rf {WORK}; mkdir -p {WORK}"])
    words = ["-H", "a:1,b:1,c:1,d:1", "--cwd", WORK, "sh", "-c", f"{script}"]
    job = Job(cluster, ["--collect", f"out/**:{tmp_path}/res", *words])
    assert job.code(LIMIT) == 3, job.stderr
    assert results(tmp_path / "res") == sorted(
        f"{host}/out/{n}.txt" for host in "abcd" for n in range(1, 101)
    )
    assert (tmp_path / "res/c/out/7.txt").read_text() == "2.7\n"
    assert "400 files of 4 hosts" in job.stderr
    assert "host d: stays there: out/evil: it is a link that leads out" in job.stderr
    assert "out/pipe: it is neither" in job.stderr
    on_host(cluster, "a", f"echo more > {WORK}/more.log")
    done = hvlaunch(cluster, "collect", job_id(cluster), f"*.log:{tmp_path}/later")
    assert done.returncode == 0, done.stderr
    assert results(tmp_path / "later") == ["a/more.log"]


def hvlaunch(cluster: TestHosts, *words: object) -> "subprocess.CompletedProcess[str]":
    return cluster.driver.run([*HVLAUNCH, *map(str, words)])


def job_id(cluster: TestHosts) -> str:
    """The newest job."""
    return str(json.loads(hvlaunch(cluster, "jobs", "--json").stdout.splitlines()[-1])["id"])


def test_a_running_job_is_asked_and_a_lost_connection_changes_nothing(
    cluster: TestHosts, tmp_path: Path
) -> None:
    """Files come while the job runs. Then it ends by Ctrl-C, and its connection is cut while its files come."""
    on_host(cluster, "b", f"rm -rf {WORK}; mkdir -p {WORK}")
    # Slow enough for what happens on the way.
    cluster["b"].delay(20)
    script = "head -c 64M /dev/urandom > big; echo 1 > a.log; echo begun; sleep 1000"
    words = ["-H", "b:1", "--reconnect-timeout", 30, "--lease", 30, "--cwd", WORK, "sh", "-c", script]
    job = Job(cluster, ["--collect", f"big:{tmp_path}/res", *words])
    job.saw("begun")
    done = hvlaunch(cluster, "collect", job_id(cluster), f"*.log:{tmp_path}/now")
    assert done.returncode == 0, done.stderr
    assert results(tmp_path / "now") == ["b/a.log"]
    job.send(signal.SIGINT)
    wait_until(lambda: [*(tmp_path / "res").glob(".b.hvlaunch/*.part")] != [], "content comes", LIMIT)
    kill_sshd(cluster)
    assert job.code(LIMIT) == 130, job.stderr
    assert on_host(cluster, "b", f"sha256sum < {WORK}/big") == digest(tmp_path / "res/b/big")
    assert results(tmp_path / "res") == ["b/big"]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() + "  -\n"


def test_a_killed_driver_leaves_what_came_and_the_next_call_brings_the_others(
    cluster: TestHosts, tmp_path: Path
) -> None:
    on_host(cluster, "b", f"rm -rf {WORK}; mkdir -p {WORK}")
    # Slow enough for what happens on the way.
    cluster["b"].delay(20)
    script = "for n in 1 2 3; do head -c 24M /dev/urandom > $n.bin; done"
    job = Job(cluster, ["--collect", f"*.bin:{tmp_path}/res", "-H", "b:1", "--cwd", WORK, "sh", "-c", script])
    wait_until(lambda: [*(tmp_path / "res").glob(".b.hvlaunch/*")] != [], "content comes", LIMIT)
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    wait_until(lambda: not cluster["b"].user_processes(), "nothing runs", LIMIT)
    job = Job(cluster, ["--collect", f"*.bin:{tmp_path}/res", "-H", "b:1", "--cwd", WORK, "true"])
    assert job.code(LIMIT) == 0, job.stderr
    assert results(tmp_path / "res") == ["b/1.bin", "b/2.bin", "b/3.bin"]
    assert on_host(cluster, "b", f"sha256sum < {WORK}/2.bin") == digest(tmp_path / "res/b/2.bin")


@pytest.mark.long
@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("victim", ["driver", "receiver"])
def test_a_copy_is_whole_or_not_there_whatever_is_killed(
    cluster: TestHosts, model: Path, victim: str, number: int
) -> None:
    copy = Copy(cluster, "--lease", 5, "-H", "a,b,c", model, f"{PLACE}/model")
    time.sleep(0.3 + 0.1 * number)
    if victim == "driver":
        os.kill(copy.process.pid, signal.SIGKILL)
    else:
        cluster["b"].kill()
    copy.end()
    if victim == "receiver":
        cluster["b"].restore()
    wait_until(lambda: not any(host.user_processes() for host in cluster), "nothing runs", LIMIT)
    for host in "abc":
        names = on_host(cluster, host, f"ls {PLACE} 2>/dev/null || true").split()
        assert names in ([], ["model"])
        assert not names or sums(cluster, host) == sums_here(model)
    code, _, stderr = Copy(cluster, "-H", "a,b,c", model, f"{PLACE}/model").end()
    assert code == 0, stderr
    for host in "abc":
        assert sums(cluster, host) == sums_here(model)
        assert on_host(cluster, host, f"ls -A {PLACE}").split() == ["model"]
