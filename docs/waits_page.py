"""Write the page of waits: python docs/waits_page.py > docs/internals/waits.md, or make options-page."""

import sys
from collections.abc import Iterator
from typing import NamedTuple

from hvlaunch.engine.waits import Wait

__all__ = ["page"]

_HEAD = """\
<!-- Made of hvlaunch/engine/waits.py and docs/waits_page.py by `make options-page`: change those, not this. -->

# Waits

Each wait for a host or a worker has a bound. What a user's program does in its round is the user's own; `--commit-timeout` bounds it.

## The engine's waits

`engine/waits.py` has all of them in one table. A wait begins with `begin(wait, of, until)`: `of` is the host, worker, slot or pair of hosts. The
engine's next deadline is the first time among the waits that count as things stand (`Engine._open_waits`). Two functions change many waits at once:
`prolong(seconds)` after the driver was stopped (Ctrl-Z; `DriverStopped`) or replaced (`DriverReplaced`), and `end_all` with a round.

A driver that was stopped could not hear anybody. So a wait marked with + has as much longer, and up to 5 s more. A driver that is late in every turn still
makes progress: at least half of the time in which it was not stopped counts.

"""
_OTHERS_HEAD = """
## Waits outside of the engine

"""


class _OtherWait(NamedTuple):
    thing: str
    end: str
    bound: str
    then: str
    module: str


_OTHERS = (
    _OtherWait(
        "stacks of workers that are to be killed",
        "all are there",
        "0.5 s",
        "the agent kills all the same: its order has this delay in it",
        "engine/workers.py",
    ),
    _OtherWait(
        "an agent's end, until its workers' output is durable",
        "it is",
        "5 s after its bye, and a pulse",
        "it ends all the same",
        "agent/main.py",
    ),
    _OtherWait(
        "another connection, after one was lost",
        "it is made, or there is no agent",
        "`--reconnect-timeout` if the host refuses, `--lease` if it does not answer",
        "the host is lost",
        "driver/links",
    ),
    _OtherWait(
        "a worker in the process that can't reach the rendezvous",
        "it can",
        "`--lease`",
        "its agent ends it",
        "rendezvous/client.py",
    ),
    _OtherWait(
        "a host's next sign of life",
        "a pong, or any other frame",
        "`--lease`; if the driver is late itself, that long after its turn, for eight turns",
        "the host is lost",
        "driver/links",
    ),
    _OtherWait(
        "a host that takes none of the relay's answers",
        "it takes them",
        "`--lease`, since nothing more is read of it meanwhile",
        "the host is lost",
        "driver/links",
    ),
    _OtherWait("the last run of discovery", "it ends", "5 s", "it is abandoned", "hosts/discovery.py"),
)


def page() -> str:
    """Return the text of the page."""
    engine = ((f"{wait.thing}{' +' * wait.is_prolonged}", *_columns(wait), f"`{wait.name}`") for wait in Wait)
    others = ((other.thing, *_columns(other), f"`{other.module}`") for other in _OTHERS)
    return _HEAD + "".join(_table("name", engine)) + _OTHERS_HEAD + "".join(_table("where", others))


def _columns(wait: Wait | _OtherWait) -> tuple[str, str, str]:
    return wait.end, wait.bound, wait.then


def _table(last: str, rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| wait for | what ends it | at the latest after | then | {last} |\n|---|---|---|---|---|\n"
    for row in rows:
        yield f"| {' | '.join(row)} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())
