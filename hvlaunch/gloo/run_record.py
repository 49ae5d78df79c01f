"""Writes the record of a job's run: hvlaunch/outside/run_record.py.

The record is not part of a job's start. The driver writes the record after a second, with the question for the hosts'
versions, again with the hosts' answers, and at the end of a job with a kept directory.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hvlaunch import __version__
from hvlaunch.console.masking import MASK, masked, masked_words
from hvlaunch.engine.codec import encode
from hvlaunch.job import JobSpec, SyncOptions
from hvlaunch.outside.run_record import RUN, text_of_manifest

if TYPE_CHECKING:
    from hvlaunch.outside import JobDirectory

__all__ = ["gpus_of", "write_run"]

_LOCKS = r"(?:uv|poetry|pdm|pixi)\.lock|Pipfile\.lock|pylock(?:\.[^/\"]*)?\.toml|(?:conda-lock|environment)\.ya?ml|requirements[^/\"]*\.txt"
_SEED = re.compile(r"--?(?:[\w-]*[_-])?seed(?:=(.*))?", re.IGNORECASE)
_HASH_SEED = "PYTHONHASHSEED"


_writing = threading.Lock()


def write_run(spec: JobSpec, directory: "JobDirectory", hosts: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the record, with answers of further hosts. For any thread. A full disk costs the record alone."""
    with _writing, suppress(OSError):
        earlier: Mapping[str, Any] = {}
        with suppress(OSError, ValueError, LookupError):
            earlier = json.loads((directory.path / RUN).read_bytes())["hosts"]
        directory.write(RUN, _record(spec, directory, {**earlier, **hosts}))


def gpus_of(spec: JobSpec, directory: Path) -> Callable[[str, int], int | None]:
    """Return a function for the number of GPUs of so many workers of a host; None if unknown."""
    counts: dict[str, int] = {}
    with suppress(OSError, ValueError, LookupError, TypeError):
        hosts = json.loads((directory / RUN).read_bytes())["hosts"]
        counts = {host: len(versions["gpus"]) for host, versions in dict(hosts).items()}
    counts |= {host: len(gpus) for host, gpus in spec.visible_gpus.items()}
    per_worker = spec.gpus_per_worker or 1

    def count(host: str, workers: int) -> int | None:
        # The workers of a role may have any number.
        if spec.has_gpus:
            return None
        if spec.leases is not None and spec.leases.slots is None:
            return workers * per_worker
        return min(workers * per_worker, counts[host]) if host in counts else None

    return count


def _record(
    spec: JobSpec, directory: "JobDirectory", hosts: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    environment = {name: masked(name, value) for name, value in sorted(spec.env.items())}
    locks = _locks(spec, directory.path)
    return {
        "format": 1,
        "version": __version__,
        "call": None if spec.call is None else spec.call.name,
        "command": [*masked_words(spec.command)],
        "cwd": spec.cwd,
        "options": [[*masked_words(words)] for words in spec.options],
        "environment": environment,
        "masked": [name for name, value in environment.items() if value != spec.env[name]],
        "seeds": dict(_seeds(spec)),
        "sync": None if spec.sync is None else encode(SyncOptions, spec.sync._replace(job=None)),
        "code": directory.about.get("code"),
        "lock": sha256(json.dumps(locks).encode()).hexdigest() if locks else None,
        "locks": locks,
        "hosts": dict(sorted(hosts.items())),
    }


def _locks(spec: JobSpec, directory: Path) -> dict[str, str]:
    """Return hashes of the lock files in the tree's root, the workers' directory and the directories between."""
    if spec.sync is None:
        return {}
    try:
        manifest = text_of_manifest(directory)
    except OSError:
        return {}
    below = PurePosixPath(spec.sync.below)
    places = [f"{place}/" if place.name else "" for place in (below, *below.parents)]
    # As text: the JSON of 20,000 files takes a twentieth of a second.
    prefixes = "|".join(re.escape(json.dumps(place)[1:-1]) for place in places)
    entries = re.finditer(rf'\["f","((?:{prefixes})(?:{_LOCKS}))",([^\]]*\])', manifest)
    return {
        json.loads(f'"{path}"'): sha256(content.encode()).hexdigest()
        for path, content in (entry.groups() for entry in entries)
    }


def _seeds(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield PYTHONHASHSEED, and options of the command such as `--seed 42`."""
    if _HASH_SEED in spec.env:
        yield _HASH_SEED, spec.env[_HASH_SEED]
    words: Sequence[str] = spec.command
    for word, following in zip(words, [*words[1:], ""], strict=True):
        match = _SEED.fullmatch(word)
        if match is not None:
            value = following if match[1] is None else match[1]
            yield word.partition("=")[0], value if re.fullmatch(r"-?\w{1,40}", value) else MASK
