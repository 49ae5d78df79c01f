"""The file of a job's journal."""

import os
import stat

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import replay
from hvlaunch.errors import BadUsage
from hvlaunch.watch.journal import ReplayJournal, entries

from .history import PORT, History, spec


class Kept(History):
    """A history whose journal is in a file."""

    def __init__(self, path, say=pytest.fail):
        job = spec("a:1", env={"TOKEN": "of-the-user"})
        super().__init__(job)
        self.file = ReplayJournal(path, say)
        self.file.begin(job, "j0b", PORT)

    def play(self, *events):
        new: list[do.Action] = []
        for event in events:
            actions = super().play(event)
            self.file.watch(event, actions, self.now)
            new += actions
        return new


def test_each_entry_is_in_the_file_at_once(tmp_path):
    job = Kept(tmp_path / "journal")
    for count, event in enumerate([on.Began(), on.HostConnected("a"), on.Tick()], 1):
        job.play(event)
        assert len(list(entries(tmp_path / "journal"))) == 1 + count


def test_a_job_replays_from_its_file(tmp_path):
    job = Kept(tmp_path / "journal")
    job.start()
    job.exit("a", 0, 3)
    job.close()
    job.file.close()
    found = list(entries(tmp_path / "journal"))
    assert found[1:] == job.journal[1:]
    assert replay(found).phase is job.engine.phase
    assert found[0]["spec"]["env"] == {"TOKEN": "of-the-user"}


def test_incomplete_line_is_no_entry(tmp_path):
    job = Kept(tmp_path / "journal")
    job.play(on.Began(), on.Tick())
    path = tmp_path / "journal"
    path.write_bytes(path.read_bytes()[:-9])
    assert len(list(entries(path))) == 2


def test_journal_is_private(tmp_path):
    before = os.umask(0)
    try:
        Kept(tmp_path / "journal")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("name", "cause"), [("old", "file exists"), ("no/such", "no such file or directory")]
)
def test_a_file_that_can_not_be_made_is_bad_usage(tmp_path, name, cause):
    (tmp_path / "old").write_text("of another job\n")
    with pytest.raises(BadUsage, match=f"journal .*{name}: {cause}"):
        Kept(tmp_path / name)
    assert (tmp_path / "old").read_text() == "of another job\n"


def test_journal_ends_when_writing_fails(tmp_path):
    told: list[str] = []
    job = Kept(tmp_path / "journal", told.append)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, job.file._descriptor)
    os.close(full)
    job.play(on.Began(), on.Tick())
    assert told == [f"journal {tmp_path / 'journal'}: no space left on device; it ends here"]


def test_journal_ends_at_a_turn_that_has_no_encoding(tmp_path):
    told: list[str] = []
    job = Kept(tmp_path / "journal", told.append)
    job.file.watch(on.HostConnected(3), [], 1.0)  # type: ignore[arg-type]
    job.play(on.Began())
    assert told == [f"journal {tmp_path / 'journal'}: event.host: 3 is no str; it ends here"]
    assert len(list(entries(tmp_path / "journal"))) == 1
