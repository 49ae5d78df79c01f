"""Stories: histories of events as text, with the actions that the engine must want after each.

A story is a title (`== ...`), then commands with what must follow, indented:

    == a worker that fails ends a static job
    History(spec('a:2'))
    start()
    exit('a', 1, 7)
        Stop('a', slots=(0,), gently)

A command is an expression: a method of `History` (`exit`, `ask`, `beat`, `play`, `wait`, ...), a function of
`elastic_history` (`training`, `pool`, `arrive`, ...), or `+10.0`, which lets seconds pass. `xN` behind a command repeats
it. The form follows etcd raft's `testdata`. After a change of the engine that is meant, `pytest
tests/unit/engine/test_stories.py --rewrite` writes the new actions, and `git diff` shows what has changed.
"""

import re
import signal
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hvlaunch import errors, job
from hvlaunch.engine import actions, causes, events
from hvlaunch.engine import facts as facts_module
from hvlaunch.hosts import placement
from tests.unit.gloo import elastic_history, history
from tests.unit.gloo.history import AT_ONCE, GENTLE, History

__all__ = ["Story", "played", "read", "render", "rewritten"]

_END = "the end"
_SETUP = ("start(", "training(", "pool(")
"""Commands that bring a job to where many stories begin: their actions are counted here, and told in other stories."""
_MACROS = ("elastic", "training", "pool", "arrive", "wire")
_NAMES = {
    name: getattr(module, name)
    for module in (errors, job, causes, events, facts_module, placement, actions)
    for name in module.__all__
}


class Story(NamedTuple):
    """A title, and commands, each with the lines that must follow."""

    title: str
    steps: tuple[tuple[str, tuple[str, ...]], ...]


def read(path: Path) -> list[Story]:
    """Read all stories of a file. Empty lines and lines that begin with # are for readers."""
    stories: list[tuple[str, list[tuple[str, list[str]]]]] = []
    for line in path.read_text().splitlines():
        if line.startswith("== "):
            stories.append((line.removeprefix("== "), []))
        elif line.startswith("    "):
            stories[-1][1][-1][1].append(line.strip())
        elif line and not line.startswith("#"):
            stories[-1][1].append((line, []))
    return [
        Story(title, tuple((command, tuple(follows)) for command, follows in steps))
        for title, steps in stories
    ]


def rewritten(path: Path) -> str:
    """Return a file of stories with the actions that the engine wants now."""
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    texts = ["\n".join(header) + "\n"] if header else []
    for story in read(path):
        lines = [f"== {story.title}"]
        for command, follows in played(story):
            lines += [command, *(f"    {line}" for line in follows)]
        texts.append("\n".join(lines) + "\n")
    return "\n".join(texts)


def played(story: Story) -> Iterator[tuple[str, list[str]]]:
    """Play a story; yield each command with the lines that follow now."""
    teller: History | None = None
    for command, _ in story.steps:
        if command == _END:
            continue
        expression, _, times = command.partition(" x")
        before, count = (len(teller.actions), teller.now) if teller else (0, 100.0), int(times or 1)
        for _ in range(count):
            if passing := re.fullmatch(r"\+([\d.]+)", expression):
                assert teller is not None
                teller.now += float(passing[1])
            else:
                result = eval(expression, _namespace(teller))
                teller = result if isinstance(result, History) else teller
        assert teller is not None, "a story begins with a job"
        lines = [render(action) for action in teller.actions[before[0] :]]
        if expression.startswith(_SETUP):
            lines = [f"... {len(lines)} actions"]
        if expression.startswith("wait("):
            lines.insert(0, f"{teller.now - before[1]:.2f} s later")
        yield command, lines
    assert teller is not None
    deadline = teller.engine.deadline
    due = "waits for nothing" if deadline is None else f"due in {deadline - teller.now:.2f} s"
    yield _END, [f"{teller.engine.phase.name}, {due}"]


