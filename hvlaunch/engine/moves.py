"""The move of a host's workers to a spare: its workers start first, then one round swaps them in at a commit. Pure."""

from dataclasses import dataclass

from hvlaunch.engine import facts as tell
from hvlaunch.engine.actions import Action
from hvlaunch.engine.events import MoveWanted
from hvlaunch.engine.hosts import HostState, Pool, PoolHost
from hvlaunch.engine.round import RoundState
from hvlaunch.engine.rounds import Rounds
from hvlaunch.engine.waits import Wait, Waits
from hvlaunch.engine.workers import Worker, WorkerState
from hvlaunch.job import ElasticOptions

__all__ = ["Moves"]

_LEAST_TO_HAND_OVER = 2
"""Places in a round of a worker with the state and of a new one, to which it hands the state over."""


@dataclass(slots=True)
class _Move:
    host: str
    to: str | None
    since: float
    round: int | None = None
    """Number of the round that the host's workers leave; None while the spare's workers start."""
    workers: int = 0
    """Number of workers to replace."""
    exclusions: int = 0
    """The host's cool-downs before."""


class Moves:
    """Moves one host's workers at a time. While the spare's workers start, nothing changes for the round.

    Afterwards the host counts as excluded, and its workers leave like workers of a host outside of the pool.
    """

    def __init__(self, options: ElasticOptions, pool: Pool, rounds: Rounds, waits: Waits) -> None:
        self._options = options
        self._pool = pool
        self._rounds = rounds
        self._waits = waits
        self._move: _Move | None = None

    def refusal(self, host: str, to: str | None, now: float) -> str | None:
        """Return why the host can't be moved now, if so."""
        # Workers that never ask for a place have no moment at which another could take over.
        if not self._rounds.is_running or not self._rounds.forming.sees_commits:
            return "its workers are in no round with commits (hvlaunch.torch.elastic)"
        if self._move is not None:
            return f"the move of host {self._move.host} is not over yet"
        if self._pool.get(host) is None:
            return "the job has no such host"
        if host == to:
            return "its workers run there already"
        if not self._members(host):
            return "no worker of the round runs there"
        return self._lack(host, to, now)

    def begin(self, event: MoveWanted, now: float) -> list[Action]:
        """Begin to move a host; the caller has asked for a refusal."""
        self._move = _Move(event.host, event.to, now)
        self._pool.moving, self._pool.target = event.host, event.to
        # A spare that never gets ready must not leave the move open for ever.
        self._waits.begin(Wait.MOVING, None, now, self._options.elastic_timeout)
        return [tell.MoveBeginning(*event)]

    def advance(self, now: float) -> list[Action]:
        """Take the next step, before the next round is looked for."""
        move = self._move
        if move is None:
            return []
        return self._prepare(move, now) if move.round is None else self._leave(move, now)

    def _prepare(self, move: _Move, now: float) -> list[Action]:
        """Let the host's workers leave as soon as enough others wait for their places."""
        host, current = self._pool.get(move.host), self._rounds.round
        if host is None or current is None or not host.is_usable(now):
            return self._give_up(move, "it is lost, or has left the pool")
        reason = self._lack(move.host, move.to, now)
        if reason is None and self._waits.is_over(Wait.MOVING, now):
            seconds = self._options.elastic_timeout
            reason = f"too few new workers have asked for a place within {seconds:g} s"
        if reason is not None:
            return self._give_up(move, reason)
        members, ready = self._members(move.host), self._ready(move, now)
        if not self._rounds.is_running or len(ready) < len(members):
            return []
        move.round, move.workers, move.exclusions = current.number, len(members), host.cooldown.count
        self._pool.moving = None
        self._waits.end(Wait.MOVING)
        # Excluded from now on: the workers leave by the same rules as those of a host outside of the pool.
        host.cooldown.retire()
        self._rounds.changed()
        return [tell.HostMoving(move.host, tuple(dict.fromkeys(worker.host for worker in ready)))]

    def _leave(self, move: _Move, now: float) -> list[Action]:
        """Go back if the new workers are lost before the next round: the host is as good as it was."""
        current = self._rounds.round
        host = self._pool.get(move.host)
        if current is None or current.number != move.round:
            # The job may need the host again, even if its workers do not end.
            if host is not None and not self._members(move.host):
                host.was_moved = host.cooldown.is_for_good
            return []
        others = [host for host in self._pool if host.may_join(now)]
        has_enough = self._pool.capacity(others) >= self._rounds.bounds.least
        if has_enough and len(self._ready(move, now)) >= move.workers:
            return []
        # A host that was lost meanwhile has a cool-down of its own.
        if host is not None and host.cooldown.count == move.exclusions:
            host.cooldown.lift()
        self._rounds.changed()
        return self._give_up(
            move, "the new workers are lost" if has_enough else "the other hosts are too few"
        )

    def finish(self, now: float) -> list[Action]:
        """Note the end of the move: the next round runs, and no worker is left on the host."""
        move, current = self._move, self._rounds.round
        if move is None or move.round is None or current is None or current.number == move.round:
            return []
        if current.state is RoundState.BROKEN or self._rounds.workers.on(move.host):
            return []
        if host := self._pool.get(move.host):
            host.was_moved = host.cooldown.is_for_good
        self._end()
        return [tell.HostMoved(move.host, current.number, round(now - move.since, 3))]

    def _give_up(self, move: _Move, reason: str) -> list[Action]:
        self._end()
        return [tell.HostStays(move.host, reason, was_moving=True)]

    def _end(self) -> None:
        self._move = self._pool.moving = self._pool.target = None
        self._waits.end(Wait.MOVING)

    def _members(self, host: str) -> list[Worker]:
        """Return the host's workers of the round, also after their requests for the next place."""
        current = self._rounds.round
        return [
            worker
            for worker in self._rounds.workers.on(host)
            if not worker.is_ending
            and current is not None
            and (self._rounds.is_member(worker) or worker.last_round == current.number)
        ]

    def _ready(self, move: _Move, now: float) -> list[Worker]:
        """Return the waiting workers for the places of the host's workers."""
        current = self._rounds.round
        return [
            worker
            for worker in self._rounds.workers.within(WorkerState.WAITING)
            if worker.host != move.host
            and move.to in (None, worker.host)
            and self._pool.may_join(worker.seat, now)
            and (current is None or worker.last_round != current.number)
        ]

    def _lack(self, name: str, to: str | None, now: float) -> str | None:
        """Return why other hosts can't take the host's workers over, if so."""
        if to is not None and self._pool.get(to) is None:
            return f"the job has no host {to}"
        others = [
            host
            for host in self._pool
            if host.name != name
            and to in (None, host.name)
            and host.listed
            and not host.cooldown.holds(now)
            and host.state not in (HostState.PARTING, HostState.CLOSING)
        ]
        members = len(self._members(name))
        room = sum(self._room(host, members) for host in others)
        if room < members:
            problem = None if to is None else self._pool.errors.get(to)
            which = "the other hosts have" if to is None else f"host {to} has"
            slots = f"{room or 'no'} free slot{'' if room == 1 else 's'}"
            reason = f"{which} {slots} for {members} worker{'' if members == 1 else 's'}"
            return reason if problem is None else f"{reason} ({problem.cause})"
        current = self._rounds.round
        is_all = current is not None and members == current.size
        if is_all and self._rounds.bounds.most < _LEAST_TO_HAND_OVER:
            return "with --max-np 1 its worker can't hand its state over to another"
        return None

    def _room(self, host: PoolHost, members: int) -> int:
        """Return the number of slots, free or with a waiting worker; as many as needed for a host without a count."""
        if host.facts is None and host.host.slots is None and not host.was_ready:
            return members
        return max(0, self._pool.slots(host) - len(self._members(host.name)))
