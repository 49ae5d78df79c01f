"""Runs elastic jobs whose pool, workers and end are in the test's hands, and reads their event log."""

import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.cluster.jobs import HVLAUNCH, LIGHT, PROGRAMS, Job, agent_of
from tests.testhosts.hosts import Driver, Host, Process, TestHosts, wait_until

__all__ = ["LIMIT", "ElasticJob", "Work"]

T = TypeVar("T")
LIMIT = 150.0  # seconds for what takes one or two, with torch five, on a machine that is busy
GOOD = 0.9  # of the test images

COMMIT = "commit at step"
ESTABLISHED = "01"

Event = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What the workers run: a program of programs/, in the same processes or started anew for each round."""

    program: str
    python: str
    restarts: bool = False
    trains: bool = False
    """A network, whose accuracy it reports."""

    @property
    def lease(self) -> int:
        """Seconds of silence after which a host is to count as lost: more than a busy machine keeps anybody waiting."""
        return 10 if self.trains else 3

    def __str__(self) -> str:
        return f"{self.program.removesuffix('.py')}-{'restarts' if self.restarts else 'in-process'}"


class ElasticJob(Job):
    """A job on hosts from a discovery script, or from -H. `directory` is one that all hosts see; close() removes it.

    `events_file` is where the driver writes its event log, which stays.
    """

    def __init__(
        self,
        hosts: TestHosts,
        work: Work,
        events_file: Path,
        pool: str,
        *options: object,
        is_fixed: bool = False,
    ) -> None:
        self.hosts = hosts
        self.work = work
        self.directory = Path(tempfile.mkdtemp(prefix="hvlaunch-elastic-", dir="/var/tmp"))
        (self.directory / "orders").mkdir()
        self.pool(pool)
        self._events_file = events_file
        self._read_to = 0
        self._known: list[Event] = []
        self._seen = 0
        script = ("--host-discovery-script", f"cat {self.directory / 'pool'}", "--discovery-interval", 0.2)
        arguments = [
            *(("-H", pool) if is_fixed else script),
            *("--grace", 30, "--events", self._events_file),
            # What happens at the end of the lease is most tests' subject.
            *("--suspect-after", 0, "-x", "OMP_NUM_THREADS=1", *options),
            *(["-x", f"PYTHONPATH={LIGHT}"] if work.trains else []),
            *(work.python, PROGRAMS / work.program, self.directory),
            *(["--restarts"] if work.restarts else []),
        ]
        super().__init__(hosts, arguments)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.code()
        assert self.journal.stat().st_size
        shutil.rmtree(self.directory)

    # What the test does

    def pool(self, hosts: str) -> None:
        """From now on the pool is this: `a:2,b:1`."""
        self._write("pool", hosts.replace(",", "\n") + "\n")

    def order(self, who: str, what: str) -> None:
        """See programs/orders.py."""
        self._write(f"orders/{who}", what)

    def withdraw(self, who: str) -> None:
        (self.directory / "orders" / who).unlink(missing_ok=True)

    def doom(self, number: int) -> None:
        """All workers of the round are to fail at the same step."""
        self._write("doom", str(number))

    def end(self) -> None:
        """Let the training end, once the network has seen enough."""
        self._write("end", "")

    def finish(self) -> dict[str, Any]:
        """Let the training end, and see that it ends well: what rank 0 says of it."""
        self.end()
        assert self.code(LIMIT) == 0, self.stdout + self.stderr
        return self.report()

    def signal(self, name: str, host: str, slot: int = 0) -> None:
        """Send a worker a signal."""
        (pid,) = [event["pid"] for event in self.events("worker_started") if _seat(event) == (host, slot)][
            -1:
        ]
        self.hosts[host].run(["kill", f"-{name}", str(pid)], check=True)

    def kill_agent(self, host: str) -> None:
        self.hosts[host].run(["kill", "-9", str(agent_of(self.hosts[host]).pid)], check=True)

    def move(self, *hosts: str) -> tuple[int, str]:
        """Let the user move a host's workers: the exit code, and the words without what they begin with."""
        done = self.hosts.driver.run([*HVLAUNCH, "move", *hosts], env=self.hosts.driver.env, timeout=LIMIT)
        words = re.sub(r"^hvlaunch: (?:job \w+: )?", "", done.stdout + done.stderr)
        return done.returncode, words.strip()

    def _write(self, name: str, text: str) -> None:
        new = self.directory / "new"
        new.write_text(text)
        new.replace(self.directory / name)

    # What is to be seen

    def events(self, *types: str) -> list[Event]:
        """All so far; of these types."""
        path = self._events_file if self._events_file.exists() else Path(os.devnull)
        with path.open("rb") as file:
            file.seek(self._read_to)
            whole, _, _ = file.read().rpartition(b"\n")
        if whole:
            self._read_to += len(whole) + 1
            self._known += map(json.loads, whole.splitlines())
        return [event for event in self._known if not types or event["type"] in types]

    def until(self, condition: Callable[[], T | None], what: str) -> T:
        def answer() -> T | None:
            found = condition()
            if not found and self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode} before: {what}\n{self.stderr}")
            return found

        try:
            return wait_until(answer, what, LIMIT)
        except TimeoutError as late:
            raise AssertionError(f"{late}\n{self.stdout[-2000:]}\n{self.stderr}") from None

    def event(self, kind: str, **fields: Any) -> Event:
        """The next event of that kind, after the one that was waited for before."""

        def found() -> tuple[int, Event] | None:
            for number, one in enumerate(self.events()[self._seen :], self._seen + 1):
                if one["type"] == kind and all(one.get(name) == fields[name] for name in fields):
                    return number, one
            return None

        self._seen, event = self.until(found, f"{kind} {fields}")
        return event

    def from_now(self) -> None:
        """Wait for no event that there was already."""
        self._seen = len(self.events())

    def place(self, number: int) -> Counter[str]:
        """How many workers each host has in a round."""
        kind = "worker_started" if self.work.restarts else "worker_placed"
        return Counter(event["host"] for event in self.events(kind) if event["round"] == number)

    @property
    def round(self) -> int:
        """The number of the newest round; -1 before the first."""
        kind = "worker_started" if self.work.restarts else "worker_placed"
        return max((event["round"] for event in self.events(kind)), default=-1)

    def goes_on_with(self, hosts: str, *, after: int = -1) -> int:
        """Wait for a round with just these workers, newer than `after`, and for work in it; its number."""
        wanted = Counter({name: int(slots) for name, slots in (one.split(":") for one in hosts.split(","))})
        size = sum(wanted.values())

        def there() -> int | None:
            number = self.round
            begun = f"round {number} has {size} at step" in self.stdout
            return number + 1 if number > after and begun and self.place(number) == wanted else None

        number = self.until(there, f"a round with {hosts}") - 1
        self.advances()
        return number

    def advances(self) -> None:
        """Wait until there are some more commits."""
        before = self.stdout.count(COMMIT)
        self.until(lambda: self.stdout.count(COMMIT) >= before + 3, "more commits")

    def stalls(self) -> None:
        """Wait until TCP has sent something again three times in vain, and no commit was made meanwhile."""
        commits = resent = 0

        def stands_still() -> bool:
            nonlocal commits, resent
            seen, now = self.stdout.count(COMMIT), max(map(_resent, (self.hosts.driver, *self.hosts)))
            if seen != commits or now < resent:
                commits, resent = seen, now
            return now >= resent + 3

        self.until(stands_still, "the training stands still")

    def left_on(self, host: str) -> list[Process]:
        return self.hosts[host].user_processes()

    def report(self) -> dict[str, Any]:
        """What the training came to, which is checked: each step was counted once by each worker of its round.

        A network is to be right about the test images.
        """
        done = re.findall(r"done (\{.*\})", self.stdout)
        assert len(done) == 1, self.stdout
        report: dict[str, Any] = json.loads(done[0])
        ends = [begin for _, begin, _ in report["rounds"][1:]] + [report["step"]]
        counted = sum(
            (end - begin) * size for (_, begin, size), end in zip(report["rounds"], ends, strict=True)
        )
        assert report["weight"] == counted, report
        numbers = [number for number, _, _ in report["rounds"]]
        assert numbers == sorted(set(numbers))
        for number, _, size in report["rounds"]:
            assert self.place(number).total() == size, (number, size)
        assert not self.work.trains or report["accuracy"] > GOOD, report
        return report

    def log(self) -> str:
        """The event log, for a person."""
        return "\n".join(
            " ".join(str(value) for name, value in event.items() if name not in ("job", "type", "hint"))[:200]
            for event in [{"t": one["time"][14:23], "what": one["type"], **one} for one in self.events()]
        )


def _resent(place: Driver | Host) -> int:
    """How often TCP has sent again, at most, what a connection of the place still has no answer to."""
    if not place.pid:
        return 0
    tables = Path(f"/proc/{place.pid}/net").glob("tcp*")
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    return max((int(row[6], 16) for row in rows if row[3] == ESTABLISHED), default=0)


def _seat(event: Event) -> tuple[str, int]:
    return event["host"], event["slot"]
