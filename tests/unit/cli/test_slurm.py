"""Batch scripts of Slurm: what their options ask for, what `srun` means in them, and which mistakes are named."""

import os
from functools import partial

import pytest

from hvlaunch.cli.jobs import queue_commands
from hvlaunch.cli.jobs.slurm import run_sbatch_command, script
from hvlaunch.cli.jobs.slurm.run import exported, job_variables, scontrol, step_of, task_variables
from hvlaunch.cli.jobs.slurm.script import (
    allocation,
    batch_options,
    expanded,
    read_options,
    read_script,
    read_submission,
    submission_of,
    submit,
)
from hvlaunch.errors import BadUsage
from hvlaunch.gloo.batch import Allocated
from hvlaunch.outside.queue import Queue

HOSTS = [Allocated(name, name, f"10.0.0.{number}", 8) for number, name in enumerate("abc", 1)]


def options_of(*lines):
    given, _ = read_script("\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines)]), "s.sh")
    return batch_options(given)


@pytest.mark.parametrize(
    ("lines", "fields"),
    [
        (["--nodes=2-4 --ntasks-per-node 8"], {"nodes": 2, "tasks": 16}),
        (["-N2", "-n 6"], {"nodes": 2, "tasks": 6, "ntasks_per_node": None}),
        (["--ntasks=8 --tasks-per-node=4"], {"node_count": 2, "tasks": 8}),
        (["-n8"], {"node_count": 1, "tasks": 8}),
        (["--gres=gpu:4"], {"gpus_per_node": 4}),
        (["--gres=gpu:a100:2(S:0-1),nvme:1"], {"gpus_per_node": 2}),
        (["--gres=gpu"], {"gpus_per_node": 1}),
        (["--gres=nvme:1"], {"gpus_per_node": None}),
        (["-N 2 --gpus=h100:8"], {"gpus_per_node": 4}),
        (["-N 2 --ntasks-per-node=4 --gpus-per-task=2"], {"gpus_per_node": 8, "gpus_per_task": 2}),
        (["--time=90"], {"time_limit": 5400.0}),
        (["-t 1:30"], {"time_limit": 90.0}),
        (["-t 1:30:00"], {"time_limit": 5400.0}),
        (["-t 2-12"], {"time_limit": 216000.0}),
        (["-t 2-12:30"], {"time_limit": 217800.0}),
        (["-t UNLIMITED"], {"time_limit": None}),
        (["--array=0-6:2,9%3"], {"array": (0, 2, 4, 6, 9), "array_limit": 3}),
        (
            ["-d afterok:12:13_2,afterany:14", "--hold"],
            {"after": (("12", "ok"), ("13_2", "ok"), ("14", "any")), "is_held": True, "unused": ()},
        ),
        (['--job-name="two words"  # a comment', "-J later"], {"job_name": "later"}),
        (
            ["--cpus_per_gpu 4 --mem=4G", "-p gpu --mem 8G -q x"],
            {"unused": ("--cpus-per-gpu", "--mem", "-q")},
        ),
    ],
)
def test_options_of_a_script(lines, fields):
    options = options_of(*lines)
    assert {name: getattr(options, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["-N 1", "--nodes=two"], "s.sh, line 3: #SBATCH --nodes=two: must be a number above 0"),
        (["--nodess=2"], "s.sh, line 2: #SBATCH --nodess is no option of sbatch; try: --nodes"),
        (["--nodes"], "s.sh, line 2: #SBATCH --nodes: a value is missing"),
        (["-N 2 train.py"], "s.sh, line 2: #SBATCH: 'train.py' is not an option"),
        (['-J "open'], "s.sh, line 2: no closing quotation"),
        (["-t soon"], "s.sh, line 2: #SBATCH --time=soon: must be a time; try: 90, 1:30:00 or 2-12:00:00"),
        (["--array=a-b"], "s.sh, line 2: #SBATCH --array=a-b: must be numbers and ranges; try: 0-31%4"),
        (["--array=1-20000"], "s.sh, line 2: #SBATCH --array=1-20000: 1000 tasks are the most"),
        (
            ["--dependency=afternotok:4"],
            "s.sh, line 2: #SBATCH --dependency=afternotok:4: must be afterok or afterany with jobs' numbers; try: afterok:12:13",
        ),
        (["--begin=now"], "s.sh, line 2: #SBATCH --begin=now: jobs can't wait for a time here"),
        (
            ["-N 2", "hetjob", "-N 1"],
            "s.sh, line 3: #SBATCH hetjob: an allocation of several kinds of hosts is not possible here",
        ),
        (
            ["-N 3 --gpus=4"],
            "s.sh, line 2: #SBATCH --gpus=4: 4 GPUs can't be shared evenly by 3 nodes; try: --gpus-per-node",
        ),
    ],
)
def test_mistakes_are_named_with_their_line(lines, message):
    with pytest.raises(BadUsage) as error:
        options_of(*lines)
    assert str(error.value) == message


