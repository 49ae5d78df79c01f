"""A value for each option of the table, and ways to set it."""

import json
from typing import NamedTuple

from hvlaunch.cli.config import group_key, key_of, names_of
from hvlaunch.cli.options import values
from hvlaunch.cli.options.table import COMMAND, GROUPS

OPTIONS = [(group, option) for group in GROUPS for option in group.options]
IN_FILES = [(group, option) for group, option in OPTIONS if option.source in ("any", "own")]
IN_VARIABLES = [(group, option) for group, option in OPTIONS if names_of(option)]
TEXTS = {
    values.printable: ["a b"],
    values.count: ["2"],
    values.positive: ["3"],
    values.port: ["2222"],
    values.port_or_any: ["0"],
    values.address: ["10.0.0.9"],
    values.mount: ["/data", "/data:/mnt:ro"],
    values.http_url: ["http://localhost:8000/health"],
    values.ports: ["29500-29599"],
    values.seconds: ["2.5"],
    values.factor: ["1.5"],
    values.span: ["2h"],
    values.from_0: ["1.5"],
    values.from_0_to_1: ["0.5"],
    values.size: ["2M"],
    values.user: ["me"],
    values.ranks: ["0,2-4"],
    values.slots_or_gpus: ["3"],
    values.workers_per_host: ["4"],
    values.hosts_or_bounds: ["1:2"],
    values.streams: ["2"],
    values.mapping: ["ppr:2:node"],
    values.not_empty: ["some-text"],
    values.notify_target: ["https://ntfy.sh/jobs", "mail:me@x.org"],
    values.notify_events: ["failed,done"],
    values.module_names: ["torch,numpy.linalg"],
    values.words: ["--first 'a b'", "--second"],
    str: ["some text"],
}
"""By the function that reads a value: its words, several where the option may be repeated."""


class Sample(NamedTuple):
    """An option with the words of each time that it is set."""

    words: tuple[tuple[str, ...], ...]
    typed: list[str]


def sample(option):
    """A value that is not the default."""
    value = option.value
    if option == COMMAND:
        return Sample((("python", "train.py", "a b"),), ["python", "train.py", "a b"])
    if value is None:
        return Sample(((),), [option.flags[0]])
    words: tuple[tuple[str, ...], ...]
    if len(value.metavars) > 1:
        words = (("10", "300"),)
    elif option.name == "x":
        words = (("A=1",), ("B=it's = 2",))
    elif value.choices:
        words = ((value.choices[-1],),)
    else:
        texts = TEXTS[value.read]
        words = tuple((text,) for text in (texts if option.repeats in ("list", "add") else texts[:1]))
    return Sample(words, [word for each in words for word in (option.flags[0], *each)])


def of_toml(option, group):
    """The lines of a TOML file."""
    return "\n".join(
        [*([f"[{group_key(group)}]"] if group else []), f"{key_of(option)} = {_value(option)}", ""]
    )


def of_yaml(option, group):
    """The lines of a YAML file; JSON's values are YAML's."""
    line = f"{key_of(option)}: {_value(option)}\n"
    return f"{group_key(group).replace('-', '_')}:\n    {line}" if group else line


def of_variable(option):
    """The variable and its text."""
    words = sample(option).words
    name = names_of(option)[0] if option != COMMAND else "HVLAUNCH_COMMAND"
    if option.value is None:
        return name, "1"
    if option.value.has_options:
        return name, " ".join(word for (word,) in words)
    import shlex

    is_list = option.repeats in ("list", "add") or option == COMMAND
    return name, shlex.join(word for each in words for word in each) if is_list else " ".join(words[0])


def _value(option):
    words = sample(option).words
    if option.value is None:
        return "true"
    if option == COMMAND or len(option.value.metavars) > 1:
        return json.dumps(words[0])
    return json.dumps([word for (word,) in words]) if option.repeats else json.dumps(words[0][0])