def _namespace(teller: History | None) -> dict[str, Any]:
    names: dict[str, Any] = {**_NAMES, "signal": signal, "History": History, "spec": history.spec}
    names |= {"facts": history.facts, "ready": history.ready, "lost": history.lost, "hosts": history.hosts}
    names["surveyed"] = history.surveyed
    for name in _MACROS:
        macro = getattr(elastic_history, name)
        first = (teller,) if name in ("arrive", "wire") else ()
        names[name] = lambda *args, _macro=macro, _first=first, **options: _macro(*_first, *args, **options)
    names["discovered"] = elastic_history.discovered
    if teller is not None:
        for name in ("play", "wait", "connect", "start", "exit", "ask", "beat", "close"):
            names[name] = getattr(teller, name)
        names["reach"] = teller.wire
        names["set"] = partial(_set, teller)
    return names


def _set(teller: History, **values: object) -> None:
    for name, value in values.items():
        setattr(teller, name, value)


def render(value: object) -> str:
    """Return a value as one line that omits what has its default, and is an expression where commands need one."""
    match value:
        case events.HostFacts():
            return _facts(value)
        case placement.Launch():
            return _launch(value)
        case actions.HostNetwork():
            return _network(value)
        case Enum():
            return str(value)
        case tuple() if value == GENTLE:
            return "gently"
        case tuple() if value == AT_ONCE:
            return "at once"
        case tuple() if hasattr(value, "_fields"):
            defaults = getattr(value, "_field_defaults")  # noqa: B009 (mypy sees a plain tuple)
            parts = [(name, getattr(value, name)) for name in getattr(value, "_fields")]  # noqa: B009
            return _call(type(value).__name__, parts, defaults)
        case tuple():
            return f"({', '.join(map(render, value))}{',' if len(value) == 1 else ''})"
        case list():
            return f"[{', '.join(map(render, value))}]"
        case dict():
            return "{" + ", ".join(f"{render(key)}: {render(item)}" for key, item in value.items()) + "}"
        case _ if is_dataclass(value) and not isinstance(value, type):
            made = {
                field.name: field.default_factory()
                for field in fields(value)
                if callable(field.default_factory)
            }
            defaults = {field.name: field.default for field in fields(value)} | made
            parts = [(field.name, getattr(value, field.name)) for field in fields(value)]
            return _call(type(value).__name__, parts, defaults, is_named=True)
        case Path():
            return repr(str(value))
        case float():
            return f"{value:g}"
        case int() if isinstance(value, signal.Signals):
            return str(int(value))
        case _:
            return repr(value)


def _call(
    name: str, parts: list[tuple[str, object]], defaults: dict[str, Any], *, is_named: bool = False
) -> str:
    words = []
    for field, value in parts:
        if field in defaults and defaults[field] == value:
            is_named = True
        else:
            words.append(f"{field}={render(value)}" if is_named else render(value))
    return f"{name}({', '.join(words)})"


def _facts(facts: events.HostFacts) -> str:
    number = facts.beacon_port - 9000
    usual = history.facts(number)
    changed = [
        f"{name}={render(getattr(facts, name))}"
        for name in facts._fields
        if getattr(facts, name) != getattr(usual, name)
    ]
    if facts.fabric is not None:
        return f"surveyed({number})"
    return f"facts({', '.join([str(number), *changed])})"


def _launch(launch: placement.Launch) -> str:
    place = launch.place
    name = f"{launch.host}/{launch.slot}/{launch.start}"
    if place is None:
        return f"<{name}>"
    ranks = f"rank {place.rank} of {place.size}, local {place.local_rank} of {place.local_size}"
    return f"<{name}: {ranks}, cross {place.cross_rank} of {place.cross_size}>"


def _network(network: actions.HostNetwork) -> str:
    words = [f"master {network.master_addr}:{network.master_port}", f"by {network.interface}"]
    words.append(
        "no rendezvous" if network.rendezvous is None else "rendezvous {}:{}".format(*network.rendezvous)
    )
    words += [f"{name}={value}" for name, value in (network.variables or {}).items()]
    if network.hosts:
        words.append(
            "hosts " + " ".join(f"{host.name}={host.address}*{host.workers}" for host in network.hosts)
        )
    return f"<{', '.join(words)}>"
