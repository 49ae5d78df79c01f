"""Words for existing jobs (`hvlaunch stop`), as data; valid only as the first word of a command line."""

from typing import NamedTuple

__all__ = ["JOB_WORDS", "JobWord"]


class JobWord(NamedTuple):
    """A word and its arguments."""

    name: str
    usage: str
    help: str
    """A phrase. `code` is in backquotes."""


JOB_WORDS = {
    word.name: word
    for word in (
        JobWord(
            "jobs", "[--json]", "list your jobs on this machine: those that run, and those that failed lately"
        ),
        JobWord(
            "attach",
            "[JOB] [--ranks LIST]",
            "look on at a job, or take it up again; Ctrl-C leaves it running",
        ),
        JobWord(
            "logs",
            "[JOB] [-f] [--ranks LIST] [--since TIME] [--json]",
            "print the output of a job, as far as it is kept",
        ),
        JobWord("events", "[JOB] [-f]", "print what has happened in a job, an object on each line"),
        JobWord(
            "top",
            "[JOB] [--plain] [--web [--bind ADDRESS [--no-tls]]]",
            "show what a job's hosts and ranks do, full screen or in a browser",
        ),
        JobWord(
            "stacks",
            "[JOB] [--ranks LIST] [--native] [--json]",
            "print what the workers of a job are doing: their stacks, equal ones once",
        ),
        JobWord(
            "metrics",
            "[JOB] [--textfile FILE [--interval SECONDS]] [--scrape [--bind ADDRESS [--no-tls]]]",
            "print what your jobs do, or one of them, for Prometheus; or write or serve it",
        ),
        JobWord("signal", "SIGNAL [JOB]", "send a signal to all workers of a job"),
        JobWord("stop", "[JOB] [--kill]", "stop a job as Ctrl-C does, and wait for its end"),
        JobWord("wait", "[JOB]", "wait for a job's end; its exit code is this command's"),
        JobWord(
            "pool",
            "up NAME -H HOSTS | down NAME | status [NAME]",
            "keep connections to hosts, so that jobs there start sooner",
        ),
        JobWord("forget", "JOB", "remove what is kept of a job that has ended"),
    )
}
"""Words by name."""
