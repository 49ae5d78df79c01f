"""Acknowledged frames of an agent, and their record on disk."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvlaunch.driver.job_record import FrameNumbers, FrameRecord, FrameRecords
from hvlaunch.driver.links.session import AckedFrames


def test_prefix_ends_before_the_first_unacknowledged_frame() -> None:
    frames = AckedFrames()
    for number in (1, 2, 4, 6, 5):
        frames.add(number)
    assert frames.prefix == 2
    assert [number in frames for number in range(1, 8)] == [True, True, False, True, True, True, False]
    frames.add(3)
    assert frames.prefix == 6


def test_frames_acknowledged_earlier_count() -> None:
    frames = AckedFrames(3, [2, 5, 4, 7])
    assert frames.prefix == 5
    assert 7 in frames
    assert 6 not in frames


def test_frame_that_is_never_acknowledged_is_given_up() -> None:
    frames = AckedFrames()
    for number in range(2, 20_000):
        frames.add(number)
    assert frames.prefix >= 16_000


def test_frame_numbers_are_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    record = FrameRecords(path).of_link(2)
    record.acknowledge(5)
    record.record_printed("stderr", 9)
    record.record_printed("stderr", 8)  # of another outlet, later
    assert FrameRecords(path).of_link(2).numbers == FrameNumbers(acked=5, stdout=0, stderr=9)
    record.take_back("stderr", 9)
    record.take_back("stderr", 8)
    assert FrameRecords(path).of_link(2).numbers.stderr == 7
    record.record_printed("stderr", 9)
    assert FrameRecords(path).of_link(1).numbers == FrameRecords(path).of_link(3).numbers == FrameNumbers()


def test_acknowledgement_is_synced_before_the_agent_hears_it() -> None:
    """After a loss of power the successor would otherwise ask for frames that the agent has dropped."""
    on_disk: list[int] = []
    numbers = memoryview(bytearray(32)).cast("Q")
    record = FrameRecord(numbers, lambda: on_disk.append(numbers[0]))
    for number in (5, 5, 3, 9):
        record.acknowledge(number)
    record.record_printed("stdout", 12)
    assert on_disk == [5, 9]


def test_frame_numbers_of_many_links_outlive_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    program = (
        "import os, sys; from pathlib import Path; from hvlaunch.driver.job_record import FrameRecords\n"
        "file = FrameRecords(Path(sys.argv[1]))\n"
        "for link in range(1000): file.of_link(link).record_printed('stdout', link + 1)\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, path], check=False).returncode == -9
    file = FrameRecords(path)
    assert [file.of_link(link).numbers.stdout for link in range(1001)] == [*range(1, 1001), 0]


def test_printing_continues_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "")

    file = FrameRecords(tmp_path / "seen")
    file.of_link(1).record_printed("stdout", 3)
    monkeypatch.setattr(os, "pwrite", full)
    beyond = file.of_link(10_000)
    beyond.record_printed("stdout", 7)
    assert (beyond.numbers.stdout, file.of_link(1).numbers.stdout) == (7, 3)
    assert FrameRecords(tmp_path / "seen").of_link(1).numbers.stdout == 3


def test_a_missing_frame_before_an_acked_one_is_noticed() -> None:
    acked = AckedFrames(3, [2, 4])
    assert acked.is_whole
    acked.add(6)
    assert not acked.is_whole
    assert not AckedFrames(3, [5]).is_whole
    acked.add(5)
    assert acked.is_whole
