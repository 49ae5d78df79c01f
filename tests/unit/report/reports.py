"""Results of jobs for the failure report, and what a person reads of them."""

from signal import SIGTERM
from textwrap import dedent

from hvlaunch.errors import HostsFailed
from hvlaunch.job import JobResult, WorkerExit
from hvlaunch.report.failure_report import make_report
from hvlaunch.report.text import as_text

__all__ = ["ENDS", "check", "ended", "failure_report", "not_begun", "stopped", "worker"]

ENDS = "  The job ends: no worker was started.\n"


def worker(rank, host="a", **facts):
    return WorkerExit(rank=rank, host=host, **facts)


def stopped(*ranks, host="a", signal=SIGTERM, when=13.0, **facts):
    return [worker(rank, host, signal=signal, when=when, stopped=True, **facts) for rank in ranks]


def ended(failure=None, *others, **facts):
    exits = tuple(sorted([*([failure] if failure else []), *others], key=lambda end: end.rank))
    code = failure.exit_code if failure else facts.pop("exit_code", 69)
    return JobResult(exit_code=code, elapsed=13.2, exits=exits, failure=failure, **facts)


def not_begun(*errors):
    """The result where each of `errors` ended the job before its workers were started."""
    return JobResult(
        exit_code=69, elapsed=0.0, error=HostsFailed([error.problem for error in errors]).problem
    )


def failure_report(result, tails, size, **options):
    return as_text(make_report(result, tails, size, **options))


def check(result, size, expected, tails=None, **options):
    assert failure_report(result, tails or {}, size, **options) == dedent(expected).lstrip("\n")
