"""The notifier of a job: it makes notices (outside/notices.py) of what happens, for the targets of --notify."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hvlaunch.console.masking import masked_value
from hvlaunch.console.status import count
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.gloo.reporting import Reporting
from hvlaunch.job import JobResult, JobSpec
from hvlaunch.outside.notices import Notices
from hvlaunch.watch.sentences import sentence

__all__ = ["Notifier"]

_LONGEST = 3000
"""Characters of a text: servers for messages refuse long ones."""
_INTERRUPT = 2


class Notifier:
    """A watcher. A successor's replay makes the same notices by the same names, so each is delivered once."""

    def __init__(
        self,
        spec: JobSpec,
        about: Mapping[str, Any],
        directory: Path,
        reporting: Reporting,
        warn: Callable[[str], object],
    ) -> None:
        self._events = frozenset(spec.notify_on)
        self._about = about
        self._reporting = reporting
        self._notices = Notices(directory, about["id"], spec.notify, warn)
        self._hangs = 0
        self._notices.begin()

    def watch(self, event: on.Event, actions: Sequence[do.Action], _now: float) -> None:
        """Tell of a hang, and of workers that go on after a failure."""
        if isinstance(event, on.JobHangs):
            self._hangs += 1
            self._post(f"hung-{self._hangs}", "hung", "hangs", lambda: event.text)
        for action in actions:
            if isinstance(action, tell.RoundFormed | tell.RoundStarting) and action.round:
                self._post(
                    f"recovered-{action.round}",
                    "recovered",
                    f"goes on with {count(action.workers, 'worker')}",
                    partial(sentence, action),
                )

    def ended(self, result: JobResult) -> None:
        """Tell of the job's end, unless the user has ended it from the keyboard."""
        if result.interrupted == _INTERRUPT:
            return
        if result.exit_code == 0:
            text = partial(self._reporting.last_words(result), False)
            self._post("done", "done", "is done", text, result)
        else:
            self._post(
                "failed",
                "failed",
                f"failed with exit code {result.exit_code}",
                partial(self._reporting.text, result),
                result,
            )

    def _post(
        self, key: str, event: str, verb: str, text: Callable[[], str], result: JobResult | None = None
    ) -> None:
        # Most events are not wanted, or a killed driver has told of them.
        if event not in self._events:
            return
        name = self._about["name"] or " ".join(self._about["command"])

        def make() -> Mapping[str, Any]:
            return {
                "format": 1,
                "event": event,
                "job": self._about["id"],
                "name": self._about["name"],
                "machine": self._about["machine"],
                "title": masked_value(f"{name[:100]} {verb}"),
                "text": "\n".join(map(masked_value, text()[:_LONGEST].splitlines())),
                "report": None if result is None else self._reporting.form(result),
            }

        self._notices.post(key, make)
