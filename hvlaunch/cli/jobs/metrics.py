"""`hvlaunch metrics`: what jobs do, in Prometheus' text format: printed, written to a file, or served to who scrapes it."""

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

from hvlaunch.cli.process import complain, print_answer
from hvlaunch.errors import BadUsage
from hvlaunch.outside.control import Control, ControlRefused, DriverGone
from hvlaunch.outside.known import KnownJob, await_driver, await_end, choose
from hvlaunch.owners import reason, write_whole
from hvlaunch.telemetry.metrics import JobNow, metrics_text

__all__ = ["metrics"]

_PATIENCE = 5.0
"""Seconds for a driver: more than it waits for its hosts."""
_AT_ONCE = 16
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


def metrics(jobs: Sequence[KnownJob], options: argparse.Namespace) -> int:
    """Print the metrics of these jobs, or do what the options say instead; the exit code. Raises HvlaunchError."""
    if options.interval is not None and options.textfile is None:
        raise BadUsage("--interval is for --textfile", hint="hvlaunch metrics --textfile FILE --interval 15")
    if options.scrape and options.textfile is not None:
        raise BadUsage("--scrape and --textfile are two ways", hint="one of them")
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
    """The jobs that are asked now; None where the one that was named has ended. Raises BadUsage."""
    jobs = options.known_jobs()
    if options.job is None:
        return [job for job in jobs if job.has_driver]
    job = choose(jobs, options.job)
    return [job] if await_driver(job) else None


def _text(jobs: Sequence[KnownJob] | None) -> bytes:
    """One that does not answer, since it may be ending, is left out."""
    with ThreadPoolExecutor(_AT_ONCE) as asking:
        found = [*asking.map(_now, jobs or ())]
    return metrics_text([one for one in found if one is not None])


def _now(job: KnownJob) -> JobNow | None:
    control = Control(job, _PATIENCE)
    with suppress(DriverGone, ControlRefused):
        samples = control.get("/samples")  # first, since these take a moment
        totals, state = control.get("/totals"), control.get("/job")
        return JobNow(state, totals, samples, time.time())
    return None


def _keep_fresh(path: Path, interval: float, running: Callable[[], Sequence[KnownJob] | None]) -> int:
    """Write the file again and again. It goes with this program: else nobody would see that it grows old."""

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
            path.unlink(missing_ok=True)
    return 0


def _write(path: Path, text: bytes) -> None:
    """All may read it: who does is another user, as a rule. Raises BadUsage."""
    try:
        write_whole(path, text, 0o644)
    except OSError as error:
        raise BadUsage(f"--textfile {path}: {reason(error)}", hint="a file that you may write") from None


def _scrape(job: KnownJob, options: argparse.Namespace) -> int:
    """Serve the job's metrics in the foreground, until the job has ended or Ctrl-C."""
    from hvlaunch.cli.jobs.web_access import has_bearer  # noqa: PLC0415 (with --scrape alone)
    from hvlaunch.cli.jobs.web_server import WebAnswer, WebRequest, WebServer  # noqa: PLC0415 (as above)

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
    with server.serving(respond):
        if server.certificate is not None:
            complain(f"the certificate that is shown there: {server.certificate.fingerprint}")
        elif options.no_tls:
            complain("whoever can read this network gets the token, and with it the metrics")
        complain("the address, and the bearer token; Ctrl-C ends it:")
        if code := print_answer(f"{server.url}/metrics\n{token}\n"):
            return code
        with suppress(KeyboardInterrupt):
            await_end(job)
    return 0
