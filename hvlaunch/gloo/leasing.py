"""Leases of a job's GPUs or slots: taken on all hosts or not at all, after each host's agent has answered.

The hosts' kernels keep the leases, as locks. The choice is made among units that were free a moment ago.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from hvlaunch.agent.errands.leases import IDLE, STATE
from hvlaunch.agent.leases import TAKEN, TICKET
from hvlaunch.agent.quick import dumps, loads
from hvlaunch.console.status import count, duration
from hvlaunch.driver.links.errands import Errand, Limits
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.errors import HostError, HostFault, LeaseImpossible, LeasesTaken
from hvlaunch.hosts.parse import host_set
from hvlaunch.job import JobSpec, LeaseOptions
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.outside.queue import Queue, QueueEntry, QueueNotWritten

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.engine.events import HostFacts

__all__ = [
    "Holder",
    "HostOffer",
    "JobLeases",
    "Looks",
    "Ticket",
    "Unit",
    "choose",
    "first_claim",
    "holders",
    "offer_of",
    "stopper",
    "units_noun",
]


class Holder(NamedTuple):
    """The holder of a lease, or a user whose process is on a GPU without a lease."""

    user: str
    job: str
    """The holder's own word; the command of a process without a lease."""
    since: float | None = None
    """Wall clock time, by the holder's own word."""
    is_outside: bool = False
    """True for a process without a lease."""


class Unit(NamedTuple):
    """A GPU or a slot of a host."""

    name: str
    """Name of its lock, and a GPU's name for CUDA_VISIBLE_DEVICES."""
    is_free: bool
    holder: Holder | None = None


class Ticket(NamedTuple):
    """A waiting job's claim on a host; tickets are in the order of their times on all hosts."""

    since: float
    job: str
    user: str
    is_mine: bool
    """True if it is of the user who asks."""


class HostOffer(NamedTuple):
    """The units of a host."""

    host: str
    units: tuple[Unit, ...]
    tickets: tuple[Ticket, ...] = ()
    most: int | None = None
    """Most workers that the user wants there; None for any number."""

    @property
    def free(self) -> tuple[str, ...]:
        """Names of free units."""
        return tuple(unit.name for unit in self.units if unit.is_free)

    def room(self, size: int, *, per_worker: int) -> int:
        """Return the number of workers for which so many units suffice."""
        room = size // per_worker
        return room if self.most is None else min(room, self.most)


def offer_of(host: str, most: int | None, state: Mapping[str, Any]) -> HostOffer:
    """Return a host's offer by a state of the errand `leases`."""
    units = []
    for unit in state["units"]:
        holder = unit["holder"] and Holder(*(unit["holder"][name] for name in ("user", "job", "since")))
        if holder is None and not unit["is_free"]:
            processes = unit["processes"] or [{"user": "?", "command": "?"}]
            holder = Holder(processes[0]["user"], processes[0]["command"], is_outside=True)
        units.append(Unit(unit["name"], unit["is_free"], holder))
    tickets = (
        Ticket(*(ticket[name] for name in ("since", "job", "user", "is_mine"))) for ticket in state["tickets"]
    )
    return HostOffer(host, tuple(units), tuple(tickets), most)


def first_claim(
    offer: HostOffer, job: str, since: float, fair_wait: float, now: float, *, passes_own: bool = False
) -> Ticket | None:
    """Return the ticket of an earlier job with the first claim: it has waited for `fair_wait` seconds.

    `since` is when the job has queued up, infinite if it has not. The order, by time and then by job, is the same for all jobs on all
    hosts, so no two jobs keep each other away. With `passes_own`, tickets of the same user do not count.
    """
    for ticket in sorted(offer.tickets):
        if (ticket.since, ticket.job) >= (since, job):
            return None
        is_passed = ticket.is_mine and (passes_own or ticket.job == job)
        if now - ticket.since >= fair_wait and not is_passed:
            return ticket
    return None


def choose(offers: Sequence[HostOffer], workers: int, per_worker: int) -> dict[str, tuple[str, ...]] | None:
    """Return the units to lease by host, on as few hosts as possible; None if too few are free."""
    rooms = {offer.host: offer.room(len(offer.free), per_worker=per_worker) for offer in offers}
    chosen: dict[str, tuple[str, ...]] = {}
    left = workers
    # Stable: equal hosts in the user's order.
    waiting = sorted(offers, key=lambda offer: -rooms[offer.host])
    while left > 0 and waiting and rooms[waiting[0].host]:
        # The last host is the smallest sufficient host: larger gaps stay for others.
        enough = [offer for offer in waiting if rooms[offer.host] >= left]
        offer = min(enough, key=lambda offer: rooms[offer.host]) if enough else waiting[0]
        waiting.remove(offer)
        count = min(left, rooms[offer.host])
        chosen[offer.host] = offer.free[: count * per_worker]
        left -= count
    return chosen if left <= 0 else None


