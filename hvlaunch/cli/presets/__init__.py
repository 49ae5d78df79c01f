"""Presets, `--for NAME`: what a program needs from its launcher, as data. Each has a file beside this one; users have their own."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NoReturn

from hvlaunch import agent
from hvlaunch.cli.config import ConfigFile, Tree, config_settings, read_tree, toml_tree
from hvlaunch.cli.options.settings import Options, Setting, config_directory, merged, place_of
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.templates import escaped, names_in
from hvlaunch.named_tuples import NamedTuple

__all__ = ["Preset", "is_program_of", "preset_list", "preset_of", "with_preset"]

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_SERVICES = "services/__init__.py"
"""The file of the agent that starts a preset's services, and then the command."""
_WITH_TUNNEL = ("wire/peers.py", "services/tunnel.py", _SERVICES)
"""Files of the agent for `[services.tunnel]`, each behind the files that it imports."""
_TUNNEL = "tunnel"
_ONE_PER_HOST = frozenset(["node_rank", "own_port", "slots", "slots_before", "slot_list"])
"""Places with the same value for every worker of a host."""
_BETWEEN = re.compile(r"^from (?:__future__|hvlaunch\.agent\.[\w.]+) import .*\n", re.MULTILINE)
"""Imports that are not needed where the modules are one text."""


class Preset(NamedTuple):
    """A preset. Texts have places, as hosts/templates.py says."""

    name: str
    about: str
    """A line for the list of presets."""
    example: str
    """A command line with it."""
    origin: str
    """The file, as in messages."""
    settings: tuple[Setting, ...]
    """Options of hvlaunch; every other source is stronger."""
    environment: Mapping[str, str]
    after: str
    """Word of the command behind which `words` go; empty for the command's end."""
    words: tuple[str, ...]
    """Options of the program with their values. One that the command has already is left out."""
    services: Mapping[str, object]
    """Programs beside the command, for agent/services/__init__.py."""

    def command(self, words: Sequence[str], escape: Callable[[str], str]) -> tuple[str, ...]:
        """Return the whole command with its places; `escape` makes a user's word a text with places. Raises BadUsage."""
        # Many parsers take --node_rank for --node-rank.
        present = {word.partition("=")[0].replace("_", "-") for word in words}
        more = [word for text in self.words for word in self._split(text) if self._flag(text) not in present]
        index = len(words)
        if self.after:
            if self.after not in words:
                raise BadUsage(
                    f"--for {self.name}: the command has no word {self.after!r}", hint=self.example
                )
            index = words.index(self.after) + 1
        before, behind = map(escape, words[:index]), map(escape, words[index:])
        command = (*before, *more, *behind)
        if not self.services:
            return command
        from hvlaunch.driver.program import without_words  # noqa: PLC0415 (few presets have any)

        names = _WITH_TUNNEL if self.services[_TUNNEL] else (_SERVICES,)
        texts = [Path(agent.__file__).parent.joinpath(name).read_text(encoding="ascii") for name in names]
        text = "from __future__ import annotations\n" + _BETWEEN.sub("", without_words("\n".join(texts)))
        plan = json.dumps({"rank": "{rank}", **self.services})
        return ("python3", "-c", escaped(text + "\nmain()\n"), plan, *command)

    def check_workers(self, options: Options, texts: Iterable[str]) -> None:
        """Raise BadUsage for several workers of a host if the preset's places need a single worker."""
        name = "nproc_per_node"
        wants_one = any(setting.option.name == name for setting in self.settings)
        if not wants_one or options.given[name] == 1:
            return
        if _ONE_PER_HOST.isdisjoint(place for text in texts for place in names_in(text)):
            return
        setting = options.settings[name][-1]
        asked = " ".join([setting.called, *setting.texts])
        raise BadUsage(
            f"{place_of(setting.origin, setting.table)}{asked}, but --for {self.name} starts one worker on each host",
            hint="--per-host; options of the program go behind its name",
        )

    def keys(self) -> Mapping[str, str]:
        """Return variables with new keys for the preset's tunnel; none without one."""
        if not self.services.get(_TUNNEL):
            return {}
        from hvlaunch.rendezvous.serving.certificate import new_peer  # noqa: PLC0415 (few presets have any)

        return {"HVLAUNCH_TUNNEL_KEY": json.dumps(dict(new_peer()))}

    def _split(self, text: str) -> list[str]:
        # A place with a text is one word, blanks and all.
        return [text] if text.startswith("{") else text.split()

    def _flag(self, text: str) -> str:
        words = re.sub(r"^\{(?:first|others):", "", text).split() or [text]
        return words[0].partition("=")[0].rstrip("}").replace("_", "-")


