"""A cluster: jobs on a pool of its own, of which nothing is left when its block ends, however it does."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import hvlaunch
from hvlaunch.errors import BadUsage, HvlaunchError
from tests.testhosts.places import wait_until

CALLER = """
import sys
import hvlaunch
with hvlaunch.Cluster(hosts="localhost:1", quiet=True) as cluster:
    print(cluster.pool, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "hvlaunch/pools"


def test_jobs_run_on_its_hosts_and_nothing_is_left_of_it(pools: Path) -> None:
    with hvlaunch.Cluster(hosts="localhost:2", quiet=True) as cluster:
        assert [pool.name for pool in pools.iterdir()] == [cluster.pool]
        for _ in range(2):
            assert cluster.run(os.getppid) != []
        assert len(cluster.run(max, (1, 2))) == 2
        job = cluster.start(max, (1, 2))
        assert job.results() == [2, 2]
    assert list(pools.iterdir()) == []
    assert not [each for each in psutil.Process().children() if "hold" in " ".join(each.cmdline())]


def test_an_error_in_the_block_ends_it_too(pools: Path) -> None:
    with pytest.raises(ZeroDivisionError), hvlaunch.Cluster(hosts="localhost:1") as cluster:
        assert (pools / str(cluster.pool)).exists()
        raise ZeroDivisionError
    assert list(pools.iterdir()) == []


def test_it_ends_with_a_caller_that_is_killed(pools: Path) -> None:
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with caller:
        assert caller.stdout is not None
        name = caller.stdout.readline().strip()
        assert (pools / name).exists()
        caller.kill()
    wait_until(lambda: not (pools / name).exists(), "the pool has ended")


def test_hosts_that_cannot_be_reached_are_an_error(pools: Path, tmp_path: Path) -> None:
    config = tmp_path / "ssh_config"
    config.write_text("Host *\n  HostName 127.0.0.1\n  Port 1\n")
    config.chmod(0o600)
    with (
        pytest.raises(HvlaunchError, match="refused"),
        hvlaunch.Cluster(hosts="nohost:1", ssh_config=str(config)),
    ):
        pass
    assert list(pools.iterdir()) == []


def rank() -> str:
    return os.environ["RANK"]


def seen() -> tuple[str, str | None]:
    return os.environ["HVLAUNCH_HOST"], os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("name", "value"),
    [("HOSTS", "localhost:1"), ("HOSTS", "otherhost:1"), ("HOSTFILE", "nofile"), ("POOL", "lab")],
)
def test_its_own_hosts_come_before_those_of_weaker_sources(
    name: str, value: str, pools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"HVLAUNCH_{name}", value)
    with hvlaunch.Cluster(hosts="localhost:2", quiet=True) as cluster:
        assert cluster.run(rank) == ["0", "1"]


def test_its_own_hosts_come_before_those_of_a_file(
    pools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hvlaunch.toml").write_text('hosts = "localhost:1"\n')
    monkeypatch.chdir(tmp_path)
    with hvlaunch.Cluster(hosts="localhost:2", quiet=True) as cluster:
        assert cluster.run(rank) == ["0", "1"]


def test_choice_of_hosts_is_reported_once(pools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = "localhost:1,127.0.0.2:1"
    with hvlaunch.Cluster(hosts=two, nnodes=2, quiet=True) as cluster:
        assert [host for host, _ in cluster.run(seen)] == ["localhost", "127.0.0.2"]
    with hvlaunch.Cluster(hosts=two, exclude="localhost", quiet=True) as cluster:
        assert [host for host, _ in cluster.run(seen)] == ["127.0.0.2"]
    monkeypatch.setenv("HVLAUNCH_EXCLUDE", "localhost")
    with hvlaunch.Cluster(hosts=two, quiet=True) as cluster:
        assert [host for host, _ in cluster.run(seen)] == ["127.0.0.2"]
    with hvlaunch.Cluster(hosts="localhost:4,127.0.0.2:1", include="localhost:1,3", quiet=True) as cluster:
        assert cluster.run(seen) == [("localhost", "1,3")] * 2


def test_hosts_are_needed() -> None:
    cluster = hvlaunch.Cluster(host_discovery_script="echo a:1", min_np=1)
    with pytest.raises(BadUsage, match="a Cluster needs hosts"), cluster:
        pass
