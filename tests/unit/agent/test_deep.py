"""Pieces of training on a host: outcomes of real torch, and of programs that are not what they should be."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.agent.errands import deep


class Orders:
    """The driver's end of the errand: orders in, answers out."""

    def __init__(self, *orders: dict[str, Any]) -> None:
        self._lines = [json.dumps(order).encode() + b"\n" for order in orders]
        self.answers: list[Any] = []

    def read_line(self) -> bytes:
        if not self._lines:
            raise EOFError
        return self._lines.pop(0)

    def write(self, data: bytes) -> None:
        self.answers.append(json.loads(data))


def outcomes(program: str, *orders: dict[str, Any]) -> list[Any]:
    arguments = {"program": program, "directory": "/", "env": {}}
    assert deep.ARGUMENTS(arguments)
    stream = Orders(*orders)
    assert deep.run(arguments, stream) == {}  # type: ignore[arg-type]  # it reads lines and writes
    ports, *answers = stream.answers
    assert deep.PORTS(ports)
    assert all(map(deep.OUTCOMES, answers))
    return answers


def order(**changes: Any) -> dict[str, Any]:
    return {"size": 0, "rank": 0, "local": 0, "seconds": 60, "env": {}, **changes}


@pytest.mark.xdist_group("torch")
def test_product_and_sum_with_torch() -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 10000)}
    [alone], both = outcomes(sys.executable, order(), order(size=2, local=2, env=env))
    assert alone["error"] is None
    assert not alone["wrong"]
    assert len(alone["matmul"]) == 1
    assert 0 < alone["matmul"][0] < 10
    assert len(both) == 2
    assert all(
        outcome["error"] is None and 0 < outcome["sum"] < 10 and not outcome["wrong"] for outcome in both
    )


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_failures_have_words(tmp_path: Path) -> None:
    assert "No such file" in outcomes("/nowhere/python", order())[0][0]["error"]
    no_torch = script(tmp_path / "a", "echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1")
    assert outcomes(no_torch, order())[0][0]["error"] == "ModuleNotFoundError: No module named 'torch'"
    assert outcomes(script(tmp_path / "b", "exit 1"), order())[0][0]["error"] == "it wrote nothing"
    hanging = script(tmp_path / "c", "exec sleep 100")
    assert outcomes(hanging, order(seconds=0.2))[0][0]["error"].startswith("no result within")


def test_notes_of_nccl_diagnostics(tmp_path: Path) -> None:
    """The lines are examples of NCCL's documentation."""
    lines = [
        "NCCL DIAG [OK]   p2p: verified P2P access in both directions between every GPU pair (56 peer accesses)",
        "node0:24563 NCCL DIAG [INFO] net bw: cross-nic rank 3 (node0): 265.1 Gbit/s, >30% off median 391.5 Gbit/s",
        "NCCL DIAG NCCL diagnostics completed in 245.3 ms across 8 ranks",
        'hvlaunch-deep {"gpus": 8, "nccl": [2, 31, 2], "sum": 0.002}',
    ]
    program = script(tmp_path / "a", "\n".join(f"echo '{line}'" for line in lines))
    [outcome] = outcomes(program, order(size=8, local=1))[0]
    assert outcome["gpus"] == 8
    assert outcome["nccl"] == [2, 31, 2]
    assert outcome["notes"] == [
        "[INFO] net bw: cross-nic rank 3 (node0): 265.1 Gbit/s, >30% off median 391.5 Gbit/s"
    ]
