"""What is seen of whole jobs on this machine, through the command line."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hvlaunch.console.lines import INTERVAL
from tests.full_pipe import full_pipe

HVLAUNCH = [sys.executable, "-m", "hvlaunch"]
DEADLINE = 100.0
STATUS = re.compile(rb"\x1b\[\?7l[^\n]*?\x1b\[\?7h\r(?:\r\x1b\[J)?")
"""What a job that takes more than a second to start shows meanwhile, and what removes it."""


def run(*arguments, env=None):
    command = [*HVLAUNCH, *map(str, arguments)]
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        env={**os.environ, **(env or {})},
    )


def on_a_terminal(*arguments, env=None, awaited=None, then=None):
    """All that a job writes to a terminal, and its exit code. `then` is called when `awaited` has been written."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", **(env or {})}
    command = [*HVLAUNCH, *map(str, arguments)]
    job = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    seen = b""
    with os.fdopen(ours, "rb", buffering=0) as screen:
        try:
            while data := screen.read(65536):
                seen += data
                if awaited is not None and awaited in seen:
                    then()
                    awaited = None
        except OSError:  # EIO: all of the other side have closed
            pass
        except BaseException:  # the test's time is over
            job.terminate()
            raise
    return seen, job.wait(DEADLINE)


@pytest.mark.parametrize(("end", "code"), [("exit 5", 5), ("sleep 600", 143), ("exit 0", 74)])
def test_a_job_whose_output_nobody_reads_ends(end, code):
    """What is not taken within the grace is dropped, with a word."""
    read, write = full_pipe()
    program = "import hvlaunch.gloo.controller as c; c._PAGER_PATIENCE = 0.2; from hvlaunch.cli.main import script; script()"
    with os.fdopen(read), os.fdopen(write, "wb") as stdout:
        command = [sys.executable, "-c", program, "-np", "1", "--quiet", "--grace", "0.2"]
        command += ["sh", "-c", f"echo words; echo going >&2; {end}"]
        job = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE)
        assert job.stderr is not None
        assert job.stderr.readline() == b"[0]<stderr>: going\n"
        if end == "sleep 600":
            job.terminate()
        _, stderr = job.communicate(timeout=DEADLINE)
    assert job.returncode == code
    assert b"hvlaunch: stdout: nothing has read it for 0.2 s; some output is lost\n" in stderr


@pytest.mark.parametrize(("command", "code"), [("echo words", 74), ("echo words; exit 3", 3)])
def test_a_job_whose_output_has_no_room_does_not_end_with_0(command, code):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*HVLAUNCH, "--quiet", "-np", "1", "sh", "-c", command],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=DEADLINE,
            check=False,
        )
    assert done.returncode == code
    assert b"hvlaunch: stdout: no space left on device; some output is lost\n" in done.stderr


def test_a_prefix_with_places():
    done = run(
        "--quiet",
        "-np",
        2,
        "--prefix",
        "{host}/{local_rank:02}|{stream}| ",
        "sh",
        "-c",
        "echo $RANK; echo e >&2",
    )
    assert sorted(done.stdout.splitlines()) == ["localhost/00|stdout| 0", "localhost/01|stdout| 1"]
    assert sorted(done.stderr.splitlines()) == ["localhost/00|stderr| e", "localhost/01|stderr| e"]


def test_a_prefix_as_horovodrun_has_it():
    done = run("-np", 1, "-prefix-timestamp", "echo", "x")
    assert re.fullmatch(
        r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\[0\]<stdout>: x\n", done.stdout
    )


def test_a_bad_prefix_starts_nothing(tmp_path):
    done = run("--prefix", "{lol}", "touch", tmp_path / "started")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "unknown field {lol}; try: {rank}" in done.stderr
    assert not (tmp_path / "started").exists()


