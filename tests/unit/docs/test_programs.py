"""The programs of the documents that stand for themselves are run as they are there, but with the hosts of this machine."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.docs.blocks import ROOT, blocks_of
from tests.unit.test_local_jobs import DEADLINE, HVLAUNCH

HERE = {'hosts="gpu01:4,gpu02:4"': 'hosts="localhost:2"', "np=8": "np=2", "range(100)": "range(2)"}
"""What a page says, and what is said on one small machine."""
OUTSIDE = re.compile("RANK|WORLD_SIZE|LOCAL_|MASTER_|GROUP_|HVLAUNCH_|OMP_NUM")

FAILS = """
try:
    test_two_workers_meet()
except AssertionError:
    print("FAILED")
"""


def program(page: str, *begin: str) -> str:
    """The page's blocks of Python that begin so; all without a word, one after the other."""
    blocks = [block.text for block in blocks_of(ROOT / "docs" / page) if block.language == "python"]
    chosen = [text for text in blocks if not begin or text.startswith(begin)]
    assert len(chosen) >= len(begin)
    text = "\n".join(chosen)
    for there, here in HERE.items():
        text = text.replace(there, here)
    return text


def run(home: Path, text: str, launcher: Sequence[str] = ()) -> str:
    """What the program prints."""
    (home / "program.py").write_text(text)
    env = {name: value for name, value in os.environ.items() if not OUTSIDE.match(name)}
    done = subprocess.run(
        [*launcher, sys.executable, "program.py"],
        cwd=home, env={**env, "HOME": str(home), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def as_workers(home: Path, text: str) -> list[str]:
    """What two workers print, without what tells which."""
    launcher = [*HVLAUNCH, "-np", "2", "--quiet", "--prefix", ""]
    return sorted(run(home, text, launcher).splitlines())


def test_functions_are_called_as_python_md_says(tmp_path):
    printed = run(tmp_path, program("guides/python.md")).splitlines()
    assert printed == ["{'rank': 0, 'epochs': 3}", "[{'rank': 0, 'epochs': 3}, {'rank': 1, 'epochs': 3}]"]


def test_a_function_is_tested_as_ci_md_says(tmp_path):
    text = program("guides/ci.md", "import os\n\nimport hvlaunch")
    run(tmp_path, f"{text}\ntest_two_workers_meet()\n")
    assert "FAILED" in run(tmp_path, text.replace("== [0, 1]", "== [1, 0]") + FAILS)


def test_tensorflow_would_find_its_workers(tmp_path):
    text = program("reference/environment.md", "import json, os") + "print(os.environ['TF_CONFIG'])\n"
    printed = as_workers(tmp_path, text)
    workers = '{"cluster": {"worker": ["127.0.0.1:29600", "127.0.0.1:29601"]}'
    assert printed == [f'{workers}, "task": {{"type": "worker", "index": {rank}}}}}' for rank in (0, 1)]


def test_workers_meet_at_the_rendezvous(tmp_path):
    text = program("reference/rendezvous.md") + "print(client.wait('stage', 'shards', timeout=60))\n"
    assert as_workers(tmp_path, text) == ["b'128'"] * 2


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_torch_md_shows_trains(tmp_path):
    optimizer, join = program("reference/torch.md", "import torch\nimport hvlaunch.torch as hvd").split(
        "import torch\n"
    )[1:]
    text = f"import torch\n{optimizer}\nhvd.shutdown()\nimport torch\n{join}\nprint(last)\n"
    assert as_workers(tmp_path, text) == ["1", "1"]
