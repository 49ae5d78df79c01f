"""Results of hvlaunch.torch equal those of Horovod's own workers for the same inputs."""

import inspect
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import hvlaunch.torch as hvd
from hvlaunch.torch.group_errors import NotOffered
from tests.unit.torch import horovod_cases
from tests.unit.torch.ranks import in_worlds

ROOT = Path(__file__).parents[3]
FIRST_BY_PLACE = {"ProcessSet", "elastic.run"}
"""A name of Horovod's that no script uses."""
RECORDED = Path(__file__).parent / "horovod_results.json"


def differences(recorded):
    """Results of Horovod's workers and of ours by name, in order of rank, without functions that Horovod lacks."""
    ours = in_worlds(horovod_cases.SIZE, lambda rank: horovod_cases.found(hvd, rank))
    assert all(ranks.keys() == recorded["found"].keys() for ranks in ours)
    compared = {name: theirs for name, theirs in recorded["found"].items() if theirs != [None] * 3}
    assert len(compared) > 100
    return {
        name: (theirs, [ranks[name] for ranks in ours])
        for name, theirs in compared.items()
        if not horovod_cases.same([ranks[name] for ranks in ours], theirs)
    }


def test_results_equal_horovods():
    recorded = json.loads(RECORDED.read_text())
    assert recorded["horovod"] == "0.28.1"
    assert differences(recorded) == {}


def test_all_names_are_there_and_take_what_horovods_take():
    names = json.loads(RECORDED.read_text())["names"]
    assert len(names) > 60
    documented = (ROOT / "docs" / "reference" / "horovod.md").read_text()
    for name, takes in names.items():
        ours = attrgetter(name)(hvd)
        assert f"`{name}" in documented or name.removeprefix("elastic.") in documented, name
        if takes is not None:
            accepted = list(inspect.signature(ours).parameters)
            wanted = [word for word in takes if word not in ("args", "kwargs")]
            assert (
                accepted[bool(name in FIRST_BY_PLACE) : len(wanted)] == wanted[bool(name in FIRST_BY_PLACE) :]
            ), name


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum), "use Average"),
        (lambda: hvd.reducescatter(torch.ones(1), op=hvd.Adasum), "use Average"),
        (lambda: hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1)]), op=hvd.Adasum), "use Average"),
        (lambda: hvd.start_timeline("file"), r"use torch\.profiler"),
        (hvd.stop_timeline, r"use torch\.profiler"),
        (lambda: hvd.init(comm=[0]), r"use add_process_set\(\)"),
        (lambda: hvd.init(cast("Any", [0, 1])), r"use add_process_set\(\)"),
    ],
)
def test_missing_functions_name_a_replacement(call, hint):
    with pytest.raises(NotOffered, match=hint):
        call()


def test_how_torch_was_built_is_told_in_horovods_words():
    assert (hvd.gloo_built(), hvd.mpi_built(), hvd.mpi_enabled(), hvd.ddl_built(), hvd.ccl_built()) == (
        (True,) + (False,) * 4
    )
    assert hvd.gloo_enabled() != torch.cuda.is_available()
    assert bool(hvd.nccl_built()) == torch.cuda.is_available()
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert hvd.rocm_built() == (torch.version.hip is not None)
    assert not hvd.mpi_threads_supported()


def test_grouped_and_async_functions_have_horovods_parameters():
    """Each is written out, so that the reference has it."""
    assert str(inspect.signature(hvd.grouped_allgather)).startswith(
        "(tensors: 'Sequence[torch.Tensor]', name:"
    )
    assert str(inspect.signature(hvd.grouped_allreduce_)).startswith(
        "(tensors: 'Sequence[torch.Tensor]', average:"
    )
    assert str(inspect.signature(hvd.broadcast_)).startswith("(tensor: 'torch.Tensor', root_rank:")
    for name in (
        "allreduce_",
        "allreduce_async_",
        "broadcast_",
        "grouped_reducescatter_async",
        "grouped_allreduce_",
    ):
        assert getattr(hvd, name).__name__ == name


def test_all_functions_are_written_out_with_what_they_do():
    functions = {name: getattr(hvd, name) for name in hvd.__all__ if inspect.isroutine(getattr(hvd, name))}
    assert len(functions) > 50
    for name, function in functions.items():
        assert inspect.getsource(inspect.unwrap(function)).startswith(("def ", "@")), name
        assert inspect.unwrap(function).__code__.co_name == name
        assert function.__doc__, name
        if name.endswith(("_async", "_async_")):
            assert "tensor: " in function.__doc__ or "tensors: " in function.__doc__, name


@pytest.mark.long
@pytest.mark.skipif(
    find_spec("horovod") is None,
    reason="Horovod is not there: docs/reference/horovod.md says how to build it",
)
def test_all_is_as_with_horovod_itself(tmp_path):
    command = [sys.executable, "-m", "hvlaunch", "--horovod", "-np", str(horovod_cases.SIZE)]
    command += [
        "-x",
        "HOROVOD_DYNAMIC_PROCESS_SETS=1",
        sys.executable,
        horovod_cases.__file__,
        str(tmp_path / "found"),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=ROOT, env=env)
    found = json.loads((tmp_path / "found").read_text())
    assert differences(found) == {}
    assert found["found"] == json.loads(RECORDED.read_text())["found"]
