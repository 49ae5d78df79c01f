"""Brings files of the workers back: `--collect` at the end of a job, `hvlaunch collect` at any time.

A host is not trusted: its list is checked before anything is written (sync/files.py), and all that is written is in DIR/HOST.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvlaunch.agent.errands.bring import Destination
from hvlaunch.console.status import OnStatus, Status, size_words
from hvlaunch.driver.links.errands import ErrandFailed
from hvlaunch.engine.codec import BadData, decode, encode
from hvlaunch.job import CollectOptions, Host, JobSpec, SSHOptions
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.owners import reason, write_whole
from hvlaunch.sync.delivery import cause_of
from hvlaunch.sync.files import HostFiles, offer_files

if TYPE_CHECKING:
    from hvlaunch.agent.errands.sync.content import PartWriter
    from hvlaunch.driver.links.errands import Errand
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.driver.observing import CollectWanted

__all__ = ["LIMIT", "Collected", "Collection", "JobCollector", "keep_hosts", "kept_hosts", "summary"]

LIMIT = 10_000_000_000
"""Bytes, of all hosts together."""
_UNUSUAL = re.compile(r"[^\w.:@%+-]")
_NAMED = 3
_HOSTS = "hosts.json"
_ENDING = 5.0


class Collected(NamedTuple):
    """Collected files of a host."""

    host: str
    files: int = 0
    """The host's files on this machine."""
    received: int = 0
    """Received bytes."""
    skipped: Sequence[tuple[str, str]] = ()
    """Paths left on the host, and the reasons."""
    problem: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "skipped": [list(entry) for entry in self.skipped]}


class Collection:
    """Collects files of hosts, at most `limit` bytes. For any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._size = 0
        self._progress: dict[str, str] = {}
        self.results: list[Collected] = []
        self._threads: list[threading.Thread] = []

    @property
    def progress(self) -> str:
        """How far the hosts are, in words; empty at the end."""
        with self._lock:
            return ", ".join(f"{name} {part}" for name, part in sorted(self._progress.items()))

    def begin(
        self, link: "HostLink", directory: str, options: Sequence[CollectOptions], then: Callable[[], None]
    ) -> None:
        """Collect the files of a host in another thread, and call `then`, whatever happens."""

        def run() -> None:
            try:
                self.collect(link, directory, options)
            finally:
                then()

        # Before the thread begins: the engine's wait for the host's end has begun.
        link.tell_preparing("results")
        thread = threading.Thread(target=run, name=f"results {link.host.name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self) -> None:
        """Wait for the threads, whose hosts have closed."""
        for thread in self._threads:
            thread.join(_ENDING)

    def collect(self, link: "HostLink", directory: str, options: Sequence[CollectOptions]) -> Collected:
        """Collect the files of a host. `directory` is the workers'."""
        name = link.host.name
        globs: dict[str, list[str]] = {}
        for order in options:
            globs.setdefault(order.directory, []).append(order.glob)
        collected = Collected(name)
        for target, of_target in globs.items():
            try:
                collected = self._collect(link, directory, of_target, target, collected)
            except ErrandFailed as error:
                collected = collected._replace(problem=cause_of(error.detail))
            except OSError as error:
                text = f"{error.filename or target}: {reason(error)}" if error.errno else str(error)
                collected = collected._replace(problem=f"{text} (here; nothing was removed on the host)")
            except ValueError as error:
                collected = collected._replace(problem=str(error))
            if collected.problem is not None:
                break
        with self._lock:
            self._progress.pop(name, None)
            self.results.append(collected)
        return collected

    def _collect(
        self, link: "HostLink", directory: str, globs: Sequence[str], target: str, before: Collected
    ) -> Collected:
        """Raises ErrandFailed, OSError, ValueError."""
        self._tell(link, "lists its files")
        errand = offer_files(link, directory, globs, self._limit)
        try:
            return self._receive(link, errand, _place(target, link.host.name), before)
        finally:
            errand.stop()

    def _receive(self, link: "HostLink", errand: "Errand", place: str, before: Collected) -> Collected:
        files = HostFiles(
            errand,
            self._limit,
            lambda: self._tell(link, "lists its files"),
            host=link.host.name,
        )
        skipped = [*before.skipped, *files.skipped]
        if not files.listed.kinds:
            return before._replace(skipped=skipped)
        with self._lock:
            self._size += files.size
            if self._size > self._limit:
                raise ValueError(
                    f"the files of the hosts have more than the limit of {size_words(self._limit)}"
                )
        with Destination(place, files.listed, is_file=False) as destination:
            writer = destination.writer()
            try:
                changed = self._fetch(link, files, writer)
            except (ErrandFailed, OSError, ValueError):
                # Whole files count, whatever happened to the others.
                with suppress(OSError):
                    destination.install(is_whole=False)
                raise
            installed = destination.install(is_whole=False)
            destination.clear()
        here = set(installed)
        if changed:
            skipped += [
                (file.path, "it was changed while it was read")
                for file in files.listed.files
                if file.path not in here
            ]
        return before._replace(
            files=before.files + len(here), received=before.received + writer.received, skipped=skipped
        )

    def _fetch(self, link: "HostLink", files: HostFiles, writer: "PartWriter") -> bool:
        """Return True if some content has changed since its listing."""
        numbers = sorted(writer.needed)
        size = sum(files.size_of(number) for number in numbers) or 1
        has_changed = False
        for data in files.parts(numbers):
            if not data:
                writer.skip_next()
                has_changed = True
            elif not writer.write_next(data) and writer.needed:
                raise ValueError("a part of its files was damaged on its way")
            self._tell(link, f"{100 * writer.received // size}%")
        return has_changed

    def _tell(self, link: "HostLink", text: str) -> None:
        with self._lock:
            self._progress[link.host.name] = text
        link.tell_preparing("results")


