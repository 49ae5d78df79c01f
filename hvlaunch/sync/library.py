"""What workers import on a host: hvlaunch's modules where the host lacks them, and the copy of the project where the project is installed as editable."""

import io
import re
import zipfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from hvlaunch import __version__
from hvlaunch.driver.links.errands import Errand, ErrandFailed
from hvlaunch.errors import HostError
from hvlaunch.job import JobSpec, SyncOptions

if TYPE_CHECKING:
    from importlib.abc import Traversable

    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.engine.events import HostFacts

__all__ = ["WorkerImports", "library", "module_texts", "sources_of", "worker_modules"]

_MODULES = (
    "__init__.py",
    "agent/__init__.py",
    "agent/commits",
    "agent/proc.py",
    "errors.py",
    "named_tuples.py",
    "owners.py",
    "rendezvous",
    "torch",
    "torchrun.py",
)
"""Modules that scripts and functions may import on hosts without hvlaunch."""
_NOT_FOR_WORKERS = ("serving",)
_EPOCH = (1980, 1, 1, 0, 0, 0)
_COPY = re.compile(r"/hvlaunch/trees/([^/]+)/[0-9]+/tree(?=/|$)")


class WorkerImports:
    """Decides by the packages of a host's Python what comes first and last on PYTHONPATH. `say` prints a message."""

    def __init__(self, spec: JobSpec, say: Callable[[str], None]) -> None:
        self._sync = spec.sync
        self._is_verbose = spec.verbose
        self._say = say
        self._has_told = False

    def prepare(
        self,
        link: "HostLink",
        facts: "HostFacts",
        ready: "Callable[[HostFacts], None]",
        _failed: Callable[[HostError], None],
    ) -> None:
        """Call `ready` with the facts and the paths, at once or when the host has hvlaunch's modules."""
        packages = facts.packages
        if packages is None:
            ready(facts)
            return
        if self._sync is not None and facts.directory is not None:
            facts = facts._replace(sources=self._sources(link.host.name, facts, self._sync))
        if packages.hvlaunch == __version__:
            ready(facts)
            return
        name, data = library()
        # No thread waits for this: the link's own has the answer, perhaps before start() returns here.
        errand: SimpleQueue[Errand] = SimpleQueue()
        arguments = {"hash": name, "size": len(data)}
        try:
            started = link.errands.start(
                "library",
                arguments,
                on_data=lambda _: errand.get().write(data),
                on_end=partial(self._end, link.host.name, facts, ready),
            )
        except ErrandFailed:  # the host is gone, and its link says so
            return
        errand.put(started)

    def _end(
        self, host: str, facts: "HostFacts", ready: "Callable[[HostFacts], None]", errand: Errand
    ) -> None:
        try:
            facts = facts._replace(library=errand.result()["path"])
        except ErrandFailed as error:
            # Most scripts import none of this: a host with a full disk or a read-only home runs them as before.
            if self._is_verbose:
                self._say(f"host {host}: can't keep hvlaunch's modules for workers: {error.detail}")
        ready(facts)

    def _sources(self, host: str, facts: "HostFacts", sync: SyncOptions) -> tuple[str, ...]:
        directory = facts.directory or ""
        tree = directory.removesuffix(f"/{sync.below}") if sync.below else directory
        editable = () if facts.packages is None else facts.packages.editable
        sources = sources_of(editable, sync.root, tree)
        if sources and not self._has_told:
            self._has_told = True
            self._say(
                f"host {host}: the project is installed there as editable; workers import it from its copy"
            )
        return sources


def sources_of(editable: tuple[str, ...], root: str, tree: str) -> tuple[str, ...]:
    """Return the directories of the copy `tree` in place of those of `root`, or of another copy, that are installed as editable."""
    project = _COPY.search(tree)
    sources = []
    for path in editable:
        copy = _COPY.search(path)
        if copy is not None and project is not None and copy[1] == project[1]:
            source = tree + path[copy.end() :]
        else:
            try:
                below = Path(path).resolve().relative_to(Path(root).resolve()).as_posix()
            except (OSError, ValueError):
                continue
            source = tree if below == "." else f"{tree}/{below}"
        if source.rstrip("/") != path.rstrip("/"):
            sources.append(source.rstrip("/"))
    return tuple(dict.fromkeys(sources))


@cache
def library() -> tuple[str, bytes]:
    """Return the zip file with hvlaunch's modules for workers, and its SHA-256. The same version gives the same bytes."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in worker_modules():
            archive.writestr(zipfile.ZipInfo(path, _EPOCH), content, zipfile.ZIP_DEFLATED)
        # torchrun looks for its backends in the metadata of packages.
        about = f"Metadata-Version: 2.1\nName: hvlaunch\nVersion: {__version__}\n"
        entry = "[torchrun.handlers]\nhvlaunch = hvlaunch.torchrun:handler\n"
        for name, text in (("METADATA", about), ("entry_points.txt", entry)):
            archive.writestr(zipfile.ZipInfo(f"hvlaunch-{__version__}.dist-info/{name}", _EPOCH), text)
    return sha256(data.getvalue()).hexdigest(), data.getvalue()


def worker_modules() -> Iterator[tuple[str, bytes]]:
    """Yield path and text of each module that workers may import."""
    for name in _MODULES:
        yield from module_texts(files("hvlaunch") / name, f"hvlaunch/{name}")


def module_texts(place: "Traversable", name: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and text of a module, or of all modules in a folder."""
    # hvlaunch may be in an archive itself: a function on a host may call another.
    if place.is_dir():
        for entry in sorted(place.iterdir(), key=lambda entry: entry.name):
            if entry.name not in _NOT_FOR_WORKERS:
                yield from module_texts(entry, f"{name}/{entry.name}")
    elif name.endswith(".py"):
        yield name, place.read_bytes()
