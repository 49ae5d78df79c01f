import errno
import gc
import os
import resource
from pathlib import Path

import pytest

from hvlaunch.console.files import OutputFiles, rank_directory
from hvlaunch.console.notes import FileSizes
from hvlaunch.errors import BadUsage


def open_files():
    gc.collect()  # what earlier tests have left
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("rank", "size", "name"),
    [
        (0, 1, "rank.0"),
        (9, 10, "rank.9"),
        (9, 11, "rank.09"),
        (7, 101, "rank.007"),
        (1023, 1024, "rank.1023"),
    ],
)
def test_names_are_padded_to_the_largest_rank(tmp_path, rank, size, name):
    assert rank_directory(tmp_path, rank, size) == tmp_path / name


def test_empty_files_exist_from_the_start(tmp_path):
    old = tmp_path / "out" / "rank.1" / "stdout"
    old.parent.mkdir(parents=True)
    old.write_text("of the last job")
    OutputFiles(tmp_path / "out", 2)
    found = {
        str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert found == {f"out/rank.{rank}/{stream}": b"" for rank in (0, 1) for stream in ("stdout", "stderr")}


def test_bytes_can_be_seen_at_once_raw_and_unprefixed(tmp_path):
    files = OutputFiles(tmp_path, 1)
    files.write(0, "stdout", b"half a line \xff\r")
    assert (tmp_path / "rank.0" / "stdout").read_bytes() == b"half a line \xff\r"
    files.write(0, "stdout", b"\nrest")
    assert (tmp_path / "rank.0" / "stdout").read_bytes() == b"half a line \xff\r\nrest"
    assert (tmp_path / "rank.0" / "stderr").read_bytes() == b""


def test_a_truncated_file_continues_at_its_start(tmp_path):
    files = OutputFiles(tmp_path, 1)
    files.write(0, "stdout", b"old")
    os.truncate(tmp_path / "rank.0" / "stdout", 0)
    files.write(0, "stdout", b"new")
    assert (tmp_path / "rank.0" / "stdout").read_bytes() == b"new"


def test_more_files_than_may_be_open(tmp_path):
    size = 100
    before = open_files()
    files = OutputFiles(tmp_path, size, most_open=8)
    for turn in (b"1", b"2", b"3"):
        for rank in range(size):
            files.write(rank, "stdout", b"%d:%s " % (rank, turn))
            files.write(rank, "stderr", turn)
    assert open_files() <= before + 1 + 8
    for rank in range(size):
        assert (tmp_path / f"rank.{rank:02}" / "stdout").read_text() == f"{rank}:1 {rank}:2 {rank}:3 "
        assert (tmp_path / f"rank.{rank:02}" / "stderr").read_text() == "123"
    files.close()
    assert open_files() == before


def test_the_limit_of_open_files_stays_what_it_is(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = OutputFiles(tmp_path, 1024)
    for rank in range(1024):
        files.write(rank, "stdout", b"x")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    assert sum(path.stat().st_size for path in tmp_path.glob("rank.*/stdout")) == 1024
    files.close()


def test_a_rank_added_later(tmp_path):
    files = OutputFiles(tmp_path, 2)
    files.write(12, "stderr", b"x")
    assert (tmp_path / "rank.12" / "stderr").read_bytes() == b"x"


def test_a_directory_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadUsage) as raised:
        OutputFiles(tmp_path / "file" / "out", 2)
    assert str(raised.value) == (
        f"--output-filename {tmp_path}/file/out: {tmp_path}/file/out: not a directory"
        "; try: a directory that you may write to"
    )
    assert raised.value.exit_code == 2


def test_a_write_that_fails_names_the_file(tmp_path):
    files = OutputFiles(tmp_path, 1)
    (tmp_path / "rank.0" / "stdout").unlink()
    (tmp_path / "rank.0" / "stdout").mkdir()
    with pytest.raises(OSError, match="Is a directory") as raised:
        files.write(0, "stdout", b"x")
    assert raised.value.errno == errno.EISDIR
    assert raised.value.filename == str(tmp_path / "rank.0" / "stdout")


def test_a_successor_continues_at_the_recorded_size(tmp_path: Path) -> None:
    done: list[int] = []
    files = OutputFiles(tmp_path / "out", 2, sizes=FileSizes(tmp_path / "sizes", 2, is_known=False))
    files.write(0, "stdout", b"one\n")
    settle = files.settler(0, "stdout", done.append)
    files.write(0, "stdout", b"tw")  # of which its agent was not told
    tell = files.noter(0, "stdout", 4, lambda _: None)
    assert tell is not None
    tell(True)
    tell(False)  # nobody has taken it
    settle(4)
    files.write(1, "stderr", b"nor of this")
    files.close()
    assert done == [4]
    for lines in (b"two\n", b"three\n"):
        again = OutputFiles(
            tmp_path / "out", 2, sizes=FileSizes(tmp_path / "sizes", 2, is_known=True), goes_on=True
        )
        again.write(0, "stdout", lines)
        again.settler(0, "stdout", done.append)(len(lines))
        again.close()
    assert (tmp_path / "out" / "rank.0" / "stdout").read_bytes() == b"one\ntwo\nthree\n"
    assert (tmp_path / "out" / "rank.1" / "stderr").read_bytes() == b""


def test_a_file_without_a_record_stays_unchanged(tmp_path: Path) -> None:
    """As after a start of the machine, which may lack the newest of what was noted."""
    first = OutputFiles(tmp_path / "out", 1)
    first.write(0, "stdout", b"one\n")
    first.close()
    sizes = FileSizes(tmp_path / "sizes", 1, is_known=False)
    assert not (tmp_path / "sizes").exists()
    again = OutputFiles(tmp_path / "out", 1, sizes=sizes, goes_on=True)
    again.write(0, "stdout", b"two\n")
    assert (tmp_path / "out" / "rank.0" / "stdout").read_bytes() == b"one\ntwo\n"
    assert FileSizes(tmp_path / "sizes", 1, is_known=True).of(0, "stdout") == 4
    with pytest.raises(OSError, match="sizes"):
        FileSizes(tmp_path / "sizes", 2000, is_known=True)
