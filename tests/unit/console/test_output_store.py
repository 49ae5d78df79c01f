"""The store of a job's output, and its reader."""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from hvlaunch.console.notes import lost_output_text
from hvlaunch.console.output_store import (
    OutputStore,
    Stored,
    StoreReader,
    from_where,
    head_of,
    items,
    newest_lines,
    options_of,
    pack,
    segment_path,
    segments,
)
from hvlaunch.console.printer import Output
from hvlaunch.console.recent import Recent
from hvlaunch.job import ConsoleOptions


@pytest.fixture
def store(tmp_path):
    return new_store(tmp_path)


def new_store(directory, head=None, **options):
    ticks = iter(range(1, 1_000_000))
    return OutputStore(directory, head, wall=lambda: float(next(ticks)), **options)


def all_items(directory):
    found = []
    for number in segments(directory):
        file = os.open(segment_path(directory, number), os.O_RDONLY)
        found += [item for item, _ in items(file)]
        os.close(file)
    return found


def kept(directory):
    return [(item.rank, item.data) for item in all_items(directory) if item.kind == "stdout"]


def test_the_stored_items(store, tmp_path):
    store.learn_places({0: ("a", 0)})
    store.output(0, "stdout", b"one\n", ("a", 7))
    store.output(3, "stderr", b"\x00\xff")
    store.end_stream(0, "stdout", ("a", 8))
    store.say("host b: lost \udcff")
    store.show("the report\n")
    store.write()
    head, *others = all_items(tmp_path)
    assert (head.kind, head.data) == ("head", b'{"places": {}, "seen": {}}')
    assert others == [
        Stored(2.0, "placed", b'{"0": ["a", 0]}'),
        Stored(3.0, "stdout", b"one\n", 0, ("a", 7)),
        Stored(4.0, "stderr", b"\x00\xff", 3),
        Stored(5.0, "stdout ended", b"", 0, ("a", 8)),
        Stored(6.0, "said", b"host b: lost \\udcff"),
        Stored(7.0, "shown", b"the report\n"),
    ]


def test_other_users_may_not_read_the_store(store, tmp_path):
    assert segment_path(tmp_path, 1).stat().st_mode & 0o777 == 0o600


def test_a_successor_continues_the_store(store, tmp_path):
    store.output(0, "stdout", b"one\n", ("a", 7))
    store.output(1, "stderr", b"oh\n", ("b", 3))
    store.write()
    store.output(0, "stdout", b"never written\n", ("a", 8))
    again = new_store(tmp_path)
    assert again.seen == {"a": 7, "b": 3}
    assert again.tails(100) == {1: b"oh\n"}
    again.output(0, "stdout", b"two\n", ("a", 8))
    again.write()
    assert kept(tmp_path) == [(0, b"one\n"), (0, b"two\n")]


def test_a_truncated_store_continues_after_the_last_complete_item(store, tmp_path):
    for number in range(4):
        store.output(number, "stdout", b"line %d\n" % number, ("a", number))
        store.write()
    whole = segment_path(tmp_path, 1).read_bytes()
    for cut in range(len(whole)):
        segment_path(tmp_path, 1).write_bytes(whole[:cut])
        again = new_store(tmp_path)
        before = kept(tmp_path)
        assert before == [(number, b"line %d\n" % number) for number in range(len(before))]
        assert again.seen == ({"a": len(before) - 1} if before else {})
        again.output(9, "stdout", b"more\n")
        again.write()
        again.close()
        assert kept(tmp_path) == [*before, (9, b"more\n")]


@pytest.mark.parametrize("offset", [0, 5, 9, 20, 31, -1])
def test_a_changed_byte_ends_the_valid_part(store, tmp_path, offset):
    store.write()
    begin = segment_path(tmp_path, 1).stat().st_size
    store.output(0, "stdout", b"loss 0.1\n", ("a", 1))
    store.write()
    data = bytearray(segment_path(tmp_path, 1).read_bytes())
    data[begin + offset if offset >= 0 else offset] ^= 1
    segment_path(tmp_path, 1).write_bytes(data)
    assert kept(tmp_path) == []
    assert new_store(tmp_path).seen == {}


