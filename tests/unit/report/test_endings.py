import subprocess
import sys

import pytest

from hvlaunch.console.status import duration
from hvlaunch.hosts.parse import fold_hosts, fold_ranks
from hvlaunch.job import PortHolder, WorkerExit
from hvlaunch.report.text import end, endings, signal_name


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"),
        (0.04, "0.04 s"),
        (12.44, "12.4 s"),
        (60.0, "1 min 0 s"),
        (192.4, "3 min 12 s"),
        (3599.7, "1 h 0 min"),
        (8040.0, "2 h 14 min"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"code": 0}, "exit code 0"),
        ({"code": 255}, "exit code 255"),
        ({"code": 126}, "exit code 126 (in a shell: command found, but not executable)"),
        ({"code": 139}, "exit code 139 (128 + 11: SIGSEGV ended a command that it ran)"),
        ({"signal": 9}, "SIGKILL (killed)"),
        ({"signal": 200}, "signal 200"),
        ({"code": 137, "oom_killed": True}, "killed by the kernel's out-of-memory killer (exit code 137)"),
        (
            {"code": 1, "port_taken_by": 1001, "port_holder": PortHolder(20001, "bob", "nc, pid 77")},
            "its MASTER_PORT 20001 was taken by a program of another user, uid 1001 (bob): nc, pid 77 (exit code 1)",
        ),
        (
            {"code": 1, "port_taken_by": 1001, "port_holder": PortHolder(20001)},
            "its MASTER_PORT 20001 was taken by a program of another user, uid 1001 (exit code 1)",
        ),
        ({"code": 127, "not_started": "x: command not found"}, "could not be started: x: command not found"),
    ],
)
def test_a_single_worker_end(facts, text):
    assert end(WorkerExit(rank=0, host="a", **facts)) == text


def test_signal_names():
    assert [signal_name(15), signal_name(99)] == ["SIGTERM", "signal 99"]


def test_earlier_later_and_at_the_same_time():
    first = WorkerExit(rank=0, host="a", code=1, when=5.0)

    def told(*times):
        workers = [
            WorkerExit(rank=number, host="b", code=2, when=when) for number, when in enumerate(times, 1)
        ]
        (line,) = endings(workers, len(times) + 1, first)
        return line.partition(": exit code 2, ")[2]

    assert told(5.3) == "0.3 s later"
    assert told(4.9) == "0.1 s earlier"
    assert told(5.01, 4.99) == "at the same time"
    assert told(6.0, 5.2, 5.5) == "0.2 to 1.0 s later"
    assert told(4.8, 5.2) == "0.2 s earlier to 0.2 s later"


def test_very_many_endings_are_cut():
    workers = [WorkerExit(rank=number, host="a", code=number + 1) for number in range(20)]
    lines = endings(workers, 20, None)
    assert (len(lines), lines[-1]) == (13, "and 8 other endings")


def test_folding():
    assert fold_ranks([3]) == "rank 3"
    assert fold_ranks([7, 0, 1, 2, 3, 6, 10]) == "ranks 0-3,6-7,10"
    assert fold_hosts(["b"]) == "host b"
    assert fold_hosts(["b", "b"]) == "host b"
    assert fold_hosts(["gpu03", "gpu01", "gpu02", "login"]) == "4 hosts (gpu[01-03],login)"
    assert fold_hosts(["10.0.0.1", "10.0.0.2"]) == "hosts 10.0.0.1 and 10.0.0.2"
    assert fold_hosts(["odd[", "b"]) == "hosts odd[ and b"


def test_a_successful_job_loads_no_report():
    script = (
        "import sys, hvlaunch.console.printer, hvlaunch.report.text\n"
        "print(sorted({'ClusterShell', 'rich', 'paramiko', 'torch', 'psutil'} & set(sys.modules)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    assert ended.stdout == "[]\n"