def test_lines_after_the_first_command_and_comments_do_not_count():
    given, warnings = read_script(
        "#!/bin/bash\n##SBATCH -N 9\n\n# -N 8\n#SBATCH -N 2\necho\n#SBATCH -N 7\n", "s.sh"
    )
    assert [(option.name, option.value) for option in given] == [("nodes", "2")]
    assert warnings == ["s.sh, line 7: #SBATCH after the first command has no effect, as in Slurm"]
    with pytest.raises(BadUsage, match=r"^s\.sh: line 1 must name the shell"):
        read_script("echo\n", "s.sh")


def test_names_of_output_files():
    values = {"j": "42", "A": "40", "a": "2", "x": "train", "N": "gpu1"}
    assert expanded("%x-%j_%A-%a.%N.out", values) == "train-42_40-2.gpu1.out"
    assert expanded("%5j_%%j%q", values) == "00042_%j%q"


BATCH = {"SLURM_NTASKS": "6", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "42"}


@pytest.mark.parametrize(
    ("line", "environ", "counts"),
    [
        ("true", {}, [("a", 1), ("b", 1), ("c", 1)]),
        ("true", BATCH, [("a", 2), ("b", 2), ("c", 2)]),
        ("-N1 -n1 -w b hostname", BATCH, [("b", 1)]),
        ("-n 2 true", {}, [("a", 1), ("b", 1)]),
        ("-n 8 true", {}, [("a", 3), ("b", 3), ("c", 2)]),
        ("-n 4 true", BATCH, [("a", 2), ("b", 1), ("c", 1)]),
        ("-N 2 true", BATCH, [("a", 2), ("b", 2)]),
        ("-N 2 -n 5 true", {}, [("a", 3), ("b", 2)]),
        ("--ntasks-per-node=1 true", BATCH, [("a", 1), ("b", 1), ("c", 1)]),
        ("--nodelist=b,c --ntasks-per-node 4 true", {}, [("b", 4), ("c", 4)]),
        ("-x a true", {}, [("b", 1), ("c", 1)]),
        ("-r 2 -N1 -n1 true", {}, [("c", 1)]),
    ],
)
def test_tasks_of_a_step(line, environ, counts):
    assert list(step_of(line.split(), environ, HOSTS, 0).counts) == counts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-N 4 true", "srun: 4 nodes were asked for, and the job has 3"),
        ("-n 2", "srun: no command to run"),
        ("-w zz true", "srun: --nodelist=zz: zz is no host of the job; its hosts are a,b,c"),
        ("-x a,b,c true", "srun: --exclude=a,b,c: no host is left"),
        ("-r 3 true", "srun: --relative=3: must be a number below 3"),
        ("--pty bash", "srun: --pty: workers have no terminal"),
        ("--frob x", "srun: --frob is no option of srun"),
    ],
)
def test_mistakes_of_srun(line, message):
    with pytest.raises(BadUsage) as error:
        step_of(line.split(), {}, HOSTS, 0)
    assert str(error.value) == message