class JobCollector:
    """Collects files of a job's hosts for its driver. `status` shows the progress until it gets None."""

    def __init__(self, spec: JobSpec, status: OnStatus) -> None:
        self._spec = spec
        self._status = status
        self._limit = LIMIT if spec.collect_limit is None else spec.collect_limit
        self.at_end = Collection(self._limit)
        """The files of `--collect`."""

    def release(self, link: "HostLink", directory: str, then: Callable[[], None]) -> None:
        """Collect the files of `--collect` from a host; call `then` at the end, in another thread."""
        self._status(lambda: Status(f"collecting {self.at_end.progress}"))
        self.at_end.begin(link, directory, self._spec.collect, then)

    def report(self, names: Iterable[str], job_id: str) -> tuple[bool, list[str]]:
        """Return True if files of hosts are missing, and the messages about the collected files."""
        self.at_end.wait()
        results = list(self.at_end.results)
        is_lacking = any(collected.problem is not None for collected in results)
        # A lost host is in the job's own exit code; an elastic job goes on without it.
        results += [
            Collected(name, problem="the host was lost")
            for name in names
            if all(collected.host != name for collected in results)
        ]
        directories = [options.directory for options in self._spec.collect]
        lines = summary(results, directories, f"hvlaunch collect {job_id}")
        return is_lacking, lines

    def collect(self, hosts: "Sequence[tuple[HostLink, str]]", request: "CollectWanted") -> None:
        """Collect files of running workers' hosts, and answer."""
        collection = Collection(self._limit)
        options = request.options or self._spec.collect

        def run() -> None:
            with ThreadPoolExecutor(max(1, len(hosts))) as pool:
                for link, directory in hosts:
                    pool.submit(collection.collect, link, directory, options)
            request.answer(
                {
                    "hosts": [collected.as_json() for collected in collection.results],
                    "options": [list(option) for option in options],
                }
            )

        threading.Thread(target=run, name="results", daemon=True).start()


def keep_hosts(folder: Path, spec: JobSpec, directories: Mapping[str, str]) -> None:
    """Keep in an ended job's directory how its hosts are reached. Raises OSError."""
    words = {
        "hosts": encode(tuple[Host, ...], spec.hosts),
        "ssh": encode(SSHOptions, spec.ssh),
        "remote_python": spec.remote_python,
        "collect": [list(options) for options in spec.collect],
        "limit": spec.collect_limit,
        "directories": dict(directories),
    }
    write_whole(folder / _HOSTS, json.dumps(words).encode("ascii"), 0o600)


def kept_hosts(folder: Path) -> tuple[JobSpec, Mapping[str, str]] | None:
    """Return a job for the hosts of an ended job, and the workers' directory on each; None if they are unknown."""
    try:
        words = json.loads((folder / _HOSTS).read_bytes())
        directories: Mapping[str, str] = words["directories"]
        spec = JobSpec(
            command=("true",),
            hosts=tuple(
                host for host in decode(tuple[Host, ...], words["hosts"]) if host.name in directories
            ),
            cwd="/",
            ssh=decode(SSHOptions, words["ssh"]),
            remote_python=words["remote_python"],
            collect=tuple(CollectOptions(*options) for options in words["collect"]),
            collect_limit=words["limit"],
            relay="always",
        )
    except (OSError, ValueError, KeyError, TypeError, BadData):
        return None
    return spec, directories


def _place(directory: str, host: str) -> str:
    """Return the directory of a host's files."""
    name = _UNUSUAL.sub("_", host)
    return str(Path(directory).resolve() / (f"_{name}" if name.startswith(".") else name))


def summary(results: Sequence[Collected], directories: Sequence[str], hint: str) -> list[str]:
    """Return messages about the collected files. `hint` is a command for the next try."""
    files = sum(collected.files for collected in results)
    received = sum(collected.received for collected in results)
    targets = ", ".join(dict.fromkeys(directories))
    hosts = f"{len(results)} host{'s' * (len(results) != 1)}"
    lines = [f"{files} file{'s' * (files != 1)} of {hosts} in {targets} ({size_words(received)} were new)"]
    for collected in results:
        if collected.skipped:
            named = "; ".join(f"{path}: {why}" for path, why in collected.skipped[:_NAMED])
            more = f"; and {len(collected.skipped) - _NAMED} more" if len(collected.skipped) > _NAMED else ""
            lines.append(f"host {collected.host}: stays there: {named}{more}")
        if collected.problem is not None:
            lines.append(
                f"host {collected.host}: its files were not collected: {collected.problem}; try: {hint}"
            )
    return lines
