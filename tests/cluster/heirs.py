"""Drivers that take jobs over from one that a test has killed, and what they keep of the output."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from hvlaunch.console.output_store import items, segment_path, segments
from hvlaunch.outside import jobs_directory
from tests.testhosts.hosts import TestHosts, wait_until

__all__ = ["Heir", "directory_of", "stored"]

LIMIT = 90.0
SUCCESSOR = [sys.executable, "-c", "from hvlaunch.gloo.controller import run_successor; run_successor()"]
PRINTED = ("stdout", "stderr", "said", "shown")


def directory_of(hosts: TestHosts, pid: int) -> Path:
    """That of the job whose driver this is."""
    root = jobs_directory(hosts.driver.env)

    def found() -> Path | None:
        for about in root.glob("[!.]*/about.json"):
            if json.loads(about.read_text())["pid"] == pid:
                return about.parent
        return None

    return wait_until(found, f"the directory of driver {pid}", LIMIT)


def stored(directory: Path) -> str:
    """What the job's output store has: the output of one rank after the other, and messages."""
    texts: dict[tuple[int, str], bytes] = {}
    for number in segments(directory):
        with segment_path(directory, number).open("rb") as file:
            for item, _ in items(file.fileno()):
                if item.kind in PRINTED:
                    who = -1 if item.rank is None else item.rank, item.kind
                    texts[who] = texts.get(who, b"") + item.data
    return b"\n".join(texts.values()).decode()


class Heir:
    """Kills the driver of a job, and starts one in its place."""

    def __init__(self, hosts: TestHosts, process: "subprocess.Popen[bytes]") -> None:
        self._hosts = hosts
        self.directory = directory_of(hosts, process.pid)
        self.process = process

    def kill(self) -> None:
        """The driver that there is."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(LIMIT)

    def succeed(self) -> "subprocess.Popen[bytes]":
        """Another one comes."""
        self.process = self._hosts.driver.popen(
            [*SUCCESSOR, str(self.directory)],
            env=self._hosts.driver.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        return self.process

    @property
    def stored(self) -> str:
        """What the drivers have kept."""
        return stored(self.directory)
