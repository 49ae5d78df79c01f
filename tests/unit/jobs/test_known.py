"""Which jobs there are, which one a name means, and what is removed."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvlaunch.errors import BadUsage
from hvlaunch.outside import ABOUT, RESULT, JobDirectory, choose, known_jobs, prune

NOW = 1_795_000_000.0
DAY = 86400.0


class Jobs:
    """Jobs of this process, made by hand."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: list[JobDirectory] = []

    def start(self, job_id: str, *, began: float = NOW, name: str | None = None) -> JobDirectory:
        directory = JobDirectory(self.root, job_id, {"id": job_id, "name": name, "began": began})
        self._open.append(directory)
        return directory

    def end(self, directory: JobDirectory) -> None:
        self._open.remove(directory)
        directory.close()

    def fail(
        self, job_id: str, *, began: float = NOW, ended: float = NOW, name: str | None = None, code: int = 1
    ) -> None:
        directory = self.start(job_id, began=began, name=name)
        directory.keep({"exit_code": code})
        self.end(directory)
        os.utime(directory.path, (ended, ended))

    @property
    def ids(self) -> list[str]:
        return [job.id for job in known_jobs(self.root)]

    def close(self) -> None:
        for directory in list(self._open):
            self.end(directory)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path / "jobs")
    yield jobs
    jobs.close()


def test_no_job_at_all(jobs):
    assert jobs.ids == []


def test_the_newest_is_the_last_and_who_runs_has_a_driver(jobs):
    jobs.start("bbbb", began=NOW + 1)
    jobs.fail("aaaa", began=NOW + 2)
    jobs.end(jobs.start("cccc"))
    found = known_jobs(jobs.root)
    assert [(job.id, job.has_driver, job.result) for job in found] == [
        ("bbbb", True, None),
        ("aaaa", False, {"exit_code": 1}),
    ]


@pytest.mark.parametrize("damage", [b"", b'{"id": "aaaa"', b"[]", b"\xff"])
def test_what_is_no_jobs_directory_is_left_out(jobs, damage):
    jobs.fail("aaaa")
    (jobs.root / "aaaa" / ABOUT).write_bytes(damage)
    (jobs.root / "note").write_text("of the user")
    jobs.fail("bbbb")
    assert jobs.ids == ["bbbb"]


def test_the_only_one_that_runs_needs_no_name(jobs):
    jobs.fail("aaaa0000")
    jobs.start("bbbb0000")
    assert choose(known_jobs(jobs.root), None).id == "bbbb0000"


def test_one_that_has_lost_its_driver_comes_after_those_that_have_one(jobs):
    jobs.fail("aaaa0000")
    running = jobs.start("bbbb0000")
    lost = jobs.root / "cccc0000"
    jobs.fail("cccc0000")
    (lost / RESULT).unlink()
    assert choose(known_jobs(jobs.root), None).id == "bbbb0000"
    jobs.end(running)
    assert choose(known_jobs(jobs.root), None).id == "cccc0000"


@pytest.mark.parametrize(
    ("word", "meant"),
    [("aaaa0000", "aaaa0000"), ("aaaa", "aaaa0000"), ("base", "cccc0000"), ("other", "dddd0000")],
)
def test_by_id_or_its_beginning_or_name(jobs, word, meant):
    jobs.fail("aaaa0000", name="base")
    jobs.start("cccc0000", name="base")
    jobs.fail("dddd0000", name="other")
    assert choose(known_jobs(jobs.root), word).id == meant


@pytest.mark.parametrize(
    ("word", "cause"),
    [
        (None, "2 jobs run here: aaaa0000, aaaa1111"),
        ("aaaa", "2 jobs are called aaaa: aaaa0000, aaaa1111"),
        ("aaa", "there is no job aaa"),
        ("bbbb", "there is no job bbbb"),
    ],
)
def test_no_such_job_or_too_many(jobs, word, cause):
    jobs.start("aaaa0000")
    jobs.start("aaaa1111", began=NOW + 1)
    with pytest.raises(BadUsage) as raised:
        choose(known_jobs(jobs.root), word)
    assert raised.value.cause == cause


def test_the_newest_twenty_stay_for_a_week_and_none_that_runs_goes(jobs):
    jobs.start("0000", began=NOW - 30 * DAY)
    for number in range(1, 25):
        jobs.fail(f"{number:04}", began=NOW - 20 * DAY, ended=NOW - (9 - number / 3) * DAY)
    prune(jobs.root, NOW)
    assert sorted(jobs.ids) == ["0000", *(f"{number:04}" for number in range(6, 25))]


def test_of_those_that_ended_well_the_newest_twenty_stay_for_a_day(jobs):
    jobs.fail("bad0", ended=NOW - 6 * DAY)
    for number in range(25):
        jobs.fail(f"{number:04}", ended=NOW - (25 - number) / 20 * DAY, code=0)
    prune(jobs.root, NOW)
    assert sorted(jobs.ids) == [*(f"{number:04}" for number in range(5, 25)), "bad0"]
    prune(jobs.root, NOW + DAY / 2)
    assert sorted(jobs.ids) == [*(f"{number:04}" for number in range(15, 25)), "bad0"]


def test_one_that_is_being_made_stays_and_one_that_never_was_goes(jobs, tmp_path):
    jobs.fail("aaaa")
    making = jobs.root / ".0123456789ab"
    making.mkdir()
    made_at = making.stat().st_mtime
    prune(jobs.root, made_at + 1)
    assert making.exists()
    prune(jobs.root, made_at + 3600)
    assert not making.exists()
