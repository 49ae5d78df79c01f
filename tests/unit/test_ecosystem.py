"""Others' programs: examples with their trainers, in which two ranks train one model that learns; and servers' own parsers."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli import own_parser
from tests.unit.cli.test_presets import commands

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


SMALL = ("cbor2", "msgspec", "orjson", "pydantic", "regex")
"""What the parsers really need; the rest of their programs' packages is several GB."""
PLACES = {"{host_ip}": "10.0.0.9", "{master_addr}": "10.0.0.1"}


def sources(program: str, folder: Path) -> Path:
    """Return the program's unpacked wheel, with the packages that its parser needs: 340 MB for vLLM, 40 MB for SGLang."""
    target = folder / "sources"
    for more in ([program], SMALL):
        words = ["--no-deps" if more == [program] else "--only-binary=:all:", "--target", str(target), *more]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", *words],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"pip can't get {' '.join(more)}: {done.stderr.splitlines()[-1]}")
    return target


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("program", "lines"),
    [
        (
            "vllm",
            {
                "--for vllm -H a,b,c vllm serve M --tensor-parallel-size 8 --pipeline-parallel-size 3": [
                    {
                        "model_tag": "M",
                        "tensor_parallel_size": 8,
                        "pipeline_parallel_size": 3,
                        "nnodes": 3,
                        "node_rank": rank,
                        "master_addr": "10.0.0.1",
                        "master_port": 29501,
                        "headless": rank > 0,
                    }
                    for rank in range(3)
                ],
                "--for vllm-dp -H a:2,b:4,c:2 vllm serve M --data-parallel-size 8": [
                    {
                        "data_parallel_size": 8,
                        "data_parallel_size_local": size,
                        "data_parallel_start_rank": first,
                        "data_parallel_address": "10.0.0.1",
                        "data_parallel_rpc_port": 29501,
                        "headless": first is not None,
                    }
                    for size, first in ((2, None), (4, 2), (2, 6))
                ],
            },
        ),
        (
            "sglang",
            {
                "--for sglang -H a,b,c python3 -m sglang.launch_server --model-path M --tp 24": [
                    {
                        "model_path": "M",
                        "tp_size": 24,
                        "dist_init_addr": "10.0.0.1:29501",
                        "nnodes": 3,
                        "node_rank": rank,
                    }
                    for rank in range(3)
                ]
            },
        ),
    ],
    ids=("vllm", "sglang"),
)
def test_a_servers_own_parser_takes_the_words_of_its_preset(
    program: str, lines: dict[str, list[dict[str, object]]], tmp_path: Path
) -> None:
    target = sources(program, tmp_path)

    def parse(words: list[str]) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, str(own_parser.__file__), str(target), program, *words]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    for line, options in lines.items():
        for command, expected in zip(commands(line), options, strict=True):
            text = re.sub(r"\{port:\w+\}", "29501", command)
            for place, value in PLACES.items():
                text = text.replace(place, value)
            words = shlex.split(text)
            begin = words.index("vllm" if program == "vllm" else "sglang.launch_server") + 1
            done = parse(words[begin:])
            assert done.returncode == 0, done.stderr
            parsed = json.loads(done.stdout.splitlines()[-1])
            assert {name: parsed[name] for name in expected} == expected
    assert "unrecognized arguments: --node-rnk" in parse([*words[begin:], "--node-rnk", "1"]).stderr
