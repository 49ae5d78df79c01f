"""The example trains to what its README says, in one process and in several."""

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from hvlaunch.torch.backends import wait_until_idle
from tests.unit.torch.ranks import in_forks

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/ddp_digits.py"
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

pytestmark = pytest.mark.timeout(300)  # importing torch and scikit-learn is slow on a busy machine


def run(*command: str) -> list[str]:
    """The lines that rank 0 prints."""
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests/light")}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def accuracy(lines: list[str], *, ranks: int) -> float:
    found = re.fullmatch(rf"accuracy (0\.\d{{3}}|1\.000) seconds \d+\.\d ranks {ranks}", lines[-1])
    assert found, lines
    return float(found[1])


def run_with_torchrun(ranks: int, name: str = SCRIPT.name) -> list[str]:
    script = str(ROOT / "examples" / name)
    return run("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script)


@pytest.fixture
def in_fork(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """in_fork(name, ..., then=f): what an example prints in a process that has imported what it needs; f is called last."""
    import sklearn.datasets  # noqa: F401
    import torch._dynamo  # noqa: F401 (by the first optimizer)

    def work(name: str, arguments: tuple[str, ...], then: Callable[[], object]) -> list[str]:
        monkeypatch.syspath_prepend(SCRIPT.parent)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            import_module(name).main()
        then()
        return printed.getvalue().splitlines()

    def run(name: str, *arguments: str, then: Callable[[], object] = lambda: None) -> list[str]:
        lines: list[str]
        (lines,) = in_forks([0], lambda _rank: work(name, arguments, then))
        return lines

    for variable in LAUNCHER_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return run


@pytest.fixture(scope="module")
def one_process() -> list[str]:
    return run(str(SCRIPT))


def test_one_process_without_a_launcher_learns_the_digits(one_process):
    assert accuracy(one_process, ranks=1) > 0.95


def test_rank_0_alone_prints_and_the_accuracy_does_not_depend_on_the_ranks(one_process):
    lines = run_with_torchrun(2)
    assert len(lines) == len(one_process)
    assert accuracy(lines, ranks=2) == pytest.approx(accuracy(one_process, ranks=1), abs=0.01)


def test_the_same_seed_trains_the_same_and_another_does_not(in_fork):
    first, again, other = (in_fork("ddp_digits", "--epochs=1", f"--seed={seed}")[0] for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_hvlaunch_torch_under_torchrun_trains_as_plain_torch_does(one_process):
    lines = run_with_torchrun(2, "init_digits.py")
    assert accuracy(lines, ranks=2) == pytest.approx(accuracy(one_process, ranks=1), abs=0.01)


def test_the_example_is_plain_torch():
    assert "hvlaunch" not in SCRIPT.read_text()


@pytest.mark.parametrize("name", ["ddp_digits", "ddp_digits_checkpoint", "elastic_digits", "init_digits"])
def test_no_thread_of_gloos_is_left_that_could_abort_the_end_of_python(name, in_fork, tmp_path):
    arguments = [str(tmp_path / "digits.pt")] if name == "ddp_digits_checkpoint" else []

    def wait() -> None:
        assert wait_until_idle(sleep=lambda _: pytest.fail("a thread is at work"))

    assert in_fork(name, "--epochs=1", *arguments, then=wait)
