"""What workers on real hosts are doing: asked for, and taken before they are stopped."""

import json
import subprocess
import sys
from pathlib import Path

from tests.cluster.jobs import HVLAUNCH, PROGRAMS, Job
from tests.testhosts.hosts import TestHosts, wait_until

LIMIT = 60.0


def test_stacks_of_all_hosts_on_request_and_before_a_kill(cluster: TestHosts, tmp_path: Path) -> None:
    state, fail = tmp_path / "state", Path("/var/tmp") / f"fail-{tmp_path.name}"
    env = {"XDG_STATE_HOME": str(state), "FAIL": str(fail)}
    shell = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, PROGRAMS / "odd_one.py"]
    job = Job(cluster, ["-H", "a:2,b:2,c:2,d:2", "-x", "FAIL", *shell], env=env)
    job.saw("<stdout>: up", 8)

    def ask(*words: str) -> str:
        asked = cluster.driver.popen(
            [*HVLAUNCH, "stacks", *words],
            env={**cluster.driver.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = asked.communicate(timeout=LIMIT)
        assert asked.returncode == 0, err.decode()
        return str(out.decode())

    told = wait_until(lambda: out if "ranks 1-6: main (odd_one.py:" in (out := ask()) else "", "stacks")
    assert told.index("  load (odd_one.py:") < told.index("  step (odd_one.py:")
    assert "the worker itself, sh -c" in told
    try:
        fail.touch()
        assert job.code() == 5
    finally:
        fail.unlink()
    assert "  Before they were stopped:\n    rank" in job.stderr
    name = job.stderr.partition("hvlaunch stacks ")[2].split()[0]
    found = [json.loads(line) for line in ask(name, "--json").splitlines()]
    assert {one["rank"] for one in found if one["threads"]} == set(range(1, 8))
