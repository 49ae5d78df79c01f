"""Readers of an output store find each item once, while it is written, rotated, and taken up by another driver."""

import shutil

import pytest

from hvlaunch.console.output_store import OutputStore
from hvlaunch.console.stored import (
    Stored,
    StoreReader,
    from_where,
    head_of,
    newest_lines,
    options_of,
    segment_path,
)
from hvlaunch.job import ConsoleOptions


def write(store: OutputStore, *texts: bytes, rank: int = 0) -> None:
    for text in texts:
        store.output(rank, "stdout", text)
    store.write()


def texts(found) -> list[bytes]:
    return [item.data for item in found if item.kind == "stdout"]


def test_each_item_is_read_once_as_it_comes(tmp_path):
    store = OutputStore(tmp_path)
    reader = StoreReader(tmp_path)
    for number in range(50):
        write(store, b"%d" % number)
        assert texts(reader.read()) == [b"%d" % number]
    assert texts(reader.read()) == []
    assert texts(StoreReader(tmp_path, reader.position).read()) == []
    assert len(texts(StoreReader(tmp_path).read())) == 50


def test_an_empty_store_has_no_items(tmp_path):
    reader = StoreReader(tmp_path / "not yet")
    assert list(reader.read()) == []
    assert reader.head() is None
    (tmp_path / "not yet").mkdir()
    write(OutputStore(tmp_path / "not yet"), b"now")
    assert texts(reader.read()) == [b"now"]


def test_a_reader_misses_nothing_during_rotation(tmp_path):
    store = OutputStore(tmp_path, most=4000)
    reader = StoreReader(tmp_path)
    found = []
    for number in range(300):
        write(store, b"%03d" % number * 30)
        if number % 7 == 0:
            found += texts(reader.read())
    found += texts(reader.read())
    assert found == [b"%03d" % number * 30 for number in range(300)]
    assert not reader.has_missed


def test_a_late_reader_continues_with_the_oldest_segment(tmp_path):
    store = OutputStore(tmp_path, most=4000)
    write(store, b"first")
    reader = StoreReader(tmp_path)
    assert texts(reader.read()) == [b"first"]
    position = reader.position
    reader.close()
    for number in range(300):
        write(store, b"%03d" % number * 30)
    late = StoreReader(tmp_path, position)
    assert texts(late.read())[-1] == b"299" * 30
    assert late.has_missed


def test_a_large_item_is_read_whole(tmp_path):
    store = OutputStore(tmp_path)
    reader = StoreReader(tmp_path)
    write(store, b"x" * 3_000_000, b"small")
    assert [len(text) for text in texts(reader.read())] == [3_000_000, 5]


def test_an_incomplete_item_is_awaited(tmp_path):
    store = OutputStore(tmp_path)
    reader = StoreReader(tmp_path)
    write(store, b"one", b"two")
    whole = segment_path(tmp_path, 1).read_bytes()
    segment_path(tmp_path, 1).write_bytes(whole[:-1])
    assert texts(reader.read()) == [b"one"]
    segment_path(tmp_path, 1).write_bytes(whole)
    assert texts(reader.read()) == [b"two"]


def test_the_directory_may_go_while_it_is_read(tmp_path):
    directory = tmp_path / "job"
    directory.mkdir()
    store = OutputStore(directory)
    reader = StoreReader(directory)
    write(store, b"one")
    assert texts(reader.read()) == [b"one"]
    write(store, b"two")
    shutil.rmtree(directory)
    assert texts(reader.read()) == [b"two"]


def test_the_time_is_found_without_reading_all(tmp_path):
    times = iter(range(10_000))
    store = OutputStore(tmp_path, most=8000, wall=lambda: float(next(times)))
    for number in range(60):
        write(store, b"%02d" % number * 40)
    reader = StoreReader(tmp_path)
    for since in (0.0, 33.0, 61.0, 10_000.0):
        reader.seek_time(since)
        first = next(StoreReader(tmp_path, reader.position).read())
        assert first.time <= since or reader.position.segment == 0
    reader.seek_time(33.0)
    assert 1 < reader.position.segment < 8


STREAM = [
    Stored(1, "stdout", b"a1\na2\n", 0),
    Stored(2, "stdout", b"b1\nb2 ha", 1),
    Stored(3, "said", b"hello"),
    Stored(4, "stdout", b"a3\n", 0),
    Stored(5, "stdout", b"lf\nb3\n", 1),
    Stored(6, "placed", b"{}"),
    Stored(7, "stdout", b"a4\n", 0),
]


@pytest.mark.parametrize(
    ("early", "left"),
    [
        (0, [b"a1\na2\n", b"b1\nb2 ha", b"hello", b"a3\n", b"lf\nb3\n", b"{}", b"a4\n"]),
        (2, [b"hello", b"a3\n", b"b3\n", b"{}", b"a4\n"]),
        (6, [b"{}", b"a4\n"]),
        (99, [b"{}"]),
    ],
)
def test_lines_that_begin_too_early_are_left_out_as_a_whole(early, left):
    assert [item.data for item in from_where(STREAM, lambda item: item.time <= early)] == left


@pytest.mark.parametrize(
    ("count", "found"), [(1, (5, 0)), (2, (4, 1)), (3, (4, 0)), (6, (1, 0)), (7, (0, 1)), (100, (0, 0))]
)
def test_the_position_of_the_newest_lines(count, found):
    assert newest_lines(STREAM, count, lambda _: True) == found


def test_how_output_is_shown_comes_back():
    options = ConsoleOptions(
        prefix="{time} {rank}|", color="never", ranks=(range(3), range(4, 9, 2)), merge=True
    )
    assert options_of(head_of(options)) == options
