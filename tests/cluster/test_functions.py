"""Functions on real hosts: docs/guides/python.md."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import HVLAUNCH, PROGRAMS
from tests.testhosts.hosts import CHECKOUT, TestHosts, wait_until

HOSTS = "a:2,b:2,c:2,d:2"
LIMIT = 120.0


def begin(hosts: TestHosts, *words: str, **env: str) -> "subprocess.Popen[bytes]":
    return hosts.driver.popen(
        [sys.executable, str(PROGRAMS / "functions.py"), *words],
        env={**hosts.driver.env, "PYTHONPATH": str(CHECKOUT), **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )


def call(hosts: TestHosts, *words: str) -> Any:
    return answer(begin(hosts, *words))


def answer(process: "subprocess.Popen[bytes]") -> Any:
    out, _ = process.communicate(timeout=LIMIT)
    return json.loads(out.splitlines()[-1])


def test_results_and_tracebacks_by_rank(cluster: TestHosts) -> None:
    places = [[rank, "abcd"[rank // 2], "abcd"[rank // 2]] for rank in range(8)]
    assert call(cluster, HOSTS, "places") == places
    rank, host, cause, story, ends = call(cluster, HOSTS, "fail")
    assert (rank, host, cause) == (2, "b", "LookupError('nothing there')")
    assert "in fail" in story
    assert ends == [[number, "abcd"[number // 2], True] for number in range(8) if number != 2]


def test_a_warm_pool_calls_functions_too(cluster: TestHosts, tmp_path: Path) -> None:
    cluster.driver.run([*HVLAUNCH, "pool", "up", "functions", "-H", "a:1,b:1"], check=True, cwd=CHECKOUT)
    try:
        for _ in range(2):
            assert call(cluster, "pool=functions", "places") == [[0, "a", "a"], [1, "b", "b"]]
        process = begin(cluster, "pool=functions", "wait", TMPDIR=str(tmp_path))
        read_ready(process, 2)
        assert list(tmp_path.glob("hvlaunch-call-*"))
        process.kill()
        process.communicate(timeout=LIMIT)
        wait_until(lambda: not list(tmp_path.iterdir()), "nothing of the call is left here", LIMIT)
    finally:
        cluster.driver.run([*HVLAUNCH, "pool", "down", "functions", "--kill"], check=True, cwd=CHECKOUT)


def test_large_results_come_whole(cluster: TestHosts) -> None:
    assert call(cluster, "a:1,b:1", "large", str(16 << 20)) == [True, True]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_result_of_a_gigabyte_comes_whole(cluster: TestHosts) -> None:
    process = begin(cluster, "a:1", "large", str(1 << 30))
    out, _ = process.communicate(timeout=800)
    assert json.loads(out) == [True]


def test_a_lost_host_and_an_interrupt_end_the_call(new_hosts: Callable[..., TestHosts]) -> None:
    hosts = new_hosts(["a", "b"])
    process = waiting(hosts)
    hosts["b"].kill()
    kind, host = answer(process)
    assert (kind, host) == ("HostLost", "b")
    process = begin(hosts, "a:2", "wait")
    assert process.stdout is not None
    read_ready(process, 2)
    process.send_signal(signal.SIGINT)
    assert answer(process) == "interrupted"
    wait_until(lambda: not hosts["a"].user_processes(), "nothing is left", LIMIT)


def waiting(hosts: TestHosts) -> "subprocess.Popen[bytes]":
    process = begin(hosts, "a:1,b:1", "wait")
    read_ready(process, 2)
    return process


def read_ready(process: "subprocess.Popen[bytes]", count: int) -> None:
    assert process.stdout is not None
    for _ in range(count):
        assert process.stdout.readline().endswith(b"ready\n")


def test_hosts_with_only_python_receive_everything_for_the_call(
    new_hosts: Callable[..., TestHosts],
) -> None:
    version = "{}.{}".format(*sys.version_info)
    if not Path(f"/usr/bin/python{version}").exists() or sys.base_prefix == "/usr":
        pytest.skip(f"no other Python {version} here")
    hidden = [str(CHECKOUT), sys.base_prefix]
    hidden += [] if Path(sys.prefix).is_relative_to(CHECKOUT) else [sys.prefix]
    hosts = new_hosts(["a", "b"], hide={"b": hidden})
    here, there = call(hosts, "a:1,b:1", "modules")
    assert here[0] == sys.executable
    assert there[0].startswith("/usr/bin/python")
    assert all("/hvlaunch-" in path and "/call/" in path for path in there[1:])