LINE = "-l -N2 -n3 -o %j_%t.out -e {x}%N.err --mem=1G --cpu_bind=v -m cyclic true"


def test_variables_of_a_step_and_its_files():
    step = step_of(LINE.split(), BATCH, HOSTS, 7)
    expected = {
        "SLURM_STEP_ID": "7",
        "SLURM_STEP_NODELIST": "a,b",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURM_PROCID": "{rank}",
        "SLURMD_NODENAME": "{host}",
    }
    assert {name: step.variables[name] for name in expected} == expected
    assert (step.files, step.has_own_files) == (("42_{rank}.out", "{{x}}{host}.err"), True)
    assert (step.is_labelled, step.by_node, step.unused) == (True, True, ())
    plain = step_of(["-o", "all {rank}.%j", "--begin=now", "true"], BATCH, HOSTS, 7)
    assert (plain.files, plain.has_own_files) == (("all {rank}.42", None), False)
    assert plain.unused == ("--begin",)


def test_variables_of_a_job():
    leased = [host._replace(leased=(f"GPU-{host.host}",)) for host in HOSTS[:2]]
    options = options_of("-N2 --ntasks-per-node=4 -c 3 --gpus-per-node=1")
    job = {"SLURM_JOB_ID": "42", "SLURM_JOB_NAME": "train"}
    variables = job_variables(options, job, leased)
    expected = {
        "SLURM_JOB_ID": "42",
        "SLURM_NTASKS": "8",
        "SLURM_NPROCS": "8",
        "SLURM_TASKS_PER_NODE": "4(x2)",
        "SLURM_CPUS_PER_TASK": "3",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
        "CUDA_VISIBLE_DEVICES": "GPU-a",
    }
    assert {name: variables[name] for name in expected} == expected
    # Not asked for, so srun decides.
    assert "SLURM_NTASKS" not in job_variables(options_of("-N 3"), job, HOSTS)


def test_values_of_the_script_are_stronger_than_values_of_hvlaunch():
    assert task_variables({"WORLD_SIZE": "8", "FOO": "1", "RANK": "{rank}", "HVLAUNCH_TOKEN": "x"}) == {
        "WORLD_SIZE": "8",
        "RANK": "{{rank}}",
    }


def test_export():
    base, environ = {"A": "1", "B": "2"}, {"A": "1", "C": "3"}
    assert exported("ALL", base, environ) == base
    assert exported("NONE", base, environ) == {}
    assert exported("ALL,C,D=4", base, environ) == {**base, "C": "3", "D": "4"}
    assert exported("A", base, environ) == {"A": "1"}


def test_scontrol():
    job = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "gpu[01-03]"}
    assert scontrol(["show", "hostnames"], {}, job) == "gpu01\ngpu02\ngpu03\n"
    assert scontrol(["show", "hostname", "b,a"], {}, job) == "b\na\n"
    assert scontrol(["show", "hostlist", "n1,n2"], {}, job) == "n[1-2]\n"
    assert scontrol(["show", "job", "42"], {}, job).startswith("JobId=42 ")
    with pytest.raises(BadUsage, match=r"^scontrol requeue 42: only"):
        scontrol(["requeue", "42"], {}, job)


@pytest.fixture
def environ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.sh").write_text("#!/bin/bash\n#SBATCH -N 2\n#SBATCH --gres=gpu:4\n")
    return {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}


def allocated(line, environ):
    given = submission_of(line.split(), environ)
    options, _ = given.options()
    return allocation(given, options, environ)[0]


