"""The pure session: any interleaving of frames, losses, new connections and drivers, and bugs that one of them finds."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from hvlaunch.agent.wire.frames import BY_AGENT, BY_DRIVER, BadFrame, Session, StaleEpoch
from tests.simulation.sessions import Broken, SessionWorld
from tests.simulation.test_sessions import (
    AcknowledgesEarly,
    ChecksNoEpoch,
    ForgetsUnacknowledged,
    KeepsInputs,
    SendsTwice,
)

STEPS = (
    SessionWorld.driver_sends,
    SessionWorld.agent_sends,
    SessionWorld.deliver_to_agent,
    SessionWorld.deliver_to_driver,
    SessionWorld.acknowledge,
    SessionWorld.cut,
    SessionWorld.resume,
    SessionWorld.take_over,
    SessionWorld.stale,
)
History = tuple[list[Callable[[SessionWorld], None]], list[float]]
HISTORIES: "st.SearchStrategy[History]" = st.tuples(
    st.lists(st.sampled_from(STEPS), min_size=40, max_size=160),
    st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=20, max_size=160),
)


class Chance(Random):
    """What a step leaves to chance is drawn by hypothesis; then no connection is lost any more."""

    def __init__(self, draws: list[float]) -> None:
        super().__init__(0)
        self._draws = list(draws)

    def random(self) -> float:
        return self._draws.pop() if self._draws else 0.9


def play(history: History, make: type[Session] = Session) -> None:
    """Raises Broken, BadFrame."""
    steps, draws = history
    world = SessionWorld(Chance(draws), make)
    for step in steps:
        step(world)
        world.check()
    world.settle()


@given(HISTORIES)
@settings(max_examples=200, deadline=None)
def test_nothing_is_lost_doubled_or_reordered(history: History) -> None:
    play(history)


@pytest.mark.parametrize(
    "bug", [SendsTwice, AcknowledgesEarly, ForgetsUnacknowledged, ChecksNoEpoch, KeepsInputs]
)
def test_planted_bugs_are_found(bug: type[Session]) -> None:
    def falls(history: History) -> bool:
        try:
            play(history, bug)
        except (Broken, BadFrame):
            return True
        return False

    find(HISTORIES, falls, settings=settings(max_examples=20_000, deadline=None, phases=[Phase.generate]))


COUNTS = st.lists(st.integers(0, 12), min_size=2, max_size=2)


@given(st.lists(st.sampled_from(sorted(BY_AGENT)), max_size=10), COUNTS, COUNTS)
def test_acknowledged_count_is_between_the_last_one_and_the_sent_frames(
    kinds: list[str], first: list[int], second: list[int]
) -> None:
    session = Session(BY_AGENT, BY_DRIVER)
    for number, kind in enumerate(kinds):
        session.sending(kind, number)
    streams = [[number for number, kind in enumerate(kinds) if BY_AGENT[kind] == stream] for stream in (0, 1)]
    taken = [0, 0]
    for counts in (first, second):
        fits = all(low <= count <= len(sent) for low, count, sent in zip(taken, counts, streams, strict=True))
        if not fits:
            with pytest.raises(BadFrame):
                session.again(counts)
            return
        left = [number for count, sent in zip(counts, streams, strict=True) for number in sent[count:]]
        assert session.again(counts) == left
        taken = counts


@given(st.lists(st.integers(1, 5), max_size=8))
def test_epochs_never_go_back(epochs: list[int]) -> None:
    session, newest = Session(BY_AGENT, BY_DRIVER), 1
    for epoch in epochs:
        if epoch < newest:
            with pytest.raises(StaleEpoch):
                session.begin_epoch(epoch)
        else:
            assert session.begin_epoch(epoch) is (epoch > newest)
            newest = epoch
