"""100,000 broken frames and handshakes, in both directions, and at the door; benchmarks/fuzz_frames.py goes on for as long as one likes."""

import gc
import sys
import threading
from pathlib import Path

import psutil
import pytest

from hvlaunch.agent.wire.frames import encode
from tests.security.fuzz import SESSIONS
from tests.security.fuzz.judge import files_below, nothing_else
from tests.security.fuzz.orders import orders
from tests.unit.agent.harness import AgentProcess

SHARES = {
    "an agent to a driver": 36_000,
    "an agent of a launcher to a driver": 14_000,
    "a driver to an agent": 32_000,
    "a launcher's process to its agent": 6_000,
    "a caller behind the door's handshake": 9_000,
    "a stranger at the door": 2_400,
    "a stranger whom an agent calls": 600,
}
MOST_MEMORY = 200 << 20
OFTEN = 50


def test_there_are_as_many_as_we_say() -> None:
    assert sum(SHARES.values()) == 100_000
    assert SHARES.keys() == SESSIONS.keys()


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.timeout(600)
def test_broken_frames_change_nothing(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    play = SESSIONS[kind]
    play(0)
    gc.collect()  # what other tests left may remove their files as it goes
    process = psutil.Process()
    before = process.memory_info().rss
    threads = threading.active_count()
    seen = seed = 0
    while seen < SHARES[kind]:
        seed += 1
        with nothing_else():
            seen += play(seed)
        if seed % OFTEN == 0:
            assert process.memory_info().rss < before + MOST_MEMORY
    assert threading.active_count() <= threads + 1
    assert files_below(tmp_path) == set()


@pytest.mark.parametrize("kind", SHARES)
def test_valid_frames_are_accepted(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a fuzzer would only see how its first frame is refused."""
    monkeypatch.chdir(tmp_path)
    for seed in range(10):
        assert SESSIONS[kind](seed, is_broken=False) == 0


@pytest.mark.parametrize("seed", range(8))
def test_a_real_agent_ends_in_order_whatever_a_driver_sends(seed: int) -> None:
    agent = AgentProcess(candidates=[sys.executable])
    try:
        for frame in orders(seed):
            try:
                agent.write(frame)
            except BrokenPipeError:
                break
        try:
            agent.write(encode({"type": "bye"}))
            agent.hang_up()
        except BrokenPipeError:
            pass
        assert agent.status() == 0
        for header, body in agent.seen:
            assert header["type"] != "fault" or (header["cause"].startswith("the driver sent "), body) == (
                True,
                b"",
            )
        assert "Traceback" not in agent.stderr()
    finally:
        agent.end()
