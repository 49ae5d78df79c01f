"""What the documents show as typed and printed (`console`) is typed here, and prints that."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvlaunch.cli.options.parser import JOB_WORDS
from tests.unit.docs.blocks import PAGES, Block, blocks_of
from tests.unit.test_local_jobs import DEADLINE, HVLAUNCH

SESSIONS = [block for path in PAGES for block in blocks_of(path) if block.language == "console"]
DIFFERS = [
    (r"\b[0-9a-f]{12}\b", "[0-9a-f]{12}"),  # a job's id
    (r"\b\d+ min ago", r"\\d+ \\S+ ago"),
    (r"\b\d+\\\.\d+ s\b", r"[\\d.]+ s"),
    (r"127\\\.0\\\.0\\\.1:\d+", r"127\\.0\\.0\\.1:\\d+"),
    (r"gpu\\\[01\\-02\\\]", "localhost"),
    (r" {2,}", " +"),
]
"""What is otherwise each time, or here."""
ONLY_BEGIN = ("hvlaunch stacks",)
"""What is printed depends on the program: its first line's first words are compared."""
TRAIN = "import time\n\n\ndef main():\n    print('here', flush=True)\n    time.sleep(600)\n\n\nmain()\n"


def pattern(shown: str) -> str:
    """What matches all that a page shows as printed."""
    found = re.escape(shown).replace("\\ ", " ")
    for what, by in DIFFERS:
        found = re.sub(what, by, found)
    return found


def parts_of(block: Block) -> Iterator[tuple[str, str]]:
    """What is typed, and what is printed then."""
    for part in block.text.removeprefix("$ ").split("\n$ "):
        typed, _, printed = part.partition("\n")
        yield typed, printed.rstrip()


@contextmanager
def baseline(home: Path, env: Mapping[str, str]) -> Iterator[None]:
    """The job that the pages speak of, on this machine."""
    (home / "train.py").write_text(TRAIN)
    words = ["--job-name", "baseline", "-np", "8", "-H", "localhost:8", "python", "train.py"]
    job = subprocess.Popen(
        [*HVLAUNCH, *words], cwd=home, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert job.stdout is not None
    try:
        assert [job.stdout.readline()[-5:] for _ in range(8)] == [b"here\n"] * 8
        yield
    finally:
        job.terminate()
        job.communicate(timeout=DEADLINE)


@pytest.mark.parametrize("block", SESSIONS, ids=lambda block: block.where)
def test_a_session_is_as_the_page_shows_it(block, tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(sys.executable)
    (programs / "hvlaunch").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hvlaunch "$@"\n')
    (programs / "hvlaunch").chmod(0o755)
    env = {
        "HOME": str(tmp_path),
        "PATH": f"{programs}{os.pathsep}/usr/bin:/bin",
        "LC_ALL": "C.UTF-8",
    }
    if any(typed.split()[1] in JOB_WORDS for typed, _ in parts_of(block)):
        with baseline(tmp_path, env):
            play(block, tmp_path, env)
    else:
        play(block, tmp_path, env)


def play(block: Block, home: Path, env: Mapping[str, str]) -> None:
    for typed, shown in parts_of(block):
        done = subprocess.run(
            ["/bin/bash", "-c", typed],
            cwd=home, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=DEADLINE, check=False,
        )  # fmt: skip
        printed = "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())
        end = ":" if typed in ONLY_BEGIN else "\0"
        what = pattern(shown.partition(end)[0])
        assert re.fullmatch(what, printed.partition(end)[0]), f"{block.where}: {typed}\n{printed}"
