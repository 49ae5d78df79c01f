"""torchrun's agents on test hosts, each started by itself, as torchrun wants it."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from tests.cluster.jobs import PROGRAMS
from tests.testhosts.hosts import Host, TestHosts, wait_until

__all__ = ["Agent", "rendezvous", "rounds", "tell_to_stop", "wait_for_round"]

PATIENCE = 120.0


class Agent:
    """A torchrun on a host, with one worker. `output` grows as it and its worker print."""

    def __init__(self, host: Host, options: Sequence[object], env: Mapping[str, str] | None = None) -> None:
        self.host = host
        self.output = ""
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", *map(str, options)]
        self.process = host.popen(
            [*words, str(PROGRAMS / "all_reduce_until.py")],
            env={**host.env, "OMP_NUM_THREADS": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while data := os.read(self.process.stdout.fileno(), 1 << 16):
            self.output += data.decode(errors="replace")

    def code(self) -> int:
        """Wait for the end: its exit code."""
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def reports(self) -> list[dict[str, Any]]:
        """What its workers have told, one after the other."""
        lines = self.output[: self.output.rfind("\n") + 1].splitlines()
        return [json.loads(line) for line in lines if line.startswith('{"at"')]

    def worker(self) -> int:
        """The pid of its running worker, as its host counts."""
        (pid,) = (
            one.pid
            for one in self.host.user_processes()
            if str(PROGRAMS) in one.argv[-1] and "-u" in one.argv[:2]
        )
        return pid


def rounds(agents: Sequence[Agent]) -> int:
    """In how many rounds all ranks have done an all_reduce."""
    reports = [report for agent in agents for report in agent.reports()]
    came = Counter((report["round"], report["size"]) for report in reports)
    return sum(count == size for (_, size), count in came.items())


def wait_for_round(agents: Sequence[Agent], number: int, timeout: float = PATIENCE) -> float:
    """Wait until so many rounds have done an all_reduce; when the newest did, in seconds of CLOCK_MONOTONIC."""

    def there() -> bool:
        for agent in agents:
            if agent.process.poll() is not None and agent.host.pid:
                raise AssertionError(
                    f"{agent.host.name} ended with {agent.process.returncode}: {agent.output}"
                )
        return rounds(agents) >= number

    try:
        wait_until(there, f"round {number} trains", timeout)
    except TimeoutError as error:
        said = "\n".join(f"{agent.host.name}: {agent.output}" for agent in agents)
        raise AssertionError(f"{error}\n{said}") from None
    return max(float(report["at"]) for agent in agents for report in agent.reports())


def tell_to_stop(hosts: TestHosts) -> None:
    for host in hosts:
        (host.home / "root" / "stop").touch()


@contextlib.contextmanager
def rendezvous(hosts: TestHosts, token: Path) -> Iterator[list[object]]:
    """A rendezvous in the driver place; torchrun's options for it. The token goes to every host's home."""
    program = Path(sys.executable).with_name("hvlaunch-rendezvous")
    server = hosts.driver.popen(
        [str(program), "--bind=:0", "--token-file", str(token)],
        env=hosts.driver.env,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        while not (said := server.stdout.readline()).startswith("serving on "):
            assert said, "hvlaunch-rendezvous has ended"
        for host in hosts:
            (host.home / "root" / "stop").unlink(missing_ok=True)
            for file in (token, token.with_name(f"{token.name}.crt")):
                shutil.copy(file, host.home / "root" / file.name)
        endpoint = f"{hosts.driver.address}:{said.strip().rpartition(':')[2]}"
        yield ["--rdzv-backend=hvlaunch", f"--rdzv-endpoint={endpoint}"]
    finally:
        server.terminate()
        server.wait(PATIENCE)
        server.stdout.close()
