"""Sessions over faulty connections, by seed, and planted bugs."""

from collections.abc import Sequence
from typing import Any

import pytest

from hvlaunch.agent.wire.frames import BadFrame, Session
from tests.simulation.sessions import Broken, play

SEEDS = 400


def test_nothing_is_lost_doubled_or_reordered(request: pytest.FixtureRequest) -> None:
    chosen = request.config.getoption("--seed")
    takeovers = 0
    for seed in range(SEEDS) if chosen is None else [chosen]:
        try:
            takeovers += len(play(seed).drivers) - 1
        except (Broken, BadFrame) as error:
            pytest.fail(f"seed {seed}: {error}")
    assert takeovers > 0 or chosen is not None


class SendsTwice(Session):
    """Sends the newest frame of the other end's list once more."""

    last: Any = None

    def sending(self, kind: str, frame: Any) -> None:
        super().sending(kind, frame)
        self.last = frame

    def again(self, counts: Sequence[int]) -> list[Any]:
        return [*super().again(counts), *([] if self.last is None else [self.last])]


class AcknowledgesEarly(Session):
    """Acknowledges a frame that has not come yet."""

    def tell(self) -> list[int]:
        return [self.have[0] + (self.have[0] > 3), self.have[1]]


class ForgetsUnacknowledged(Session):
    """Keeps no frame that goes out."""

    def again(self, counts: Sequence[int]) -> list[Any]:
        return super().again(counts)[1:]


class ChecksNoEpoch(Session):
    """Takes any caller for the driver."""

    def begin_epoch(self, epoch: int) -> bool:
        return super().begin_epoch(max(epoch, self.epoch))


class KeepsInputs(Session):
    """Counts one driver's input for the next one, too."""

    def begin_epoch(self, epoch: int) -> bool:
        have = list(self.have)
        is_new = super().begin_epoch(epoch)
        self.have = have
        return is_new


@pytest.mark.parametrize(
    "bug", [SendsTwice, AcknowledgesEarly, ForgetsUnacknowledged, ChecksNoEpoch, KeepsInputs]
)
def test_planted_bugs_are_found(bug: type[Session]) -> None:
    for seed in range(SEEDS):
        try:
            play(seed, bug)
        except (Broken, BadFrame):
            return
    pytest.fail(f"no seed finds that it {bug.__doc__}")
