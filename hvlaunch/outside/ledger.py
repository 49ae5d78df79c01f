"""The ledger of hosts: verdicts of jobs on machines, for the user's next jobs.

A verdict fades with a half-life, and the sum for a machine is bounded: no machine is out of favour for longer than a
half-life at a time. A single append-only file serves all jobs of this user. Damage to the file costs the damaged
part, never a job.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hvlaunch.named_tuples import NamedTuple
from hvlaunch.outside import jobs_directory
from hvlaunch.outside.shared_log import LogContent, SharedLog
from hvlaunch.record import Mark

__all__ = [
    "CLEARED",
    "HALF_LIFE",
    "SUSPECT",
    "VERDICTS",
    "WEIGHTS",
    "HostRecord",
    "Ledger",
    "LedgerEntry",
    "directory_beside",
    "ledger_directory",
]

HALF_LIFE = 7 * 86400.0
SUSPECT = 0.5
"""A machine with at least this sum of faded weights is a suspect."""
CLEARED, SEEN = "cleared", "seen"
"""Other entries: a good check ends earlier verdicts; a sighting gives the newest machine of a name."""

VERDICTS: Mapping[str, tuple[float, str]] = {
    "gpu fault": (1.0, "the driver of its GPU reports a fault (ECC, XID, lost)"),
    "check failed": (1.0, "hvlaunch check found what would stop a job"),
    "lost": (0.6, "the host was lost while its workers ran"),
    "not started": (0.6, "the host was not ready in time, or its agent did not start"),
    "workers fail": (0.6, "its workers failed in several rounds, and an elastic job excluded it"),
    "disk full": (0.6, "its disk was full"),
    "memory": (0.5, "its kernel killed a worker for want of memory"),
    "lacks a file": (0.5, "it lacks a file or module that other hosts have"),
    "network error": (0.5, "NCCL reported a system error of its network there first"),
    "hang": (0.5, "the other workers waited for its workers"),
    "slow": (0.3, "its workers were slower than the others"),
    "crash": (0.3, "a signal such as SIGSEGV ended its worker first"),
    "killed": (0.2, "another program killed its worker (SIGKILL)"),
    # The same script fails the same way on any host, so the host where it failed first says nothing.
    "exception": (0.0, "an error of the script itself"),
}
"""Weight and meaning of each verdict. A fault of hardware weighs 1; a verdict below 0.5 needs another beside it."""
WEIGHTS = {name: weight for name, (weight, _) in VERDICTS.items()}

_MOST, _KEPT = 2000, 1000
"""Number of entries from which the file is shortened, and the number of the newest ones kept then."""
_FADED = 8
"""Half-lives after which an entry is dropped when the file is shortened."""
_SAME = 3600.0
"""Seconds within which a verdict counts once, however many jobs repeat it."""
_PATIENCE = 10.0
"""Seconds for other jobs to write, of which many may end at once."""
_RECENT = 20
_LONGEST = 200
"""Characters of a text."""


class LedgerEntry(NamedTuple):
    """A line of the ledger."""

    when: float
    """Seconds since 1970."""
    host: str
    """Name in the job."""
    machine: str
    """The machine's own id; empty if unknown, or shared by hosts of the job."""
    verdict: str
    """A name of VERDICTS, CLEARED or SEEN."""
    job: str = ""
    detail: str = ""


class HostRecord(NamedTuple):
    """The entries about one machine."""

    hosts: tuple[str, ...]
    """Its names, the newest last."""
    score: float
    """Faded sum between 0 and 1 that makes a suspect. Verdicts on a suspect do not raise it."""
    weight: float
    """Faded sum of all verdicts: by it suspects are put in order."""
    entries: tuple[LedgerEntry, ...]
    """Counting verdicts, the oldest first."""

    @property
    def is_suspect(self) -> bool:
        return self.score >= SUSPECT

    @property
    def why(self) -> str:
        """The verdicts with their numbers, and the newest one's detail."""
        numbers = Counter(entry.verdict for entry in self.entries)
        verdicts = ", ".join(f"{name} {number}x" if number > 1 else name for name, number in numbers.items())
        detail = self.entries[-1].detail
        return f"{verdicts}: {detail}" if detail else verdicts


def ledger_directory(environ: Mapping[str, str]) -> Path:
    """Return the ledger's directory, beside that of the jobs. Raises NoJobDirectory."""
    return directory_beside(jobs_directory(environ))


def directory_beside(jobs: Path) -> Path:
    """Return the ledger's directory by that of the jobs."""
    return jobs.with_name("ledger")


