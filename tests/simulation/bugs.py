"""Bugs of the engine, planted by hand: each removes something that jobs rely on over time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from hvlaunch.engine import facts as tell
from hvlaunch.engine import lifecycle, workers
from hvlaunch.engine import round as round_module
from hvlaunch.engine.engine import Engine
from hvlaunch.engine.events import HostAnswers, HostQuiet
from hvlaunch.engine.health import Draining, Health, Hearing, Overdue
from hvlaunch.engine.hosts import Network, Pool, Probing
from hvlaunch.engine.lifecycle import AT_WORK, Lifecycle, Phase
from hvlaunch.engine.policy import Policy
from hvlaunch.engine.round import Restarts, RoundState
from hvlaunch.engine.rounds import AskingWorkers, FreshWorkers, Rounds
from hvlaunch.engine.waits import Cooldown, Wait, Waits
from hvlaunch.engine.workers import StacksBeforeKill, Worker, Workers, WorkerState
from hvlaunch.job import ElasticOptions

__all__ = ["BUGS", "Bug"]

Patch = pytest.MonkeyPatch


class Bug(NamedTuple):
    """A bug, the words of the law that finds it, and a seed just before one that does."""

    plant: Callable[[Patch], None]
    words: str
    seed: int


def instead(patch: Patch, owner: object, name: str, wrong: Callable[..., Any]) -> None:
    """Replace a function by `wrong`, which gets the right one before its arguments."""
    right = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: wrong(right, *args, **kwargs))


def afterwards(patch: Patch, owner: object, name: str, spoil: Callable[..., object]) -> None:
    """Call `spoil` after the right function, with its result and arguments."""

    def wrong(right: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        spoil(result, *args)
        return result

    instead(patch, owner, name, wrong)


def forgetting(patch: Patch, owner: type, name: str, attribute: str) -> None:
    """Undo what the method does to this attribute."""

    def wrong(right: Callable[..., Any], self: object, *args: Any) -> Any:
        before = getattr(self, attribute)
        result = right(self, *args)
        setattr(self, attribute, before)
        return result

    instead(patch, owner, name, wrong)


def nothing_begins(patch: Patch, wait: Wait) -> None:
    """Make a wait of this kind never begin, so that it has no bound."""
    instead(
        patch,
        Waits,
        "begin",
        lambda right, self, kind, *args: None if kind is wait else right(self, kind, *args),
    )


def meanwhile(patch: Patch, owner: object, name: str, other: object, attribute: str, value: Any) -> None:
    """Give another object this value of an attribute while the function runs."""

    def wrong(right: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as short:
            short.setattr(other, attribute, value)
            return right(*args, **kwargs)

    instead(patch, owner, name, wrong)


# Failures


def progress_forgives_no_strike(patch: Patch) -> None:
    instead(patch, Policy, "_strike", lambda right, *args, fruitful: right(*args, fruitful=False))


def ends_are_ordered_by_their_news(patch: Patch) -> None:
    instead(
        patch,
        Worker,
        "ended",
        lambda right, self, event, since, now: right(self, event, since, now)._replace(when=now - since),
    )


def the_last_failure_is_named(patch: Patch) -> None:
    def last(right, ends):
        found = [end for end in ends if not (end.ok or end.stopped)]
        return max(found, key=lambda end: end.when) if found else right(ends)

    instead(patch, lifecycle, "cause_of", last)


def one_restart_too_many(patch: Patch) -> None:
    afterwards(patch, Restarts, "__init__", lambda _, self, _options: _allow(self, 1))


def one_restart_too_few(patch: Patch) -> None:
    afterwards(patch, Restarts, "__init__", lambda _, self, _options: _allow(self, -1))


def _allow(restarts: Restarts, more: int) -> None:
    if restarts._limit is not None:
        restarts._limit += more


def changes_of_the_pool_use_up_restarts(patch: Patch) -> None:
    policies: dict[Rounds, Policy] = {}
    afterwards(patch, Policy, "__init__", lambda _, self, *args: policies.update({args[2]: self}))
    afterwards(
        patch,
        Rounds,
        "change",
        lambda _, self, _cause, now: policies[self]._restarts.failed(now, fruitful=None),
    )


def a_failure_waits_forever(patch: Patch) -> None:
    nothing_begins(patch, Wait.SETTLING)


def an_early_end_is_not_reported(patch: Patch) -> None:
    patch.setattr(tell, "WorkerEndedEarly", lambda _rank, host: tell.HostNotClosing(host))


# Hosts


def a_relisted_host_is_not_forgiven(patch: Patch) -> None:
    def wrong(right, self, hosts):
        before = {host.name: (host.cooldown.until, host.strikes) for host in self}
        right(self, hosts)
        for host in self:
            if host.name in before:
                host.cooldown.until, host.strikes = before[host.name]

    instead(patch, Pool, "update", wrong)


def a_host_is_connected_in_its_cooldown(patch: Patch) -> None:
    holds = Cooldown.holds
    meanwhile(patch, Policy, "needed_hosts", Cooldown, "holds", lambda self, now: holds(self, now + 2.0))


def the_end_of_a_cooldown_wakes_nothing(patch: Patch) -> None:
    nothing_begins(patch, Wait.COOLDOWN)


def a_cooldown_doubles_beyond_its_most(patch: Patch) -> None:
    def wrong(right, self, now, bounds):
        return right(self, now, bounds and (bounds[0], 64 * bounds[1]))

    instead(patch, Cooldown, "begin", wrong)


def a_cooldown_never_doubles(patch: Patch) -> None:
    def wrong(right, self, now, bounds):
        self.count = 0
        return right(self, now, bounds)

    instead(patch, Cooldown, "begin", wrong)


def an_excluded_host_has_no_probation(patch: Patch) -> None:
    afterwards(patch, Policy, "exclude", lambda _, _self, host, *_args: setattr(host, "strikes", 0))


def leaving_a_round_has_no_time(patch: Patch) -> None:
    afterwards(
        patch,
        AskingWorkers,
        "break_off",
        lambda _, self, _current, _cause, now: self._waits.begin(Wait.LEAVING, None, now + 0.5),
    )


def the_wrong_host_is_excluded(patch: Patch) -> None:
    instead(
        patch, Policy, "exclude", lambda right, self, _, *args: right(self, next(iter(self._pool)), *args)
    )


def lost_hosts_are_never_tried_again(patch: Patch) -> None:
    patch.setattr(Policy, "_exclude_lost", lambda self, host, cause, now: self.exclude(host, cause, now)[:1])


def the_network_is_taken_untried(patch: Patch) -> None:
    patch.setattr(Probing, "is_settled", lambda self, now, *, others: self.network is not None)
    patch.setattr(Network, "problem", lambda self: None)


def hosts_never_try_each_other_again(patch: Patch) -> None:
    patch.setattr(Probing, "doubt", lambda self: None)


def the_first_failed_probe_is_final(patch: Patch) -> None:
    patch.setattr(Probing, "is_certain", lambda *_: True)


def probing_does_not_wait_for_silent_hosts(patch: Patch) -> None:
    patch.setattr(Network, "is_final", True)


def a_slot_is_forgotten(patch: Patch) -> None:
    instead(
        patch,
        Pool,
        "has_slot",
        lambda right, self, seat, now: right(self, (seat[0], seat[1] + (seat[1] > 0)), now),
    )


# Rounds


def survivors_sit_slot_by_slot(patch: Patch) -> None:
    patch.setattr(round_module, "_seniority", lambda worker: worker.slot)


def survivors_go_backwards(patch: Patch) -> None:
    patch.setattr(round_module, "_seniority", lambda worker: (not worker.has_state, -worker.rank))


def survivors_are_left_out(patch: Patch) -> None:
    def new(self):
        waiting = [worker for worker in self if worker.state is WorkerState.WAITING]
        return [worker for worker in waiting if not worker.has_state] or waiting

    meanwhile(patch, AskingWorkers, "choose", Workers, "waiting", property(new))


def spares_are_forgotten(patch: Patch) -> None:
    def wrong(right, self, hosts, now):
        room = self._bounds.most - len(self._workers.living)
        return right(self, hosts, now) if room > 0 or math.isinf(room) else {}

    instead(patch, AskingWorkers, "_free_slots", wrong)


def a_round_begins_before_the_last_is_over(patch: Patch) -> None:
    meanwhile(patch, AskingWorkers, "choose", Workers, "count", lambda self, state: 0)


def fresh_workers_start_beside_old_ones(patch: Patch) -> None:
    patch.setattr(FreshWorkers, "is_busy", lambda self, current: False)


def the_last_worker_with_the_state_is_dismissed(patch: Patch) -> None:
    patch.setattr(Draining, "_has_survivors", lambda self, now: True)


def a_round_forgets_its_cause(patch: Patch) -> None:
    afterwards(patch, Rounds, "_begin", lambda current, *_: setattr(current, "cause", None))


def a_round_ends_without_a_cause(patch: Patch) -> None:
    instead(
        patch,
        AskingWorkers,
        "gain",
        lambda right, self, current, now: right(self, current, now) + (now > 20.0),
    )


def a_change_is_not_followed(patch: Patch) -> None:
    patch.setattr(
        AskingWorkers,
        "is_busy",
        lambda self, current: current is not None and current.state is RoundState.CHANGING,
    )


# Waits


def a_straggler_in_a_broken_round_is_not_killed(patch: Patch) -> None:
    afterwards(patch, AskingWorkers, "break_off", lambda _, self, *__: self._waits.end(Wait.LEAVING))


def a_meeting_has_no_bound(patch: Patch) -> None:
    nothing_begins(patch, Wait.MEETING)


def a_commit_is_due_too_soon(patch: Patch) -> None:
    def wrong(right, self, wait, of, until, bound=0.0):
        right(self, wait, of, until, 5.0 if wait is Wait.COMMIT and bound < math.inf else bound)

    instead(patch, Waits, "begin", wrong)


def _health_has(patch: Patch, change: Callable[[ElasticOptions], ElasticOptions]) -> None:
    instead(
        patch,
        Health,
        "__init__",
        lambda right, self, options, *others: right(self, change(options), *others),
    )


def a_silent_worker_is_not_killed(patch: Patch) -> None:
    instead(patch, Worker, "beat", lambda right, self, commit, now: right(self, commit, None))


def a_beating_worker_is_killed(patch: Patch) -> None:
    _health_has(patch, lambda options: replace(options, worker_timeout=4.0))


def a_silent_host_excuses_no_worker(patch: Patch) -> None:
    patch.setattr(Hearing, "hears", lambda self, event, now: None)


def a_host_that_answers_again_has_no_time(patch: Patch) -> None:
    def wrong(right, self, event, now):
        right(self, event, now)
        if isinstance(event, HostAnswers):
            del self._answers[event.host]

    instead(patch, Hearing, "hears", wrong)


def a_hanging_worker_on_a_cut_host_is_not_killed(patch: Patch) -> None:
    def wrong(right, self, event, now):
        if isinstance(event, HostQuiet):
            right(self, event, now)

    instead(patch, Hearing, "hears", wrong)
    patch.setattr(
        Hearing, "until", lambda self, worker, since, time, _: self._answers.get(worker.host, since + time)
    )


def workers_silent_at_once_are_killed(patch: Patch) -> None:
    instead(
        patch,
        Health,
        "_silent_by",
        lambda right, self, worker, newest, **_: right(self, worker, newest, is_alone=True),
    )


def a_survivor_of_sigkill_is_awaited_forever(patch: Patch) -> None:
    patch.setattr(Overdue, "hosts", lambda self, now: [])


def a_survivor_of_sigkill_holds_up_the_end(patch: Patch) -> None:
    instead(
        patch,
        Engine,
        "_give_up_stuck",
        lambda right, self, now: right(self, now) if self.phase in AT_WORK else [],
    )


def a_parting_agent_is_awaited_forever(patch: Patch) -> None:
    afterwards(
        patch,
        Lifecycle,
        "parting",
        lambda _, self, host, _now: self._pool._waits.end(Wait.PARTING, host.name),
    )


def a_closing_agent_is_awaited_forever(patch: Patch) -> None:
    afterwards(
        patch,
        Lifecycle,
        "release",
        lambda _, self, host, _now: self._pool._waits.end(Wait.CLOSING, host.name),
    )


def the_first_list_is_awaited_forever(patch: Patch) -> None:
    nothing_begins(patch, Wait.FIRST_LIST)


# The end


def starting_workers_are_not_stopped_at_the_end(patch: Patch) -> None:
    def wrong(right, self, elastic, now):
        waiting = self._workers.waiting
        placed = [
            worker for worker in self._workers.living if self._rounds.is_member(worker) or worker in waiting
        ]
        with pytest.MonkeyPatch.context() as short:
            short.setattr(Workers, "living", property(lambda _: placed))
            return right(self, elastic, now)

    instead(patch, Policy, "_finish", wrong)


def a_second_interrupt_is_ignored(patch: Patch) -> None:
    instead(
        patch,
        Lifecycle,
        "interrupt",
        lambda right, self, *args: [] if self.phase is Phase.STOPPING else right(self, *args),
    )


def other_workers_are_not_stopped_at_the_end(patch: Patch) -> None:
    patch.setattr(Lifecycle, "hosts_with_workers", lambda self: [])


# Inspections


def stacks_are_awaited_forever(patch: Patch) -> None:
    patch.setattr(workers, "TIME", 5.0)


def complete_stacks_release_no_kill(patch: Patch) -> None:
    patch.setattr(StacksBeforeKill, "taken", lambda *_: [])


BUGS: Sequence[Bug] = (
    Bug(stacks_are_awaited_forever, "is killed at", 11),
    Bug(complete_stacks_release_no_kill, "all stacks are there, and", 11),
    Bug(progress_forgives_no_strike, "in spite of progress", 13),
    Bug(starting_workers_are_not_stopped_at_the_end, "was not told that the job ends", 127),
    Bug(a_relisted_host_is_not_forgiven, "since it was listed", 1486),
    Bug(ends_are_ordered_by_their_news, "has a wrong time", 0),
    Bug(one_restart_too_many, "failures are made up for, of 2", 103),
    Bug(one_restart_too_few, "1 restarts, and 2 were allowed", 23),
    Bug(changes_of_the_pool_use_up_restarts, "restarts, and 2 were allowed", 64),
    Bug(survivors_sit_slot_by_slot, "rank 0 is no", 27),
    Bug(survivors_go_backwards, "survivors change their order", 16),
    Bug(a_host_is_connected_in_its_cooldown, "is connected in its cool-down", 16),
    Bug(the_end_of_a_cooldown_wakes_nothing, "sleeps beyond the end of a cool-down", 14),
    Bug(a_cooldown_doubles_beyond_its_most, "excluded for 16.0 s", 248),
    Bug(a_cooldown_never_doubles, "s, in place of", 16),
    Bug(an_excluded_host_has_no_probation, "fails again, and is not excluded", 493),
    Bug(leaving_a_round_has_no_time, "before they had time to ask", 39),
    Bug(spares_are_forgotten, "no worker is started in", 8),
    Bug(a_round_begins_before_the_last_is_over, "is still in its round", 8),
    Bug(fresh_workers_start_beside_old_ones, "have workers already", 14),
    Bug(the_network_is_taken_untried, "has not reached it", 1135),
    Bug(the_last_worker_with_the_state_is_dismissed, "that has the state is dismissed", 9),
    Bug(a_round_forgets_its_cause, "a round without a cause", 4),
    Bug(a_round_ends_without_a_cause, "there are no 1 more workers", 4),
    Bug(the_wrong_host_is_excluded, "is excluded for", 11),
    Bug(a_straggler_in_a_broken_round_is_not_killed, "a broken round is not left", 281),
    Bug(a_meeting_has_no_bound, "its workers never meet", 64),
    Bug(a_silent_worker_is_not_killed, "the job never ends", 71),
    Bug(a_survivor_of_sigkill_is_awaited_forever, "does not end, and the host is kept", 54),
    Bug(a_failure_waits_forever, "nothing can ever happen again", 526),
    Bug(lost_hosts_are_never_tried_again, "is needed, and excluded for good", 78),
    Bug(hosts_never_try_each_other_again, "failures are to be made up for", 337),
    Bug(an_early_end_is_not_reported, "has no fault, and is named", 57),
    Bug(a_change_is_not_followed, "no round begins", 53),
    Bug(a_second_interrupt_is_ignored, "leaves the workers of", 0),
    Bug(other_workers_are_not_stopped_at_the_end, "was not told that the job ends", 2),
    Bug(the_last_failure_is_named, "was not the first failure", 115),
    Bug(a_slot_is_forgotten, "no worker of", 0),
    Bug(survivors_are_left_out, "training goes back", 37),
    Bug(a_commit_is_due_too_soon, "had no time for a commit", 33),
    Bug(a_beating_worker_is_killed, "is killed for nothing", 8),
    Bug(a_silent_host_excuses_no_worker, "is killed for nothing", 485),
    Bug(a_host_that_answers_again_has_no_time, "is killed for nothing", 425),
    Bug(a_hanging_worker_on_a_cut_host_is_not_killed, "and lives", 1117),
    Bug(workers_silent_at_once_are_killed, "is killed for nothing", 71),
    Bug(a_survivor_of_sigkill_holds_up_the_end, "the job never ends", 60),
    Bug(a_parting_agent_is_awaited_forever, "ends, and is waited for", 289),
    Bug(a_closing_agent_is_awaited_forever, "nothing can ever happen again", 102),
    Bug(the_first_list_is_awaited_forever, "nothing can ever happen again", 1),
)
