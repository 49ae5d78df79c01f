"""Rounds and failures over time, in one line. Pure."""

from hvlaunch.view.model import View

__all__ = ["FAILURE", "strip"]

FAILURE = "x"


def strip(view: View, width: int) -> str:
    """A letter for each part of the time since the job began: the last digit of the round, `-` for none, `x` for a failure."""
    length = max(view.time - view.began, 1.0)

    def place(time: float) -> int:
        return max(0, min(width - 1, int((time - view.began) / length * width)))

    letters = ["-"] * width
    for one in view.rounds:
        first = place(one.begin)
        last = width - 1 if one.end is None else place(one.end)
        letters[first : last + 1] = str(one.number % 10) * (last + 1 - first)
    for moment in view.moments:
        if moment.kind == "failure":
            letters[place(moment.time)] = FAILURE
    return "".join(letters)
