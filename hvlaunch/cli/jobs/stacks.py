"""`hvlaunch stacks`: stacks of a job's workers, now or before they were killed."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hvlaunch.cli.jobs.view import Ranks
from hvlaunch.cli.process import complain, print_answer
from hvlaunch.console.lines import visible
from hvlaunch.driver.observing.stacks import kept_stacks
from hvlaunch.errors import BadUsage
from hvlaunch.outside import KnownJob, await_driver, choose
from hvlaunch.outside.control import ControlClient
from hvlaunch.telemetry.stack import ProcessStack, from_json, tree_lines, whole_stacks

__all__ = ["stacks"]

# Seconds beyond the usual limit of answers: py-spy needs some seconds per process.
_WAIT = 30.0


def stacks(jobs: Sequence[KnownJob], options: argparse.Namespace) -> int:
    """Print the stacks; return the exit code. Raises HvlaunchError, OSError."""
    job = choose(jobs, options.job)
    answer = _answer(job, options)
    if options.json:
        selected = [stack for stack in whole_stacks(answer) if _is_selected(stack["rank"], options.ranks)]
        return print_answer("".join(f"{json.dumps(stack)}\n" for stack in selected))
    processes = [process for process in from_json(answer) if _is_selected(process.rank, options.ranks)]
    return print_answer("".join(f"{visible(line)}\n" for line in _lines(processes)))


def _lines(processes: Sequence[ProcessStack]) -> list[str]:
    return tree_lines(processes) if processes else ["no workers"]


def _answer(job: KnownJob, options: argparse.Namespace) -> Mapping[str, Any]:
    if await_driver(job):
        ranks = None if options.ranks is None else ",".join(map(_text, options.ranks))
        wish = {"ranks": ranks, "native": options.native}
        answer: Mapping[str, Any] = ControlClient(job).post("/stacks", wish, _WAIT)
        return answer
    kept = list(kept_stacks(job.directory))
    if not kept:
        raise BadUsage(f"job {job.id} has ended, and no stacks were taken", hint=f"hvlaunch logs {job.id}")
    complain(f"job {job.id} has ended: its workers' stacks before they were stopped:")
    return kept[-1]


def _text(part: range) -> str:
    return f"{part.start}-{part.stop - 1}/{part.step}"


def _is_selected(rank: int, ranks: Ranks) -> bool:
    return ranks is None or any(rank in part for part in ranks)
