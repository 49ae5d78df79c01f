"""The ledger of hosts: verdicts fade, names and machines are told apart, and no damage stops a job."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hvlaunch.cli.hosts.hosts import ledger_table
from hvlaunch.cli.main import main
from hvlaunch.outside import take_lock
from hvlaunch.outside.ledger import (
    CLEARED,
    HALF_LIFE,
    VERDICTS,
    WEIGHTS,
    Ledger,
    LedgerEntry,
    ledger_directory,
)

DAY = 86400.0
NOW = 1_800_000_000.0
SURE = [name for name, weight in WEIGHTS.items() if weight == 1.0]


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def ledger(tmp_path: Path, warnings: list[str]) -> Ledger:
    return Ledger(tmp_path / "ledger", warnings.append)


def file_of(ledger: Ledger) -> Path:
    return ledger._path


def test_a_single_verdict_fades_and_counts_for_a_half_life_at_most(ledger: Ledger) -> None:
    for name, weight in WEIGHTS.items():
        host = name.replace(" ", "-")
        ledger.record("", host, name, "job", NOW)
        assert (host in ledger.suspects(NOW)) == (weight >= 0.5), name
        assert host not in ledger.suspects(NOW + HALF_LIFE * 1.001), name


def test_many_verdicts_keep_a_host_out_no_longer_than_one(ledger: Ledger) -> None:
    for number in range(50):
        ledger.record("m", "a", SURE[0], f"job{number}", NOW + number)
    assert ledger.suspects(NOW + 50)["a"].score <= 1.0
    assert ledger.suspects(NOW + HALF_LIFE * 0.99)
    assert not ledger.suspects(NOW + HALF_LIFE * 1.001)


def test_a_suspect_gets_its_trial_although_it_fails_again(ledger: Ledger) -> None:
    is_suspect = {}
    for day in range(17):
        if day % 2 == 0:
            ledger.record("m", "a", SURE[0], f"job{day}", NOW + day * DAY)
        is_suspect[day] = "a" in ledger.suspects(NOW + (day + 0.5) * DAY)
    # Its trial begins after a half-life, and ends with its next failure.
    assert [day for day, suspect in is_suspect.items() if not suspect] == [7, 15]
    ledger.record("n", "b", SURE[0], "1", NOW + 16 * DAY)
    assert [*ledger.suspects(NOW + 16 * DAY)] == ["a", "b"], "the worst is the first"


def test_weak_verdicts_add_up(ledger: Ledger) -> None:
    ledger.record("m", "a", "crash", "1", NOW)
    assert not ledger.suspects(NOW)
    # Within an hour it is one fault, tried several times.
    for number in range(10):
        ledger.record("m", "a", "crash", f"again{number}", NOW + 60 * number)
    assert not ledger.suspects(NOW + 600)
    ledger.record("m", "a", "crash", "2", NOW + 7200)
    assert ledger.suspects(NOW + 7200)["a"].why == "crash 2x"
    # A day apart they count almost as much; a month apart they do not.
    ledger.record("m2", "b", "crash", "1", NOW)
    ledger.record("m2", "b", "crash", "2", NOW + 30 * DAY)
    assert "b" not in ledger.suspects(NOW + 30 * DAY)


def test_errors_of_scripts_do_not_count_against_hosts(ledger: Ledger) -> None:
    for number in range(100):
        ledger.record("m", "a", "exception", str(number), NOW)
    assert ledger.records(NOW) == []


def test_a_cleared_host_has_no_record_and_may_get_one_again(ledger: Ledger) -> None:
    ledger.record("m", "a", SURE[0], "1", NOW)
    assert ledger.clear(["a", "b"], "", NOW + 1) == ["a"]
    assert ledger.records(NOW + 1) == []
    assert len(ledger.entries()) == 2, "a host without a record fills the file"
    ledger.record("m", "a", SURE[0], "2", NOW + 2)
    assert [entry.job for entry in ledger.suspects(NOW + 2)["a"].entries] == ["2"]


def test_a_machine_is_known_under_its_other_names(ledger: Ledger) -> None:
    ledger.record("m", "gpu01", SURE[0], "1", NOW)
    assert "gpu01.cluster" not in ledger.suspects(NOW)
    ledger.note_machines({"gpu01.cluster": "m", "gpu02": "n"}, "2", NOW + 1)
    assert {*ledger.suspects(NOW + 1)} == {"gpu01", "gpu01.cluster"}
    size = len(ledger.entries())
    ledger.note_machines({"gpu01.cluster": "m", "gpu01": "m", "gpu02": "n"}, "3", NOW + 2)
    assert len(ledger.entries()) == size, "nothing is new, and the file grows"


def test_another_machine_under_the_old_name_is_innocent(ledger: Ledger) -> None:
    ledger.record("m", "a", SURE[0], "1", NOW)
    ledger.note_machines({"a": "new"}, "2", NOW + 1)
    assert ledger.records(NOW + 1) == []
    # The old machine comes back: its record does too.
    ledger.note_machines({"a": "m"}, "3", NOW + 2)
    assert "a" in ledger.suspects(NOW + 2)


def test_a_host_without_an_id_is_told_by_its_name_until_the_id_is_known(ledger: Ledger) -> None:
    ledger.record("", "a", "not started", "1", NOW)
    ledger.record("", "b", SURE[0], "1", NOW)
    assert {*ledger.suspects(NOW)} == {"a", "b"}
    ledger.record("m", "a", "lost", "2", NOW + 1)
    ledger.record("", "a", "check failed", "3", NOW + 2)
    (record,) = (record for record in ledger.records(NOW + 2) if "a" in record.hosts)
    assert [entry.job for entry in record.entries] == ["1", "2", "3"]


def test_a_clock_that_is_ahead_makes_nothing_last_longer(ledger: Ledger) -> None:
    ledger.record("m", "a", SURE[0], "1", NOW + 365 * DAY)
    assert ledger.suspects(NOW)["a"].score == 1.0
    ledger.record("m", "a", "crash", "2", NOW)
    assert ledger.suspects(NOW)["a"].score == 1.0
    ledger.clear(["a"], "", NOW)
    assert ledger.records(NOW) == []


WRITER = """
import sys
import time
from pathlib import Path
from hvlaunch.outside.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]), lambda text: sys.exit(text))
for number in range(40):
    ledger.record("", sys.argv[2], "hang", str(number), 1e9 + number)
