"""Incidents with a known culprit, and the questions of an assistant about them."""

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import anyio
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

__all__ = ["INCIDENTS", "Incident", "ToolAnswer", "asked", "verdicts"]


class Incident(NamedTuple):
    """`code` runs on the culprit; the others wait. `words` must be in the answer."""

    code: str
    words: str

    def program(self, rank: int) -> str:
        """Return the program of all workers."""
        wait = "import time\nprint('waits', flush=True)\ntime.sleep(1000)\n"
        return f"import os, signal, sys\nif os.environ['RANK'] == '{rank}':\n    {self.code}\n{wait}"


INCIDENTS: Mapping[str, Incident] = {
    "exception": Incident("raise ValueError('bad batch 7')", "ValueError: bad batch 7"),
    "exit code": Incident("sys.exit(41)", "exit code 41"),
    "message and exit": Incident("sys.exit('the data is gone')", "the data is gone"),
    "segfault": Incident("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    "bus error": Incident("os.kill(os.getpid(), signal.SIGBUS)", "SIGBUS"),
    "illegal instruction": Incident("os.kill(os.getpid(), signal.SIGILL)", "SIGILL"),
    "abort": Incident("os.abort()", "SIGABRT"),
    "killed": Incident("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    "missing module": Incident("import no_such_module_here", "no_such_module_here"),
    "missing file": Incident("open('/no/such/weights.bin')", "weights.bin"),
    "no permission": Incident("raise PermissionError(13, 'Permission denied', '/data/x')", "/data/x"),
    "memory": Incident("raise MemoryError()", "MemoryError"),
    "gpu memory": Incident(
        "raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')", "CUDA out of memory"
    ),
    "gpu fault": Incident(
        "raise RuntimeError('CUDA error: uncorrectable ECC error encountered')", "uncorrectable ECC"
    ),
    "assertion": Incident("assert 1 + 1 == 3, 'shapes differ'", "shapes differ"),
    "key": Incident("{}['lr']", "KeyError"),
    "division": Incident("1 / 0", "ZeroDivisionError"),
    "disk full": Incident("raise OSError(28, 'No space left on device')", "No space left on device"),
    "recursion": Incident("f = lambda: f(); f()", "RecursionError"),
    "raised from another": Incident(
        "exec('try:\\n 1/0\\nexcept Exception as e:\\n raise RuntimeError(\"epoch 3 failed\") from e')",
        "epoch 3 failed",
    ),
}


class ToolAnswer(NamedTuple):
    text: str
    is_error: bool

    @property
    def value(self) -> Any:
        return json.loads(self.text)


def asked(
    environ: Mapping[str, str], calls: Sequence[tuple[str, Mapping[str, Any]]], *words: str
) -> list[ToolAnswer]:
    """Return the answers of one server, started by the library's client."""

    async def ask() -> list[ToolAnswer]:
        server = StdioServerParameters(
            command=sys.executable, args=["-m", "hvlaunch", "mcp", *words], env=dict(environ)
        )
        answers = []
        async with Client(stdio_client(server)) as client:
            for name, arguments in calls:
                result = await client.call_tool(name, dict(arguments))
                answers.append(ToolAnswer(result.content[0].text, result.is_error))  # type: ignore[union-attr]
        return answers

    return anyio.run(ask)


def verdicts(
    environ: Mapping[str, str], incidents: Mapping[str, Incident], start: Callable[[Incident, int], Any]
) -> Iterator[tuple[str, ToolAnswer]]:
    """Play each incident with a seeded culprit, and yield the verdict. Raises AssertionError if rank or words are wrong."""
    chance = random.Random(20)
    for name, incident in incidents.items():
        rank = chance.randrange(3)
        start(incident, rank)
        (verdict,) = asked(environ, [("verdict", {})])
        assert not verdict.is_error, (name, verdict.text)
        assert verdict.value["rank"] == rank, (name, verdict.text)
        assert incident.words in verdict.text, (name, verdict.text)
        yield name, verdict