_NO_LIMITS = Limits(seconds=None, memory=None, output=None)
_LONGEST_LINE = 1 << 20
_FIRST_LOOK = 60.0
"""Seconds for the first look at a host's GPUs: NVIDIA's library may hang."""
_KEEP_EVERY = 20.0
"""Seconds between looks at the use of the job's own GPUs."""
_LOOKS_IN_MAX_IDLE = 10
"""Least number of such looks within --max-idle."""
_TOLD_EVERY = 20.0
"""Seconds between words to the engine that the host still waits, less than its patience."""
_AGAIN = 0.2
_ATTEMPTS = 3
"""Tries without --wait: another job may be giving its leases back, since it got too few."""
_CLAIMS_EVERY = 1.0
"""Seconds between looks at claims, which begin with time alone."""
_HINT = "hvlaunch hosts -H HOSTS, or --lease-slots N for hosts without GPUs"
_SHOWN = 6
"""Holders in a message."""


class Looks:
    """States of a host from its errand `leases`. `changed` is notified of each new state, and of the end."""

    def __init__(self, link: "HostLink", arguments: Mapping[str, Any], changed: threading.Condition) -> None:
        """Raises ErrandFailed."""
        self.state: Mapping[str, Any] | None = None
        self.problem: HostError | None = None
        self.idle: float | None = None
        """Seconds for which none of the job's GPUs was at work; None if nothing is known."""
        self._host = link.host.name
        self._data = b""
        self._changed = changed
        self.errand = link.errands.start("leases", arguments, _NO_LIMITS, on_data=self._add, on_end=self._end)

    @property
    def is_over(self) -> bool:
        """True if the host can't be used."""
        return self.problem is not None or (self.state is not None and self.state["cause"] is not None)

    def wait_after(self, shown: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Wait for another state than this, and return it; None at the end of the errand. Raises HostError."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.state is not shown or self.problem is not None or self.errand.has_ended
            )
            if self.problem is not None:
                raise self.problem
            if self.state is not None and self.state["cause"] is not None:
                raise HostError(self.state["cause"], host=self._host)
            return None if self.state is shown else self.state

    def _add(self, data: bytes) -> None:
        *lines, self._data = (self._data + data).split(b"\n")
        with self._changed:
            for line in lines:
                try:
                    state = loads(line.decode("ascii"))
                except (ValueError, RecursionError):
                    state = None
                if IDLE(state):
                    self.idle = state["idle"]
                elif not STATE(state):
                    self.problem = HostError("its list of leases makes no sense", host=self._host)
                else:
                    self.state = state
            if len(self._data) > _LONGEST_LINE:
                self.problem = HostError("its list of leases has no end", host=self._host)
                self._data = b""
            self._changed.notify_all()

    def _end(self, errand: Errand) -> None:
        with self._changed:
            try:
                errand.result()
            except HostError as error:
                self.problem = self.problem or error
            self._changed.notify_all()


class _Host:
    """A host whose agent is there."""

    def __init__(
        self, link: "HostLink", facts: "HostFacts", looks: Looks, changed: threading.Condition
    ) -> None:
        self.name = link.host.name
        self.most = link.host.slots
        self.looks = looks
        # The same for every user, whatever the users call the host.
        self.order = facts.boot_id or "", self.name
        self._link = link
        self._changed = changed
        self.tickets: list[str] = []
        """The job's ticket, while it has one here."""
        self.cause: str | None = None
        self._answers: list[Mapping[str, Any]] = []
        link.held = self._answer

    def _answer(self, header: Mapping[str, Any]) -> None:
        with self._changed:
            self._answers.append(header)
            self._changed.notify_all()

    def hold(self, directory: str, names: Sequence[str], note: Mapping[str, Any]) -> bool:
        """Have the agent hold exactly these; return False if it can't, or is lost. `cause` then has its words, if any."""
        with self._changed:
            self._answers.clear()
            self._link.send(
                {"type": "hold", "directory": directory, "names": [*names], "note": dumps(dict(note))}
            )
            self._changed.wait_for(lambda: self._answers or self.looks.problem is not None)
            self.cause = self._answers[0]["cause"] if self._answers else None
            return bool(self._answers) and self._answers[0]["names"] == sorted(names)


