"""Sources of options beside the command line, weakest first: the user's file, the project's, the job's, variables.

Every job looks for these files with a few stat calls, and loads their readers only if a file exists.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hvlaunch.cli.options import OptionGroup
from hvlaunch.cli.options.settings import Setting
from hvlaunch.errors import BadUsage

if TYPE_CHECKING:
    from hvlaunch.cli.config.read import FileSettings

__all__ = ["OptionSource", "config_directory", "other_sources", "project_file", "user_file"]


_PYPROJECT = "pyproject.toml"

_OWN_NAME = "hvlaunch.toml"
_LARGEST = 1 << 20
# Another user may have written the text, so neither pattern takes longer than the text is long.
_KEY = re.compile(rb"""(?<![\w-])hvlaunch["']?[ \t]*[].=]""")
_TABLE = re.compile(
    rb"""(?m)^[ \t]*(?:\[[ \t]*)?["']?tool["']?[ \t]*(?:\.[ \t]*["']?hvlaunch["']?[ \t]*[].=]|[]=])"""
)
"""Every way to begin the table tool.hvlaunch: a pyproject.toml without it is not worth parsing."""
_WORKER = "HVLAUNCH_JOB_ID"


class OptionSource(NamedTuple):
    """A source of settings, with a title for messages."""

    title: str
    settings: Sequence[Setting]


def other_sources(
    typed: Sequence[Setting],
    environ: Mapping[str, str],
    groups: Sequence[OptionGroup],
    warn: Callable[[str], object],
) -> list[OptionSource]:
    """Return the sources beside the command line, which may name a file and a profile.

    `warn` gets a line about each file or variable that is not used. Raises BadUsage.
    """
    # A driver in a worker of another job must not inherit that job's options.
    is_isolated = _WORKER in environ or bool(_last(typed, "isolated"))
    variables = [] if is_isolated else _variables(environ, groups, warn)
    named = _last([*variables, *typed], "config_file")
    paths = [] if is_isolated else [path for path in _paths(environ) if not _is_same(path[1], named)]
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
        profiles = sorted({name for _, settings in files for name in settings.profiles})
        hint = ", ".join(profiles) or "[profiles.NAME] in hvlaunch.toml"
        raise BadUsage(f"no file has a profile {profile!r}", hint=hint)
    return [*sources, OptionSource("environment", variables)]


def _of_file(title: str, settings: "FileSettings", profile: str | None) -> Iterator[OptionSource]:
    yield OptionSource(title, settings.always)
    if profile is not None and profile in settings.profiles:
        yield OptionSource(f"{title}, profile {profile}", settings.profiles[profile])


def _read(
    path: str, groups: Sequence[OptionGroup], warn: Callable[[str], object], *, is_found: bool
) -> "FileSettings":
    """Return a file's settings. A found file that other users can change is skipped with a warning."""
    from hvlaunch.cli.config.files import NotTrusted, read_config  # noqa: PLC0415 (most jobs have no file)
    from hvlaunch.cli.config.read import FileSettings  # noqa: PLC0415 (as above)

    try:
        return read_config(path, groups, is_found=is_found)
    except NotTrusted as error:
        if not is_found:
            raise
        warn(f"warning: not used: {error}")
        return FileSettings((), {})


def _last(settings: Sequence[Setting], name: str) -> Any:
    return next((setting.value for setting in reversed(settings) if setting.option.name == name), None)


def _is_same(path: str, named: str | None) -> bool:
    """Return whether the user named this file, which hvlaunch finds anyway."""
    try:
        return named is not None and os.path.samefile(path, os.path.expanduser(named))  # noqa: PTH121, PTH111 (quick)
    except (OSError, ValueError):
        return False


def _variables(
    environ: Mapping[str, str], groups: Sequence[OptionGroup], warn: Callable[[str], object]
) -> list[Setting]:
    if not any(name.startswith("HVLAUNCH_") for name in environ):
        return []
    from hvlaunch.cli.config.read import variable_settings  # noqa: PLC0415 (most environments have none)

    return variable_settings(environ, groups, warn)


def _paths(environ: Mapping[str, str]) -> Iterator[tuple[str, str, bool]]:
    """Yield title and path of each existing file, and whether it is the project's."""
    users = user_file(environ)
    if users is not None:
        yield "your file", users, False
    try:
        directory = os.getcwd()  # noqa: PTH109 (quick)
    except OSError:
        return
    project = project_file(directory, environ.get("HOME", ""))
    if project is not None:
        yield "the project's file", project, True


def project_file(directory: str, home: str) -> str | None:
    """Return the nearest project's file: of this directory, or of a directory above, up to the home directory."""
    while True:
        hvlaunch_toml, shared = os.path.join(directory, _OWN_NAME), os.path.join(directory, _PYPROJECT)  # noqa: PTH118 (quick)
        if os.path.lexists(hvlaunch_toml):
            return hvlaunch_toml
        if _may_have_options(shared):
            return shared
        parent = os.path.dirname(directory)  # noqa: PTH120 (quick)
        # Directories above the home may be an automounter's, which asks the network for each name.
        if directory in (parent, home):
            return None
        directory = parent


def user_file(environ: Mapping[str, str]) -> str | None:
    """Return the user's own file; None if it does not exist."""
    directory = config_directory(environ)
    path = f"{directory}/config.toml"
    return path if directory is not None and os.path.lexists(path) else None


def config_directory(environ: Mapping[str, str]) -> str | None:
    """Return the directory of the user's own files; None without a home."""
    directory = environ.get("XDG_CONFIG_HOME", "")
    if not directory.startswith("/"):
        home = environ.get("HOME", "")
        if not home.startswith("/"):
            return None
        directory = f"{home}/.config"
    return f"{directory}/hvlaunch"


def _may_have_options(path: str) -> bool:
    try:
        descriptor = _opened(path)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        text = os.read(descriptor, _LARGEST)
        return b"hvlaunch" in text and bool(_KEY.search(text)) and bool(_TABLE.search(text))
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _opened(path: str) -> int:
    """Open the file. Raises OSError, also for another user's link: opening its target may block for ever."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP or os.lstat(path).st_uid not in (os.getuid(), 0):
            raise
        return os.open(path, flags)
