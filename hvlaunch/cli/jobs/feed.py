"""The view of one job, from outside: by its control socket and its output store."""

import time

from hvlaunch.console.stored import StoreReader
from hvlaunch.outside.control import Control, DriverGone
from hvlaunch.outside.known import KnownJob, await_driver, has_ended
from hvlaunch.view.feed import Feed
from hvlaunch.view.model import View

__all__ = ["INTERVAL", "JobFeed"]

INTERVAL = 1
"""Seconds between two looks, unless something happens."""


class JobFeed:
    """The view of one job, kept up to date by its driver, and by the one that takes its place."""

    def __init__(self, job: KnownJob) -> None:
        self.job = job
        self.control = Control(job)
        self._reader = StoreReader(job.directory)
        self._reader.seek_newest(1)
        self._feed = Feed(self._ask, self._reader.read, time.time)
        self._has_looked = False

    @property
    def has_ended(self) -> bool:
        """Whether the job is over, as its events or its directory tell."""
        return self._feed.has_ended or has_ended(self.job)

    def next(self) -> View | None:
        """The job when something has happened, or after a second; None where it is over and says no more."""
        while (view := self._look()) is None:
            if not await_driver(self.job):
                return None
        return view

    def _look(self) -> View | None:
        """None where no driver answers."""
        try:
            if self._has_looked:
                self._feed.await_news(INTERVAL)
            self._has_looked = True
            return self._feed.look()
        except DriverGone:
            return None

    def _ask(self, path: str) -> object:
        return self.control.get(path, INTERVAL)
