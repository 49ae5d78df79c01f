"""Examples with others' trainers: under plain hvlaunch two ranks train one model, and it learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.long
"""`make ecosystem-tests` runs them: all but fsdp2 need the extra that it installs, and fsdp2 trains for ten seconds."""
GOOD = 0.9  # of the test images
WEIGHTS = re.compile(r"\[\d\]<stdout>: rank (\d) of 2 .*whose sum is (-?[0-9.]+)$", re.MULTILINE)
ACCURACY = re.compile(r"\[0\]<stdout>: accuracy (0\.\d{3}|1\.000)$", re.MULTILINE)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    ["fsdp2", "accelerate", "lightning", "trainer"],
)
def test_two_ranks_train_one_model(name: str) -> None:
    command = [
        sys.executable,
        "-m",
        "hvlaunch",
        "-np",
        "2",
        sys.executable,
        str(EXAMPLES / f"{name}_digits.py"),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = WEIGHTS.findall(done.stdout)
    assert sorted(rank for rank, _ in found) == ["0", "1"], done.stdout
    assert len({total for _, total in found}) == 1
    [share] = ACCURACY.findall(done.stdout)
    assert float(share) > GOOD
