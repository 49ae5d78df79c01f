"""Strangers at the rendezvous: who can only connect neither stops it for the job's workers, nor makes it grow."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from hvlaunch.rendezvous.client import Client

pytestmark = pytest.mark.timing

TOKEN = "the-jobs-token"
FLOOD = Path(__file__).parent / "flood.py"
MEASURED = 1.5  # seconds of attack during which the honest client is served
SLOW = 3.0  # seconds: the honest client's 99th percentile beside a flood,
SLOWER = 50  # or so many times that without one, on a machine that does much else
GROWTH = 150 << 20  # bytes

SERVER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
from hvlaunch.rendezvous.serving.certificate import Certificate
from hvlaunch.rendezvous.serving import RendezvousServer
with RendezvousServer(sys.argv[2], certificate=Certificate(), host="127.0.0.1") as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""


@contextmanager
def running(*words: str) -> Iterator[tuple[psutil.Process, str]]:
    """A Python program that ends with its stdin, and the first line that it says."""
    with subprocess.Popen(
        [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline().strip()
            yield psutil.Process(process.pid), line
        finally:
            process.kill()


def served(port: int, seconds: float) -> list[float]:
    """How long each request of an honest client took. Every second one comes by a connection of its own."""
    url = f"http://127.0.0.1:{port}"
    took = []
    kept = Client(url, TOKEN)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for client in (kept, Client(url, TOKEN)):
            began = time.monotonic()
            client.put("s", "k", b"value")
            assert client.get("s", "k") == b"value"
            took.append(time.monotonic() - began)
            if client is not kept:
                client.close()
    kept.close()
    return took


def percentile(took: list[float]) -> float:
    return statistics.quantiles(took, n=100)[98]


@pytest.fixture
def attack(record_property) -> Callable[..., None]:
    """attack(kind, count, *sources, files=…): the honest client is served beside `count` strangers from each of these.

    `files` is how many the server may have open.
    """

    def run(kind: str, count: int, *sources: str, files: int = 4000) -> None:
        with ExitStack() as stack:
            process, port = stack.enter_context(running("-c", SERVER, str(files), TOKEN))
            calm = percentile(served(int(port), 0.5))
            before = process.memory_info().rss
            assert stack.enter_context(running(str(FLOOD), kind, port, str(count), *sources))[1] == "there"
            took = served(int(port), MEASURED)
            grown = process.memory_info().rss - before
            print(
                f"{kind}: {len(took)} served, 99% within {percentile(took):.3f} s (calm {calm:.4f} s), "
                f"longest {max(took):.3f} s, {grown >> 20} MiB more",
                file=sys.__stderr__ if os.environ.get("HVLAUNCH_FIGURES") else sys.stdout,
            )
            assert percentile(took) < max(SLOW, SLOWER * calm)
            assert grown < GROWTH

    return run


def test_pipelines_without_a_token(attack):
    attack("pipeline", 500, "127.0.0.2", "127.0.0.3")


def test_half_open_connections_from_two_addresses(attack):
    attack("half-open", 500, "127.0.0.2", "127.0.0.3", files=1000)


def test_half_open_connections_from_the_job_s_own_address(attack):
    attack("half-open", 1000, "127.0.0.1", files=1000)


def test_requests_that_drip(attack):
    attack("drip", 300, "127.0.0.2", "127.0.0.1", files=700)


def test_handshakes_of_tls_that_never_end(attack):
    attack("tls", 300, "127.0.0.2", "127.0.0.1", files=700)


def test_a_crowd_that_is_refused_and_comes_again(attack):
    attack("refused", 100, *(f"127.0.0.{number}" for number in range(2, 8)))
