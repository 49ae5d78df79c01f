"""Options as Python values: a field for each option of the table, and the job specification that the values make."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvlaunch.cli.arguments import other_sources
from hvlaunch.cli.options import BadValue, Option
from hvlaunch.cli.options.settings import Options, Setting, merged, read_value
from hvlaunch.cli.options.table import COMMAND, GROUPS
from hvlaunch.cli.process import complain
from hvlaunch.cli.spec import job_spec
from hvlaunch.errors import BadUsage
from hvlaunch.job import JobSpec

__all__ = ["FIELDS", "spec_of"]

_NOT_FOR_FUNCTIONS = frozenset(
    [
        # Other launchers can't start a function.
        *("launcher", "mpirun", "mpi_args", "binding_args"),
        # The caller waits for the results.
        *("detach", "fsync"),
        *("module", "stdin"),
        *("dry_run", "show_config", "show_secrets", "check_build"),
    ]
)
_NAMES = {"x": "env", "env": "forward_env", "output_filename": "output_dir"}
"""Options with another name in Python."""


def _fields() -> dict[str, Option]:
    options = [option for group in GROUPS for option in group.options]
    return {
        _NAMES.get(option.name, option.name): option
        for option in options
        if not option.question and option.name not in _NOT_FOR_FUNCTIONS
    }


FIELDS: Mapping[str, Option] = _fields()
"""The options of functions, by their names in Python."""


def spec_of(given: Mapping[str, object], command: Sequence[str], environ: Mapping[str, str]) -> JobSpec:
    """Make the specification of a job from field values (None: not given) and all other sources of options.

    Raises BadUsage.
    """
    typed = [
        setting
        for name, value in given.items()
        if value is not None
        for setting in _settings(name, FIELDS[name], value)
    ]
    allowed = {option.name for option in FIELDS.values()}
    # Files may set options that functions do not have, for command lines; they are ignored here.
    others = [
        [setting for setting in source.settings if setting.option.name in allowed]
        for source in other_sources(typed, environ, GROUPS, complain)
    ]
    typed.append(Setting(COMMAND, tuple(command), list(command), "function"))
    options = Options(merged([*others, typed]), GROUPS, is_marked=True)
    options.check_found()
    for note in options.found_notes():
        complain(note)
    spec, warnings = job_spec(options, environ)
    for warning in () if options.quiet else warnings:
        complain(f"warning: {warning}")
    return replace(spec, stdin="none")


def _settings(name: str, option: Option, value: object) -> Iterator[Setting]:
    """Yield the settings of a value, as if it had been typed. Raises BadUsage."""
    try:
        for texts in _texts(option, value):
            is_off = option.value is None and value is False
            yield Setting(option, texts, read_value(option, texts, is_off=is_off), name)
    except (BadValue, TypeError) as error:
        raise BadUsage(f"{name}={value!r}: {error}") from None


def _texts(option: Option, value: Any) -> Iterator[tuple[str, ...]]:
    """Yield the words of each occurrence of the option on a command line. Raises BadValue, TypeError."""
    if option.value is None:
        # Any object is true or false: a text like "no" would count as True.
        if not isinstance(value, bool):
            raise BadValue("is neither True nor False")
        # False is typed only for a flag with an opposite, such as --no-x.
        if value or option.opposites:
            yield ()
    elif len(option.value.metavars) > 1:
        # A text also has a length, and items: its characters.
        if isinstance(value, str) or len(value) != len(option.value.metavars):
            raise BadValue(f"needs {len(option.value.metavars)} values")
        yield tuple(_text(part) for part in value)
    elif option.value.is_assignment and isinstance(value, Mapping):
        for name, text in value.items():
            if not isinstance(name, str) or not name or "=" in name:
                raise BadValue(f"{name!r} is no name of a variable")
            yield (f"{name}={_text(text)}",)
    elif option.repeats in ("list", "add") and not isinstance(value, str | os.PathLike):
        for item in value:
            yield (_text(item),)
    else:
        yield (_joined(option, value),)


def _joined(option: Option, value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{_in_brackets(str(name))}:{_text(slots)}" for name, slots in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ("-" if option.name == "worker_port_range" else ",").join(map(_text, value))
    return _text(value)


def _text(value: Any) -> str:
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, str | int | float | os.PathLike):
        raise BadValue(f"{value!r} is of type {type(value).__name__}")
    text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    # The operating system would cut the word at a NUL.
    if "\0" in text:
        raise BadValue("has a NUL byte")
    return text


def _in_brackets(host: str) -> str:
    """Put an IPv6 address in brackets, since a colon follows."""
    return f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host
