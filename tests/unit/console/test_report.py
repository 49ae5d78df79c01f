"""The failure report for each kind of ending, as a person would read it."""

import json
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGPIPE, SIGSEGV, SIGTERM
from textwrap import dedent

import pytest

from hvlaunch.console.report import failure_report
from hvlaunch.errors import (
    AgentFailed,
    ConnectFailed,
    HostKeyUnknown,
    HostLost,
    HostsFailed,
    NotEnoughSlots,
    PermissionDenied,
    UnknownHost,
)
from hvlaunch.job import JobResult, WorkerExit

GIB = 1 << 30
ENDS = "  The job ends: no worker was started.\n"

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


def worker(rank, host="a", **facts):
    return WorkerExit(rank=rank, host=host, **facts)


def stopped(*ranks, host="a", signal=SIGTERM, when=13.0, **facts):
    return [worker(rank, host, signal=signal, when=when, stopped=True, **facts) for rank in ranks]


def ended(failure=None, *others, **facts):
    exits = tuple(sorted([*([failure] if failure else []), *others], key=lambda end: end.rank))
    code = failure.exit_code if failure else facts.pop("exit_code", 69)
    return JobResult(exit_code=code, elapsed=13.2, exits=exits, failure=failure, **facts)


def check(result, size, expected, tails=None, **options):
    assert failure_report(result, tails or {}, size, **options) == dedent(expected).lstrip("\n")


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
        output_dir=Path("logs"),
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


def test_a_command_that_is_nowhere():
    cause = "trainer: command not found (PATH=/usr/bin:/bin)"
    check(
        ended(*(worker(rank, host, code=127, not_started=cause) for rank, host in enumerate("aabb"))),
        4,
        """
        hvlaunch: hosts a,b: trainer: command not found (PATH=/usr/bin:/bin)
          Try: its full path (./train if it is in the working directory), or a PATH that has it (-x PATH=…)
        """,
    )


def test_a_command_that_a_shell_did_not_find():
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


def test_nothing_but_lost_connections():
    check(
        ended(worker(0, code=1, when=10.0), worker(1, "b", code=1, when=10.01)),
        2,
        """
        hvlaunch: rank 0 of 2 on host a failed first, after 10.0 s: exit code 1
          Its last lines of stderr:
            Connection reset by peer
          The others:
            rank 1 on host b: exit code 1, at the same time
          Try: -x NCCL_DEBUG=INFO or -x TORCH_CPP_LOG_LEVEL=INFO to see its connections; and check the network between the hosts (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, a firewall)
        """,
        {0: b"Connection reset by peer\n", 1: b"Connection reset by peer\n"},
    )


def test_a_worker_that_said_nothing():
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


def test_a_lost_host():
    error = HostLost("lost: silent for 30 s (--lease)", host="b", hint="ping b: the host is down")
    check(
        ended(
            None,
            *stopped(0, 1),
            worker(3, code=1, when=12.0),
            worker(4, code=1, when=14.5),
            error=error.problem,
        ),
        6,
        """
        hvlaunch: host b: lost: silent for 30 s (--lease)
          Try: ping b: the host is down
          The workers, after 13.2 s:
            ranks 3-4 on host a: exit code 1, after 12.0 s to 14.5 s
            2 stopped by hvlaunch (SIGTERM): ranks 0-1
            2 ended in an unknown way: ranks 2,5
        """,
    )


def test_an_error_before_any_worker():
    error = UnknownHost("no address for this name", host="gpu9", hint="its spelling")
    result = JobResult(exit_code=69, elapsed=0.0, error=error.problem)
    check(result, 0, f"hvlaunch: host gpu9: no address for this name\n  Try: its spelling\n{ENDS}")


def test_workers_that_never_started():
    error = HostLost("lost: its connection closed", host="b").problem
    exits = tuple(stopped(0, 1, when=0.3))
    result = JobResult(exit_code=69, elapsed=0.3, exits=exits, error=error, never_started=(2, 3))
    check(
        result,
        5,
        """
        hvlaunch: host b: lost: its connection closed
          The workers, after 0.30 s:
            2 stopped by hvlaunch (SIGTERM): ranks 0-1
            1 ended in an unknown way: rank 4
            2 never started: ranks 2-3
        """,
    )
    interrupted = result._replace(exit_code=130, error=None, interrupted=SIGINT, never_started=(2, 3, 4))
    check(
        interrupted,
        5,
        "hvlaunch: interrupted by SIGINT after 0.30 s; all others have ended; never started: ranks 2-4\n",
    )


def test_an_error_beside_a_failure():
    error = HostLost("lost: its connection closed", host="b")
    check(
        ended(worker(0, code=7, when=1.0), error=error.problem),
        2,
        """
        hvlaunch: rank 0 of 2 on host a failed first, after 1.0 s: exit code 7
          The others:
            1 ended in an unknown way: rank 1
          Also:
            host b: lost: its connection closed
        """,
    )