def test_the_newest_is_kept_and_the_oldest_goes(tmp_path):
    store = new_store(tmp_path, most=80_000)
    store.learn_places({0: ("a", 0)})
    for number in range(1000):
        store.output(0, "stdout", b"%04d\n" % number * 40, ("a", number))
        store.write()
    sizes = [segment_path(tmp_path, number).stat().st_size for number in segments(tmp_path)]
    assert len(sizes) == 8
    assert max(sizes) < 10_500
    assert 60_000 < sum(sizes) < 84_000
    numbers = [int(data[:4]) for _, data in kept(tmp_path)]
    assert numbers == list(range(numbers[0], 1000))
    again = new_store(tmp_path, most=80_000)
    assert again.seen == {"a": 999}
    again.output(0, "stdout", b"x" * 11_000)
    again.write()
    assert b'"places": {"0": ["a", 0]}' in all_items(tmp_path)[-1].data


def test_the_head_of_a_new_segment_that_is_not_whole_takes_nothing_with_it(tmp_path):
    store = new_store(tmp_path, {"prefix": "p"}, most=8000)
    store.learn_places({5: ("a", 2)})
    store.output(0, "stdout", b"x" * 1000, ("a", 4))
    store.write()
    segment_path(tmp_path, 2).write_bytes(segment_path(tmp_path, 2).read_bytes()[:10])
    new_store(tmp_path, {"prefix": "p"}).close()
    assert all_items(tmp_path)[-1].data == b'{"prefix": "p", "places": {"5": ["a", 2]}, "seen": {"a": 4}}'


class Disk:
    """So many bytes are free."""

    def __init__(self, free):
        self.free = free
        self.real = os.pwrite

    def write(self, file, data, offset):
        if not self.free:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = min(self.free, len(data))
        self.free -= taken
        return self.real(file, bytes(data[:taken]), offset)


def test_on_a_full_disk_the_rest_is_whole_and_says_once_how_much_is_missing(tmp_path, monkeypatch):
    seconds = [10.0]
    store = OutputStore(tmp_path, clock=lambda: seconds[0])
    store.output(0, "stdout", b"before\n")
    store.write()
    disk = Disk(40)
    monkeypatch.setattr(os, "pwrite", disk.write)
    store.output(0, "stdout", b"lost " * 10, ("a", 3))
    with pytest.raises(OSError, match="No space"):
        store.write()
    assert kept(tmp_path) == [(0, b"before\n")]
    assert store.seen == {"a": 3}
    disk.free = 1000
    store.output(0, "stdout", b"too soon\n")
    store.write()
    assert kept(tmp_path) == [(0, b"before\n")]
    seconds[0] += 1.0
    store.output(0, "stdout", b"after\n")
    store.write()
    assert [item.data for item in all_items(tmp_path)[1:]] == [
        b"before\n",
        b"128 bytes of output are lost: no space left on device",
        b"after\n",
    ]


def test_a_killed_drivers_lost_output_is_reported(tmp_path, monkeypatch):
    """Readers report it, and the next driver with its first item."""
    store = OutputStore(tmp_path, clock=lambda: 10.0)
    disk = Disk(0)
    monkeypatch.setattr(os, "pwrite", disk.write)
    assert lost_output_text(tmp_path) is None
    for lost in (b"lost", b"lost too"):
        store.output(0, "stdout", lost)
        with suppress(OSError):
            store.write()
    size = sum(len(pack(Stored(0.0, "stdout", each, 0))) for each in (b"lost", b"lost too"))
    text = f"{size} bytes of output are lost: no space left on device"
    assert lost_output_text(tmp_path) == text
    monkeypatch.undo()
    after = OutputStore(tmp_path)
    after.output(0, "stdout", b"after\n")
    after.write()
    assert [item.data for item in all_items(tmp_path)[1:]] == [text.encode(), b"after\n"]
    assert lost_output_text(tmp_path) is None


def test_a_message_is_tried_at_once(tmp_path, monkeypatch):
    store = OutputStore(tmp_path, clock=lambda: 10.0)
    disk = Disk(0)
    monkeypatch.setattr(os, "pwrite", disk.write)
    store.output(0, "stdout", b"lost")
    with pytest.raises(OSError, match="No space"):
        store.write()
    disk.free = 1000
    store.show("the report\n")
    store.write()
    assert all_items(tmp_path)[-1].data == b"the report\n"


