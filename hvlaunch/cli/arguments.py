"""The options of a job: those of the command line, which is split into options and the user's command, and of other sources, weakest first.

argparse can't split a line: words of the command that look like options would be its own. Every job looks for files of options with a few
stat calls, and loads their readers only if a file exists.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvlaunch.cli.options import Option, OptionGroup, Typed, UnknownOption, by_name, split
from hvlaunch.cli.options.settings import (
    HELP_HINT,
    Options,
    Setting,
    check_words,
    config_directory,
    merged,
    typed_setting,
)
from hvlaunch.cli.options.table import COMMAND, GROUPS
from hvlaunch.errors import BadUsage
from hvlaunch.named_tuples import NamedTuple

if TYPE_CHECKING:
    from hvlaunch.cli.config import FileSettings

__all__ = [
    "Answered",
    "OptionSource",
    "options_of_word",
    "other_sources",
    "parse",
    "project_file",
    "user_file",
]


class Answered(Exception):
    """The user asked a question instead of for a job; `text` is the answer."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def parse(
    argv: Sequence[str],
    groups: Sequence[OptionGroup] = GROUPS,
    *,
    environ: Mapping[str, str] | None = None,
    earlier: Sequence[Setting] = (),
    warn: Callable[[str], object] = str,
) -> Options:
    """Read the command line, without the program's name, and the other sources of options.

    Other sources count only with an environment; `warn` gets a line about each that is not used. `earlier` are weaker than
    the line. Raises BadUsage, and Answered for --help and --version.
    """
    options_by_name = by_name(groups)
    try:
        typed, command = split(argv, options_by_name, _is_foreign)
    except UnknownOption:
        from hvlaunch.cli.foreign import without_needless  # noqa: PLC0415 (most lines have none)

        argv, needless = without_needless(argv, options_by_name)
        typed, command = split(argv, options_by_name, _is_foreign)
        if not any(options_by_name[option.name].name == "quiet" for option in typed):
            for sentence in needless:
                warn(f"warning: {sentence}")
    settings = [_setting(option, options_by_name[option.name], groups) for option in typed]
    # --check-build is for bug reports: an invalid file must not stop it.
    is_report = any(setting.option.name == "check_build" for setting in settings)
    others = [] if environ is None or is_report else other_sources(settings, environ, groups, warn)
    if command:
        settings.append(Setting(COMMAND, tuple(command), list(command), "COMMAND"))
    # The word before the command tells whether the user marked its begin: `-- python`.
    is_marked = not command or list(argv[: -len(command)])[-1:] == ["--"]
    options = Options(
        merged([*(source.settings for source in others), earlier, settings]), groups, is_marked=is_marked
    )
    # After merging, since the strongest source decides the host keys.
    options.check_found()
    # `hvlaunch -v` alone is a question for the version in many programs.
    has_none = not options.command and "role" not in options.given
    if has_none and not options.check_build and not options.show_config:
        version = "hvlaunch -V for the version, " if options.given.keys() == {"verbose"} else ""
        raise BadUsage("no command to run", hint=f"{version}hvlaunch -np 2 python train.py, or {HELP_HINT}")
    return options


def options_of_word(
    word: str,
    argv: Sequence[str],
    environ: Mapping[str, str] | None,
    taken: Container[str],
    taken_if_typed: Container[str] = (),
    warn: Callable[[str], object] = str,
    groups: Sequence[OptionGroup] = GROUPS,
) -> Options:
    """Return the options behind a word. `taken` has the names of accepted options of jobs, also from other sources.

    Raises BadUsage, and Answered for a question.
    """
    hint = f"hvlaunch {word.partition(' ')[0]} --help"
    # A command makes the line complete; the word has none.
    options = parse([*argv, "--", "true"], groups, environ=environ, warn=warn)
    if options.command != ("true",):
        raise BadUsage(f"{word}: {options.command[0]!r} is not an option", hint=hint)
    kept: dict[str, Sequence[Setting]] = {}
    for name, settings in options.settings.items():
        typed = [setting for setting in settings if not setting.origin]
        if name in taken or (typed and name in taken_if_typed):
            kept[name] = settings
        elif typed:
            raise BadUsage(f"{word}: {typed[0].called} is for jobs", hint=hint)
    return Options(kept, groups, is_marked=True)


def _is_foreign(name: str) -> bool:
    from hvlaunch.cli.foreign import rows_of  # noqa: PLC0415 (most lines have nothing like it)

    return bool(rows_of(name))


def _setting(typed: Typed, option: Option, groups: Sequence[OptionGroup]) -> Setting:
    """Return the setting. Raises BadUsage, and Answered for a question."""
    check_words(option, typed.values, is_joined=typed.is_joined)
    setting = typed_setting(option, typed.values, is_off=typed.name in option.opposites)
    if option.question:
        raise Answered(_answer(setting, groups))
    return setting


def _answer(question: Setting, groups: Sequence[OptionGroup]) -> str:
    match question.option.question:
        case "version":
            from hvlaunch import __version__  # noqa: PLC0415 (as below: no job needs it)

            return f"hvlaunch {__version__}\n"
        case "completion":
            from hvlaunch.cli.pages.completion import completion  # noqa: PLC0415 (as above)

            return completion(groups, str(question.value))
        case asked:
            from hvlaunch.cli.pages.help import help_text  # noqa: PLC0415 (as above)

            return help_text(groups, is_long=asked == "help")


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
    from hvlaunch.cli.config import (  # noqa: PLC0415 (most jobs have no file)
        FileSettings,
        NotTrusted,
        read_config,
    )

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
    from hvlaunch.cli.config import variable_settings  # noqa: PLC0415 (most environments have none)

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