def preset_of(name: str, environ: Mapping[str, str]) -> Preset:
    """Return the preset of that name. Raises BadUsage for unknown names and invalid files."""
    users, ours = _files(environ)
    if name in users:
        path = users[name]
        return _Reader(name, path).preset(read_tree(path))
    if name not in ours:
        hint = f"hvlaunch presets, or {config_directory(environ) or '~/.config/hvlaunch'}/presets/{name}.toml"
        raise BadUsage(f"no preset {name!r}; there are {', '.join(sorted({*users, *ours}))}", hint=hint)
    return _Reader(name, f"preset {name}").preset(toml_tree(ours[name]))


def is_program_of(name: str, program: str, environ: Mapping[str, str]) -> bool:
    """Return whether a preset's own example has this program. Raises BadUsage for an unknown preset."""
    return program in preset_of(name, environ).example.split()


def preset_list(environ: Mapping[str, str], *, is_json: bool = False) -> str:
    """Return a line about each preset, as text or as an object. Raises BadUsage for invalid files."""
    users, ours = _files(environ)
    presets = [preset_of(name, environ) for name in sorted({*users, *ours})]
    if is_json:
        names = ("name", "about", "example", "origin")
        return "".join(
            json.dumps({name: getattr(preset, name) for name in names}) + "\n" for preset in presets
        )
    width = max(len(preset.name) for preset in presets)
    return "".join(f"{preset.name:{width}}  {preset.about}\n" for preset in presets)


def with_preset(options: Options, preset: Preset) -> Options:
    """Return the options, with the preset's as the weakest source."""
    others = [setting for settings in options.settings.values() for setting in settings]
    return Options(merged([preset.settings, others]), GROUPS, is_marked=options.is_marked)


def _files(environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return paths of the user's presets, and texts of ours, by name."""
    directory = config_directory(environ)
    users = sorted(Path(directory, "presets").glob("*.toml")) if directory else []
    ours = {
        file.name.removesuffix(".toml"): file.read_text(encoding="utf-8")
        for file in files(__name__).iterdir()
        if file.name.endswith(".toml")
    }
    return {path.stem: str(path) for path in users if _NAME.fullmatch(path.stem)}, ours


class _Reader:
    """Reads a preset's file, and refuses what has another form."""

    def __init__(self, name: str, origin: str) -> None:
        self._name = name
        self._origin = origin

    def preset(self, root: Tree) -> Preset:
        table = self._table("", root, ("about", "example", "options", "environment", "words", "services"))
        words = self._table("words", table.get("words"), ("after", "append"))
        services = self._table(
            "services",
            table.get("services"),
            ("first", "others", "all", "until", "address", "files", "tunnel"),
        )
        commands: dict[str, object] = {
            name: self._words("services", name, services.get(name))
            for name in ("first", "others", "all", "until")
        }
        more: dict[str, object] = {
            "address": self._text("services", "address", services.get("address", "")),
            "files": self._texts("services.files", services.get("files")),
            "tunnel": self._tunnel(services.get("tunnel")),
        }
        directory = str(Path(self._origin).parent)
        settings = config_settings(
            table.get("options"), ConfigFile(self._origin, directory, is_found=False, table="options"), GROUPS
        )
        return Preset(
            name=self._name,
            about=self._text("", "about", table.get("about")),
            example=self._text("", "example", table.get("example", "")),
            origin=self._origin,
            settings=settings.always,
            environment=self._texts("environment", table.get("environment")),
            after=self._text("words", "after", words.get("after", "")),
            words=tuple(self._words("words", "append", words.get("append"))),
            services={**commands, **more} if services else {},
        )

    def _tunnel(self, tree: Tree) -> dict[str, str]:
        keys = ("option", "service", "exits")
        table = self._table("services.tunnel", tree, keys)
        return {key: self._text("services.tunnel", key, table.get(key)) for key in keys} if table else {}

    def _table(self, name: str, tree: Tree, keys: Sequence[str]) -> dict[str, Tree]:
        table = self._any_table(name, tree)
        for key in table:
            if key not in keys:
                self._refuse(name, f"unknown key {key!r}", hint=f"one of {', '.join(keys)}")
        return table

    def _any_table(self, name: str, tree: Tree) -> dict[str, Tree]:
        if tree is None:
            return {}
        if not isinstance(tree, dict):
            self._refuse("", f"{name or 'the file'} must be a table of keys and values")
        return tree

    def _texts(self, name: str, tree: Tree) -> dict[str, str]:
        return {key: self._text(name, key, value) for key, value in self._any_table(name, tree).items()}

    def _text(self, table: str, key: str, value: Tree) -> str:
        if not isinstance(value, str):
            self._refuse(table, f"{key} {'is missing' if value is None else 'must be a text'}")
        return value

    def _words(self, table: str, key: str, value: Tree) -> list[str]:
        if value is None:
            return []
        if not isinstance(value, list):
            self._refuse(table, f"{key} must be a list of texts")
        return [self._text(table, key, word) for word in value]

    def _refuse(self, table: str, cause: str, hint: str = "hvlaunch presets") -> NoReturn:
        place = f"[{table}] " if table else ""
        raise BadUsage(f"{self._origin}: {place}{cause}", hint=hint)