def test_a_full_disk_drops_the_oldest_segment(tmp_path, monkeypatch):
    store = new_store(tmp_path, most=8000)
    for number in range(4):
        store.output(0, "stdout", b"%d" % number * 1000)
        store.write()
    assert segments(tmp_path) == [1, 2, 3, 4, 5]
    disk = Disk(10)
    monkeypatch.setattr(os, "pwrite", disk.write)
    real = Path.unlink

    def unlink(path, **options):
        disk.free = 1000
        real(path, **options)

    monkeypatch.setattr(Path, "unlink", unlink)
    store.output(0, "stdout", b"the newest")
    store.write()
    assert segments(tmp_path) == [2, 3, 4, 5]
    assert kept(tmp_path)[-1] == (0, b"the newest")


@pytest.mark.parametrize("form", [b"\r%d", b"%d\r"])
def test_one_state_of_a_bar_per_second_is_stored(tmp_path, form):
    seconds = [10.0]
    store = OutputStore(tmp_path, clock=lambda: seconds[0])
    for number in range(100):
        store.output(0, "stderr", form % number, ("a", number))
        store.write()
        seconds[0] += 0.125
    assert store.deadline == 23.0
    seconds[0] = store.deadline
    store.write()
    assert store.deadline is None
    states = [int(item.data.split()[-1]) for item in all_items(tmp_path) if item.kind == "stderr"]
    assert states == [*range(0, 100, 8), 99]
    store.output(0, "stderr", b"\r100", ("a", 100))
    store.output(0, "stderr", b"\r101", ("a", 101))
    store.output(0, "stderr", b"done\n", ("a", 102))
    store.end_stream(0, "stderr")
    store.write()
    assert [item.data for item in all_items(tmp_path)][-3:] == [b"\r100\r101", b"done\n", b""]
    assert store.seen["a"] == 102


@pytest.mark.parametrize("form", [b"\rstep %03d of 300", b"step %03d of 300\r", b"\r step %03d of 300\r"])
@pytest.mark.parametrize("size", [1, 3, 7, 16, 50, 4096])
def test_complete_states_of_a_bar_are_stored(tmp_path, form, size):
    """However its bytes come, and whichever states are left out."""
    seconds = [10.0]
    states = [form % number for number in range(300)]
    text = b"".join(states) + b"\nend\n"
    store = OutputStore(tmp_path, clock=lambda: seconds[0])
    for at in range(0, len(text), size):
        store.output(0, "stdout", text[at : at + size])
        store.write()
        seconds[0] += 0.01
    *_, last, end = (found := b"".join(data for _, data in kept(tmp_path)).splitlines())
    assert set(found) <= {state.strip(b"\r") for state in states} | {b"", b"end"}
    assert last == states[-1].strip(b"\r")
    assert end == b"end"


def test_recent_output_is_bounded_and_moves_into_a_store(store, tmp_path):
    recent = Recent()
    for number in range(2000):
        data = b"%d\n" % number
        recent.add(Output(0, "stdout", data, lambda _: None), len(data))
    recent.pour_into(store)
    store.write()
    lines = [data for _, data in kept(tmp_path)]
    assert 900 < len(lines) < 1100
    assert lines[-1] == b"1999\n"


def test_stored_items_are_not_stored_again(store, tmp_path):
    store.output(0, "stdout", b"one\n", ("a", 7))
    store.write()
    store.close()
    again = new_store(tmp_path)
    for number, text in ((6, b"zero\n"), (7, b"one\n"), (8, b"two\n")):
        again.output(0, "stdout", text, ("a", number))
    again.output(0, "stdout", b"another\n", ("b", 1))
    again.end_stream(0, "stdout", ("a", 7))
    again.write()
    assert kept(tmp_path) == [(0, b"one\n"), (0, b"two\n"), (0, b"another\n")]
    assert not [item for item in all_items(tmp_path) if item.kind == "stdout ended"]


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
