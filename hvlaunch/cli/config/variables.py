"""Options in the environment: HVLAUNCH_ and the option's name."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches

from hvlaunch.cli.config.read import key_of, keys_of
from hvlaunch.cli.config.texts import texts_of_variable
from hvlaunch.cli.options import values
from hvlaunch.cli.options.option import BadValue, Group, Option
from hvlaunch.cli.options.settings import HELP_HINT, Setting, read_value
from hvlaunch.cli.options.table import COMMAND
from hvlaunch.errors import BadUsage

__all__ = ["OTHERS", "PREFIX", "names_of", "variable_settings"]

PREFIX = "HVLAUNCH_"
OTHERS = frozenset(
    f"{PREFIX}{name}"
    for name in (
        "ADDRESS", "BAGGAGE", "CROSS_RANK", "CROSS_SIZE", "DRIVER", "DRIVER_CERT", "ELASTIC", "ENTRY", "HOST", "HOSTS", "JOB_ID", "JOURNAL",
        "LEASE", "LOCAL_RANK", "LOCAL_SIZE", "RANK", "RENDEZVOUS", "RENDEZVOUS_CERT", "ROUND", "SCRATCH", "SIZE", "SPARE", "TOKEN", "TOKEN_FILE", "WORKER",
        "WORKER_PORTS", "WORKER_TIMEOUT",
    )
)  # fmt: skip
"""Variables that mean something else: they are workers', but for some. Some are also options, where no worker is."""
_LIKE = 0.85


def names_of(option: Option) -> tuple[str, ...]:
    """The option's variables, the usual one first; none where it can't be set in the environment."""
    return () if option.source == "command line" else _names(option)


def _names(option: Option) -> tuple[str, ...]:
    return tuple(PREFIX + key.replace("-", "_").upper() for key in keys_of(option))


def variable_settings(
    environ: Mapping[str, str], groups: Sequence[Group], warn: Callable[[str], object]
) -> list[Setting]:
    """What the environment sets. `warn` is told of names that look mistyped. Raises BadUsage."""
    options = {name: option for group in groups for option in group.options for name in names_of(option)}
    options[f"{PREFIX}COMMAND"] = COMMAND
    settings: list[Setting] = []
    seen: dict[str, str] = {}
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        if name not in options:
            advice = _advice(name, options, groups)
            if advice and environ[name] and name not in OTHERS:
                warn(f"warning: {name} {advice}")
        elif environ[name]:
            other = seen.setdefault(options[name].name, name)
            if other != name and options[name].constant is True:
                raise BadUsage(f"environment: {name} and {other} are the same option", hint=f"unset {name}")
            settings += _settings(options[name], name, environ[name])
    return settings


def _advice(name: str, options: Collection[str], groups: Sequence[Group]) -> str | None:
    """What may have been meant by a variable that sets nothing."""
    for option in (option for group in groups for option in group.options):
        if option.source == "command line" and not option.question and name in _names(option):
            return f"is not read: {key_of(option)} can't be set by a variable; try: {option.flags[-1]} on the command line"
    close = get_close_matches(name, options, 1, _LIKE)
    return f"is no option; try: {close[0]}" if close else None


def _settings(option: Option, name: str, text: str) -> Iterator[Setting]:
    try:
        for texts in texts_of_variable(option, text):
            is_off = option.value is None and not values.yes_or_no(texts[0])
            words = tuple(texts) if option.value else ()
            yield Setting(option, words, read_value(option, words, is_off=is_off), name, "environment")
    except BadValue as error:
        raise BadUsage(f"environment: {name}: {error}", hint=HELP_HINT) from None
