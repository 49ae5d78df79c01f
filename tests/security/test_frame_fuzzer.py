"""100,000 broken frames, in both directions, and at the door; benchmarks/fuzz_frames.py goes on for as long as one likes."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hvlaunch.agent.frames import encode
from tests.security.frame_fuzzer import door_session, driver_session, order_session, orders
from tests.unit.agent.harness import AgentProcess

SHARES = [(driver_session, 60_000, 1), (order_session, 30_000, 2), (door_session, 10_000, 3)]
MOST_MEMORY = 200 << 20


@pytest.mark.parametrize(("session", "frames", "seed"), SHARES, ids=[one[0].__name__ for one in SHARES])
@pytest.mark.timeout(600)
def test_broken_frames_change_nothing(
    session: Callable[[int], int], frames: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    process = psutil.Process()
    before = process.memory_info().rss
    threads = threading.active_count()
    seen = 0
    while seen < frames:
        seen += session(seed)
        seed += len(SHARES)
    assert process.memory_info().rss < max(MOST_MEMORY, before + (32 << 20))
    assert threading.active_count() <= threads + 1
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("seed", range(12))
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
