"""The file of --events."""

import json
import os
import stat

import pytest

from hvlaunch.console.event_file import EventFile
from hvlaunch.errors import BadUsage


def no_error(text):
    pytest.fail(text)


def test_records_are_appended_as_lines(tmp_path):
    path = tmp_path / "events"
    path.write_text('{"old": 1}\n')
    records: list[dict[str, object]] = [
        {"type": "a", "text": 'quote " \n ü \udcff'},
        {"type": "b", "number": 1, "none": None},
    ]
    events = EventFile(path, no_error)
    for record in records:
        events.write(record)
    events.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"old": 1}, *records]


def test_a_record_can_be_read_at_once(tmp_path):
    path = tmp_path / "events"
    os.mkfifo(path)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:  # noqa: PTH123 (a descriptor)
        events = EventFile(path, no_error)
        os.set_blocking(reader.fileno(), True)
        events.write({"n": 1})
        assert reader.readline() == b'{"n": 1}\n'
        events.close()
        assert reader.read() == b""


def test_a_pipe_without_a_reader_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "events")
    with pytest.raises(BadUsage, match="this pipe has no reader; try: start its reader first"):
        EventFile(tmp_path / "events", no_error)


def test_a_new_file_is_for_its_owner_alone(tmp_path):
    before = os.umask(0o022)
    try:
        EventFile(tmp_path / "events", no_error).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "events").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("name", "cause"), [("no/such", "no such file or directory"), (".", "is a directory")]
)
def test_an_unwritable_file_is_bad_usage(tmp_path, name, cause):
    with pytest.raises(BadUsage, match=f"--events .*: {cause}; try: a file that you may write to"):
        EventFile(tmp_path / name, no_error)


def test_a_full_disk_is_told_of_once(tmp_path):
    path = tmp_path / "events"
    path.symlink_to("/dev/full")
    told: list[str] = []
    events = EventFile(path, told.append)
    for number in range(3):
        events.write({"n": number})
    events.close()
    assert told == [f"--events {path}: no space left on device; some events are lost"]


def test_a_hanging_disk_blocks_no_caller(tmp_path):
    path = tmp_path / "events"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    events = EventFile(path, no_error)
    for _ in range(100):
        events.write({"text": "x" * 10_000})
    events.close(timeout=0.01)
    os.set_blocking(reader, True)
    with os.fdopen(reader, "rb") as pipe:
        assert len(pipe.read().splitlines()) == 100