class Ledger:
    """The file. `warn` gets a message for the user about an unreadable or unwritable file; no method raises an error."""

    def __init__(self, directory: Path, warn: Callable[[str], object], half_life: float = HALF_LIFE) -> None:
        self._log = SharedLog(directory, b"hvlaunch ledger 1\n", lock="lock", patience=_PATIENCE)
        self._path = self._log.path
        self._warn = warn
        self._half_life = half_life

    def entries(self) -> list[LedgerEntry]:
        """Return all entries, in the order of writing."""
        return self._read()[0]

    def records(self, now: float) -> list[HostRecord]:
        """Return the record of each machine with counting verdicts, the worst first."""
        records = _records(self.entries(), now, self._half_life)
        return sorted(records, key=lambda record: (record.is_suspect, record.weight), reverse=True)

    def suspects(self, now: float) -> dict[str, HostRecord]:
        """Return the records of suspects by each of their names, the worst first."""
        records = [record for record in self.records(now) if record.is_suspect]
        return {host: record for record in records for host in record.hosts}

    def record(
        self, machine_id: str, host: str, verdict: str, job: str, when: float, detail: str = ""
    ) -> None:
        """Append a verdict of VERDICTS. `machine_id` is empty if unknown, or shared by hosts of the job."""
        self.append([LedgerEntry(when, host, machine_id, verdict, job, detail)])

    def clear(self, hosts: Iterable[str], job: str, when: float) -> list[str]:
        """End the verdicts on these hosts; return the names of hosts with a record."""
        # A check of many good hosts must not fill the file.
        names = {name for record in self.records(when) for name in record.hosts}
        cleared = [host for host in hosts if host in names]
        self.append(LedgerEntry(when, host, "", CLEARED, job) for host in cleared)
        return cleared

    def note_machines(self, machines: Mapping[str, str], job: str, when: float) -> None:
        """Note the machine of each name, if the ledger has the machine or the name."""
        history = _History(self.entries())
        ids = {*history.machines.values()}
        self.append(
            LedgerEntry(when, host, machine, SEEN, job)
            for host, machine in machines.items()
            if machine
            and history.machines.get(host) != machine
            and (machine in ids or host in history.machines)
        )

    def append(self, entries: Iterable[LedgerEntry]) -> None:
        """Append entries, after those of other jobs."""
        new = [*entries]
        if not new:
            return
        try:
            with self._log.locked():
                self._append(new)
        except OSError as error:
            self._warn(f"the ledger of hosts is not written: {self._path}: {error.strerror}")

    def _append(self, new: Sequence[LedgerEntry]) -> None:
        """Append under the lock. Raises OSError."""
        old, content = self._read()
        if not content.damage and len(old) + len(new) > _MOST:
            since = new[-1].when - _FADED * self._half_life
            kept = [entry for entry in [*old, *new] if entry.when >= since][-_KEPT:]
            self._log.replace(content, [_encode(entry) for entry in kept])
        else:
            self._log.append(content, [_encode(entry) for entry in new])

    def _read(self) -> tuple[list[LedgerEntry], LogContent]:
        """Return the readable entries, and the content of the file."""
        try:
            content = self._log.read()
        except OSError as error:
            self._warn(f"the ledger of hosts can't be read: {self._path}: {error.strerror}")
            return [], LogContent([], Mark(0))
        entries = [entry for body in content.bodies for entry in _decode(body)]
        if content.damage:
            self._warn(
                f"the ledger of hosts is damaged: {self._path}: {content.damage}; {len(entries)} entries are kept"
            )
        return entries, content


def _encode(entry: LedgerEntry) -> bytes:
    return json.dumps([entry.when, *(text[:_LONGEST] for text in entry[1:])]).encode()


def _decode(body: bytes) -> Iterator[LedgerEntry]:
    """Yield the entry; nothing for one of another version of hvlaunch."""
    with suppress(ValueError, TypeError):
        when, *texts = json.loads(body)
        entry = LedgerEntry(float(when), *texts)
        if all(isinstance(text, str) for text in entry[1:]):
            yield entry


class _History:
    """Entries by machine. A machine without an id is told by its name until an id is known."""

    def __init__(self, entries: Iterable[LedgerEntry]) -> None:
        self.machines: dict[str, str] = {}
        """The newest machine of each name; empty if no id is known."""
        self.of: dict[tuple[str, str], list[LedgerEntry]] = {}
        """Entries by machine or name; the other part of the key is empty."""
        for entry in entries:
            before = self.machines.get(entry.host, "")
            machine = self.machines[entry.host] = entry.machine or before
            key = self.key(entry.host)
            if machine and not before:
                # What is known by the name alone was about this machine, as far as anybody can tell.
                self.of.setdefault(key, []).extend(self.of.pop(("", entry.host), ()))
            self.of.setdefault(key, []).append(entry)

    def key(self, host: str) -> tuple[str, str]:
        """Return the key of the name's newest machine."""
        machine = self.machines[host]
        return (machine, "") if machine else ("", host)


def _is_repeated(entry: LedgerEntry, before: Sequence[LedgerEntry]) -> bool:
    """True if the same verdict is less than an hour old: a user tries a failing job again and again."""
    return any(
        entry.verdict == other.verdict and entry.when < other.when + _SAME for other in before[-_RECENT:]
    )


def _records(entries: Iterable[LedgerEntry], now: float, half_life: float) -> Iterator[HostRecord]:
    """Return the record of each machine with counting verdicts."""
    history = _History(entries)
    for key, of_machine in history.of.items():
        score, weight, at = 0.0, 0.0, 0.0
        counting: list[LedgerEntry] = []
        for entry in of_machine:
            # Clocks of the user's machines differ: an entry from the future counts as new.
            when = min(entry.when, now)
            fading, at = 0.5 ** (max(0.0, when - at) / half_life), max(at, when)
            score, weight = score * fading, weight * fading
            added = WEIGHTS.get(entry.verdict, 0.0)
            if entry.verdict == CLEARED:
                score, weight, counting = 0.0, 0.0, []
            elif added and not _is_repeated(entry, counting):
                # A suspect that was needed all the same, and failed again, still gets its trial after a half-life.
                score = score if score >= SUSPECT else min(1.0, score + added)
                weight += added
                counting.append(entry)
        names = dict.fromkeys(entry.host for entry in of_machine if history.key(entry.host) == key)
        if counting and names:
            fading = 0.5 ** ((now - at) / half_life)
            yield HostRecord((*names,), score * fading, weight * fading, (*counting,))
