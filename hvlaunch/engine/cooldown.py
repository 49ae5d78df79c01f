"""How long something that fails is excluded. Pure."""

import math

__all__ = ["Cooldown"]

_MOST_DOUBLINGS = 30


class Cooldown:
    """Twice as long each time; forgotten when all was well for as long as the longest two."""

    def __init__(self) -> None:
        self.until = -math.inf
        self.count = 0
        """How often in a row it was begun."""

    def begin(self, now: float, bounds: tuple[float, float] | None) -> float:
        """Exclude it from `now` on: at first the lesser of the bounds, at most the greater; None is for good.

        The number of seconds.
        """
        if bounds is None:
            self.until = math.inf
            return math.inf
        least, most = bounds
        if now > self.until + 2 * most:
            self.count = 0
        seconds = min(most, least * 2.0 ** min(self.count, _MOST_DOUBLINGS))
        self.count += 1
        self.until = now + seconds
        return seconds

    def holds(self, now: float) -> bool:
        return now < self.until

    @property
    def is_for_good(self) -> bool:
        return self.until == math.inf

    def cut_short(self, now: float) -> None:
        """End it now; the next one is still twice as long."""
        self.until = min(self.until, now)

    def lift(self) -> None:
        """End one that is for good."""
        if self.is_for_good:
            self.until = -math.inf