def test_hosts_of_a_job(environ):
    plain = allocated("-H a:8,b:8,c:8 s.sh", environ)
    assert [(host.name, host.slots) for host in plain.hosts] == [("a", 1), ("b", 1)]
    assert plain.leases is None
    # With leases any two hosts with four free GPUs each, and not one with eight.
    leased = allocated("--lease-gpus -H a,b,c s.sh", environ)
    assert [(host.name, host.slots) for host in leased.hosts] == [("a", 1), ("b", 1), ("c", 1)]
    assert (leased.np, leased.gpus_per_worker) == (2, 4)
    assert leased.leases is not None
    slots = allocated("--lease-slots 16 -H a,b,c --ntasks-per-node=3 s.sh", environ)
    assert ({host.slots for host in slots.hosts}, slots.np, slots.gpus_per_worker) == ({3}, 6, 1)
    # A script without GPUs takes none, whatever the lab's file says.
    configured = {**environ, "HVLAUNCH_LEASE_GPUS": "true"}
    assert allocated("-H a,b --gres=nvme:1 s.sh", configured).leases is None
    for line, message in {
        "-H a s.sh": "s.sh asks for 2 nodes, and there are 1 hosts",
        "-H a,b --min-np 1 s.sh": "sbatch and elastic jobs can't be together",
    }.items():
        with pytest.raises(BadUsage, match=message):
            allocated(line, environ)


def test_kept_submission_is_the_submitted_one(environ, tmp_path, monkeypatch):
    environ |= {"HVLAUNCH_LEASE_GPUS": "true"}
    line = ["-H", "a,b", "--nodes=1", "-J", "x", "--hold", "--array=2,4"]
    first = submission_of([*line, "s.sh", "--flag", "two words"], environ)
    options, _ = first.options()
    spec, _ = allocation(first, options, environ)
    monkeypatch.setattr(script, "enqueue", partial(enqueue_without_server, monkeypatch))
    assert submit(first, options, spec, environ) == "1"
    (tmp_path / "s.sh").write_text("#!/bin/sh\nchanged\n")
    monkeypatch.setattr(os, "environ", {"RANK": "3"})
    folder = tmp_path / "state/hvlaunch/queue/1"
    kept, kept_spec = read_submission(folder)
    assert (kept, kept_spec) == (first, spec)
    assert kept.arguments == ("--flag", "two words")
    # Variables of the worker around the job would be those of its tasks.
    assert os.environ == environ
    assert (folder / "batch.json").stat().st_mode & 0o77 == 0
    jobs = Queue(tmp_path / "state/hvlaunch/queue").read()
    assert [(job.id, job.name, job.command, job.hosts, job.per_worker) for job in jobs.jobs.values()] == [
        (f"1_{task}", "x", "sbatch s.sh --flag 'two words'", ("a", "b"), 4) for task in (2, 4)
    ]
    # An array has a number for each of its tasks.
    assert jobs.next == 3
    (folder / "batch.json").write_text("{}")
    with pytest.raises(BadUsage, match="another version"):
        read_submission(folder)


def enqueue_without_server(monkeypatch, *words, **options):
    monkeypatch.setattr(queue_commands, "ensure_server", lambda _: None)
    return queue_commands.enqueue(*words, **options)


def test_words_behind_sbatch(environ, capsys):
    assert run_sbatch_command(["--help"], environ) == 0
    assert "usage: hvlaunch sbatch" in capsys.readouterr().out
    assert run_sbatch_command(["--test-only", "--mem=3G", "-H", "a,b", "s.sh"], environ) == 0
    assert capsys.readouterr().err == "hvlaunch: warning: s.sh: not used here: --mem\n"
    for line, message in {
        "": "sbatch: no script",
        "-H a": "sbatch: no script",
        "nosuch.sh": "nosuch.sh: no such file or directory",
        "--nodez=3 s.sh": "unknown option '--nodez'",
        "--begin=now s.sh": "--begin=now: jobs can't wait for a time here",
        "-H a,b --dependency=afterok:7 s.sh": "there is no job 7 in the queue",
    }.items():
        with pytest.raises(BadUsage, match=message):
            run_sbatch_command(line.split(), environ)


def test_options_of_sbatch_end_at_the_script():
    given, others = read_options(["-N2", "--wait", "s.sh"])
    assert ([option.name for option in given], others) == (["nodes", "wait"], ["s.sh"])
