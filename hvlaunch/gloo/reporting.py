"""The failure report of a job: during the job, at its end, and in the file of `--report`."""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvlaunch.console.printer import Printer
from hvlaunch.errors import BadUsage
from hvlaunch.job import JobResult, JobSpec
from hvlaunch.owners import part_of, reason, write_whole

if TYPE_CHECKING:
    from hvlaunch.driver.history import History
    from hvlaunch.driver.loop import Driver
    from hvlaunch.engine.actions import Action
    from hvlaunch.engine.events import Event
    from hvlaunch.report.bill import Bill
    from hvlaunch.report.failure_report import FailureReport
    from hvlaunch.watch.rounds import Failures

__all__ = ["Reporting", "check_report_path", "write_report"]

_LONG = 60.0
"""Seconds of a job that is worth a bill in its last line."""


class Reporting:
    """Makes the report on demand. `about` describes the job at its begin.

    The modules for a report are loaded with the first report: most jobs need none.
    """

    def __init__(
        self, spec: JobSpec, printer: Printer, about: Mapping[str, Any], directory: Path | None
    ) -> None:
        """`directory`: the job's, which keeps its stacks."""
        self._spec = spec
        self._printer = printer
        self._about = about
        self._directory = directory
        self._driver: Driver | None = None
        self._history: History | None = None
        self._failures: Failures | None = None
        self._has_begun = False
        self._lock = threading.Lock()
        self._result: JobResult | None = None
        self._final: Mapping[str, Any] | None = None
        self._waiting: dict[object, Callable[[Mapping[str, Any]], None]] = {}

    def follow(self, driver: "Driver", history: "History | None") -> None:
        """Take the number, stacks and output of workers from `driver`, and what the job took from its history."""
        self._driver, self._history = driver, history

    def begin(self) -> None:
        """Note that the replay of a killed driver's turns is over: the printer has output from now on."""
        self._has_begun = True

    def watch(self, event: "Event", actions: "Sequence[Action]", now: float) -> None:
        """Note failures of an elastic job's rounds before the last; a watcher."""
        # Loaded with the first turn of an elastic job; other jobs do not watch.
        if self._failures is None:
            from hvlaunch.watch.rounds import Failures  # noqa: PLC0415 (elastic jobs alone)

            self._failures = Failures(self._rank_of, self._tail)
        self._failures.watch(event, actions, now)

    def text(self, result: JobResult) -> str:
        """Return the report for a terminal; empty after a success."""
        from hvlaunch.report.text import as_text  # noqa: PLC0415 (15 ms, and hopefully never)

        call = self._spec.call
        # run() raises; whoever only waits for a job of start() sees the error nowhere else.
        is_raised = call is not None and not call.is_followed
        return as_text(self.report(result), is_verbose=self._spec.verbose, is_raised=is_raised)

    def form(self, result: JobResult) -> Mapping[str, Any]:
        """Return the report as JSON."""
        from hvlaunch.report.forms import as_json  # noqa: PLC0415 (as above)

        return as_json(self.report(result))

    def write(self, result: JobResult, say: Callable[[str], None]) -> None:
        """Write the file of --report, if wanted. A failure is said, and does not change the exit code."""
        path = self._spec.report
        if path is None:
            return

        try:
            write_report(path, self.report(result))
        except OSError as error:
            say(f"--report {path}: {reason(error)}; the report was not written")

    def now(self) -> Mapping[str, Any]:
        """Return the report of the running job; in the loop's thread."""
        from dataclasses import replace  # noqa: PLC0415 (when somebody asks)

        from hvlaunch.report.forms import as_json  # noqa: PLC0415 (as above)

        elapsed = time.time() - self._about["began"]
        so_far = self.report(JobResult(exit_code=0, elapsed=elapsed))
        return as_json(replace(so_far, outcome="running", ended=None))

    @property
    def final(self) -> Mapping[str, Any] | None:
        """The report as JSON; None until the job has ended."""
        with self._lock:
            result = self._result
        if result is None:
            return None
        # Made when first asked for: few programs ask for the report of a job that went well.
        if self._final is None:
            self._final = self.form(result)
        return self._final

    def announce_end(self, result: JobResult) -> None:
        """Note the end of the job, and pass the report to the callers of when_ended()."""
        with self._lock:
            self._result = result
            waiting, self._waiting = self._waiting, {}
        for call in waiting.values():
            call(self.final or {})

    def when_ended(self, call: Callable[[Mapping[str, Any]], None]) -> Callable[[], None]:
        """Call `call` once with the final report, in any thread. Returns a function that cancels this."""
        key = object()
        # Under the lock: the job may end in this moment, and would miss the call.
        with self._lock:
            is_over = self._result is not None
            if not is_over:
                self._waiting[key] = call
        if is_over:
            call(self.final or {})
        return lambda: self._forget(key)

    def _forget(self, key: object) -> None:
        with self._lock:
            self._waiting.pop(key, None)

    def directories(self) -> Mapping[str, str]:
        """Return the workers' directory on each host that had workers."""
        return {} if self._driver is None else self._driver.directories

    def report(self, result: JobResult) -> "FailureReport":
        """Return the report as data."""
        from hvlaunch.report.failure_report import make_report, survivors  # noqa: PLC0415 (as above)

        driver = self._driver
        stacks = [] if driver is None else driver.observing.stacks_before_kill()
        ends = (*result.exits, *([] if result.failure is None else [result.failure]))
        return make_report(
            result,
            {end.rank: self._printer.tail(end.rank) for end in ends},
            0 if driver is None else driver.size,
            output=None if driver is None else driver.output_dir,
            before_kill=survivors(stacks, ends, self._kept_as()),
            memory=() if driver is None else driver.observing.memory(),
            missing=None if driver is None else driver.observing.missing(),
            rounds=() if self._failures is None else self._failures.rounds(),
            about=self._about,
            ended=time.time(),
            bill=self.bill(),
            slow={} if driver is None else driver.observing.slow_hosts(),
        )

    def bill(self) -> "Bill | None":
        """Return what the job took so far; None for a job without a directory."""
        if self._driver is None or self._history is None or self._directory is None:
            return None
        from hvlaunch.gloo.run_record import gpus_of  # noqa: PLC0415 (as above)
        from hvlaunch.report.bill import make_bill  # noqa: PLC0415 (as above)

        observing = self._driver.observing
        return make_bill(
            self._history.totals(),
            gpus_of(self._spec, self._directory),
            observing.energy(),
            observing.commit_costs(),
        )

    def last_words(self, result: JobResult) -> Callable[[bool], str]:
        """Return the last line of a job that has ended well, as a function of whether output was lost."""
        from hvlaunch.watch import ended_well  # noqa: PLC0415 (the loop has loaded it)

        bill = ""
        # A short job must not pay for loading the modules.
        if result.elapsed >= _LONG:
            from hvlaunch.report.bill import bill_words, commit_words  # noqa: PLC0415 (as above)

            took = self.bill()
            bill = "; ".join(filter(None, (bill_words(took), commit_words(took))))
        return partial(ended_well, result, code=self._about.get("code"), bill=bill)

    def _kept_as(self) -> str | None:
        """Return the job's id if its directory has the stacks."""
        return None if self._directory is None else str(self._about["id"])

    def _rank_of(self, host: str, slot: int, start: int) -> int | None:
        return None if self._driver is None else self._driver.ranks.rank_of(host, slot, start)

    def _tail(self, rank: int) -> bytes:
        # During a replay the printer has no output yet.
        return self._printer.tail(rank) if self._has_begun else b""


def check_report_path(path: Path) -> None:
    """Check early that the report can be written to `path`. Raises BadUsage."""
    hint = "a file in a directory that you may write to"
    if path.exists() and not path.is_file():
        raise BadUsage(f"--report {path}: it is no file", hint=hint)
    # Only a trial shows whether the directory takes a file; the job may run for days before the report is due.
    try:
        part, descriptor = part_of(path)
        os.close(descriptor)
        part.unlink()
    except OSError as error:
        raise BadUsage(f"--report {path}: {reason(error)}", hint=hint) from None


def write_report(path: Path, report: "FailureReport") -> None:
    """Write the report to `path`. Raises OSError."""
    from hvlaunch.report.forms import as_json  # noqa: PLC0415 (when the job has ended)

    # The HTML form is made from the JSON form, so secrets are masked once for both.
    form = as_json(report)
    if path.suffix == ".html":
        from hvlaunch.report.forms import as_html  # noqa: PLC0415 (as above)

        text = as_html(form)
    else:
        text = json.dumps(form, indent=2) + "\n"
    write_whole(path, text.encode(), 0o600)
