"""Write the options of a job as Python has them: python docs/python_options.py hvlaunch/api/options.py, or make options-page."""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hvlaunch.api.given import FIELDS
from hvlaunch.cli.options import Option, values
from hvlaunch.cli.options.parser import default_text

__all__ = ["module"]

_HEAD = '''\
"""The options of a job as Python has them. Made of the table in hvlaunch/cli/options/table.py by `make options-page`: change that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Literal, TypedDict

__all__ = ["GivenOptions", "LauncherOptions"]

'''
_TYPES: Mapping[Callable[[str], Any], str] = {
    values.positive: "int",
    values.count: "int",
    values.port: "int",
    values.port_or_any: "int",
    values.slots_or_gpus: 'int | Literal["auto", "gpu"]',
    values.workers_per_host: 'int | Literal["auto", "cpu", "gpu"]',
    values.seconds: "float",
    values.from_0: "float",
    values.from_0_to_1: "float",
    values.size: "int | str",
    values.ranks: "str | Sequence[int]",
    values.ports: "str | tuple[int, int]",
    values.hosts_or_bounds: "int | str",
    values.streams: 'Literal["0", "1", "2", "3"]',
}
_BY_NAME = {
    "hosts": "str | Sequence[str] | Mapping[str, int]",
    "env": "Mapping[str, str | int | float] | Sequence[str]",
    "network_interfaces": "str | Sequence[str]",
    "env_file": "str | PathLike[str] | Sequence[str | PathLike[str]]",
    "bring": "str | Sequence[str]",
    "collect": "str | Sequence[str]",
    "cooldown": "tuple[float, float]",
    "setup_key": "str | Sequence[str]",
}
_NOTES = {
    "hosts": 'Such as `"a:4,b:4"`, `["a:4", "b:4"]` or `{"a": 4, "b": 4}`.',
    "env": 'Such as `{"NAME": "value"}`, or `["NAME"]` for one that is set here.',
}


def _type(name: str, option: Option) -> str:
    value = option.value
    if value is None:
        return "bool"
    if name in _BY_NAME:
        return _BY_NAME[name]
    if value.choices:
        return "Literal[{}]".format(", ".join(f'"{choice}"' for choice in value.choices))
    if value.path:
        return "str | PathLike[str]"
    return _TYPES.get(value.read, "str")


def _text(name: str, option: Option) -> str:
    unit = {"s": ", in seconds"}.get(option.value.unit if option.value else "", "")
    text = f"{option.help[0].upper()}{option.help[1:]}{unit}."
    default = default_text(option)
    return " ".join(filter(None, [text, _NOTES.get(name, ""), f"Default: {default}." if default else ""]))


def module() -> str:
    """The source of the module."""
    return _HEAD + "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "\n@dataclass(frozen=True, kw_only=True)"
    yield "class LauncherOptions:"
    yield '    """What a job is started with; None is what docs/reference/options.md says of an option that is not given."""\n'
    for name, option in FIELDS.items():
        yield f"    {name}: {_type(name, option)} | None = None"
        yield f'    """{_text(name, option)}"""'
    yield "\n\nclass GivenOptions(TypedDict, total=False):"
    yield '    """The same, as keywords of a call."""\n'
    for name, option in FIELDS.items():
        yield f"    {name}: {_type(name, option)} | None"
    yield ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(module())
