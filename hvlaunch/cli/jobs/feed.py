"""The view of a job from outside, by its control socket and its stored output."""

import time

from hvlaunch.console.output_store import StoreReader
from hvlaunch.outside import KnownJob, await_driver, has_ended
from hvlaunch.outside.control import ControlClient, DriverGone
from hvlaunch.view.model import Feed, View

__all__ = ["INTERVAL", "JobFeed"]

INTERVAL = 1
"""Seconds between two looks without news."""


class JobFeed:
    """The view of a job, kept up to date by its driver, and by successors."""

    def __init__(self, job: KnownJob) -> None:
        self.job = job
        self.control = ControlClient(job)
        self._reader = StoreReader(job.directory)
        self._reader.seek_newest(1)
        self._feed = Feed(self._ask, self._reader.read, time.time)
        self._has_looked = False

    @property
    def has_ended(self) -> bool:
        """Whether the job is over, by its events or its directory."""
        return self._feed.has_ended or has_ended(self.job)

    def next(self) -> View | None:
        """Return the view after news or a second; None once the job is over."""
        while (view := self._look()) is None:
            if not await_driver(self.job):
                return None
        return view

    def _look(self) -> View | None:
        """Return the view; None if no driver answers."""
        try:
            # The first look is for whatever is there, and must not wait for news.
            if self._has_looked:
                self._feed.await_news(INTERVAL)
            self._has_looked = True
            return self._feed.current_view()
        except DriverGone:
            return None

    def _ask(self, path: str) -> object:
        return self.control.get(path, INTERVAL)
