"""`hvlaunch top`: activity of a job's hosts and ranks, full screen, as a plain table, or in a browser."""

import argparse
import json
import os
import shutil
import time
from collections.abc import Sequence
from importlib.util import find_spec

from hvlaunch.cli.jobs.feed import INTERVAL, JobFeed
from hvlaunch.cli.jobs.output import await_output
from hvlaunch.cli.process import complain, print_answer
from hvlaunch.errors import BadUsage
from hvlaunch.outside import KnownJob, await_driver, await_end, choose, result_of
from hvlaunch.outside.control import DriverGone
from hvlaunch.view.text import plain, view_record

__all__ = ["top"]

_CLEAR = "\x1b[H\x1b[2J"
_WIDTH = 160
"""Characters of a line without a terminal."""


def top(jobs: Sequence[KnownJob], options: argparse.Namespace) -> int:
    """Show the job until it ends or the user leaves; return the exit code. Raises HvlaunchError."""
    if (options.bind or options.no_tls) and not options.web:
        raise BadUsage("--bind and --no-tls are for --web", hint="hvlaunch top --web")
    if options.no_tls and not options.bind:
        raise BadUsage("--no-tls is for --bind", hint="hvlaunch top --web --bind ADDRESS --no-tls")
    job = choose(jobs, options.job)
    if not await_driver(job):
        raise BadUsage(f"job {job.id} has ended", hint=f"hvlaunch logs {job.id}")
    if options.web:
        return _web(job, options)
    await_output(job)
    feed = JobFeed(job)
    if options.json:
        return _json(feed)
    has_terminal = all(map(os.isatty, range(3))) and os.environ.get("TERM", "dumb") != "dumb"
    if options.plain or not has_terminal:
        return _plain(feed, is_redrawn=has_terminal)
    if find_spec("textual") is None:
        complain(
            "showing a plain table, since textual is not installed; for the full screen: pip install 'hvlaunch[top]'"
        )
        return _plain(feed, is_redrawn=True)
    from hvlaunch.cli.jobs.top_screen import TopScreen  # noqa: PLC0415 (an extra, and 200 ms)

    TopScreen(feed).run()
    return _leave(feed)


def _web(job: KnownJob, options: argparse.Namespace) -> int:
    """Serve the job's page in the foreground until the job ends or Ctrl-C."""
    from hvlaunch.cli.jobs.web import (  # noqa: PLC0415 (with --web alone)
        Access,
        JobPage,
        WebServer,
    )

    await_output(job)
    feed = JobFeed(job)
    server = WebServer(options.bind, is_open=options.no_tls)
    access = Access(job.id, server.address, server.port, is_tls=server.certificate is not None)
    page = JobPage(feed, access)

    def wait() -> None:
        await_end(job)
        page.await_viewers()

    code = server.run(
        page.respond,
        f"{server.url}/#{access.new_token()}",
        introduction="the page, for one browser that opens it within 10 minutes",
        risk="can do what you can do on the page",
        wait=wait,
    )
    return code or _leave(feed)


def _json(feed: JobFeed) -> int:
    """Print the job at this moment as an object. Raises DriverGone."""
    view = feed.next()
    if view is None:
        raise DriverGone(f"job {feed.job.id} has ended", hint=f"hvlaunch logs {feed.job.id}")
    return print_answer(f"{json.dumps(view_record(view))}\n")


def _plain(feed: JobFeed, *, is_redrawn: bool) -> int:
    """Print the table at intervals."""
    width = _WIDTH
    try:
        while (view := feed.next()) is not None:
            if is_redrawn:
                width = shutil.get_terminal_size().columns
            text = plain(view, width)
            if code := print_answer(f"{_CLEAR}{text}" if is_redrawn else f"{text}\n"):
                return code
            if feed.has_ended:
                break
            # Without a terminal, news must not fill a log file.
            if not is_redrawn:
                time.sleep(INTERVAL)
    except KeyboardInterrupt:
        pass
    return _leave(feed)


def _leave(feed: JobFeed) -> int:
    """Return the exit code: the job's, if the job has ended."""
    job = feed.job
    if not feed.has_ended:
        complain(f"job {job.id} continues; to stop it: hvlaunch stop {job.id}")
        return 0
    result = result_of(job)
    return 0 if result is None else int(result["exit_code"])
