"""Bugs of the engine, planted by hand: each takes something away that jobs rest on over time."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from hvlaunch.gloo.engine import facts as tell
from hvlaunch.gloo.engine import seating
from hvlaunch.gloo.engine.cooldown import Cooldown
from hvlaunch.gloo.engine.course import Course, Phase
from hvlaunch.gloo.engine.forming import AskingWorkers, FreshWorkers
from hvlaunch.gloo.engine.health import Health
from hvlaunch.gloo.engine.network import Network, Wiring
from hvlaunch.gloo.engine.policy import Policy
from hvlaunch.gloo.engine.pool import Pool
from hvlaunch.gloo.engine.round import Restarts, RoundState
from hvlaunch.gloo.engine.rounds import Rounds
from hvlaunch.gloo.engine.workers import Worker, Workers

__all__ = ["BUGS", "Bug"]

Patch = pytest.MonkeyPatch


class Bug(NamedTuple):
    """A bug, the words of the law that finds it, and a seed of whose next few one does."""

    plant: Callable[[Patch], None]
    found: str
    seed: int


def progress_forgives_no_strike(patch: Patch) -> None:
    strike = Policy._strike
    patch.setattr(
        Policy,
        "_strike",
        lambda self, name, cause, now, *, fruitful: strike(self, name, cause, now, fruitful=False),
    )


def who_is_starting_is_not_stopped_at_the_end(patch: Patch) -> None:
    finish = Policy._finish

    def wrong(self, elastic, now):
        living = Workers.living
        known = [
            one for one in self._workers.living if self._rounds.is_member(one) or one in self._workers.waiting
        ]
        patch.setattr(Workers, "living", property(lambda _: known))
        try:
            return finish(self, elastic, now)
        finally:
            patch.setattr(Workers, "living", living)

    patch.setattr(Policy, "_finish", wrong)


def a_host_that_was_out_of_the_list_is_not_forgiven(patch: Patch) -> None:
    update = Pool.update

    def wrong(self, hosts):
        before = {host.name: (host.cooldown.until, host.strikes) for host in self}
        update(self, hosts)
        for host in self:
            if host.name in before:
                host.cooldown.until, host.strikes = before[host.name]

    patch.setattr(Pool, "update", wrong)


def an_end_counts_when_it_is_heard_of(patch: Patch) -> None:
    ended = Worker.ended
    patch.setattr(
        Worker,
        "ended",
        lambda self, event, since, now: ended(self, event, since, now)._replace(when=now - since),
    )


def there_is_one_restart_too_many(patch: Patch) -> None:
    init = Restarts.__init__

    def wrong(self, options):
        init(self, options)
        self._limit = None if self._limit is None else self._limit + 1

    patch.setattr(Restarts, "__init__", wrong)


def there_is_one_restart_too_few(patch: Patch) -> None:
    init = Restarts.__init__

    def wrong(self, options):
        init(self, options)
        self._limit = None if self._limit is None else self._limit - 1

    patch.setattr(Restarts, "__init__", wrong)


def changes_of_the_pool_use_up_restarts(patch: Patch) -> None:
    change = Rounds.change
    policies: dict[Rounds, Policy] = {}
    init = Policy.__init__

    def remember(self, spec, pool, rounds):
        init(self, spec, pool, rounds)
        policies[rounds] = self

    def wrong(self, cause, now):
        policies[self]._restarts.failed(now, fruitful=None)
        return change(self, cause, now)

    patch.setattr(Policy, "__init__", remember)
    patch.setattr(Rounds, "change", wrong)


def survivors_sit_slot_by_slot(patch: Patch) -> None:
    patch.setattr(seating, "_seniority", lambda worker: worker.slot)


def survivors_go_backwards(patch: Patch) -> None:
    patch.setattr(seating, "_seniority", lambda worker: (not worker.has_state, -worker.rank))


def a_host_is_connected_in_its_cooldown(patch: Patch) -> None:
    needed = Policy.needed_hosts

    def wrong(self, now):
        holds = Cooldown.holds
        patch.setattr(Cooldown, "holds", lambda own, at: holds(own, at + 2.0))
        try:
            return needed(self, now)
        finally:
            patch.setattr(Cooldown, "holds", holds)

    patch.setattr(Policy, "needed_hosts", wrong)


def nobody_wakes_up_after_a_cooldown(patch: Patch) -> None:
    patch.setattr(Pool, "wake_ups", lambda self, now: [])


def a_cooldown_doubles_beyond_its_most(patch: Patch) -> None:
    begin = Cooldown.begin
    patch.setattr(
        Cooldown, "begin", lambda self, now, bounds: begin(self, now, bounds and (bounds[0], 64 * bounds[1]))
    )


def spares_are_forgotten(patch: Patch) -> None:
    free = AskingWorkers._free_slots

    def wrong(self, hosts, now):
        found = free(self, hosts, now)
        room = self._bounds.most - len(self._workers.living)
        return found if room > 0 or math.isinf(room) else {}

    patch.setattr(AskingWorkers, "_free_slots", wrong)


def a_round_begins_before_the_last_is_over(patch: Patch) -> None:
    count = Workers.count
    choose = AskingWorkers.choose

    def wrong(self, current, now):
        patch.setattr(Workers, "count", lambda _self, _state: 0)
        try:
            return choose(self, current, now)
        finally:
            patch.setattr(Workers, "count", count)

    patch.setattr(AskingWorkers, "choose", wrong)


def fresh_workers_start_beside_old_ones(patch: Patch) -> None:
    patch.setattr(FreshWorkers, "is_busy", lambda self, current: False)


def the_network_is_taken_untried(patch: Patch) -> None:
    patch.setattr(Wiring, "is_settled", lambda self, now, *, others: self.network is not None)
    patch.setattr(Network, "problem", lambda self: None)


def the_last_who_has_the_state_is_dismissed(patch: Patch) -> None:
    patch.setattr(Policy, "_has_survivors", lambda self, now: True)


def a_round_forgets_why(patch: Patch) -> None:
    begin = Rounds._begin

    def wrong(self, launches, now, commit=-1):
        current = begin(self, launches, now, commit)
        current.cause = None
        return current

    patch.setattr(Rounds, "_begin", wrong)


def a_round_ends_for_nothing(patch: Patch) -> None:
    gain = AskingWorkers.gain
    patch.setattr(AskingWorkers, "gain", lambda self, current, now: gain(self, current, now) + (now > 20.0))


def the_wrong_host_is_excluded(patch: Patch) -> None:
    exclude = Policy.exclude

    def wrong(self, host, cause, now, bounds=None):
        return exclude(self, next(iter(self._pool)), cause, now, bounds)

    patch.setattr(Policy, "exclude", wrong)


def who_stays_in_a_broken_round_is_let_be(patch: Patch) -> None:
    break_off = AskingWorkers.break_off

    def wrong(self, current, cause, now):
        actions = break_off(self, current, cause, now)
        current.leave_by = None
        return actions

    patch.setattr(AskingWorkers, "break_off", wrong)


def a_meeting_has_no_bound(patch: Patch) -> None:
    enter = AskingWorkers.enter

    def wrong(self, plan, current, now):
        actions = enter(self, plan, current, now)
        current.meet_by = None
        return actions

    patch.setattr(AskingWorkers, "enter", wrong)


def who_is_silent_is_let_be(patch: Patch) -> None:
    beat = Worker.beat
    patch.setattr(Worker, "beat", lambda self, commit, now: beat(self, commit, None))


def who_outlives_sigkill_is_waited_for(patch: Patch) -> None:
    patch.setattr(Health, "stuck", lambda self, now: [])


def a_failure_waits_for_ever(patch: Patch) -> None:
    patch.setattr(Policy, "settle_by", None)


def lost_hosts_are_never_tried_again(patch: Patch) -> None:
    patch.setattr(Policy, "_exclude_lost", lambda self, host, cause, now: self.exclude(host, cause, now)[:1])


def hosts_never_try_each_other_again(patch: Patch) -> None:
    patch.setattr(Wiring, "doubt", lambda self: None)


def an_early_end_is_not_told(patch: Patch) -> None:
    patch.setattr(tell, "WorkerEndedEarly", lambda _rank, host: tell.HostNotClosing(host))


def a_change_is_not_followed(patch: Patch) -> None:
    patch.setattr(
        AskingWorkers,
        "is_busy",
        lambda self, current: current is not None and current.state is RoundState.CHANGING,
    )


def a_second_interrupt_is_not_heard(patch: Patch) -> None:
    interrupt = Course.interrupt
    patch.setattr(
        Course,
        "interrupt",
        lambda self, number, now: [] if self.phase is Phase.STOPPING else interrupt(self, number, now),
    )


def the_others_are_not_stopped_at_the_end(patch: Patch) -> None:
    patch.setattr(Course, "hosts_with_workers", lambda self: [])


BUGS: Sequence[Bug] = (
    Bug(progress_forgives_no_strike, "in spite of progress", 313),
    Bug(who_is_starting_is_not_stopped_at_the_end, "was not told that the job ends", 58),
    Bug(a_host_that_was_out_of_the_list_is_not_forgiven, "since it was listed", 769),
    Bug(an_end_counts_when_it_is_heard_of, "has a wrong time", 0),
    Bug(there_is_one_restart_too_many, "failures are made up for, of 2", 63),
    Bug(there_is_one_restart_too_few, "1 restarts, and 2 were allowed", 63),
    Bug(changes_of_the_pool_use_up_restarts, "restarts, and 2 were allowed", 665),
    Bug(survivors_sit_slot_by_slot, "rank 0 is no", 25),
    Bug(survivors_go_backwards, "survivors change their order", 3),
    Bug(a_host_is_connected_in_its_cooldown, "is connected in its cool-down", 2),
    Bug(nobody_wakes_up_after_a_cooldown, "whose cool-down is over", 68),
    Bug(a_cooldown_doubles_beyond_its_most, "excluded for 16.0 s", 104),
    Bug(spares_are_forgotten, "no worker is started in", 6),
    Bug(a_round_begins_before_the_last_is_over, "is still in its round", 9),
    Bug(fresh_workers_start_beside_old_ones, "have workers already", 21),
    Bug(the_network_is_taken_untried, "has not reached it", 0),
    Bug(the_last_who_has_the_state_is_dismissed, "that has the state is dismissed", 363),
    Bug(a_round_forgets_why, "a round without a cause", 2),
    Bug(a_round_ends_for_nothing, "there are no 1 more workers", 9),
    Bug(the_wrong_host_is_excluded, "is excluded for", 12),
    Bug(who_stays_in_a_broken_round_is_let_be, "a broken round is not left", 112),
    Bug(a_meeting_has_no_bound, "its workers never meet", 303),
    Bug(who_is_silent_is_let_be, "the job never ends", 86),
    Bug(who_outlives_sigkill_is_waited_for, "does not end, and the host is kept", 571),
    Bug(a_failure_waits_for_ever, "nothing can ever happen again", 68),
    Bug(lost_hosts_are_never_tried_again, "is needed, and excluded for good", 23),
    Bug(hosts_never_try_each_other_again, "failures are to be made up for", 335),
    Bug(an_early_end_is_not_told, "has no fault, and is named", 55),
    Bug(a_change_is_not_followed, "no round begins", 14),
    Bug(a_second_interrupt_is_not_heard, "leaves the workers of", 152),
    Bug(the_others_are_not_stopped_at_the_end, "was not told that the job ends", 1),
)