def denied(host):
    return PermissionDenied(
        "permission denied (publickey); tried 2 keys", host=host, hint=f"ssh -p 22 {host}", tried=["k1", "k2"]
    )


def test_all_hosts_fail_alike():
    result = JobResult(
        exit_code=69,
        elapsed=0.0,
        error=HostsFailed([denied(f"gpu0{n}").problem for n in range(1, 8)]).problem,
    )
    check(
        result,
        0,
        f"hvlaunch: hosts gpu[01-07]: permission denied (publickey); tried 2 keys\n  Try: ssh -p 22 HOST\n{ENDS}",
    )


def unknown_key(host, fingerprint):
    cause = (
        f"its host key is not known: ssh-ed25519 {fingerprint} (looked for {host} in /root/.ssh/known_hosts)"
    )
    hint = f"compare it, then run `ssh {host}` once on this machine; or --host-keys accept-new"
    return HostKeyUnknown(cause, host=host, hint=hint, key_type="ssh-ed25519", fingerprint=fingerprint)


def test_unknown_host_keys_are_one_table():
    errors = [unknown_key(host, f"SHA256:{host}") for host in ("a", "login", "b")]
    check(
        JobResult(exit_code=69, elapsed=0.0, error=HostsFailed([error.problem for error in errors]).problem),
        0,
        """
        hvlaunch: hosts a,b,login: their host keys are not known (looked for HOST in /root/.ssh/known_hosts)
          a      ssh-ed25519  SHA256:a
          login  ssh-ed25519  SHA256:login
          b      ssh-ed25519  SHA256:b
          Try: compare it, then run `ssh HOST` once on this machine; or --host-keys accept-new
          The job ends: no worker was started.
        """,
    )


def test_an_unknown_host_key_among_other_errors_keeps_its_cause():
    errors = [unknown_key("a", "SHA256:a"), UnknownHost("no address", host="b")]
    check(
        JobResult(exit_code=69, elapsed=0.0, error=HostsFailed([error.problem for error in errors]).problem),
        0,
        """
        hvlaunch: 2 hosts failed:
          host a: its host key is not known: ssh-ed25519 SHA256:a (looked for a in /root/.ssh/known_hosts)
            Try: compare it, then run `ssh a` once on this machine; or --host-keys accept-new
          host b: no address
          The job ends: no worker was started.
        """,
    )


def test_what_is_of_no_host_has_its_own_line():
    errors = [UnknownHost("no address", host="b"), NotEnoughSlots(4, 2)]
    check(
        JobResult(exit_code=69, elapsed=0.0, error=HostsFailed([error.problem for error in errors]).problem),
        0,
        """
        hvlaunch: host b: no address
        hvlaunch: 4 workers were asked for, but the hosts have only 2 slots
          Try: -np 2, or more slots (host:N)
          The job ends: no worker was started.
        """,
    )


def test_hosts_fail_for_several_reasons():
    errors = [
        denied("a"),
        AgentFailed("is no host for a job", host="c"),
        UnknownHost("no address", host="gpu03"),
        denied("b"),
        AgentFailed("is no host for a job", host="a2"),
    ]
    check(
        JobResult(exit_code=69, elapsed=0.0, error=HostsFailed([error.problem for error in errors]).problem),
        0,
        """
        hvlaunch: 5 hosts failed:
          hosts a,b: permission denied (publickey); tried 2 keys
            Try: ssh -p 22 HOST
          hosts a2,c: is no host for a job
          host gpu03: no address
          The job ends: no worker was started.
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
            "interrupted by SIGPIPE (nobody reads its output any more) after 13.2 s; all workers have ended",
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


def test_a_code_that_nobody_explains_is_still_told():
    report = failure_report(JobResult(exit_code=70, elapsed=0.0), {}, 0)
    assert report == "hvlaunch: the job ended with exit code 70\n"


@pytest.mark.parametrize(
    "addresses", [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::a:2"), ("fe80::1%ib0", "1:2:3:4:5:6:7:8")]
)
def test_hosts_that_differ_in_name_and_address_alone_are_one_line(addresses):
    errors = [
        ConnectFailed(f"no connection to gpu{n} port 22: {one}: refused", host=f"gpu{n}", hint=f"ping gpu{n}")
        for n, one in enumerate(addresses)
    ]
    result = JobResult(
        exit_code=69, elapsed=0.0, error=HostsFailed([error.problem for error in errors]).problem
    )
    assert failure_report(result, {}, 2) == (
        f"hvlaunch: hosts gpu[0-1]: no connection to HOST port 22: ADDRESS: refused\n  Try: ping HOST\n{ENDS}"
    )
