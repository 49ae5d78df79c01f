"""How long a round whose workers would all be stopped is kept, though another pool would be better for it. Pure."""

from hvlaunch.engine.round import FRUITFUL, Round

__all__ = ["Hold"]

_MOST = 240.0


class Hold:
    """A round that was given up before it got anywhere lets the next ones be kept, each twice as long.

    So a pool that flaps does not restart its workers for ever: sooner or later they have the time to begin. Times are
    seconds of the driver's clock.
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """For how long a round that begins now is kept."""
        return self._seconds

    def keeps(self, current: Round, now: float, *, is_costly: bool) -> bool:
        """Whether the round may not yet end for a change that may wait; `is_costly` is whether its workers are stopped."""
        return is_costly and now < current.started_at + self._seconds

    def change(self, current: Round, now: float) -> None:
        """The round ends for a change."""
        if now >= current.started_at + max(FRUITFUL, 2 * self._seconds):
            self._seconds = 0.0
        else:
            self._seconds = min(_MOST, max(FRUITFUL, 2 * self._seconds))
