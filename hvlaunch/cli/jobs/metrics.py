"""`hvlaunch metrics`: figures of jobs for Prometheus, printed, written to a file, or served to a scraper."""

import argparse
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

from hvlaunch.cli.process import print_answer
from hvlaunch.console.lines import visible_line
from hvlaunch.errors import BadUsage
from hvlaunch.outside import KnownJob, await_driver, await_end, choose
from hvlaunch.outside.control import ControlClient, ControlRefused, DriverGone
from hvlaunch.owners import reason, write_whole
from hvlaunch.telemetry.metrics import JobNow, metrics_text

__all__ = ["metrics"]

_PATIENCE = 5.0
"""Seconds for a driver's answer: longer than the driver waits for its hosts."""
_AT_ONCE = 16
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


def metrics(jobs: Sequence[KnownJob], options: argparse.Namespace) -> int:
    """Print, write or serve the metrics of jobs, as the options say; return the exit code. Raises HvlaunchError."""
    if options.interval is not None and options.textfile is None:
        raise BadUsage("--interval is for --textfile", hint="hvlaunch metrics --textfile FILE --interval 15")
    if options.scrape and options.textfile is not None:
        raise BadUsage("--scrape and --textfile exclude each other", hint="only one of them")
    if (options.bind or options.no_tls) and not options.scrape:
        raise BadUsage("--bind and --no-tls are for --scrape", hint="hvlaunch metrics --scrape")
    if options.no_tls and not options.bind:
        raise BadUsage("--no-tls is for --bind", hint="hvlaunch metrics --scrape --bind ADDRESS --no-tls")
    if options.interval is not None:
        return _keep_fresh(Path(options.textfile), options.interval, partial(_running, options))
    if options.job is not None and not await_driver(job := choose(jobs, options.job)):
        raise BadUsage(f"job {job.id} has ended", hint="hvlaunch jobs")
    if options.scrape:
        return _scrape(choose(jobs, options.job), options)
    text = _text(_running(options))
    if options.textfile is None:
        return print_answer(text.decode())
    _write(Path(options.textfile), text)
    return 0


def _running(options: argparse.Namespace) -> list[KnownJob] | None:
    """Return the jobs to ask; None once the named job has ended. Raises BadUsage."""
    jobs = options.known_jobs()
    if options.job is None:
        return [job for job in jobs if job.has_driver]
    job = choose(jobs, options.job)
    return [job] if await_driver(job) else None


def _text(jobs: Sequence[KnownJob] | None) -> bytes:
    """Return the metrics of these jobs, without jobs that do not answer: they may be ending."""
    with ThreadPoolExecutor(_AT_ONCE) as asking:
        answers = [*asking.map(_now, jobs or ())]
    return metrics_text([answer for answer in answers if answer is not None])


def _now(job: KnownJob) -> JobNow | None:
    control = ControlClient(job, _PATIENCE)
    with suppress(DriverGone, ControlRefused):
        # First, since measuring takes a moment: totals and state should not be older.
        samples = control.get("/samples")
        totals, state = control.get("/totals"), control.get("/job")
        # Prometheus' format escapes newlines alone, and the text may be shown on a terminal.
        state = {**state, "name": visible_line(state.get("name") or "")}
        return JobNow(state, totals, samples, time.time())
    return None


def _keep_fresh(path: Path, interval: float, running: Callable[[], Sequence[KnownJob] | None]) -> int:
    """Write the file at intervals, and remove it in the end."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    try:
        while (jobs := running()) is not None:
            began = time.monotonic()
            _write(path, _text(jobs))
            time.sleep(max(0.0, began + interval - time.monotonic()))
    except KeyboardInterrupt:
        pass
    finally:
        with suppress(OSError):
            # node_exporter would serve a file of the past for ever.
            path.unlink(missing_ok=True)
    return 0


def _write(path: Path, text: bytes) -> None:
    """Write the file. Raises BadUsage."""
    try:
        # Readable for every user: node_exporter runs as a user of its own.
        write_whole(path, text, 0o644)
    except OSError as error:
        raise BadUsage(f"--textfile {path}: {reason(error)}", hint="a file that you may write") from None


def _scrape(job: KnownJob, options: argparse.Namespace) -> int:
    """Serve the job's metrics in the foreground until the job ends or Ctrl-C."""
    from hvlaunch.cli.jobs.web import (  # noqa: PLC0415 (with --scrape alone)
        WebAnswer,
        WebRequest,
        WebServer,
        has_bearer,
    )

    token = os.urandom(32).hex()

    def respond(request: WebRequest) -> WebAnswer:
        if not has_bearer(request.fields, token):
            return WebAnswer(401, b"hvlaunch metrics --scrape shows the token\n")
        request.trust()
        if (request.method, request.path) != ("GET", "/metrics"):
            return WebAnswer(404, b"there is no such path\n")
        now = _now(job)
        if now is None:
            return WebAnswer(503, b"the driver is busy\n")
        return WebAnswer(200, metrics_text([now]), _TEXT_FORMAT)

    server = WebServer(options.bind, is_open=options.no_tls)
    return server.run(
        respond,
        f"{server.url}/metrics\n{token}",
        introduction="the metrics' address, and the bearer token",
        risk="gets the token, and with it the metrics",
        wait=lambda: await_end(job),
    )
