"""All sources of options but the command line, the weakest first: the user's file, the project's, the job's, variables."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hvlaunch.cli.config.find import project_file, user_file
from hvlaunch.cli.options.option import Group
from hvlaunch.cli.options.settings import Setting
from hvlaunch.errors import BadUsage

if TYPE_CHECKING:
    from hvlaunch.cli.config.read import Settings

__all__ = ["Source", "other_sources"]

_WORKER = "HVLAUNCH_JOB_ID"
"""Every worker has it. A driver in a worker of another job has no part in that job's options."""


class Source(NamedTuple):
    """Where settings come from."""

    title: str
    settings: Sequence[Setting]


def other_sources(
    typed: Sequence[Setting],
    environ: Mapping[str, str],
    groups: Sequence[Group],
    warn: Callable[[str], object],
) -> list[Source]:
    """Those that count, beside the command line, which may name a file and a profile.

    `warn` is told of what is not used. Raises BadUsage.
    """
    is_isolated = _WORKER in environ or bool(_last(typed, "isolated"))
    variables = [] if is_isolated else _variables(environ, groups, warn)
    named = _last([*variables, *typed], "config_file")
    paths = [] if is_isolated else [each for each in _paths(environ) if not _is_same(each[1], named)]
    if not paths and named is None and not variables and _last(typed, "profile") is None:
        return []
    if named is not None:
        paths.append(("the job's file", named, False))
    files = [
        (f"{title}, {path}", _read(path, groups, warn, is_found=is_found)) for title, path, is_found in paths
    ]
    always = [setting for _, settings in files for setting in settings.always]
    profile = _last([*always, *variables, *typed], "profile")
    sources = [source for title, settings in files for source in _of_file(title, settings, profile)]
    if profile is not None and all(profile not in settings.profiles for _, settings in files):
        known = sorted({name for _, settings in files for name in settings.profiles})
        hint = ", ".join(known) or "[profiles.NAME] in hvlaunch.toml"
        raise BadUsage(f"no file has a profile {profile!r}", hint=hint)
    return [*sources, Source("environment", variables)]


def _of_file(title: str, settings: "Settings", profile: str | None) -> Iterator[Source]:
    yield Source(title, settings.always)
    if profile is not None and profile in settings.profiles:
        yield Source(f"{title}, profile {profile}", settings.profiles[profile])


def _read(path: str, groups: Sequence[Group], warn: Callable[[str], object], *, is_found: bool) -> "Settings":
    """What the file sets; nothing where nobody named it, and another user can change it."""
    from hvlaunch.cli.config.files import NotTrusted, read_config  # noqa: PLC0415 (most jobs have no file)
    from hvlaunch.cli.config.read import Settings  # noqa: PLC0415 (as above)

    try:
        return read_config(path, groups, is_found=is_found)
    except NotTrusted as error:
        if not is_found:
            raise
        warn(f"warning: not used: {error}")
        return Settings((), {})


def _last(settings: Sequence[Setting], name: str) -> Any:
    return next((each.value for each in reversed(settings) if each.option.name == name), None)


def _is_same(path: str, named: str | None) -> bool:
    """Whether the file that is there anyway is the one that is named."""
    try:
        return named is not None and os.path.samefile(path, os.path.expanduser(named))  # noqa: PTH121, PTH111 (quick)
    except (OSError, ValueError):
        return False


def _variables(
    environ: Mapping[str, str], groups: Sequence[Group], warn: Callable[[str], object]
) -> list[Setting]:
    if not any(name.startswith("HVLAUNCH_") for name in environ):
        return []
    from hvlaunch.cli.config.variables import variable_settings  # noqa: PLC0415 (most environments have none)

    return variable_settings(environ, groups, warn)


def _paths(environ: Mapping[str, str]) -> Iterator[tuple[str, str, bool]]:
    """The files that are there, each with what it is and whether it was found."""
    own = user_file(environ)
    if own is not None:
        yield "your file", own, False
    try:
        directory = os.getcwd()  # noqa: PTH109 (quick)
    except OSError:
        return
    found = project_file(directory, environ.get("HOME", ""))
    if found is not None:
        yield "the project's file", found, True
