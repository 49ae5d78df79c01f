"""The failure report for each kind of ending, as a person would read it."""

import json
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGPIPE, SIGSEGV, SIGTERM

import pytest

from hvlaunch.errors import UnknownHost
from hvlaunch.job import JobResult
from hvlaunch.report.failure_report import Survivors, survivors
from hvlaunch.telemetry.stack import Frame, ProcessStack, ThreadStack
from tests.unit.report.reports import ENDS, check, ended, failure_report, stopped, worker

GIB = 1 << 30

TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 7, in <module>
    main()
  File "train.py", line 4, in main
    raise ValueError("bad learning rate")
ValueError: bad learning rate
"""

GLOO = b"""\
Traceback (most recent call last):
  File "train.py", line 9, in step
    dist.all_reduce(loss)
RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:31337
"""


def test_success_prints_nothing():
    result = JobResult(exit_code=0, elapsed=3.0, exits=(worker(0, code=0), worker(1, code=0)))
    assert failure_report(result, {0: b"a warning\n"}, 2) == ""


def test_an_exception():
    check(
        ended(
            worker(3, "b", code=1, when=12.41),
            worker(5, "c", code=1, when=12.63),
            *stopped(0, 1, 2, 4, 6, 7),
        ),
        8,
        """
        hvlaunch: rank 3 of 8 on host b failed first, after 12.4 s: exit code 1
          Its last lines of stderr:
            Traceback (most recent call last):
              File "train.py", line 7, in <module>
                main()
              File "train.py", line 4, in main
                raise ValueError("bad learning rate")
            ValueError: bad learning rate
          The others:
            rank 5 on host c: exit code 1, 0.2 s later
            6 stopped by hvlaunch (SIGTERM): ranks 0-2,4,6-7
          The others lost connections because of rank 3.
          All output of rank 3: logs/rank.3/
        """,
        {3: TRACEBACK.encode(), 5: GLOO},
        output=Path("logs"),
    )


def test_a_traceback_from_the_error_file():
    error_file = json.dumps(
        {
            "message": {
                "message": "ValueError: bad learning rate",
                "extraInfo": {"py_callstack": TRACEBACK, "timestamp": "1795235855"},
            }
        }
    )
    check(
        ended(worker(0, code=1, when=0.5, error_file=error_file), *stopped(1)),
        2,
        """
        hvlaunch: rank 0 of 2 on host a failed first, after 0.50 s: exit code 1
          Its traceback:
            Traceback (most recent call last):
              File "train.py", line 7, in <module>
                main()
              File "train.py", line 4, in main
                raise ValueError("bad learning rate")
            ValueError: bad learning rate
          The others:
            1 stopped by hvlaunch (SIGTERM): rank 1
        """,
        {0: b"not these lines\n"},
    )


def test_out_of_memory():
    check(
        ended(
            worker(9, "gpu02", signal=SIGKILL, when=3725.0, oom_killed=True, max_rss=int(61.23 * GIB)),
            worker(10, "gpu02", signal=SIGKILL, when=3725.3, oom_killed=True, max_rss=int(60.1 * GIB)),
            *stopped(*range(8), host="gpu01", when=3726.0),
            *stopped(8, 11, 12, 13, 14, host="gpu02", when=3726.0),
            *stopped(15, host="gpu02", signal=SIGKILL, when=3736.0),
        ),
        16,
        """
        hvlaunch: rank 9 of 16 on host gpu02 failed first, after 1 h 2 min: killed by the kernel's out-of-memory killer (SIGKILL); its memory peaked at 61.2 GiB
          Its last lines of stderr:
            epoch 3
          The others:
            rank 10 on host gpu02: killed by the kernel's out-of-memory killer (SIGKILL), 0.3 s later
            13 stopped by hvlaunch (SIGTERM): ranks 0-8,11-14
            1 stopped by hvlaunch (SIGKILL): rank 15
          Try: a smaller batch, fewer workers on gpu02 (host:slots), or more memory there (a container's limit counts)
        """,
        {9: b"epoch 3\n"},
    )


def test_a_kill_from_outside():
    check(
        ended(worker(0, code=137, when=75.0, max_rss=2 * GIB)),
        1,
        """
        hvlaunch: rank 0 of 1 on host a failed, after 1 min 15 s: exit code 137 (128 + 9: SIGKILL ended a command that it ran); its memory peaked at 2.0 GiB
          Try: dmesg -T | grep -i -e oom -e killed on a: SIGKILL came from outside hvlaunch, mostly because memory ran out, or from a scheduler
        """,
    )


def test_a_crash():
    check(
        ended(worker(1, signal=SIGSEGV, when=2.0), *stopped(0)),
        2,
        """
        hvlaunch: rank 1 of 2 on host a failed first, after 2.0 s: SIGSEGV (segmentation fault)
          The others:
            1 stopped by hvlaunch (SIGTERM): rank 0
          Try: -x PYTHONFAULTHANDLER=1, which prints the Python stack at the crash
        """,
    )


def test_a_command_missing_on_all_hosts():
    cause = "trainer: command not found (PATH=/usr/bin:/bin)"
    check(
        ended(*(worker(rank, host, code=127, not_started=cause) for rank, host in enumerate("aabb"))),
        4,
        """
        hvlaunch: hosts a and b: trainer: command not found
          Try: check the spelling; a program outside PATH needs its path (./train in the working directory)
        """,
    )


def test_a_command_not_found_by_a_shell():
    check(
        ended(worker(0, code=127, when=0.01)),
        1,
        """
        hvlaunch: rank 0 of 1 on host a failed, after 0.01 s: exit code 127 (in a shell: command not found)
          Its last lines of stderr:
            run.sh: line 2: trainer: command not found
          Try: the command's full path, or a PATH that has it on a (-x PATH=…)
        """,
        {0: b"run.sh: line 2: trainer: command not found\n"},
    )


def test_a_script_that_is_not_executable():
    cause = "train.py: permission denied"
    check(
        ended(worker(0, "b", code=126, not_started=cause), *stopped(1)),
        2,
        """
        hvlaunch: host b: train.py: permission denied
          Try: chmod +x, or put the interpreter before it (python train.py)
        """,
    )


def test_the_cause_is_named_and_the_first_victim():
    victim = worker(0, "a", code=1, when=10.0)
    check(
        ended(
            worker(6, "d", code=1, when=10.3),
            victim,
            worker(2, "b", code=1, when=10.1),
            *stopped(1, 3, 4, 5, 7),
            first_victim=victim,
        ),
        8,
        """
        hvlaunch: rank 6 of 8 on host d failed, after 10.3 s: exit code 1
          Its last lines of stderr:
            torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
          Rank 0 on host a was the first to end, 0.3 s earlier, since it lost a connection: exit code 1
          The others:
            rank 2 on host b: exit code 1, 0.2 s earlier
            5 stopped by hvlaunch (SIGTERM): ranks 1,3-5,7
          The others lost connections because of rank 6.
          Try: a smaller batch; on d, nvidia-smi shows who else uses the GPU
        """,
        {0: GLOO, 2: GLOO, 6: b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"},
    )


def test_a_cause_that_hvlaunch_stopped_and_its_first_victim():
    victim = worker(1, "b", code=1, when=10.0)
    cause = worker(0, "a", signal=SIGTERM, when=12.0, stopped=True)
    result = JobResult(exit_code=1, elapsed=12.0, exits=(cause, victim), failure=cause, first_victim=victim)
    check(
        result,
        2,
        """
        hvlaunch: rank 0 of 2 on host a failed, and was stopped by hvlaunch before it ended, after 12.0 s: SIGTERM (terminated)
          Its last lines of stderr:
            Traceback (most recent call last):
              File "train.py", line 7, in <module>
                main()
              File "train.py", line 4, in main
                raise ValueError("bad learning rate")
            ValueError: bad learning rate
          Rank 1 on host b was the first to end, 2.0 s earlier, since it lost a connection: exit code 1
        """,
        {0: TRACEBACK.encode(), 1: GLOO},
    )


def test_only_lost_connections():
    check(
        ended(worker(0, code=1, when=10.0), worker(1, "b", code=1, when=10.01)),
        2,
        """
        hvlaunch: rank 0 of 2 on host a failed first, after 10.0 s: exit code 1
          Its last lines of stderr:
            Connection reset by peer
          The others:
            rank 1 on host b: exit code 1, at the same time
          Try: -x NCCL_DEBUG=INFO, or -x TORCH_CPP_LOG_LEVEL=INFO, to see its connections; and check the network between the hosts (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, a firewall)
        """,
        {0: b"Connection reset by peer\n", 1: b"Connection reset by peer\n"},
    )


def test_a_silent_worker():
    check(
        ended(worker(0, code=1, when=1.0)),
        1,
        """
        hvlaunch: rank 0 of 1 on host a failed, after 1.0 s: exit code 1
          Try: @record of torch.distributed.elastic.multiprocessing.errors on the script's main(): it wrote nothing to stderr, and with @record its traceback is shown here
        """,
    )


def test_a_code_of_its_own_needs_no_advice():
    check(
        ended(worker(3, code=7, when=1.0), worker(0, code=0, when=0.5), worker(1, code=0, when=0.6)),
        4,
        """
        hvlaunch: rank 3 of 4 on host a failed first, after 1.0 s: exit code 7
          The others:
            2 finished (exit code 0): ranks 0-1
            1 ended in an unknown way: rank 2
        """,
    )


@pytest.mark.parametrize(
    ("result", "size", "line"),
    [
        (
            ended(None, *stopped(0, 1, signal=SIGINT), interrupted=SIGINT),
            2,
            "interrupted by SIGINT after 13.2 s; all workers have ended",
        ),
        (
            ended(None, *stopped(0, 2), *stopped(1, 3, signal=SIGKILL), interrupted=SIGTERM),
            4,
            "interrupted by SIGTERM after 13.2 s; all workers have ended, ranks 1,3 only by SIGKILL",
        ),
        (
            ended(None, *stopped(0), interrupted=SIGINT),
            3,
            "interrupted by SIGINT after 13.2 s; how ranks 1-2 ended is not known",
        ),
        (
            ended(None, *stopped(0), interrupted=SIGPIPE),
            1,
            "interrupted by SIGPIPE (the reader of its output is gone) after 13.2 s; all workers have ended",
        ),
        (
            JobResult(exit_code=130, elapsed=0.0, interrupted=SIGINT),
            0,
            "interrupted by SIGINT before the workers were started",
        ),
    ],
)
def test_an_interrupt_is_one_line(result, size, line):
    assert failure_report(result, {0: b"KeyboardInterrupt\n"}, size) == f"hvlaunch: {line}\n"


def test_an_interrupt_after_a_failure_or_an_error():
    failed = failure_report(ended(worker(0, code=7, when=1.0), interrupted=SIGINT), {}, 1)
    assert failed == (
        "hvlaunch: rank 0 of 1 on host a failed, after 1.0 s: exit code 7\n  Then interrupted by SIGINT.\n"
    )
    lost = JobResult(
        exit_code=130, elapsed=0.0, error=UnknownHost("no address", host="b").problem, interrupted=SIGINT
    )
    assert failure_report(lost, {}, 0) == f"hvlaunch: host b: no address\n{ENDS}  Interrupted by SIGINT.\n"


def test_an_unexplained_exit_code_is_reported():
    report = failure_report(JobResult(exit_code=70, elapsed=0.0), {}, 0)
    assert report == "hvlaunch: the job ended with exit code 70\n"


def test_stacks_of_the_others_before_they_were_stopped():
    places = (((1,), "load (data.py:31)"), ((2,), "\x1b[2J (x.py:1)"))
    told = failure_report(
        ended(worker(0, code=1, when=2.0), *stopped(1, 2)),
        {},
        3,
        before_kill=Survivors(places, job_id="0123456789ab"),
    )
    assert (
        """
  Before they were stopped:
    rank 1 in load (data.py:31)
    rank 2 in \\x1b[2J (x.py:1)
  All their stacks: hvlaunch stacks 0123456789ab
"""
        in told
    )
    lost = failure_report(
        ended(error=UnknownHost("no such host", host="b").problem, exit_code=69),
        {},
        3,
        before_kill=Survivors(places),
    )
    assert "  Before they were stopped:\n    rank 1 in load" in lost
    assert "hvlaunch stacks" not in lost


def test_a_worker_that_ended_before_its_stack_was_taken_is_no_survivor():
    def taken(rank: int, *threads: ThreadStack) -> ProcessStack:
        return ProcessStack("a", rank, 100 + rank, "python", False, threads, "kernel", "not in time")

    thread = ThreadStack("main", (Frame("load", "data.py", 31),), True)
    exits = [worker(0, code=1, when=1.0), worker(1, code=1, when=1.0), worker(3, code=1, when=1.0)]
    found = survivors([taken(1), taken(2), taken(3, thread)], [*exits, *stopped(2)], None)
    assert sorted(ranks for ranks, _ in found.places) == [(2,), (3,)]
    assert not any("rank 1" in note for note in found.notes)
