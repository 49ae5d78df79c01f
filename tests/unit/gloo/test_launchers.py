"""Advice at the start about commands that are launchers themselves."""

from dataclasses import replace

import pytest

from hvlaunch.engine import events as on
from hvlaunch.hosts.templates import templates_of
from hvlaunch.job import ConsoleOptions, Templates
from hvlaunch.watch.narrator import Narrator
from hvlaunch.watch.sentences import launcher_advice
from tests.unit.gloo.history import History, spec


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("torchrun --nproc-per-node 2 train.py --lr 1", "hvlaunch … python train.py --lr 1"),
        ("/opt/venv/bin/torchrun train.py", "hvlaunch … python train.py"),
        ("python3 -m torch.distributed.run --standalone train.py", "hvlaunch … python train.py"),
        ("accelerate launch --num_processes 2 run.py", "hvlaunch … python run.py"),
        ("deepspeed train.py --deepspeed", "hvlaunch … python train.py --deepspeed"),
        ("mpirun -np 4 python train.py", "hvlaunch … --mpi python train.py"),
        ("mpiexec ./solver", "hvlaunch … --mpi python train.py"),
        ("horovodrun -np 2 python train.py", "hvlaunch … --horovod python train.py"),
        ("srun -N 2 python train.py", "hvlaunch … --srun python train.py"),
    ],
)
def test_command_that_is_a_launcher_gets_advice(command: str, advice: str) -> None:
    text = launcher_advice(tuple(command.split()))
    assert text is not None
    assert text.endswith(advice)


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nnodes 2 --node-rank 1 train.py",
        "torchrun --rdzv-backend=c10d train.py",
        "accelerate launch --num_machines 2 run.py",
        "accelerate test",
        "python train.py",
        "python -m train",
        "./run",
    ],
)
def test_other_commands_and_launchers_per_host_get_no_advice(command: str) -> None:
    assert launcher_advice(tuple(command.split())) is None


PLACES = templates_of(["torchrun", "x.py"], {"PET_NODE_RANK": "{node_rank}"}, {}, is_per_host=True)


@pytest.mark.parametrize(
    ("hosts", "quiet", "templates", "is_told"),
    [
        ("a:2", False, None, 1),
        ("a:1", False, None, 0),
        ("a:2", True, None, 0),
        # A preset of one launcher for each host, and one of a worker for each GPU.
        ("a:1,b:1", False, PLACES, 0),
        ("a:2,b:2", False, PLACES, 1),
    ],
)
def test_advice_is_said_once_for_several_workers(
    hosts: str, quiet: bool, templates: Templates | None, is_told: int
) -> None:
    job = replace(
        spec(hosts, console=ConsoleOptions(quiet=quiet)), command=("torchrun", "x.py"), templates=templates
    )
    said: list[str] = []
    narrator = Narrator(job, said.append, lambda _: None)
    for action in History(job).start().actions:
        narrator.watch(on.Tick(), [action], 0.0)
    assert sum("starts a job of its own" in text for text in said) == is_told
