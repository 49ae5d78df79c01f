"""Keeps the view of a job up to date: asks for new events, output and samples. Pure: the functions that ask are arguments."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hvlaunch.console.stored import Stored
from hvlaunch.view.model import Model, View

__all__ = ["Feed"]


class Feed:
    """The view of one job.

    `ask` returns the answer to GET of a path at the control socket, None for 404; `read` the new items of the output store;
    `now` the seconds since 1970.
    """

    def __init__(
        self,
        ask: Callable[[str], Any],
        read: Callable[[], Iterable[Stored]],
        now: Callable[[], float],
    ) -> None:
        self._ask = ask
        self._read = read
        self._now = now
        self._model = Model()
        self._number = 0
        self._job: Mapping[str, Any] | None = None

    @property
    def has_ended(self) -> bool:
        """True after the job's last event."""
        return self._model.ending is not None

    def await_news(self, seconds: int) -> None:
        """Wait for a new event, at most for some seconds."""
        if not self.has_ended:
            # A driver ends as soon as it has sent its last event: asking for it twice would lose it.
            self._take_events(f"/events?since={self._number}&wait={seconds}")

    def current_view(self) -> View:
        """Return the job now. Raises the errors of `ask`."""
        self._read_events()
        self._model.add_output(self._read())
        samples = None
        # After the last event the driver's loop has ended, and does not answer.
        if not self.has_ended or self._job is None:
            job = self._ask("/job")
            # Another driver has taken the job over, and counts its events from 0.
            if self._job is not None and job["pid"] != self._job["pid"]:
                self._model.forget_events()
                self._number = 0
                self._read_events()
            self._job = job
            samples = _samples(self._ask("/samples"))
        return self._model.view(self._job, samples, self._now())

    def _read_events(self) -> None:
        while not self.has_ended and self._take_events(f"/events?since={self._number}"):
            pass

    def _take_events(self, path: str) -> bool:
        """Ask for events, and add them to the model; False if no event came."""
        page = self._ask(path)
        self._model.add_events(page["events"])
        self._number = page["next"]
        return bool(page["events"])


def _samples(answer: Any) -> list[Mapping[str, Any]]:
    """Return the samples in an answer to GET /samples."""
    return [] if answer is None else list(answer["hosts"])
