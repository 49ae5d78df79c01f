"""Files of output and events, and the folder of a job."""

import errno
import gc
import json
import os
import resource
import stat
from pathlib import Path

import pytest

from hvlaunch.console.files import EventFile, JobFolder, OutputFiles, rank_directory
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


def folder(directory, job_id, at=1_800_000_000.123):
    return JobFolder(directory, job_id, wall=lambda: at)


def written(directory):
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in directory.rglob("*")
        if path.is_file() and "latest" not in path.parts
    }


def test_the_output_of_two_jobs_is_never_mixed(tmp_path):
    """The second begins when the first is not over, with fewer ranks."""
    jobs = [folder(tmp_path, "aa"), folder(tmp_path, "bb")]
    files = [job.files(size) for job, size in zip(jobs, (2, 1), strict=True)]
    for job_files, text in zip(files, (b"one\n", b"two\n"), strict=True):
        job_files.write(0, "stdout", text)
        job_files.close()
    name = "20270115T080000.123Z"
    found = {name: text for name, text in written(tmp_path).items() if text}
    assert found == {f"{name}-aa/rank.0/stdout": "one\n", f"{name}-bb/rank.0/stdout": "two\n"}
    assert (tmp_path / "latest" / "rank.0" / "stdout").read_text() == "two\n"
    assert (tmp_path / "latest").readlink().name == jobs[1].path.name


def test_another_driver_goes_on_in_the_folder_of_its_job(tmp_path):
    jobs = [folder(tmp_path, "aa"), folder(tmp_path, "bb")]
    first = jobs[0].files(1, "round.0")
    first.write(0, "stdout", b"one\n")
    again = JobFolder(tmp_path, "aa", goes_on=True)
    files = again.files(1, "round.0", goes_on=True)
    files.write(0, "stdout", b"two\n")
    again.files(1, "round.1", goes_on=True)
    assert again.path == jobs[0].path
    assert (again.path / "round.0" / "rank.0" / "stdout").read_text() == "one\ntwo\n"
    assert (tmp_path / "latest").readlink().name == jobs[1].path.name


def test_folders_sort_by_time(tmp_path):
    for at, job_id in ((1_800_000_000.0, "zz"), (1_800_000_000.5, "yy"), (1_800_000_001.0, "aa")):
        folder(tmp_path, job_id, at).close()
    names = [path.name for path in sorted(tmp_path.iterdir()) if path.name != "latest"]
    assert [name[-2:] for name in names] == ["zz", "yy", "aa"]


def test_a_round_has_a_folder_in_it(tmp_path):
    job = folder(tmp_path, "aa")
    job.files(1, "round.3").close()
    found = {f"{job.path.name}/round.3/rank.0/{stream}" for stream in ("stdout", "stderr")}
    assert set(written(tmp_path)) == found


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_only_a_link_is_replaced(tmp_path, make):
    make(tmp_path / "latest")
    with pytest.raises(BadUsage, match="latest is not the link that hvlaunch makes; try: another directory"):
        folder(tmp_path, "aa")
    assert (tmp_path / "latest").exists()
    assert not (tmp_path / "latest").is_symlink()


def test_a_link_to_elsewhere_is_replaced_and_not_followed(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    out = tmp_path / "out"
    out.mkdir()
    (out / "latest").symlink_to(theirs)
    job = folder(out, "aa")
    job.files(1).close()
    assert (out / "latest").readlink().name == job.path.name
    assert not list(theirs.iterdir())


def test_an_existing_folder_is_not_used(tmp_path):
    folder(tmp_path, "aa").close()
    with pytest.raises(BadUsage, match="file exists"):
        folder(tmp_path, "aa")


def test_a_moved_folder_keeps_its_files(tmp_path):
    out, theirs = tmp_path / "out", tmp_path / "theirs"
    out.mkdir()
    theirs.mkdir()
    job = folder(out, "aa")
    name = job.path.name
    job.path.rename(out / "moved")
    (out / name).symlink_to(theirs)
    files = job.files(1, "round.0")
    files.write(0, "stdout", b"x")
    files.close()
    assert (out / "moved" / "round.0" / "rank.0" / "stdout").read_bytes() == b"x"
    assert not list(theirs.iterdir())


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
