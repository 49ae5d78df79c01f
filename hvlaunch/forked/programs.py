"""What a fork server's drivers may run, and what they need loaded for it."""

import os
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple, NoReturn

from hvlaunch.cli.environment import user_env
from hvlaunch.cli.job_words import JOB_WORDS
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.words import UnknownOption, by_name, split
from hvlaunch.engine.codec import prepare
from hvlaunch.engine.entries import Begin
from hvlaunch.engine.events import Event
from hvlaunch.forked.driver import Asker, run_command_line, run_function
from hvlaunch.forked.request import Request
from hvlaunch.outside.setting import setting
from hvlaunch.outside.state import POOL_VARIABLE
from hvlaunch.rendezvous.serving.certificate import Certificate

__all__ = ["Program", "names_pool", "preload", "programs_of"]

_PRELOADED = (
    "encodings.idna",
    "hvlaunch.api.driver",
    "hvlaunch.cli.main",
    "hvlaunch.cli.pool_hosts",
    "hvlaunch.console.notes",
    "hvlaunch.gloo.controller",
    "hvlaunch.driver.doors.history",
    "hvlaunch.driver.record.journal",
    "hvlaunch.driver.loop",
    "hvlaunch.driver.doors.page_door",
    "hvlaunch.driver.record.turn_keeping",
    "hvlaunch.driver.warm_findings",
    "hvlaunch.driver.links.warm_way",
    "psutil",
)
"""What a job on a pool imports when it needs it."""


class Program(NamedTuple):
    """What a driver may run."""

    setting: str
    """That of the server; who asks must have the same."""
    descriptors: int
    """How many it gets, with the working directory."""
    may_run: Callable[[Request], bool]
    run: Callable[[Asker], NoReturn]
    is_killed: bool
    """Whether it ends when who has asked for it has gone; else it looks after that itself."""


def programs_of(pool: str) -> dict[str, Program]:
    """By name. Raises OSError."""

    def may_run(request: Request) -> bool:
        return names_pool(pool, request)

    return {
        "command line": Program(setting(os.environ), 4, may_run, run_command_line, is_killed=True),
        "function": Program(setting(), 5, lambda _: True, run_function, is_killed=False),
    }


def names_pool(name: str, request: Request) -> bool:
    """Whether these words run a job on the pool of this name. Words that are wrong are for a driver of the ordinary way."""
    words = request.argv[1:]
    if not words or words[0] in JOB_WORDS:
        return False
    options = by_name(GROUPS)
    try:
        typed, _ = split(words, options, lambda _: False)
    except UnknownOption:
        return False
    pools = [each.values for each in typed if options[each.name].name == "pool"]
    return [*pools[-1]] == [name] if pools else request.environ.get(POOL_VARIABLE) == name


def preload() -> None:
    """Load what jobs on a pool need."""
    for module in _PRELOADED:
        import_module(module)
    Certificate().key  # noqa: B018 (what makes it is loaded now)
    prepare(Begin)
    prepare(Event)
    user_env(os.environ)  # its patterns are made when they are first needed
