"""The failure report where hosts fail, before or beside their workers."""

from signal import SIGINT

import pytest

from hvlaunch.errors import (
    AgentFailed,
    ConnectFailed,
    HostKeyUnknown,
    HostLost,
    NotEnoughSlots,
    PermissionDenied,
    UnknownHost,
)
from hvlaunch.job import JobResult
from hvlaunch.report.failure_report import make_report
from hvlaunch.report.text import as_text
from tests.unit.report.reports import ENDS, check, ended, not_begun, stopped, worker


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


def test_equal_failures_of_all_hosts_share_a_line():
    check(
        not_begun(*(denied(f"gpu0{n}") for n in range(1, 8))),
        0,
        f"hvlaunch: 7 hosts (gpu[01-07]): permission denied (publickey); tried 2 keys\n  Try: ssh -p 22 HOST\n{ENDS}",
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
        not_begun(*errors),
        0,
        """
        hvlaunch: hosts a, login and b: their host keys are not known (looked for HOST in /root/.ssh/known_hosts)
          a      ssh-ed25519  SHA256:a
          login  ssh-ed25519  SHA256:login
          b      ssh-ed25519  SHA256:b
          Try: compare it, then run `ssh HOST` once on this machine; or --host-keys accept-new
          The job ends: no worker was started.
        """,
    )


def test_an_error_that_is_raised_is_not_printed_too():
    report = make_report(not_begun(UnknownHost("no address", host="b")), {}, 0)
    assert as_text(report, is_raised=True) == ""
    lost = HostLost("lost: silent", host="b").problem
    report = make_report(JobResult(exit_code=69, elapsed=3.0, exits=tuple(stopped(0)), error=lost), {}, 1)
    assert as_text(report, is_raised=True).splitlines()[:2] == [
        "hvlaunch: the job ends; the exception has the cause",
        "  The workers, after 3.0 s:",
    ]
    assert "lost: silent" in as_text(report)
    report = make_report(JobResult(exit_code=130, elapsed=0.0, error=lost, interrupted=2), {}, 0)
    assert "lost: silent" in as_text(report, is_raised=True)


def test_an_unknown_host_key_among_other_errors_keeps_its_cause():
    errors = [unknown_key("a", "SHA256:a"), UnknownHost("no address", host="b")]
    check(
        not_begun(*errors),
        0,
        """
        hvlaunch: 2 hosts failed:
          host a: its host key is not known: ssh-ed25519 SHA256:a (looked for a in /root/.ssh/known_hosts)
            Try: compare it, then run `ssh a` once on this machine; or --host-keys accept-new
          host b: no address
          The job ends: no worker was started.
        """,
    )


def test_an_error_without_a_host_has_its_own_line():
    errors = [UnknownHost("no address", host="b"), NotEnoughSlots(4, 2)]
    check(
        not_begun(*errors),
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
        not_begun(*errors),
        0,
        """
        hvlaunch: 5 hosts failed:
          hosts a and b: permission denied (publickey); tried 2 keys
            Try: ssh -p 22 HOST
          hosts c and a2: is no host for a job
          host gpu03: no address
          The job ends: no worker was started.
        """,
    )


@pytest.mark.parametrize(
    "addresses", [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::a:2"), ("fe80::1%ib0", "1:2:3:4:5:6:7:8")]
)
def test_errors_that_differ_only_in_name_and_address_share_a_line(addresses):
    errors = [
        ConnectFailed(f"no connection to gpu{n} port 22: {one}: refused", host=f"gpu{n}", hint=f"ping gpu{n}")
        for n, one in enumerate(addresses)
    ]
    expected = f"hvlaunch: hosts gpu0 and gpu1: no connection to HOST port 22: ADDRESS: refused\n  Try: ping HOST\n{ENDS}"
    check(not_begun(*errors), 2, expected)
