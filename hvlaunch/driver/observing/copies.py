"""Copies of the workers' commits on other hosts: an errand on each host holds copies, and this thread orders them.

docs/internals/elastic-jobs.md has the reasons for the order of the steps.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from hvlaunch.agent.commits import KeptCommit, Version, buddies, copies, family_of, newest
from hvlaunch.agent.errands.commits import ANSWER, PORTS
from hvlaunch.agent.wire.frames import record, several, text
from hvlaunch.driver.links.errands import Answers, Errand, ErrandFailed, Limits, write_line
from hvlaunch.engine.hosts import candidates
from hvlaunch.rendezvous.messages import KEPT
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.rendezvous.serving.certificate import new_peer

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.engine.events import HostFacts

__all__ = ["Copies"]


_LIMITS = Limits(seconds=None, memory=1 << 30, output=None)
_LOOK = 0.5
"""Seconds between looks at the hosts' commits."""
_PAUSE = 10.0
"""Seconds after a failed copy."""
_PATIENCE = 60.0
"""Seconds for an answer, or a sign of life during a long order. An errand can hang with its host's kernel, or be stopped."""
_FIRST = 60.0
"""Seconds for the first commit, beyond the time of the first save, and for ranks to reach a common step."""
_FEW = 3
"""Ranks that a message names at either end."""
_RETRY = 60.0
"""Seconds before another errand on a host whose errand has hung."""
_WANT = record(
    {
        "host": text(1000, raw=True),
        "commit": lambda value: isinstance(value, list) and len(value) == len(KeptCommit._fields) - 1,
        "hosts": several(text(1000, raw=True), 4096),
    }
)


def _is_answer(value: Any) -> bool:
    return value == {} or ANSWER(value)


class _Store:
    """A host's errand, and its last answer."""

    def __init__(self, host: str, errand: Errand) -> None:
        self.host = host
        self.errand = errand
        self.port: int | None = None
        """None until the errand's first answer: other hosts do not wait for it."""
        self.own: list[KeptCommit] = []
        self.copied: list[KeptCommit] = []
        # A new errand tries to write to the directory at once.
        self.is_saving = True
        self.save_seconds = 0.0
        self.trouble = ""
        self.directory = ""
        """Id of the directory of --save-to on the host, if it has one."""
        self._answers = Answers(errand, host)
        self._begun = time.monotonic()

    def take_port(self) -> None:
        """Take the first answer if the errand has sent it. Raises ErrandFailed, also after a long wait."""
        if self.port is None and (self.errand.has_data or time.monotonic() > self._begun + _PATIENCE):
            self._answers.patience = _PATIENCE if self.errand.has_data else 0.0
            self.port = self._answers.next(PORTS)["port"]

    def read(self, deadline: float) -> Any:
        """Return the answer to the order. Raises ErrandFailed."""
        # Signs of life are empty: a copy of hundreds of gigabytes takes its time.
        self._answers.patience = deadline - time.monotonic()
        while not (answer := self._answers.next(_is_answer)):
            self._answers.patience = _PATIENCE
        self.own = [KeptCommit(*fields) for fields in answer["own"]]
        self.copied = [KeptCommit(*fields) for fields in answer["copies"]]
        self.is_saving, self.trouble = answer["is_saving"], answer["trouble"]
        self.save_seconds, self.directory = answer["save_seconds"], answer["directory"]
        return answer