def test_a_hidden_rank_that_fails_is_reported_in_full(tmp_path):
    script = (
        'echo "out $RANK"; [ $RANK = 1 ] || { touch "$0"; exit 0; }; '
        'until [ -e "$0" ]; do sleep 0.01; done; echo "it broke" >&2; exit 3'
    )
    done = run(
        "--quiet",
        "-np",
        2,
        "--ranks",
        "0",
        "--output-filename",
        tmp_path,
        "sh",
        "-c",
        script,
        tmp_path / "said",
    )
    assert done.returncode == 3
    assert done.stdout == "[0]<stdout>: out 0\n"
    report = done.stderr.splitlines()
    assert report[0].startswith("hvlaunch: rank 1 of 2 on host localhost failed first, after ")
    assert "    it broke" in report
    assert (tmp_path / "latest" / "rank.1" / "stdout").read_text() == "out 1\n"


def test_equal_lines_are_merged():
    script = "echo loading; echo shard $RANK; echo ready"
    done = run("-np", 3, "--merge", "sh", "-c", script)
    assert done.returncode == 0
    by_rank: dict[int, list[str]] = {rank: [] for rank in range(3)}
    for line in done.stdout.splitlines():
        prefixed = re.fullmatch(r"\[([\d,-]+)\]<stdout>: (.*)", line)
        assert prefixed is not None, line
        ranks, text = prefixed.groups()
        for part in ranks.split(","):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                by_rank[rank].append(text)
    assert by_rank == {rank: ["loading", f"shard {rank}", "ready"] for rank in range(3)}


def test_bars_in_a_pipe_are_few_lines_and_the_last():
    script = (
        "import sys, time\n"
        "for n in range(200):\n sys.stderr.write(f'\\r{n}/200'); sys.stderr.flush(); time.sleep(0.005)\n"
        "sys.stderr.write('\\r200/200\\n')"
    )
    began = time.monotonic()
    done = run("--quiet", "-np", 1, sys.executable, "-c", script)
    took = time.monotonic() - began
    lines = done.stderr.splitlines()
    assert all(re.fullmatch(r"\[0\]<stderr>: \d+/200", line) for line in lines)
    assert lines[-1] == "[0]<stderr>: 200/200"
    assert len(lines) <= took / INTERVAL + 2


def test_bars_on_a_terminal_are_drawn_in_place(tmp_path):
    script = (
        "import os, sys, time\n"
        "for n in range(100):\n sys.stderr.write(f'\\r{n}/100'); sys.stderr.flush(); time.sleep(0.005)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "sys.stderr.write('\\r100/100\\n')"
    )
    command = [sys.executable, "-c", script, tmp_path / "drawn"]
    seen, code = on_a_terminal("-np", 2, *command, awaited=b"99/100", then=(tmp_path / "drawn").touch)
    assert code == 0
    assert b"\x1b[J" in seen
    lines = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", seen).split(b"\r\n")
    assert sorted(line.rpartition(b"\r")[2] for line in lines if line.endswith(b"100/100")) == [
        b"[0]<stderr>: 100/100",
        b"[1]<stderr>: 100/100",
    ]


def test_a_prompt_is_shown_on_a_terminal_and_answered():
    """As input(), pdb and breakpoint() write it: without the end of a line."""
    script = "print('hello', input('Name? '))"
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm"}
    command = [
        *HVLAUNCH,
        "--quiet",
        "--color",
        "never",
        "-np",
        "2",
        sys.executable,
        "-c",
        f"import os\nif os.environ['RANK'] == '0': {script}",
    ]
    job = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    seen = b""
    with (
        os.fdopen(ours, "r+b", buffering=0) as screen,
        suppress(OSError),
    ):  # EIO: all of the other side have closed
        while data := screen.read(65536):
            is_news = b"Name? " not in seen
            seen += data
            if is_news and b"[0]<stdout>: Name? " in seen:
                screen.write(b"bob\n")
    assert job.wait(DEADLINE) == 0
    plain = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", STATUS.sub(b"", seen))
    assert plain.replace(b"\r", b"").splitlines()[-2:] == [
        b"[0]<stdout>: Name? bob",
        b"[0]<stdout>: hello bob",
    ]


def test_colours_are_for_terminals():
    seen, _ = on_a_terminal("--quiet", "-np", 1, "echo", "x")
    assert STATUS.sub(b"", seen) == b"\x1b[0;36m[0]<stdout>: \x1b[0mx\r\n"
    assert run("-np", 1, "echo", "x", env={"TERM": "xterm"}).stdout == "[0]<stdout>: x\n"


