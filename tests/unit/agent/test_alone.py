"""Workers that may have been single jobs: which programs are suspected, and when the driver gets a frame about them."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from hvlaunch.agent.workers import diagnosis
from tests.unit.agent.harness import AgentProcess, python


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does much else may take longer than a second."""
    monkeypatch.setattr(diagnosis, "_PATIENCE", 100.0)


@pytest.mark.parametrize(
    ("text", "library"),
    [
        ("import torch", "torch"),
        ("import os, torch.nn as nn", "torch"),
        ("    from torch.nn import functional", "torch"),
        ("import os; import torch", "torch"),
        ("from transformers import Trainer", "torch"),
        ("import tensorflow as tf", "tensorflow"),
        ("from mpi4py import MPI", "mpi4py"),
        ("from mpi4py import MPI\nimport torch", "torch"),
        ("import torchless", None),
        ("from . import torch", None),
        ("# needs no torch\nprint('import')", None),
        ("import torch\ntorch.distributed.init_process_group('gloo', init_method='file:///x')", None),
        ("import tensorflow, json, os\njson.loads(os.environ['TF_CONFIG'])", None),
        ("", None),
    ],
)
def test_library_is_read_from_the_imports_of_the_program(text: str, library: str | None) -> None:
    assert diagnosis.library_of(["python", "-c", text]) == library


@pytest.mark.parametrize(
    ("argv", "library"),
    [
        (["python", "train.py"], "torch"),
        (["python", "-u", "train.py", "--data", "other.py"], "torch"),
        (["bash", "wrapper", "train.py"], "torch"),
        (["python", "-m", "package.train"], "torch"),
        (["python", "-m", "package.runs"], "torch"),
        (["python", "-m", "package.no"], None),
        (["python", "no.py"], None),
        (["python", "fifo.py"], None),
        (["python", "package"], None),
        (["python", "-c"], None),
        (["./train.py"], "torch"),
    ],
)
def test_program_is_found_by_its_command(
    argv: Sequence[str], library: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package" / "runs").mkdir(parents=True)
    for path in ("train.py", "package/train.py", "package/runs/__main__.py"):
        (tmp_path / path).write_text("import torch\n")
    os.mkfifo(tmp_path / "fifo.py")
    assert diagnosis.library_of(argv) == library


def test_a_port_is_remembered_for_a_moment() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert diagnosis.was_used(port)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.shutdown(socket.SHUT_WR)
            server.accept()[0].close()
    assert diagnosis.was_used(port)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert not diagnosis.was_used(bound.getsockname()[1])


JOIN = """
import os, socket
server = socket.create_server(('127.0.0.1', int(os.environ['MASTER_PORT'])))
client = socket.create_connection(server.getsockname())
client.close()
server.accept()[0].close()
"""
NEVER = "if 0:\n import torch\n"
"""The package is not installed for the worker's bare Python."""


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("code", "size", "libraries"),
    [
        (NEVER, "2", ["torch"]),
        (NEVER.replace("torch", "mpi4py.MPI"), "2", ["mpi4py"]),
        (NEVER, "1", []),
        (NEVER + JOIN, "2", []),
        ("pass", "2", []),
    ],
)
def test_driver_gets_a_frame_at_the_end_of_a_single_job(
    agent: AgentProcess, code: str, size: str, libraries: list[str]
) -> None:
    own = {"HVLAUNCH_SIZE": size, "HVLAUNCH_RANK": "1", "MASTER_PORT": str(free_port())}
    agent.start(python(code), own=own)
    agent.expect("exited", code=0)
    assert [header["library"] for header, _ in agent.seen if header["type"] == "alone"] == libraries


def test_failed_worker_is_no_single_job(agent: AgentProcess) -> None:
    agent.start(python(NEVER + "raise SystemExit(1)"), own={"HVLAUNCH_SIZE": "2"})
    agent.expect("exited", code=1)
    assert not [header for header, _ in agent.seen if header["type"] == "alone"]
