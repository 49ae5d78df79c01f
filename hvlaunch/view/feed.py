"""Keeps a view of a job up to date: asks for what is new, and hands it to the model. What it asks and reads is passed in."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hvlaunch.console.stored import Stored
from hvlaunch.view.model import Model, View

__all__ = ["Feed"]


class Feed:
    """`ask` gives what GET of a path of the control socket gives, None for 404; `read` the new items of the output store.

    `now` is in seconds since 1970.
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
        """Whether the job's last event was seen."""
        return self._model.ending is not None

    def await_news(self, seconds: int) -> None:
        """Return when there is a new event, or after so many seconds."""
        if not self.has_ended:
            # The driver does not wait once it has given its last event: it must not be asked for again.
            self._take_events(f"/events?since={self._number}&wait={seconds}")

    def current_view(self) -> View:
        """The job now. Raises what `ask` raises."""
        self._read_events()
        self._model.add_output(self._read())
        samples = None
        if not self.has_ended or self._job is None:  # then the driver's loop has ended
            job = self._ask("/job")
            if (
                self._job is not None and job["pid"] != self._job["pid"]
            ):  # another driver, which counts events anew
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
        """Ask for events, and hand them to the model; False if there are none."""
        page = self._ask(path)
        self._model.add_events(page["events"])
        self._number = page["next"]
        return bool(page["events"])


def _samples(answer: Any) -> list[Mapping[str, Any]]:
    """The hosts' samples in an answer of GET /samples."""
    return [] if answer is None else list(answer["hosts"])
