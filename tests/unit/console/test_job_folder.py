"""Each job has a folder of its own for its output, and `latest` leads to the newest."""

from pathlib import Path

import pytest

from hvlaunch.console.files import JobFolder
from hvlaunch.errors import BadUsage


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
