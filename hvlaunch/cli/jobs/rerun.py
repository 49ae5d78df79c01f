"""Records of jobs' runs: `hvlaunch rerun` starts a job again from its record, and `hvlaunch diff` prints the differences between two."""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.environment import shown, user_env
from hvlaunch.cli.options import by_name
from hvlaunch.cli.options.settings import Options, Setting
from hvlaunch.cli.options.table import COMMAND, GROUPS
from hvlaunch.cli.process import print_answer
from hvlaunch.cli.spec import job_spec
from hvlaunch.console.lines import visible
from hvlaunch.console.masking import MASK
from hvlaunch.engine.codec import BadData, decode
from hvlaunch.errors import BadUsage
from hvlaunch.job import JobSpec, SyncOptions
from hvlaunch.outside import KnownJob, choose, jobs_directory, known_jobs
from hvlaunch.outside.run_record import MANIFEST, Difference, differences, not_compared, read_run

__all__ = ["Rerun", "diff"]

_OWN = frozenset([COMMAND.name, "job_name"])
"""Not of the new job: two jobs of a name would need their ids."""
_TREE = frozenset(["sync", "sync_dir", "sync_limit"])
"""Options that would take the tree as it is now."""


class Rerun:
    """A job to start again: `argv` names the job, with options that replace the job's."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Raises BadUsage."""
        if not argv or argv[0].startswith("-"):
            raise BadUsage("rerun needs the id or the name of a job", hint="hvlaunch jobs --all")
        self._job = choose(known_jobs(jobs_directory(environ)), argv[0])
        self._run = read_run(self._job)
        self._environ = environ
        if self._run["call"] is not None:
            raise BadUsage(
                f"{self._job.label} called {self._run['call']}(), a function of a Python program",
                hint="run that program again",
            )
        self._command = [str(word) for word in self._job.about["command"]]
        typed = self._parsed(argv[1:])
        earlier = self._parsed(["--cwd", str(self._run["cwd"]), *self._kept_words(typed)]).settings.items()
        before = [setting for name, settings in earlier if name not in _OWN for setting in settings]
        merged = self._parsed(argv[1:], before)
        self._words = tuple(merged.words())
        self._has_tree = self._run["sync"] is not None and _TREE.isdisjoint(typed.given)
        self._place = merged.sync_to
        left_out = {*_TREE, "sync_to"} if self._has_tree else set[str]()
        # The options of a job with roles have the commands.
        has_roles = "role" in merged.given
        left_out |= {COMMAND.name} if has_roles else set()
        settings = {name: group for name, group in merged.settings.items() if name not in left_out}
        self.options = Options(settings, GROUPS, is_marked=True)
        self.line = [*chain.from_iterable(self._words), *([] if has_roles else ["--", *self._command])]

    def spec(self) -> tuple[JobSpec, list[str]]:
        """Return the new job and warnings. Raises BadUsage."""
        spec, warnings = job_spec(self.options, self._environ)
        spec = replace(spec, env=self._variables(), options=self._words)
        if self._has_tree:
            return replace(spec, sync=self._tree()), warnings
        if spec.sync is None:
            warnings.append(f"{self._job.label} had no --sync: it runs the files that are there now")
        return spec, warnings

    def _parsed(self, words: Sequence[str], earlier: Sequence[Setting] = ()) -> Options:
        options = parse([*words, "--", *self._command], earlier=earlier)
        if list(options.command) != self._command:
            raise BadUsage(
                f"rerun: {options.command[0]!r} is not an option; the command is the job's",
                hint="hvlaunch rerun --help",
            )
        return options

    def _kept_words(self, typed: Options) -> Iterator[str]:
        """Yield the words of the job's options. Raises BadUsage for a secret that was not kept."""
        names = by_name(GROUPS)
        for words in self._run["options"]:
            option = names.get(words[0])
            if any(MASK in word for word in words) and (option is None or option.name not in typed.given):
                raise BadUsage(
                    f"{self._job.label}: its {words[0]} had a secret, which was not kept",
                    hint=f"{words[0]} VALUE",
                )
            yield from words

    def _variables(self) -> dict[str, str]:
        """Return the job's variables: secrets from the environment here, and those of the line. Raises BadUsage."""
        options, environ = self.options, self._environ
        explicit, _ = user_env(
            environ,
            mode="none",
            files=[Path(name) for name in options.env_file],
            chosen=options.x,
            variables=options.variables(),
        )
        recorded = dict(self._run["environment"])
        secrets = [name for name in self._run["masked"] if name not in explicit]
        missing = [name for name in secrets if name not in environ]
        if missing:
            raise BadUsage(
                f"{self._job.label} had secrets, which were not kept, and they are not set here: {', '.join(map(shown, missing))}",
                hint=f"-x {shown(missing[0])}=VALUE, or the same with these variables set",
            )
        return {**recorded, **{name: environ[name] for name in secrets}, **explicit}

    def _tree(self) -> SyncOptions:
        """Return the tree of the job, whose copy is in the job's directory. Raises BadUsage."""
        directory = self._job.directory
        try:
            sync: SyncOptions = decode(SyncOptions, self._run["sync"])
        except BadData as error:
            raise BadUsage(f"{self._job.label}: its record is another version's: {error}") from None
        if not (directory / MANIFEST).exists():
            raise BadUsage(
                f"{self._job.label}: its copy of {sync.root} is no longer kept",
                hint=f"hvlaunch rerun {self._job.id} --sync, for the files as they are now",
            )
        return sync._replace(job=directory, to=self._place)


_MOST_FILES = 50
"""Files that the text names; the JSON form has all."""
_SHORT = 12
"""Digits of a hash."""


def diff(jobs: Sequence[KnownJob], options: argparse.Namespace) -> int:
    """Print the differences. Raises BadUsage for a job without a record."""
    a, b = choose(jobs, options.job), choose(jobs, options.other)
    changes = [*differences(a, b)]
    unknown = not_compared(a, b)
    if options.json:
        rows = [difference._asdict() for difference in changes]
        return print_answer(
            json.dumps({"a": a.id, "b": b.id, "differences": rows, "not_compared": unknown}) + "\n"
        )
    lines = [*_lines(changes), *(f"not compared: {text}" for text in unknown)]
    heading = f"a is {a.label}, b is {b.label}"
    return print_answer(
        "".join(f"{visible(line)}\n" for line in (heading, *(lines or ["no difference is known"])))
    )


def _lines(differences: Sequence[Difference]) -> Iterator[str]:
    files = [difference for difference in differences if difference.part == "file"]
    for difference in differences:
        if difference.part == "file":
            if difference in files[:_MOST_FILES]:
                yield f"file {difference.name}: {_change(difference)}"
        else:
            yield f"{difference.part} {difference.name}: {_value(difference.a)} → {_value(difference.b)}"
    if len(files) > _MOST_FILES:
        yield f"and {len(files) - _MOST_FILES} more files: --json"


def _change(difference: Difference) -> str:
    if difference.a is None:
        return "added"
    return "removed" if difference.b is None else "changed"


def _value(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text[:_SHORT] if re.fullmatch(r"[0-9a-f]{40,64}", text) else text
