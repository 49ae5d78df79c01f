"""The record of a job's run, in the job's directory: code, command, options, environment, and versions on the hosts.

The driver writes the record (gloo/run_record.py). The record has no secrets: the driver masks them.
"""

import errno
import json
import shlex
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hvlaunch.errors import BadUsage
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.outside import KnownJob

__all__ = [
    "MANIFEST",
    "RUN",
    "Difference",
    "differences",
    "files_of",
    "not_compared",
    "read_run",
    "text_of_manifest",
]

RUN = "run.json"
MANIFEST = "manifest"
"""Name of the manifest that a snapshot of the job's tree has there."""
_FORMAT = 1
_LARGEST = 1 << 30


def read_run(job: KnownJob) -> Mapping[str, Any]:
    """Return the record of a job. Raises BadUsage for a job without a record."""
    try:
        words = json.loads((job.directory / RUN).read_bytes())
        if isinstance(words, dict) and words.get("format") == _FORMAT:
            return words
    except (OSError, ValueError):
        pass
    cause = "it has just begun" if job.has_driver else "it was not kept, or another version has written it"
    raise BadUsage(f"job {job.id} has no record of what it ran: {cause}", hint="hvlaunch jobs")


def files_of(directory: Path) -> dict[str, Any]:
    """Return the mode and the hashes of each file of a job's tree by path, and the targets of links. Empty without a tree."""
    try:
        entries = json.loads(text_of_manifest(directory))
        return {str(entry[1]): entry[2:] for entry in entries if entry[0] != "d"}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def text_of_manifest(directory: Path) -> str:
    """Return the manifest of a job's tree as JSON. Raises OSError."""
    try:
        return str(zlib.decompressobj().decompress((directory / MANIFEST).read_bytes(), _LARGEST), "ascii")
    except (zlib.error, ValueError) as error:
        raise OSError(errno.EBADMSG, str(error), str(directory / MANIFEST)) from None


class Difference(NamedTuple):
    """A difference between two jobs; `a` or `b` is None for a thing of the other job alone."""

    part: str
    name: str
    a: Any
    b: Any


def differences(a: KnownJob, b: KnownJob) -> Iterator[Difference]:
    """Yield the differences in code, lock files, command, options, environment, seeds, hosts and their versions."""
    runs = read_run(a), read_run(b)
    codes = [_code(run) for run in runs]
    yield from _of_mappings("code", *codes)
    if codes[0].get("hash") != codes[1].get("hash"):
        yield from _of_mappings("file", *(files_of(job.directory) for job in (a, b)))
    yield from _of_mappings("lock", *(run["locks"] for run in runs))
    yield from _of_mappings("job", *(_job(run) for run in runs))
    yield from _of_mappings("option", *(_options(run) for run in runs))
    yield from _of_mappings("environment", *(run["environment"] for run in runs))
    yield from _of_mappings("seed", *(run["seeds"] for run in runs))
    yield from _of_hosts(*(run["hosts"] for run in runs))


def _of_mappings(part: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for name in sorted({*a, *b}):
        if a.get(name) != b.get(name):
            yield Difference(part, name, a.get(name), b.get(name))


def _code(run: Mapping[str, Any]) -> Mapping[str, Any]:
    return run["code"] or {}


def _job(run: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "command": shlex.join(run["command"]),
        "function": run["call"],
        "directory": run["cwd"],
        "hvlaunch": run["version"],
    }


def _options(run: Mapping[str, Any]) -> Mapping[str, str]:
    values: dict[str, list[str]] = {}
    for name, *texts in run["options"]:
        values.setdefault(name, []).append(shlex.join(texts))
    return {name: " ".join(texts) or "set" for name, texts in values.items()}


def _of_hosts(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield hosts of one job alone, and versions: of a host of both jobs, else of all hosts together."""
    # A job that ended before its hosts were asked used some, too.
    for host in sorted({*a} ^ {*b}) if a and b else ():
        yield Difference("host", host, "used" if host in a else None, "used" if host in b else None)
    for host in sorted({*a} & {*b}):
        yield from _of_mappings(f"host {host}", a[host], b[host])
    if a and b and not {*a} & {*b}:
        yield from _of_mappings("hosts", _together(a), _together(b))


def _together(hosts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the versions on several hosts, with different values joined."""
    names = dict.fromkeys(name for versions in hosts.values() for name in versions)
    return {
        name: ", ".join(sorted({str(versions.get(name)) for versions in hosts.values()})) for name in names
    }


def not_compared(a: KnownJob, b: KnownJob) -> list[str]:
    """Return reasons for an incomplete comparison."""
    runs = read_run(a), read_run(b)
    texts = [
        f"{name} of the environment, a secret" for name in runs[0]["masked"] if name in runs[1]["masked"]
    ]
    for label, run in zip("ab", runs, strict=True):
        if not run["code"]:
            texts.append(f"the code of {label}, which had no --sync")
        if not run["hosts"]:
            texts.append(f"the versions of {label}'s hosts, which ended before they were asked")
    return texts
