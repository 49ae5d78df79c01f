"""Bugs of sessions, journal and successors, planted by hand; each is found by its consequences."""

import json
from collections.abc import Sequence
from typing import Any

from hvlaunch.agent.wire.frames import LASTING, Session
from hvlaunch.driver.links.session import AckedFrames
from hvlaunch.engine.engine import Engine
from tests.simulation.bugs import Bug, Patch, afterwards, instead
from tests.simulation.journals import Journal
from tests.simulation.links import Link
from tests.simulation.wired import Wired
from tests.simulation.wires import Agent

__all__ = ["TAKEOVER_BUGS"]


def acknowledged_before_the_journal(patch: Patch) -> None:
    patch.setattr(Link, "have", lambda self: list(self.session.have))


def a_frame_is_sent_twice(patch: Patch) -> None:
    def wrong(right, self, counts):
        kept = list(self._outboxes[LASTING].kept)
        again = right(self, counts)
        return kept[-1:] + again if kept else again

    instead(patch, Session, "again", wrong)


def an_epoch_is_not_checked(patch: Patch) -> None:
    instead(patch, Session, "begin_epoch", lambda right, self, epoch: right(self, max(epoch, self.epoch)))


def a_torn_record_is_kept(patch: Patch) -> None:
    def wrong(self):
        self._flush()
        whole = self._bytes[: self._bytes.rfind(b"\n") + 1]
        return [_loads(line) for line in whole.splitlines()]

    patch.setattr(Journal, "entries", wrong)


def _loads(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        raise AssertionError("a record that nobody can read") from None


def carried_out_before_the_journal(patch: Patch) -> None:
    """Write each record together with the next one."""

    def wrong(right, self, *record):
        waiting = self.__dict__.pop("waiting", None)
        if waiting is not None:
            right(self, *waiting)
        self.waiting = record

    instead(patch, Journal, "write", wrong)
    patch.setattr(Journal, "tear", lambda self, share: self.__dict__.pop("waiting", None))


def an_older_connection_is_still_read(patch: Patch) -> None:
    patch.setattr(Wired, "is_read", lambda self, agent, wire: True)


def the_last_actions_are_not_repeated(patch: Patch) -> None:
    instead(patch, Wired, "_go_on", lambda right, self, actions, records: right(self, (), records))


def printed_output_is_forgotten(patch: Patch) -> None:
    def wrong(right, self):
        printed, self.printed = self.printed, {}
        right(self)
        self.printed = printed

    instead(patch, Wired, "succeed", wrong)


def messages_of_workers_are_lost(patch: Patch) -> None:
    def wrong(right, self, *args):
        self._puts.clear()
        right(self, *args)

    instead(patch, Wired, "_go_on", wrong)


def frames_are_counted_anew(patch: Patch) -> None:
    """Let a successor send only its own orders."""
    afterwards(patch, Wired, "_replayed", lambda _, self, __: self.links.clear())
    instead(
        patch,
        Wired,
        "order",
        lambda right, self, action: right(self, action) if self.is_driven else None,
    )


def an_agent_ends_before_its_output_is_acked(patch: Patch) -> None:
    patch.setattr(Agent, "part", Agent.die)


def nothing_is_prolonged(patch: Patch) -> None:
    patch.setattr(Engine, "_prolong", lambda self, seconds, now: None)


def frames_behind_a_gap_are_forgotten(patch: Patch) -> None:
    """Repeat a frame whose event is in the journal if one before it was not printed yet."""
    patch.setattr(AckedFrames, "__contains__", lambda self, number: number <= self.prefix)


TAKEOVER_BUGS: Sequence[Bug] = (
    Bug(acknowledged_before_the_journal, "is to forget what nobody has", 0),
    Bug(a_frame_is_sent_twice, "", 0),
    Bug(an_epoch_is_not_checked, "hears driver", 0),
    Bug(a_torn_record_is_kept, "a record that nobody can read", 0),
    Bug(carried_out_before_the_journal, "", 0),
    Bug(an_older_connection_is_still_read, "and the journal has", 0),
    Bug(the_last_actions_are_not_repeated, "", 0),
    Bug(printed_output_is_forgotten, "is heard after", 0),
    Bug(messages_of_workers_are_lost, "there were enough slots", 534),
    Bug(frames_are_counted_anew, "", 0),
    Bug(an_agent_ends_before_its_output_is_acked, "output of agent", 0),
    Bug(nothing_is_prolonged, "has no fault, and is named", 1300),
    Bug(frames_behind_a_gap_are_forgotten, "is heard after", 0),
)