"""


def test_jobs_write_at_the_same_time(ledger: Ledger, tmp_path: Path, warnings: list[str]) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "ledger"), f"h{number}"])
        for number in range(4)
    ]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    entries = ledger.entries()
    for number in range(4):
        of_host = [entry.job for entry in entries if entry.host == f"h{number}"]
        assert of_host == [str(index) for index in range(40)]
    assert warnings == []


def test_a_job_waits_for_another_that_writes(ledger: Ledger, tmp_path: Path, warnings: list[str]) -> None:
    ledger.record("", "a", SURE[0], "first", NOW)
    lock = take_lock(tmp_path / "ledger" / "lock")
    # A second is what a full disk or a busy machine may take.
    threading.Timer(1.0, os.close, [lock]).start()
    ledger.record("", "a", SURE[0], "second", NOW)
    assert [entry.job for entry in ledger.entries()] == ["first", "second"]
    assert warnings == []


@pytest.mark.parametrize("seed", range(60))
def test_any_damage_is_a_warning_and_earlier_entries_stay(
    seed: int, ledger: Ledger, warnings: list[str]
) -> None:
    rng = random.Random(seed)
    ledger.append(LedgerEntry(NOW, f"h{number}", "m", SURE[0]) for number in range(20))
    path = file_of(ledger)
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    match seed % 3:
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            del data[at:]
        case 2:
            data[at:at] = rng.randbytes(rng.randrange(1, 100))
    path.write_bytes(data)
    whole = [entry.host for entry in ledger.entries()]
    assert whole == [f"h{number}" for number in range(len(whole))]
    warnings.clear()
    ledger.record("m", "new", SURE[0], "2", NOW)
    # Written whatever was there, with all that could be read.
    assert [entry.host for entry in ledger.entries()][-1] == "new"
    assert [entry.host for entry in ledger.entries()][:-1] == whole
    warnings.clear()
    ledger.entries()
    assert warnings == [], "the damage stays"


@pytest.mark.parametrize("content", [b"", b"hvlau", b"{}", b"hvlaunch ledger 9\n", bytes(100)])
def test_another_kind_of_file_is_put_aside(content: bytes, ledger: Ledger) -> None:
    ledger.record("m", "a", SURE[0], "1", NOW)
    file_of(ledger).write_bytes(content)
    assert ledger.records(NOW) == []
    ledger.record("m", "b", SURE[0], "1", NOW)
    assert "b" in ledger.suspects(NOW)


def test_entries_of_another_version_are_left_out(ledger: Ledger) -> None:
    ledger.append(
        [LedgerEntry(NOW, "a", "m", "a verdict of tomorrow", "1"), LedgerEntry(NOW, "b", "n", SURE[0], "1")]
    )
    assert {*ledger.suspects(NOW)} == {"b"}


@pytest.mark.parametrize("kind", ["file", "directory", "open to all"])
def test_a_place_that_can_not_be_written_is_a_warning(
    kind: str, ledger: Ledger, tmp_path: Path, warnings: list[str]
) -> None:
    match kind:
        case "file":
            (tmp_path / "ledger").write_text("")
        case "directory":
            (tmp_path / "ledger" / "log").mkdir(parents=True)
        case _:
            (tmp_path / "ledger").mkdir()
            (tmp_path / "ledger").chmod(0o777)
    ledger.record("m", "a", SURE[0], "1", NOW)
    assert warnings
    assert all(warning.startswith("the ledger of hosts ") for warning in warnings)


def test_the_file_stays_small_and_keeps_the_newest(ledger: Ledger, warnings: list[str]) -> None:
    ledger.append(LedgerEntry(NOW, f"h{number}", "", "hang", "x" * 300, "y" * 300) for number in range(1999))
    ledger.append(LedgerEntry(NOW + 1, f"new{number}", "", "hang", "1") for number in range(2))
    entries = ledger.entries()
    assert len(entries) == 1000
    assert [entry.host for entry in entries[-2:]] == ["new0", "new1"]
    assert max(len(entry.detail) for entry in entries) == 200
    ledger.append(LedgerEntry(NOW + 100 * HALF_LIFE, f"h{number}", "", "hang", "1") for number in range(1001))
    assert len(ledger.entries()) == 1000
    assert warnings == []


def test_the_command_shows_and_clears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["hosts"]) == 0
    assert capsys.readouterr().out == "no host has a record\n"
    ledger = Ledger(ledger_directory({"XDG_STATE_HOME": str(tmp_path)}), print)
    ledger.record("m", "gpu07", "gpu fault", "5f3a", time.time() - 7200, "XID 79\x1b[2J")
    ledger.record("n", "gpu08", "crash", "5f3a", time.time() - 7200)
    assert main(["hosts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["HOST", "RECORD", "LAST", "JOB", "WHY"],
        ["gpu07", "suspect", "2", "h", "ago", "5f3a", "gpu", "fault:", "XID", "79\\x1b[2J"],
        ["gpu08", "watched", "2", "h", "ago", "5f3a", "crash"],
    ]
    assert main(["hosts", "--json"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (first["hosts"], first["is_suspect"]) == (["gpu07"], True)
    assert main(["hosts", "--clear", "gpu[01-07]"]) == 0
    assert capsys.readouterr().out == "cleared: gpu07\n"
    assert main(["hosts", "--clear", "gpu[01-07]"]) == 2
    assert "no record of gpu[01-07]" in capsys.readouterr().err


def test_each_verdict_has_a_weight_and_a_meaning() -> None:
    assert CLEARED not in VERDICTS
    assert all(0 <= weight <= 1 and meaning for weight, meaning in VERDICTS.values())


def test_a_table_is_as_wide_as_its_cells() -> None:
    assert ledger_table([], NOW).split() == ["HOST", "RECORD", "LAST", "JOB", "WHY"]