class _Hosts:
    """The errands on the hosts; `save_to` is the directory of --save-to. `say` prints a message."""

    def __init__(
        self, links: "Callable[[], Iterable[HostLink]]", save_to: str | None, say: Callable[[str], None]
    ) -> None:
        self._links = links
        self._save_to = save_to
        self._say = say
        self._peer = new_peer()
        self._begun: dict[str, _Store] = {}
        self.stores: dict[str, _Store] = {}
        """The errands of `_begun` that have answered."""
        self._retries: dict[str, float] = {}
        """Times of the next errands on hosts, after one that failed."""
        self._complaints: set[str] = set()
        self.pinned: list[Version] = []
        """Versions with all of their copies: their files stay."""
        self.losses = 0
        """Number of ended errands."""

    @property
    def own(self) -> dict[str, list[KeptCommit]]:
        """The commits of each host's workers."""
        return {host: store.own for host, store in self.stores.items()}

    def start_errands(self) -> None:
        """Start errands on new hosts, and again where they were killed with the leftovers of a round."""
        links = {
            link.host.name: link
            for link in self._links()
            if link.last_heard is not None and not (link.is_closed or link.has_parted or link.is_away)
        }
        for host, store in list(self._begun.items()):
            if host not in links or store.errand.has_ended:
                self._drop(host)
        for host in [host for host in links if host not in self._begun]:
            if time.monotonic() >= self._retries.get(host, 0.0):
                link = links[host]
                try:
                    arguments = {"scratch": link.scratch, "peer": self._peer, "save_to": self._save_to or ""}
                    self._begun[host] = _Store(host, link.errands.start("commits", arguments, _LIMITS))
                except ErrandFailed as error:
                    self._fail(host, error)
        for host, store in list(self._begun.items()):
            try:
                store.take_port()
            except ErrandFailed as error:  # noqa: PERF203 (each host for itself)
                self._fail(host, error)
        self.stores = {host: store for host, store in self._begun.items() if store.port is not None}

    def _drop(self, host: str) -> None:
        self.stores.pop(host, None)
        store = self._begun.pop(host, None)
        if store is not None:
            self.losses += 1
            store.errand.stop()

    def _fail(self, host: str, error: ErrandFailed) -> None:
        self._drop(host)
        # Errands are killed with the leftovers of a round, and lost with their hosts.
        if error.reason not in ("killed", "lost"):
            self._retries[host] = time.monotonic() + _RETRY
            silent = "its copying process does not answer"
            self.complain(f"host {host}: {silent if error.reason == 'time' else error.detail}")

    def complain(self, cause: str, problem: str = "commits are not copied", topic: str | None = None) -> None:
        """Say once that copies fail, and why. `topic` is what a cause with numbers is about, if the numbers may differ."""
        topic = topic or cause
        if topic not in self._complaints:
            self._complaints.add(topic)
            self._say(f"{problem}: {cause}")

    def send_orders(self, orders: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Send orders to hosts, and return the answers. A host without an answer is left out, and gets another errand."""
        for host, order in orders.items():
            write_line(self.stores[host].errand, dict(order))
        answers = {}
        deadline = time.monotonic() + _PATIENCE
        for host in orders:
            try:
                answers[host] = self.stores[host].read(deadline)
            except ErrandFailed as error:  # noqa: PERF203 (each host for itself)
                self._fail(host, error)
        return answers

    def order_all(self, order: Mapping[str, Any]) -> None:
        self.send_orders(dict.fromkeys(self.stores, order))


def _drift(commits: Mapping[str, Iterable[KeptCommit]]) -> str | None:
    """Return the newest steps of ranks out of step, in words. `commits` are by host."""
    steps: dict[tuple[str, int, int], dict[int, int]] = {}
    for items in commits.values():
        for commit in items:
            if commit.size:
                # Ranks of an earlier round have ended.
                ranks = steps.setdefault((family_of(commit), commit.round, commit.size), {})
                rank = int(commit.name.rpartition(".")[2])
                ranks[rank] = max(ranks.get(rank, -1), commit.step)
    last = max((key[1] for key in steps), default=0)
    for (_, number, size), ranks in steps.items():
        if number == last and (len(ranks) < size or len(set(ranks.values())) > 1):
            return _steps_in_words([(ranks.get(rank, -1), rank) for rank in range(size)])
    return None


def _steps_in_words(steps: Collection[tuple[int, int]]) -> str:
    words = [
        f"rank {rank} {f'step {step}' if step >= 0 else 'none'}"
        for step, rank in sorted(steps, key=lambda pair: (-pair[0], pair[1]))
    ]
    if len(words) > 2 * _FEW:
        words = [*words[:_FEW], "...", *words[-_FEW:]]
    return ", ".join(words)


class _Saves:
    """Has the newest complete version written to the directory of --save-to, each `every` seconds."""

    def __init__(self, hosts: _Hosts, directory: str, every: float) -> None:
        self._hosts = hosts
        self._directory = directory
        self._every = every
        # The order of versions on disk begins with it: a job that is started again counts its rounds from 0.
        self._generation = int(time.time())
        self._next_at = time.monotonic() + every
        # A new errand tries to write to the directory at once.
        self._is_busy = True
        self._saved: set[Version] = set()
        self._losses = 0
        """Number of ended errands at the last look."""
        self._apart_since: float | None = None
        """Time of the first look at ranks without a new common step."""
        self.trouble: str | None = None
        """Cause of missing saves at present."""
        self.times: list[float] = []
        """Durations of the successful saves."""

    def save_if_due(self) -> None:
        """Have the newest complete version written to disk if it is time, and look after writers that are not ready."""
        if self._losses != self._hosts.losses:
            self._losses = self._hosts.losses
            # The last save of an ended errand may be unfinished.
            self._saved = set()
        if not self._hosts.stores:
            return
        now = time.monotonic()
        if self._is_busy:
            self._hosts.order_all({})
            busy = [host for host, store in self._hosts.stores.items() if store.is_saving]
            for host, store in self._hosts.stores.items():
                if store.trouble:
                    self._saved = set()
                    self._complain_of_disk(f"host {host}: {store.trouble}")
            if busy and now > self._next_at:
                self._complain_of_disk(f"host {busy[0]}: still writing after {self._every:.0f} s")
            self._is_busy = bool(busy)
            self._compare_directories()
            if not busy and self._saved and self._losses == self._hosts.losses:
                # The slowest host counts: a version needs the files of all hosts.
                self.times.append(max(store.save_seconds for store in self._hosts.stores.values()))
            return
        if now < self._next_at:
            return
        self._hosts.order_all({})
        versions = {version for version, _ in newest(self._hosts.own)}
        if not versions or versions == self._saved:
            self._explain(now)
            return
        self._apart_since = self.trouble = None
        # As for copies: fast writers would overwrite the chosen version.
        self._hosts.order_all({"pins": self._hosts.pinned, "hold": True})
        targets = newest(self._hosts.own)
        orders: dict[str, dict[str, Any]] = {
            host: {"pins": self._hosts.pinned, "hold": False, "save": [], "generation": self._generation}
            for host in self._hosts.stores
        }
        for _, sources in targets:
            for host, commit in sources:
                orders[host]["save"].append(list(commit[:-1]))
        self._next_at = now + self._every
        self._hosts.send_orders(orders)
        self._saved = {version for version, _ in targets}
        self._is_busy = True

    def _explain(self, now: float) -> None:
        """Say why no version was complete for long."""
        steps = _drift(self._hosts.own)
        if steps is None:
            self._apart_since = None
            if not self._saved and now > self._next_at + _FIRST:
                self._complain_of_disk("no worker has committed anything yet")
            return
        # Ranks of a step commit within moments of each other.
        self._apart_since = self._apart_since or now
        if now > self._apart_since + _FIRST:
            self.trouble = f"ranks commit different steps: {steps}"
            remedy = "commits at the same steps, or save(..., shared=True) if all ranks have equal values"
            self._complain_of_disk(f"{self.trouble}; try: {remedy}", "apart")

    def _compare_directories(self) -> None:
        """Name two hosts with different directories under the name: no version would have the files of all ranks."""
        hosts = {host: store.directory for host, store in self._hosts.stores.items() if store.directory}
        first = next(iter(hosts), "")
        for host, directory in hosts.items():
            if directory != hosts[first]:
                self._hosts.complain(
                    f"{self._directory} is another directory on host {host} than on host {first}; "
                    "try: a directory that all hosts share",
                    "commits are not saved",
                    topic="directories",
                )

    def _complain_of_disk(self, cause: str, topic: str | None = None) -> None:
        self._hosts.complain(cause, f"commits are not saved to {self._directory}", topic)


class Copies:
    """Keeps `count` copies of each host's commits on other hosts, and has commits saved to the directory of --save-to.

    `save` has the directory, or None, and the seconds between two saves. `links` returns the links of the hosts, `facts_of`
    the facts of a host; `say` prints a message.
    """

    def __init__(
        self,
        server: RendezvousServer,
        links: "Callable[[], Iterable[HostLink]]",
        facts_of: "Callable[[str], HostFacts | None]",
        count: int,
        say: Callable[[str], None],
        save: tuple[str | None, float] = (None, 0.0),
    ) -> None:
        self._server = server
        self._facts_of = facts_of
        self._count = count
        self._wants: SimpleQueue[tuple[str, bytes] | None] = SimpleQueue()
        self._hosts = _Hosts(links, save[0], say)
        self._saves = None if save[0] is None else _Saves(self._hosts, save[0], save[1])
        self._keepers: dict[str, list[str]] = {}
        self._not_before = 0.0
        threading.Thread(target=self._run, name="copies", daemon=True).start()

    def save_times(self) -> Sequence[float]:
        """Return the durations of the writes to the directory of --save-to."""
        return () if self._saves is None else tuple(self._saves.times)

    def save_trouble(self) -> str | None:
        """Return the cause of missing saves at present, if the ranks are the cause."""
        return None if self._saves is None else self._saves.trouble

    def receive(self, key: str, value: bytes) -> None:
        """Take a worker's message: `want.ID` asks for a commit of another host, `list.ID` for a list. Never blocks."""
        if key.startswith(("want.", "list.")):
            self._wants.put((key, value))

    def stop(self) -> None:
        """End the thread soon; the errands end with their links."""
        self._wants.put(None)

    def _run(self) -> None:
        while True:
            try:
                # Workers that wait for a commit come before copies that nobody needs yet.
                want = self._wants.get(timeout=_LOOK)
            except Empty:
                self._hosts.start_errands()
                self._copy()
                if self._saves is not None:
                    self._saves.save_if_due()
                continue
            if want is None:
                return
            self._hosts.start_errands()
            key, value = want
            verb, _, number = key.partition(".")
            answer = self._bring(value) if verb == "want" else self._list()
            self._server.put(KEPT, f"done.{number}", answer)

    def _plan(self) -> tuple[list[Version], list[tuple[str, str, KeptCommit]]]:
        copied = {host: store.copied for host, store in self._hosts.stores.items()}
        self._keepers = buddies(list(self._hosts.stores), self._count, self._keepers)
        return copies(self._hosts.own, copied, self._keepers)

    def _copy(self) -> None:
        """Copy the newest complete version, if it has not all of its copies."""
        if self._count == 0 or len(self._hosts.stores) == 1 or time.monotonic() < self._not_before:
            return
        self._hosts.order_all({})
        targets, missing = self._plan()
        if not missing and targets == self._hosts.pinned:
            return
        # Writers keep all whole versions until one is pinned. Otherwise fast ones would overwrite it meanwhile.
        self._hosts.order_all({"pins": self._hosts.pinned, "hold": True})
        targets, missing = self._plan()
        orders: dict[str, dict[str, Any]] = {
            host: {"pins": [*self._hosts.pinned, *targets], "hold": False, "fetch": []}
            for host in self._hosts.stores
        }
        for host, source, commit in missing:
            orders[host]["fetch"].append(self._fetch(commit, [source]))
        answers = self._hosts.send_orders(orders)
        for host, answer in answers.items():
            for problem in answer["problems"]:
                # Each attempt is another step, with another amount of free memory.
                topic = f"host {host}: {re.sub('[0-9.]+', '', problem)}"
                self._hosts.complain(f"host {host}: {problem}", topic=topic)
                # Each attempt holds writers up for a moment.
                self._not_before = time.monotonic() + _PAUSE
        if targets and not self._plan()[1] and answers.keys() >= orders.keys():
            self._hosts.pinned = targets
            first = targets[0][0]
            self._hosts.order_all({"pins": targets, "hold": False, "first": first})

    def _fetch(self, commit: KeptCommit, hosts: Sequence[str]) -> dict[str, Any]:
        addresses = [
            [address, self._hosts.stores[host].port]
            for host in hosts
            if host in self._hosts.stores and (facts := self._facts_of(host)) is not None
            for address in candidates(facts)
        ]
        return {"commit": list(commit[:-1]), "addresses": addresses}

    def _list(self) -> bytes:
        """Return all commits by host, as JSON."""
        self._hosts.order_all({})
        held = {host: store.own + store.copied for host, store in self._hosts.stores.items()}
        return json.dumps({host: [commit[:-1] for commit in items] for host, items in held.items()}).encode()

    def _bring(self, value: bytes) -> bytes:
        """Bring a commit to the host of a worker that waits for it; return b"1" if it is there."""
        try:
            want = json.loads(value)
        except (ValueError, RecursionError):
            return b"0"
        # Nonsense is the worker's own mistake.
        if not _WANT(want) or want["host"] not in self._hosts.stores:
            return b"0"
        commit = KeptCommit(*want["commit"])
        order = {
            "pins": [*self._hosts.pinned, commit.version],
            "hold": False,
            "fetch": [self._fetch(commit, want["hosts"])],
        }
        answer = self._hosts.send_orders({want["host"]: order}).get(want["host"])
        return b"0" if answer is None or answer["problems"] else b"1"
