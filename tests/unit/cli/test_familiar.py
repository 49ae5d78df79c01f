"""Options known from other launchers: what the job is that they ask for."""

import shlex

import pytest

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.spec import job_spec
from hvlaunch.errors import BadUsage
from hvlaunch.job import Host


def spec_of(line):
    spec, warnings = job_spec(parse(shlex.split(line)), {})
    assert warnings == []
    return spec


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
    assert (spec.slots_per_host, str(spec.output_dir), spec.cwd) == (4, "logs", "/data")
    assert spec_of("--nproc_per_node=gpu -H a true").slots_per_host is None


def test_so_many_hosts():
    assert spec_of("--nnodes 2 -H a,b:3,c true").hosts == (Host("a"), Host("b", slots=3))
    assert spec_of("--nnodes 1:1 true").hosts == (Host("localhost"),)
    assert spec_of("--nnodes=2:2 -H a,b true").elastic is None


def test_bounds_in_hosts():
    spec = spec_of("--nnodes=2:4 --nproc-per-node=8 --host-discovery-script ./d true")
    assert spec.elastic is not None
    assert (spec.elastic.min_np, spec.elastic.max_np, spec.np) == (16, 32, None)


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
        ("--nnodes 1:2 --nproc-per-node 2 --max-np 8 -H a,b true", "say the same"),
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
def test_what_makes_no_sense(line, cause):
    with pytest.raises(BadUsage, match=cause):
        spec_of(line)


def test_what_it_takes_is_not_loaded_for_a_line_that_needs_none():
    assert "hvlaunch.cli.familiar" not in _loaded("-np 2 true")
    assert "hvlaunch.cli.familiar" in _loaded("--nnodes 1 true")


def _loaded(line):
    import subprocess
    import sys

    script = "import sys; from hvlaunch.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script, "--dry-run", *line.split()], capture_output=True, text=True, check=True
    )
    return done.stdout.split()
