"""Which frames an agent need not keep."""

from pathlib import Path

from hvlaunch.gloo.driver.durable import DurableFrames
from hvlaunch.gloo.driver.seen import Seen, SeenFile


def test_the_prefix_ends_before_the_first_that_is_not_durable() -> None:
    frames = DurableFrames()
    for number in (1, 2, 4, 6, 5):
        frames.add(number)
    assert frames.prefix == 2
    assert [number in frames for number in range(1, 8)] == [True, True, False, True, True, True, False]
    frames.add(3)
    assert frames.prefix == 6


def test_what_was_durable_before_counts() -> None:
    frames = DurableFrames(3, [2, 5, 4, 7])
    assert frames.prefix == 5
    assert 7 in frames
    assert 6 not in frames


def test_a_frame_that_never_becomes_durable_does_not_make_the_agent_keep_all() -> None:
    frames = DurableFrames()
    for number in range(2, 20_000):
        frames.add(number)
    assert frames.prefix >= 16_000


def test_what_was_seen_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    seen = SeenFile(path).of(2)
    seen.tell(5)
    seen.print("stderr", 9)
    seen.print("stderr", 8)  # of another outlet, later
    assert SeenFile(path).of(2).last == Seen(told=5, stdout=0, stderr=9)
    assert SeenFile(path).of(1).last == SeenFile(path).of(3).last == Seen()
