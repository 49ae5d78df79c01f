"""Watchers of a job: they see events and actions, and change nothing; the narrator for people, the recorder for programs.

Here are the messages of every job: its workers start, and the job has ended well. Most jobs have no other message, and do without sentences.py.
"""

from hvlaunch.console.status import code_words, count, duration
from hvlaunch.engine.facts import RoundStarting, SlotsAssumed
from hvlaunch.errors import EXIT_NOT_WRITTEN
from hvlaunch.hosts.parse import fold_hosts
from hvlaunch.job import JobResult

__all__ = ["assumed", "ended_well", "starting"]


def starting(fact: RoundStarting) -> str:
    """`8 workers on 2 hosts`."""
    # A static job has one round, and its user need not know the word.
    again = f"round {fact.round}: " if fact.round else ""
    place = f"host {fact.hosts[0]}" if len(fact.hosts) == 1 else f"{len(fact.hosts)} hosts"
    return f"{again}{count(fact.workers, 'worker')} on {place}"


def assumed(fact: SlotsAssumed) -> str:
    """Say that hosts get 1 worker each by default, and how to give a number."""
    verb, subject = ("has", "it") if len(fact.hosts) == 1 else ("have", "each")
    way = "-np" if fact.hosts == ("localhost",) else "--slots-per-host"
    advice = f"; try: {way} {fact.cpus}, for a worker on each processor" if fact.cpus > 1 else ""
    return f"no number of workers was given, and {fold_hosts(fact.hosts)} {verb} no GPU: {subject} gets 1 worker{advice}"


def ended_well(result: JobResult, has_lost: bool, code: object = None, bill: str = "") -> str:
    """`done after 12.4 s, exit code 0`. `has_lost`: some of the output was lost, as an earlier message said.

    `code`: the job's code, if it is known. `bill`: what the job took, in words.
    """
    lost = " but not all of the output was written," if has_lost else ""
    words = ", commit ".join(filter(None, code_words(code)))
    ran = f"; code {words}" if words else ""
    exit_code = EXIT_NOT_WRITTEN if has_lost else 0
    return f"done after {duration(result.elapsed)},{lost} exit code {exit_code}{ran}{f'; {bill}' if bill else ''}"
