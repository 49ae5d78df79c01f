"""When a job's journal begins, and when turns are written to it."""

from typing import Any

from hvlaunch.driver.job_record import TurnRecord
from hvlaunch.driver.turn import Arrival, Turn
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on


class Kept:
    """In place of a job's files."""

    def __init__(self):
        self.has_begun = False
        self.written = []

    def write(self, turns, _hellos):
        assert self.has_begun
        self.written += [turn.arrival.event for turn in turns]

    def compact(self, _engine):
        pass


def turn(event, *actions, is_decided=True):
    return Turn(0.0, Arrival(event), actions, is_decided=is_decided)


def stage(name):
    return turn(on.HostStage("a", name), is_decided=False)


BEGAN = turn(on.Began(), do.Release("a"))


def kept():
    keeping = Kept()
    shown: list[Turn] = []
    nothing: Any = None
    files: Any = keeping
    turns = TurnRecord(files, nothing, lambda: setattr(keeping, "has_begun", True))
    return keeping, turns, shown, lambda new: shown.extend(turns.keep(new))


def test_the_journal_begins_with_the_first_turn():
    keeping, turns, shown, keep = kept()
    keep([BEGAN])
    assert keeping.written == [on.Began()]
    assert shown == [BEGAN]
    assert not turns.is_waiting


def test_turns_without_actions_wait_a_moment_for_others():
    keeping, turns, shown, keep = kept()
    keep([turn(on.Tick())])
    assert turns.is_waiting
    assert not shown
    keep([])
    assert keeping.written == [on.Tick()]
    assert not turns.is_waiting


def test_a_turn_with_actions_is_written_at_once_with_all_before():
    keeping, turns, shown, keep = kept()
    keep([stage("resolve")])  # which says nothing to the journal
    keep([turn(on.Tick())])
    assert not shown
    keep([turn(on.JobGoesOn(), do.Release("a"))])
    assert keeping.written == [on.Tick(), on.JobGoesOn()]
    assert len(shown) == 3
    keep([stage("log in")])
    assert turns.is_waiting