class JobLeases:
    """The leases of a job. `about` has its id, and when it began; `say` prints a message.

    `stop` ends the job for a cause: its GPUs have done nothing for --max-idle. `is_successor`: the leases of a killed driver may last as long as its agents.
    """

    def __init__(
        self,
        spec: JobSpec,
        options: LeaseOptions,
        about: Mapping[str, Any],
        say: Callable[[str], None],
        *,
        stop: Callable[[str], object] = lambda _cause: None,
        is_successor: bool = False,
    ) -> None:
        self._spec = spec
        self._stop = stop
        self._entry: QueueEntry | None = None
        if spec.queued is not None:
            self._entry = QueueEntry(Queue(spec.queued.queue), spec.queued.number, spec.queued.job_id)
        self._options = options._replace(wait=options.wait or is_successor)
        self._job: str = about["id"]
        self._since: float = about["began"]
        self._say = (lambda _: None) if spec.console.quiet else say
        self._changed = threading.Condition()
        self._hosts: dict[str, _Host] = {}
        self._gone: set[str] = set()
        self._outcome: Mapping[str, tuple[str, ...]] | HostError | None = None
        self._speaker = ""
        """The host whose thread raises a problem of all hosts."""
        self._is_begun = False
        self._stage = "leases"
        self._noted: object = None
        self._warned: set[str] = set()
        self._per_worker = spec.gpus_per_worker or 1
        self._workers = spec.np or sum(host.slots or 0 for host in spec.hosts)

    def lease_host(self, link: "HostLink", facts: "HostFacts", ready: "Callable[[HostFacts], None]") -> None:
        """Wait for the leases of all hosts, and call `ready` with this host's. For a thread of each host. Raises HostError."""
        name = link.host.name
        try:
            ready(facts._replace(leased=self._leases_of(link, facts)))
        except HostError:
            self.drop(name)
            raise

    def drop(self, name: str) -> None:
        """Do without a host that has failed."""
        with self._changed:
            self._gone.add(name)
            self._changed.notify_all()

    def watch(self, event: on.Event, actions: "Sequence[do.Action]", _now: float) -> None:
        """Note hosts that fail before they come here; for the loop's thread."""
        if isinstance(event, on.HostFailed | on.HostGone):
            self.drop(event.host)
        for action in actions:
            if isinstance(action, do.Abandon):
                self.drop(action.host)

    def _leases_of(self, link: "HostLink", facts: "HostFacts") -> tuple[str, ...]:
        options = self._options
        keep = None if options.slots is not None else _KEEP_EVERY
        if keep is not None and options.max_idle is not None:
            keep = min(keep, options.max_idle / _LOOKS_IN_MAX_IDLE)
        arguments = {
            "directory": options.directory,
            "slots": options.slots,
            "watch": True,
            "every": None,
            "keep": keep,
        }
        looks = Looks(link, arguments, self._changed)
        try:
            with self._changed:
                self._hosts[link.host.name] = _Host(link, facts, looks, self._changed)
                self._changed.notify_all()
                if not self._is_begun:
                    self._is_begun = True
                    threading.Thread(target=self._run, name="leases", daemon=True).start()
            self._wait(link, looks)
        except BaseException:
            looks.errand.stop()
            raise
        leased = () if isinstance(self._outcome, HostError) else (self._outcome or {}).get(link.host.name, ())
        # On hosts with leases the errand goes on, and notes when their GPUs were at work.
        (looks.errand.close_input if leased and keep else looks.errand.stop)()
        # A common problem is told once.
        if isinstance(self._outcome, HostError) and link.host.name == self._speaker:
            raise self._outcome
        return leased

    def _wait(self, link: "HostLink", looks: Looks) -> None:
        """Wait for the outcome. Raises HostError."""
        limit = time.monotonic() + _FIRST_LOOK
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._outcome is not None or looks.is_over, _TOLD_EVERY)
                if looks.problem is not None:
                    raise looks.problem
                if self._outcome is not None:
                    return
                if looks.state is not None and looks.state["cause"] is not None:
                    raise HostError(looks.state["cause"], host=link.host.name, hint=_HINT)
            if looks.state is None and time.monotonic() > limit:
                raise HostError(f"its GPUs have not answered for {_FIRST_LOOK:.0f} s", host=link.host.name)
            link.tell_preparing(self._stage)

    def _run(self) -> None:
        outcome: Mapping[str, tuple[str, ...]] | HostError
        try:
            outcome = self._lease()
        except HostError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 (the hosts' threads wait for the outcome)
            outcome = HostFault(f"internal error: {type(error).__name__}: {error}", host="leases")
        with self._changed:
            self._speaker = next(
                (host.name for host in self._spec.hosts if host.name not in self._gone), self._speaker
            )
            self._outcome = outcome
            self._changed.notify_all()
        if self._options.max_idle is not None and not isinstance(outcome, HostError):
            self._watch_idle([self._hosts[name].looks for name in outcome], self._options.max_idle)

    def _watch_idle(self, looks: Sequence[Looks], limit: float) -> None:
        """Warn when the job's GPUs have done nothing for half of the limit, and stop the job at the limit."""
        is_warned = False
        gpus = units_noun(self._workers * self._per_worker, are_slots=False)
        while True:
            with self._changed:
                self._changed.wait(_KEEP_EVERY)
                # A host without an answer may be at work.
                times = [inf if look.idle is None else look.idle for look in looks]
                if all(look.errand.has_ended for look in looks):
                    return
            idle = 0.0 if inf in times else min(times)
            if idle >= limit:
                self._stop(
                    f"the job is stopped: its {gpus} have done nothing for {duration(idle)} (--max-idle)"
                )
                return
            if idle >= limit / 2 and not is_warned:
                self._say(
                    f"warning: its {gpus} have done nothing for {duration(idle)}; the job is stopped after "
                    f"{duration(limit)} (--max-idle)"
                )
            is_warned = idle >= limit / 2

    def _lease(self) -> Mapping[str, tuple[str, ...]]:
        """Take the leases. Without --wait, a few attempts allow for jobs that give theirs back. Raises HostError."""
        attempts, is_queued = 0, False
        while True:
            offers, now = self._offers(), time.time()
            total = sum(offer.room(len(offer.units), per_worker=self._per_worker) for offer in offers)
            if total < self._workers:
                self._refuse_hosts()
                raise LeaseImpossible(
                    f"{self._wanted()} were asked for, and the hosts have room for {total} of {self._workers} workers"
                )
            since = self._since if is_queued else inf
            claims = [
                first_claim(
                    offer,
                    self._job,
                    since,
                    self._options.fair_wait,
                    now,
                    passes_own=self._options.passes_own,
                )
                for offer in offers
            ]
            self._check_queue(None)
            open_to_us = [offer for offer, claim in zip(offers, claims, strict=True) if claim is None]
            chosen = choose(open_to_us, self._workers, self._per_worker)
            if chosen is not None and self._hold(chosen):
                self._check_queue({host: len(names) for host, names in chosen.items()})
                self._say(f"leases {self._wanted()}: {_counts(chosen)}")
                return chosen
            attempts += 1
            first = next((claim for claim in claims if claim is not None), None)
            shortage = self._shortage(offers, first, now)
            self._note_wait(offers, shortage)
            if not self._options.wait and attempts >= _ATTEMPTS:
                raise LeasesTaken(f"{self._wanted()} were asked for; {shortage}")
            if self._options.wait and not is_queued:
                is_queued = True
                self._say(f"waits for {self._wanted()}; {shortage}")
                self._stage = f"wait for {self._wanted()}"
                self._place_tickets()
            with self._changed:
                self._changed.wait(_AGAIN if chosen is not None or not self._options.wait else _CLAIMS_EVERY)

    def _check_queue(self, units: Mapping[str, int] | None) -> None:
        """Give up if the queue calls the job back. With `units`, the leases are taken and the job begins. Raises HostError."""
        if self._entry is None:
            return
        try:
            is_in_vain = self._entry.is_withdrawn if units is None else not self._entry.begin(units)
        except QueueNotWritten as error:
            raise LeasesTaken(error.cause, hint="") from None
        if is_in_vain:
            raise LeasesTaken("the queue has called the job back", hint="hvlaunch queue ls")

    def _note_wait(self, offers: Sequence[HostOffer], text: str) -> None:
        """Tell the queue what the job waits for."""
        wait = {offer.host: len(offer.free) for offer in offers}, text
        if self._entry is not None and wait != self._noted:
            self._noted = wait
            self._entry.note_wait(wait[0], sum(len(offer.units) for offer in offers), text)

    def _wanted(self) -> str:
        return units_noun(self._workers * self._per_worker, are_slots=self._options.slots is not None)

    def _shortage(self, offers: Sequence[HostOffer], claim: Ticket | None, now: float) -> str:
        free = sum(len(offer.free) for offer in offers)
        total = sum(len(offer.units) for offer in offers)
        words = holders(offers, now, are_slots=self._options.slots is not None)
        first = f"; first claim: {claim.user}, job {claim.job}" if claim is not None else ""
        return f"free: {free} of {total}{first}{f'; {words}' if words else ''}"

    def _offers(self) -> list[HostOffer]:
        """Wait until each host has shown what it has, or has failed."""
        with self._changed:
            names = [host.name for host in self._spec.hosts]
            self._changed.wait_for(lambda: all(name in self._gone or self._has_shown(name) for name in names))
            hosts = [self._hosts[name] for name in names if name not in self._gone]
            return [offer_of(host.name, host.most, host.looks.state or {}) for host in hosts]

    def _refuse_hosts(self) -> None:
        """Raise HostError for a host that can't lease anything: its own thread may come later."""
        with self._changed:
            for host in self._hosts.values():
                cause = (host.looks.state or {}).get("cause")
                if cause is not None:
                    raise HostError(cause, host=host.name, hint=_HINT)

    def _has_shown(self, name: str) -> bool:
        host = self._hosts.get(name)
        return host is not None and host.looks.state is not None

    def _in_order(self) -> list[_Host]:
        """Return the hosts in the order of all jobs: of two jobs, the first at a common host gets its leases."""
        with self._changed:
            hosts = [host for host in self._hosts.values() if host.name not in self._gone]
        return sorted(hosts, key=lambda host: host.order)

    def _hold(self, chosen: Mapping[str, tuple[str, ...]]) -> bool:
        """Take these leases; give all back if a lease is missing."""
        hosts = [host for host in self._in_order() if host.name in chosen]
        if len(hosts) < len(chosen):
            return False  # a host has just failed
        note = {"job": self._spec.name or self._job, "since": time.time()}
        for index, host in enumerate(hosts):
            if not host.hold(self._options.directory, [*chosen[host.name], *host.tickets], note):
                cause = host.cause
                for earlier in hosts[: index + 1]:
                    earlier.hold(self._options.directory, earlier.tickets, note)
                self._warn(host, cause)
                return False
        for host in self._in_order():
            if host.tickets:
                host.tickets = []
                host.hold(self._options.directory, chosen.get(host.name, ()), note)
        return True

    def _place_tickets(self) -> None:
        """Queue up on all hosts, in the order of leases. A host may refuse the ticket; the job waits without."""
        note = {"job": self._job, "since": self._since}
        for host in self._in_order():
            tickets = [TICKET + self._job]
            if host.hold(self._options.directory, tickets, note):
                host.tickets = tickets
            else:
                self._warn(host, host.cause)

    def _warn(self, host: _Host, cause: str | None) -> None:
        """Tell once why leases of a host can't be had, other than for another job."""
        if cause not in (None, TAKEN) and cause not in self._warned:
            self._warned.add(str(cause))
            self._say(f"warning: host {host.name}: leases: {cause}")


def stopper(say: Callable[[str], None], put: Callable[[on.Event], None]) -> Callable[[str], None]:
    """Return a function that says why the job is stopped, with --quiet too, and stops it as `hvlaunch stop` does."""

    def stop(cause: str) -> None:
        say(cause)
        put(on.Interrupted(signal.SIGTERM))

    return stop


def _counts(chosen: Mapping[str, tuple[str, ...]]) -> str:
    return ", ".join(f"{len(names)} on {name}" for name, names in chosen.items())


def units_noun(number: int, *, are_slots: bool) -> str:
    """Return a number with its noun."""
    return count(number, "slot" if are_slots else "GPU")


def holders(offers: Iterable[HostOffer], now: float, *, are_slots: bool) -> str:
    """Return the holders of busy units in words."""
    by_holder: dict[Holder, dict[str, int]] = {}
    for offer in offers:
        for unit in offer.units:
            if unit.holder is not None:
                counts = by_holder.setdefault(unit.holder, {})
                counts[offer.host] = counts.get(offer.host, 0) + 1
    words = [_words(holder, counts, now, are_slots=are_slots) for holder, counts in by_holder.items()]
    more = f"; {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return "; ".join(words[:_SHOWN]) + more


def _words(holder: Holder, counts: Mapping[str, int], now: float, *, are_slots: bool) -> str:
    units = f"{units_noun(sum(counts.values()), are_slots=are_slots)} on {host_set(list(counts))}"
    if holder.is_outside:
        return f"{units}: outside hvlaunch, {holder.job} of {holder.user}"
    since = "" if holder.since is None else f" for {duration(max(0.0, now - holder.since))}"
    return f"{units}: {holder.user}, job {holder.job or '?'}{since}"