@pytest.mark.parametrize(
    ("flags", "env"), [([], {"NO_COLOR": "1"}), ([], {"TERM": "dumb"}), (["--color", "never"], {})]
)
def test_a_terminal_without_colours(flags, env):
    seen, _ = on_a_terminal("--quiet", *flags, "-np", 1, "echo", "x", env=env)
    assert STATUS.sub(b"", seen) == b"[0]<stdout>: x\r\n"


def test_a_quick_start_shows_two_lines_of_itself():
    began = time.monotonic()
    seen, code = on_a_terminal("-np", 2, "true")
    is_quick = time.monotonic() < began + 1.0
    assert code == 0
    plain = re.sub(rb"\x1b\[[0-9;]*m", b"", seen if is_quick else STATUS.sub(b"", seen)).replace(b"\r", b"")
    assert re.fullmatch(
        rb"hvlaunch: 2 workers on host localhost\n"
        rb"hvlaunch: done after [\d.]+ s, exit code 0\n",
        plain,
    )


def test_quiet_and_verbose():
    assert run("--quiet", "-np", 1, "true").stderr == ""
    told = run("--verbose", "-np", 2, "true").stderr.splitlines()
    assert all(line.startswith("hvlaunch: ") for line in told)
    for part in ("host localhost: connected after", "host localhost: ready after", "MASTER_ADDR=127.0.0.1"):
        assert any(part in line for line in told), part
    python = ".".join(map(str, sys.version_info[:3]))
    assert any(f"Python {python}, {len(os.sched_getaffinity(0))} CPU" in line for line in told)
    assert any(re.search(r"started ranks 0-1, pids \d+", line) for line in told)


def test_events_of_a_job(tmp_path):
    path = tmp_path / "events"
    first = run("--events", path, "-np", 2, "-x", "SECRET=hunter2", "sh", "-c", 'exit "$RANK"')
    assert first.returncode == 1
    assert run("--events", path, "-np", 1, "true").returncode == 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({record["job"] for record in records}) == 2
    ended = [record for record in records if record["type"] == "job_ended"]
    assert [(one["exit_code"], one["rank"]) for one in ended] == [(1, 1), (0, None)]
    codes = {
        one["rank"]: one["code"]
        for one in records[:-1]
        if one["type"] == "worker_exited" and one["round"] == 0
    }
    assert codes[1] == 1
    assert "hunter2" not in path.read_text()


def test_events_that_can_not_be_written_start_nothing(tmp_path):
    done = run("--events", tmp_path / "no" / "such", "touch", tmp_path / "started")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no such file or directory; try: a file that you may write to" in done.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    "flags", [[], ["--events", "{tmp}/events", "--quiet", "--ranks", "0", "--prefix", "{{host}}"]]
)
def test_a_job_in_a_pipe_loads_neither_rich_nor_the_like(flags, tmp_path):
    words = [flag.format(tmp=tmp_path) for flag in flags]
    script = (
        f"import sys; from hvlaunch.cli.main import main; code = main({[*words, '-np', '2', 'true']!r});"
        "print(code, sorted({'rich', 'rich_argparse', 'shtab', 'ClusterShell', 'paramiko', 'psutil', 'datetime'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE, check=True
    )
    assert done.stdout == "0 []\n"


@pytest.mark.parametrize("merge", [[], ["--merge"]])
def test_a_line_of_50_mb_and_any_bytes_pass_whole(merge):
    size = 50 << 20
    script = (
        "import sys\n"
        f"sys.stdout.buffer.write(bytes(b for b in range(256) if b not in (10, 13)) * ({size} // 254) + b'\\n')"
    )
    command = [*HVLAUNCH, *merge, "-np", "1", sys.executable, "-c", script]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE, check=True
    )
    line = bytes(byte for byte in range(256) if byte not in (10, 13)) * (size // 254)
    assert done.stdout == b"[0]<stdout>: " + line + b"\n"
