"""The two messages of every job: its workers start, and the job has ended well.

Most jobs have no other message, and do without sentences.py.
"""

from hvlaunch.console.status import count, duration
from hvlaunch.engine.facts import RoundStarting, SlotsAssumed
from hvlaunch.errors import EXIT_NOT_WRITTEN
from hvlaunch.hosts.parse import fold_hosts
from hvlaunch.job import JobResult

__all__ = ["assumed", "ended_well", "starting"]


def starting(fact: RoundStarting) -> str:
    """`8 workers on 2 hosts; rank 0 is at 10.0.0.1:41873`."""
    # A static job has one round, and its user need not know the word.
    again = f"round {fact.round}: " if fact.round else ""
    place = f"host {fact.hosts[0]}" if len(fact.hosts) == 1 else f"{len(fact.hosts)} hosts"
    port = f"{fact.master_addr}:{fact.master_port}"
    return f"{again}{count(fact.workers, 'worker')} on {place}; rank 0 is at {port}"


def assumed(fact: SlotsAssumed) -> str:
    """Say that a host has 1 slot by default, and how to give a number."""
    have, per_host = ("has", "") if len(fact.hosts) == 1 else ("have", " each")
    way = "-np 4" if fact.hosts == ("localhost",) else f"-H {fact.hosts[0]}:4"
    return f"{fold_hosts(fact.hosts)} {have} 1 slot{per_host}: no number was given, and no GPU was found; try: {way}"


def ended_well(result: JobResult, has_lost: bool) -> str:
    """`done after 12.4 s, exit code 0`. `has_lost`: some of the output was lost, as an earlier message said."""
    lost = " but not all of the output was written," if has_lost else ""
    return f"done after {duration(result.elapsed)},{lost} exit code {EXIT_NOT_WRITTEN if has_lost else 0}"
