"""The record of a job's run: no secret gets into it, and a hostile host can't write what it likes there."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.driver.observing import Answer, Observers, Target
from hvlaunch.driver.observing.observing import Versions
from hvlaunch.outside import known_jobs
from hvlaunch.outside.run_record import RUN
from tests.unit.cli.job_site import Site

SECRETS = ["hunter2-7f3a", "ghp_0123456789abcdefghij", "sesame-4711"]
GOOD: dict[str, Any] = {
    **dict.fromkeys(("kernel", "machine"), "x"),
    **dict.fromkeys(("driver", "executable", "python", "torch", "cuda", "nccl")),
    "gpus": [],
}


class OneHost(Observers):
    """Observers of a host that answers at once."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def ask(
        self,
        kind: str,
        question: Callable[[Target], Any],
        within: float,
        answered: Callable[[Answer], None],
    ) -> list[str]:
        assert (kind, within > 0) == ("versions", True)
        if question(Target("a", "", {0: 1}, {})) is None:
            return []
        answered(Answer("a", self._value))
        return ["a"]

    def at(self, when: float, call: Callable[[], None]) -> None:
        call()


def recorded(value: Any) -> list[Any]:
    versions, calls = Versions(OneHost(value), lambda: 0.0), list[Any]()
    versions.call = calls.append
    versions.ask_soon()
    # A host is asked once.
    versions.ask_soon()
    return [call for call in calls if call]


def test_the_answer_of_an_honest_host_is_recorded() -> None:
    assert recorded(GOOD) == [{"a": GOOD}]


@pytest.mark.parametrize(
    "value",
    [
        {**GOOD, "torch": "2.4\x1b]0;owned\x07"},
        {**GOOD, "kernel": "x" * 10_000},
        {**GOOD, "python": {"a": 1}},
        {**GOOD, "gpus": ["x"] * 1000},
        {**GOOD, "more": "x" * 1000},
        [],
        None,
    ],
    ids=["controls a terminal", "long", "of another type", "many", "unknown field", "a list", "null"],
)
def test_a_host_can_not_fill_the_record_or_control_a_terminal(value: Any) -> None:
    assert recorded(value) == []


def test_the_record_has_no_secret_of_variables_files_options_and_command(tmp_path: Path) -> None:
    site = Site(tmp_path / "state")
    (tmp_path / "variables").write_text(f"DB_URL=postgres://me:{SECRETS[0]}@db/x\nDB_PASSWORD={SECRETS[2]}\n")
    words = [
        *("-np", "1", "-x", f"API_TOKEN={SECRETS[0]}", "-x", f"PLAIN={SECRETS[1]}"),
        *("--env-file", str(tmp_path / "variables"), "--prefix", f"token={SECRETS[0]} "),
        *("sh", "-c", "exit 3", "--api-key", SECRETS[2], f"https://me:{SECRETS[0]}@db"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "hvlaunch", *words],
        env=site.environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 3, done.stderr
    [job] = known_jobs(site.root)
    text = (job.directory / RUN).read_text()
    assert text.count("****") >= len(words[5::2])
    assert not [secret for secret in SECRETS if secret in text]
