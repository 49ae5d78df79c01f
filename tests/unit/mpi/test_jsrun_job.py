"""A job of LSF's, with a jsrun that checks what it gets and starts the ranks here."""

import os
import re
import subprocess
import sys

import pytest

JSRUN = """\
#!{python}
import os, re, subprocess, sys
assert sys.argv[1] == "--erf_input" and sys.argv[3:9] == ["--env", "HVLAUNCH_DRIVER", "--env", "HVLAUNCH_DRIVER_CERT", "--env", "HVLAUNCH_ENTRY"], sys.argv
assert os.environ["HVLAUNCH_ENTRY"] not in " ".join(sys.argv)
ranks = re.findall(r"^rank: (\\d+): {{ hostname: (\\S+); cpu: {{(\\S+)}} ; gpu: \\* ; mem: \\* }}$", open(sys.argv[2]).read(), re.M)
assert ranks == [("0", "h1", "0-1"), ("1", "h1", "2-3"), ("2", "h2", "0-3")], ranks
started = []
for rank, host, _ in ranks:
    local = [r for r, h, _ in ranks if h == host]
    env = {{"RANK": rank, "SIZE": len(ranks), "LOCAL_RANK": local.index(rank), "LOCAL_SIZE": len(local)}}
    env = {{"JSM_NAMESPACE_" + name: str(value) for name, value in env.items()}}
    started.append(subprocess.Popen(sys.argv[9:], env=dict(os.environ, **env)))
sys.exit(max(one.wait() for one in started))
"""
LSF = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "batch1 1 h1 4 h2 4", "CSM_ALLOCATION_ID": "3"}


@pytest.fixture
def hvlaunch(tmp_path):
    program = tmp_path / "jsrun"
    program.write_text(JSRUN.format(python=sys.executable))
    program.chmod(0o755)
    env = {**os.environ, **LSF, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}

    def run(*words):
        line = [sys.executable, "-m", "hvlaunch", "--jsrun", *words]
        return subprocess.run(line, env=env, capture_output=True, text=True, timeout=100, check=False)

    yield run
    assert [path.name for path in tmp_path.iterdir()] == [
        "jsrun"
    ]  # neither a rankfile nor a scratch directory is left


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers run on Linux")
def test_the_ranks_are_where_the_rankfile_says(hvlaunch):
    job = hvlaunch(
        "-H", "h1:2,h2:1", "sh", "-c", "echo $RANK on $HVLAUNCH_HOST, $LOCAL_RANK of $LOCAL_WORLD_SIZE"
    )
    assert job.returncode == 0, job.stderr
    assert sorted(re.findall(r"\[\d\]<stdout>: (.*)", job.stdout)) == [
        "0 on h1, 0 of 2",
        "1 on h1, 1 of 2",
        "2 on h2, 0 of 1",
    ]
    failing = hvlaunch("-H", "h1:2,h2:1", "sh", "-c", "test $RANK = 2 && exit 7; sleep 3600")
    assert failing.returncode == 7
    assert "rank 2 of 3 on host h2 failed first" in failing.stderr


def test_the_hosts_are_those_of_the_allocation_without_the_launch_node(hvlaunch):
    plan = hvlaunch("--dry-run", "true")
    assert plan.returncode == 0, plan.stderr
    assert "hvlaunch: hosts of LSF job 7: h[1-2]" in plan.stderr
    assert "batch1" not in plan.stdout
    assert "jsrun --erf_input hvlaunch.erf" in plan.stdout
    assert "  rank: 7: { hostname: h2; cpu: {3-3} ; gpu: * ; mem: * }" in plan.stdout
