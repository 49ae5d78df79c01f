"""Options known from other launchers: what the job is that they ask for."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.spec import first_round, job_spec
from hvlaunch.errors import BadUsage, SlotsUnlikely
from hvlaunch.job import Host

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}
THREE = ("localhost", "127.0.0.1", "127.0.0.2")
"""This machine, by three names."""


def spec_of(line, environ=None):
    spec, warnings = job_spec(parse(shlex.split(line)), environ or {})
    assert warnings == []
    return spec


def slots_in(spec):
    return [(host.name, host.slots) for host in spec.hosts]


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("".join(f"{name} slots=1\n" for name in THREE))
    return path


def hosts_used(*words):
    """The hosts of the workers of a job that runs."""
    line = [
        sys.executable,
        "-m",
        "hvlaunch",
        "--isolated",
        *map(str, words),
        "sh",
        "-c",
        "echo $HVLAUNCH_HOST",
    ]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60)
    return sorted(each.rpartition(" ")[2] for each in done.stdout.splitlines())


@pytest.mark.parametrize(
    "line",
    [
        "-m train.main --lr 3",
        "--module -- train.main --lr 3",
        "--no-python python -m train.main --lr 3",
        "-m --no-python python -m train.main --lr 3",
    ],
)
def test_a_module(line):
    assert spec_of(line).command == ("python", "-m", "train.main", "--lr", "3")


def test_the_words_of_torchrun_for_slots_files_and_the_directory():
    spec = spec_of("--nproc-per-node 4 --log-dir logs -H a,b --wdir /data true")
    assert (slots_in(spec), str(spec.output_dir), spec.cwd) == ([("a", 4), ("b", 4)], "logs", "/data")


def test_so_many_workers_on_each_host_though_it_has_more_slots():
    assert slots_in(spec_of("--nnodes 2 --nproc_per_node 2 -H a:4,b:8,c:1 true")) == [("a", 2), ("b", 2)]
    assert slots_in(spec_of("--nproc-per-node 3 true")) == [("localhost", 3)]
    assert slots_in(spec_of("-np 2 --nproc-per-node 3 true")) == [("localhost", 3)]
    assert slots_in(spec_of("--nproc-per-node 3 true", SLURM)) == [("n1", 3), ("n2", 3)]
    with pytest.raises(SlotsUnlikely):
        spec_of("--nproc-per-node 2222 -H a true")


def test_gpus_that_are_counted_there():
    spec = spec_of("--nproc_per_node=gpu --slots-per-host 2 -H a:4,b true")
    assert (slots_in(spec), spec.slots_per_host) == ([("a", None), ("b", None)], None)
    assert slots_in(spec_of("--nproc-per-node auto true", SLURM)) == [("n1", None), ("n2", None)]
    spec = spec_of("--nproc-per-node gpu -H a:4,b:4 --include a:0,3@b true")
    assert slots_in(spec) == [("a", 2), ("b", None)]


def test_gpus_and_processors_of_this_machine(monkeypatch):
    processors = len(os.sched_getaffinity(0))
    assert slots_in(spec_of("--nproc-per-node cpu true")) == [("localhost", processors)]
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert slots_in(spec_of("--nproc-per-node auto true")) == [("localhost", processors)]
    with pytest.raises(BadUsage, match="no GPUs can be counted here"):
        spec_of("--nproc-per-node gpu true")
    monkeypatch.setattr(shutil, "which", lambda _: "/bin/true")
    assert slots_in(spec_of("--nproc-per-node gpu true")) == [("localhost", None)]
    assert slots_in(spec_of("--nproc-per-node auto true")) == [("localhost", None)]


def test_so_many_hosts():
    assert spec_of("--nnodes 2 -H a,b:3,c true").hosts == (Host("a"), Host("b", slots=3))
    assert spec_of("--nnodes 1:1 true").hosts == (Host("localhost"),)
    assert spec_of("--nnodes=2:2 -H a,b true").elastic is None


def test_bounds_in_hosts():
    spec = spec_of("--nnodes=2:4 --nproc-per-node=8 --host-discovery-script ./d true")
    assert spec.elastic is not None
    assert (spec.elastic.min_np, spec.elastic.max_np, spec.np) == (16, 32, None)
    assert (spec.elastic.per_host, spec.elastic.most_hosts) == (8, None)
    spec = spec_of("--nnodes=1:2 --nproc-per-node=2 -H a:4,b:4,c:4 true")
    assert slots_in(spec) == [("a", 2), ("b", 2), ("c", 2)]  # one may take another's place
    assert first_round(spec).np == 4
    spec = spec_of("--nnodes=1:2 --nproc-per-node=gpu -H a:4,b,c true")
    assert spec.elastic is not None
    assert (spec.elastic.min_np, spec.elastic.max_np, spec.elastic.most_hosts) == (1, None, 2)
    assert slots_in(spec) == [("a", None), ("b", None)]


@pytest.mark.parametrize(
    ("words", "bounds"),
    [
        ("--max_restarts=3", (4, 4)),
        ("--max-restarts 3 --min-np 2", (2, 4)),
        ("--max-np 3 --min-np 2", (2, 3)),
        ("--max-restarts 3 -np 3", (3, 4)),
    ],
)
def test_so_many_hosts_of_an_elastic_job(words, bounds):
    spec = spec_of(f"--nnodes=2 --nproc-per-node=2 {words} -H a:2,b:4,c:4 true")
    assert spec.elastic is not None
    assert (spec.elastic.min_np, spec.elastic.max_np) == bounds
    assert slots_in(spec) == [("a", 2), ("b", 2), ("c", 2)]


def test_nnodes_of_an_elastic_job_with_slots_in_its_hostfile(hostfile):
    spec = spec_of(f"--nnodes 2 --min-np 2 --hostfile {hostfile} true")
    assert spec.elastic is not None
    assert spec.elastic.most_hosts == 2
    assert slots_in(spec) == [(name, 1) for name in THREE[:2]]


@pytest.mark.parametrize(
    "words",
    [
        ("--nnodes", "2", "--min-np", "2"),
        ("--nnodes", "1:2", "--nproc-per-node", "1"),
        ("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3"),
        ("--nnodes", "2"),
    ],
)
def test_a_job_is_on_no_more_hosts(words, hostfile):
    assert hosts_used(*words, "--hostfile", hostfile) == sorted(THREE[:2])


def test_hosts_that_come_later_have_as_many_workers(tmp_path):
    script = tmp_path / "discover.sh"
    script.write_text("#!/bin/sh\necho localhost:4; echo 127.0.0.1:3\n")
    script.chmod(0o755)
    words = ("--nnodes", "1:2", "--nproc-per-node", "2", "--host-discovery-script", script)
    assert hosts_used(*words) == ["127.0.0.1"] * 2 + ["localhost"] * 2
    spec = first_round(spec_of(" ".join(map(str, (*words, "true")))))
    assert slots_in(spec) == [("localhost", 2), ("127.0.0.1", 2)]


def test_a_host_takes_the_place_of_one_that_fails(hostfile):
    hostfile.write_text("nohost.invalid:1\nlocalhost:1\n127.0.0.1:1\n127.0.0.2:1\n")
    words = ("--nnodes", "2", "--skip-bad-hosts", "--hostfile", hostfile)
    assert hosts_used(*words) == sorted(THREE[:2])
    hostfile.write_text("nohost.invalid:1\nlocalhost:2\n127.0.0.1:2\n")
    with pytest.raises(subprocess.CalledProcessError) as caught:  # who has how many is not the same for all
        hosts_used(*words)
    assert caught.value.returncode == 69
    assert "3 workers were asked for, but the hosts have only 2 slots" in caught.value.stderr


def test_good_hosts_as_many_as_workers_need():
    spec = spec_of("--nnodes 2 --skip-bad-hosts --nproc-per-node 3 -H a:4,b:3,c true")
    assert (spec.np, slots_in(spec)) == (6, [("a", 3), ("b", 3), ("c", 3)])
    spec = spec_of("--nnodes 2 -np 3 --skip-bad-hosts -H a:2,b:2,c:2 true")
    assert (spec.np, len(spec.hosts)) == (3, 3)


@pytest.mark.parametrize(
    ("words", "hidden"),
    [
        ("--tee 3", ()),
        ("--redirects 3", ("stderr", "stdout")),
        ("--redirects 3 --tee 2", ("stdout",)),
        ("--redirects 1", ("stdout",)),
        ("--redirects 0", ()),
    ],
)
def test_streams_that_are_shown(words, hidden):
    assert spec_of(f"{words} --output-filename logs true").console.hidden == hidden


def test_how_workers_are_dealt_out():
    assert spec_of("--map-by node -H a:4,b:4 true").map_by == "node"
    spec = spec_of("--map-by ppr:2:node -H a:4,b true")
    assert (spec.map_by, [host.slots for host in spec.hosts]) == ("slot", [2, 2])


def test_some_hosts_and_some_gpus():
    spec = spec_of("-H a:8,b:8,c:8 --include a@c:0,5 true")
    assert spec.hosts == (Host("a", slots=8), Host("c", slots=2))
    assert spec.visible_gpus == {"c": (0, 5)}
    assert spec_of("-H a,b --exclude a true").hosts == (Host("b"),)
    assert spec_of("--include localhost:1,3 true").visible_gpus == {"localhost": (1, 3)}


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("--nnodes 3 -H a,b true", "only 2 hosts are named"),
        ("--nnodes 3 true", "only 1 host is named"),
        ("--nnodes 3:2 -H a,b true", "3 is more than 2"),
        ("--nnodes 1:2 -H a,b true", "needs the number of workers on each host"),
        ("--nnodes 1:2 --slots-per-host 2 -H a,b true", "needs the number of workers on each host"),
        ("--nnodes 2:3 --nproc-per-node gpu -H a,b true", "needs the number of workers on each host"),
        ("--nnodes 1:2 --nproc-per-node 2 --max-np 8 -H a,b true", "mean the same"),
        ("--nnodes 2 --nproc-per-node 2 --min-np 5 -H a,b true", "--min-np 5 is more than the 4 of"),
        ("--nnodes 1:2 --nproc-per-node 2 -np 5 -H a,b true", "-np 5 is more than the 4 of"),
        ("--nnodes 2 --nproc-per-node 2 --max-np 5 -H a,b true", "--max-np 5 is more than the 4 of"),
        ("--nproc-per-node 4 -H a:4,b:3 true", "--nproc-per-node 4: host b has only 3 slots"),
        ("--nproc-per-node 2 -H a:4,b:1 --min-np 1 true", "--nproc-per-node 2: host b has only 1 slot"),
        ("--nproc-per-node cpu -H a true", "is for this machine alone"),
        ("--nproc-per-node cpu --pool p true", "is for this machine alone"),
        ("--nproc-per-node cpus true", "'cpus' is neither a whole number nor one of gpu"),
        ("--nnodes 2 --skip-bad-hosts -H a,b:1,c:1 true", "needs the number of workers on each host"),
        ("--nnodes 2 --min-np 2 --host-discovery-script ./d true", "come and go"),
        ("--tee 3 true", "needs a directory"),
        ("--redirects 4 --log-dir d true", "none of 0, 1, 2 and 3"),
        ("--map-by socket -H a true", "none of slot, node"),
        ("--map-by ppr:5:node -H a:4 true", "has only 4 slots"),
        ("--map-by ppr:0:node -H a:4 true", "0 is not between 1"),
        ("--map-by node --min-np 2 -H a:4 true", "--map-by is for static jobs"),
        ("--map-by node --mpi -H a:4 true", "the launcher deals out"),
        ("--include a --exclude b -H a,b true", "not allowed with"),
        ("--include a:0 --srun -H a:2,b:2 true", "the launcher deals out"),
        ("--include b --host-discovery-script ./d true", "--include is for static jobs"),
    ],
)
def test_impossible_selections_are_refused(line, cause):
    with pytest.raises(BadUsage, match=cause):
        spec_of(line)


def test_a_plain_line_does_not_load_the_module():
    assert "hvlaunch.cli.job_hosts" not in _loaded("-np 2 true")
    assert "hvlaunch.cli.job_hosts" in _loaded("--nnodes 1 true")


def _loaded(line):
    script = "import sys; from hvlaunch.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script, "--dry-run", *line.split()], capture_output=True, text=True, check=True
    )
    return done.stdout.split()
