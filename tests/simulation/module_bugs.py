"""Bugs of the engine, planted by hand: one or more in each of its modules, of the kind that a tired engineer makes."""

from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from types import NoneType
from typing import Any, Literal, NamedTuple

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import (
    codec,
    engine,
    fabric,
    lifecycle,
    policy,
    rounds,
    workers,
)
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine import round as round_module
from hvlaunch.engine.engine import Engine
from hvlaunch.engine.health import Draining, Health, Hearing
from hvlaunch.engine.hosts import Network, Pool, PoolHost, Probing
from hvlaunch.engine.lifecycle import GroupStates, Lifecycle
from hvlaunch.engine.moves import Moves
from hvlaunch.engine.policy import Policy, alone
from hvlaunch.engine.roles import RolePolicies
from hvlaunch.engine.round import Bounds, Hold, Restarts, Round, Starter
from hvlaunch.engine.rounds import AskingWorkers, Rounds
from hvlaunch.engine.waits import Cooldown, Wait, Waits
from hvlaunch.engine.workers import (
    TRANSITIONS,
    Life,
    Orders,
    Transition,
    Worker,
    Workers,
    WorkerState,
    WorkerTrigger,
    gently,
)
from tests.simulation.bugs import (
    Patch,
    afterwards,
    forgetting,
    instead,
    meanwhile,
    probing_does_not_wait_for_silent_hosts,
    the_first_failed_probe_is_final,
)

__all__ = ["MODULE_BUGS", "Game", "ModuleBug"]

Game = Literal[
    "elastic",
    "elastic without suspicion",
    "takeovers",
    "static",
    "idle turns",
    "replay",
    "spoilt journals",
    "stories",
    "roles",
]


class ModuleBug(NamedTuple):
    """A bug of an engine's module; `seed` of the game finds it, in these words of a law."""

    module: str
    plant: Callable[[Patch], None]
    words: str
    seed: int = 0
    game: Game = "elastic"


# actions


def a_stop_of_all_workers_stops_nobody(patch: Patch) -> None:
    patch.setattr(do.Stop.__new__, "__defaults__", ((),))


# causes


class _EndWithSwappedFields(NamedTuple):
    rank: int
    host: str
    signal: int | None
    code: int | None
    not_started: str | None
    role: str = ""


def code_and_signal_change_places(patch: Patch) -> None:
    patch.setattr(why, "WorkerEnded", _EndWithSwappedFields)


# codec


def _coders_anew(patch: Patch) -> None:
    """Let the codec inspect all types again, so that it uses what is patched."""
    for name in ("_coder", "_object"):
        patch.setattr(codec, name, cache(getattr(codec, name).__wrapped__))


def times_are_rounded_in_the_journal(patch: Patch) -> None:
    plain = codec._SCALARS[float]
    rounded = plain._replace(encode=lambda value: plain.encode(round(value, 2)))
    patch.setitem(codec._SCALARS, float, rounded)
    _coders_anew(patch)


def zero_becomes_none_in_the_journal(patch: Patch) -> None:
    def wrong(right, kinds):
        coder = right(kinds)
        if NoneType not in kinds:
            return coder
        return coder._replace(encode=lambda value: coder.encode(value) if value else None)

    instead(patch, codec, "_union", wrong)
    _coders_anew(patch)


# engine


def a_beat_with_news_counts_as_idle(patch: Patch) -> None:
    """Idle compaction drops the turn in which a worker has met the others."""
    afterwards(
        patch,
        Engine,
        "_life_sign",
        lambda _, self, event, _now: setattr(
            self, "is_idle", isinstance(event, on.WorkerBeat) and self._goes_on
        ),
    )


def an_idle_summary_forgets_the_next_look(patch: Patch) -> None:
    instead(patch, engine, "idle_summary", lambda right, *args: right(*args)._replace(next_check=None))


def a_second_failure_of_discovery_is_not_reported(patch: Patch) -> None:
    forgetting(patch, Engine, "_discovered", "_discovery_error")


def a_signal_of_the_user_reaches_one_host(patch: Patch) -> None:
    def wrong(right, self, event, now):
        decision = right(self, event, now)
        if isinstance(event, on.UserSignal):
            return decision._replace(actions=decision.actions[:1])
        return decision

    instead(patch, Engine, "_decide", wrong)


def a_used_port_is_used_again(patch: Patch) -> None:
    instead(
        patch,
        Engine,
        "_decide",
        lambda right, self, event, now: (
            alone([]) if isinstance(event, on.MasterPort) else right(self, event, now)
        ),
    )


# codec: the entries of a journal


def actions_of_other_classes_are_equal(patch: Patch) -> None:
    patch.setattr(codec, "_are_equal", lambda first, second: bool(first == second))


def missing_actions_are_not_noticed(patch: Patch) -> None:
    patch.setattr(codec, "zip_longest", lambda *sides: zip(*sides, strict=False))


# events


def an_event_has_no_encoding(patch: Patch) -> None:
    instead(
        patch,
        codec,
        "_tagged",
        lambda right, kinds: right([kind for kind in kinds if kind is not on.HostAnswers]),
    )
    _coders_anew(patch)


def a_beat_says_by_default_that_the_training_is_done(patch: Patch) -> None:
    patch.setattr(on.WorkerBeat.__new__, "__defaults__", (False, -1, True))


# facts


class _SlotsLackingWithSwappedFields(NamedTuple):
    available: int
    least: int
    seconds: float


def least_and_available_slots_change_places(patch: Patch) -> None:
    patch.setattr(tell, "SlotsLacking", _SlotsLackingWithSwappedFields)


class _NotUsableWithoutRetry(NamedTuple):
    problem: Any
    goes_on: bool
    retry_in: float | None


def retry_and_continuation_change_places(patch: Patch) -> None:
    patch.setattr(tell, "HostNotUsable", _NotUsableWithoutRetry)


# fabric


def near_hosts_stay_apart(patch: Patch) -> None:
    patch.setattr(fabric, "near_first", lambda hosts, _fabrics: list(hosts))


# health


def the_last_beat_does_not_end_the_watch(patch: Patch) -> None:
    instead(patch, Health, "beat", lambda right, self, *args, **_: right(self, *args))


def a_worker_has_the_time_of_its_round_twice(patch: Patch) -> None:
    instead(
        patch,
        Hearing,
        "until",
        lambda right, self, worker, since, timeout, most: right(self, worker, since, 3 * timeout, 3 * most),
    )


def a_drain_begins_anew_in_each_turn(patch: Patch) -> None:
    def wrong(right, self, now):
        self._waits.end_all((Wait.DRAINING,))
        return right(self, now)

    instead(patch, Draining, "go_on", wrong)


def a_stop_of_the_driver_ends_no_silence(patch: Patch) -> None:
    patch.setattr(Hearing, "hears_all", lambda self, now: None)


# workers: the states of one


def a_hanging_worker_that_is_stopped_counts_as_stopped(patch: Patch) -> None:
    changed = {**TRANSITIONS[WorkerState.HANGING], WorkerTrigger.STOPPED: WorkerState.STOPPING}
    patch.setitem(TRANSITIONS, WorkerState.HANGING, changed)


def the_oldest_transitions_are_remembered(patch: Patch) -> None:
    def wrong(right, self, trigger, now):
        story, before = self.story, self.state
        after = right(self, trigger, now)
        self.story = (*story[:2], Transition(now, before, trigger, after))[:2]
        return after

    instead(patch, Life, "go", wrong)


# lifecycle


def a_state_of_the_group_is_reported_late(patch: Patch) -> None:
    def wrong(right, self, actions, final, current, *, has_workers):
        before = self._told
        right(self, actions, final, current, has_workers=has_workers)
        if before[0] == self._told[0]:  # only another round
            actions[:] = [action for action in actions if not isinstance(action, do.GroupState)]

    instead(patch, GroupStates, "add_to", wrong)


def each_interrupt_begins_the_time_for_killing_anew(patch: Patch) -> None:
    def wrong(right, self, number, now):
        self._killing_since = None if self._killing_since is None else now
        return right(self, number, now)

    instead(patch, Lifecycle, "interrupt", wrong)


def a_job_lasts_until_its_hosts_are_closed(patch: Patch) -> None:
    forgetting(patch, Lifecycle, "close", "_ended_at")


def no_network_is_fast_enough(patch: Patch) -> None:
    patch.setattr(fabric, "_FASTER", inf)


# hosts: the network among them


def answers_about_an_earlier_agent_count(patch: Patch) -> None:
    afterwards(patch, Probing, "forget", lambda _, self, host: self._agents.subtract([host]))


def findings_about_a_lost_host_stay(patch: Patch) -> None:
    def wrong(right, self, host):
        findings = {name: dict(targets) for name, targets in self._findings.items() if name != host}
        right(self, host)
        self._findings.update(findings)

    instead(patch, Probing, "forget", wrong)


def an_address_in_reach_of_one_host_is_enough(patch: Patch) -> None:
    patch.setattr(
        Network,
        "is_best",
        property(
            lambda self: (
                any(t._reached.get(t.addresses[0]) for t in self._targets.values()) or not self._targets
            )
        ),
    )
    patch.setattr(Network, "problem", lambda self: None)


def a_host_has_the_address_of_its_neighbour(patch: Patch) -> None:
    instead(patch, Network, "own_address", lambda right, self, host: right(self, self.first))


# policy


def other_workers_have_no_exit_grace(patch: Patch) -> None:
    meanwhile(patch, Policy, "_finish", policy, "gently", lambda grace, after=0.0: gently(grace))


def the_third_failure_excludes_a_host(patch: Patch) -> None:
    patch.setattr(policy, "_STRIKES", 3)


def the_suspect_is_struck_in_place_of_the_culprit(patch: Patch) -> None:
    instead(
        patch,
        Round,
        "convict",
        lambda right, self, cause: right(self, cause if self.suspect is None else self.suspect),
    )
    instead(
        patch,
        Policy,
        "_strike",
        lambda right, self, name, *args, **options: right(
            self, self._round.culprit or name, *args, **options
        ),
    )


def the_others_wait_for_a_suspected_host(patch: Patch) -> None:
    instead(patch, Policy, "set_aside", lambda _right, _self, _now: [])


def a_suspected_host_is_left_whatever_the_others_have(patch: Patch) -> None:
    instead(patch, Policy, "_others_go_on", lambda _right, _self, _now: True)


def workers_of_a_host_that_returns_may_stay_away(patch: Patch) -> None:
    def wrong(right, self, now):
        for host in self._pool.late(Wait.RETURNING, now):
            self._waits.end(Wait.RETURNING, host.name)
        return []

    instead(patch, Policy, "stop_strays", wrong)


def a_suspicion_ends_with_the_host_alone(patch: Patch) -> None:
    def wrong(right, self, host, now):
        decision = right(self, host, now)
        if host.silent_for is None:
            host.silent_for = 1.5
        return decision

    instead(patch, Policy, "answers", wrong)


def one_lost_host_is_pardoned(patch: Patch) -> None:
    def wrong(right, self, now):
        lost = [host for host in self._pool if host.listed and host.was_lost and host.cooldown.is_for_good]
        for host in lost[1:]:
            host.was_lost = False
        actions = right(self, now)
        for host in lost[1:]:
            host.was_lost = True
        return actions

    instead(patch, Policy, "pardon", wrong)


def the_host_to_keep_is_left_out(patch: Patch) -> None:
    patch.setattr(policy, "min", max, raising=False)


# hosts


def a_host_that_comes_back_keeps_its_rendezvous(patch: Patch) -> None:
    def wrong(right, self):
        before = self.__dict__.get("rendezvous"), self.__dict__.get("has_tried_rendezvous", False)
        right(self)
        self.rendezvous, self.has_tried_rendezvous = before

    instead(patch, PoolHost, "disconnect", wrong)


def a_new_order_of_the_list_is_ignored(patch: Patch) -> None:
    def wrong(right, self, hosts):
        before = list(self._hosts)
        right(self, hosts)
        self._hosts = {name: self._hosts[name] for name in (*before, *self._hosts)}

    instead(patch, Pool, "update", wrong)


def a_ready_host_keeps_its_old_failure(patch: Patch) -> None:
    def wrong(right, self, host, facts):
        before = self.errors.get(host.name)
        right(self, host, facts)
        if before is not None:
            self.errors[host.name] = before

    instead(patch, Pool, "ready", wrong)


# roles


def a_failed_worker_takes_earlier_roles_along(patch: Patch) -> None:
    instead(
        patch, RolePolicies, "_failed", lambda right, self, unit, *more: right(self, range(unit.stop), *more)
    )


# round


def the_last_host_lends_its_port(patch: Patch) -> None:
    def wrong(right, self, plan, current, now):
        turned = plan.hosts[-1].facts
        first = plan.hosts[0]
        right_facts, first.facts = first.facts, turned
        actions = right(self, plan, current, now)
        first.facts = right_facts
        return actions

    instead(patch, Starter, "start", wrong)


def hosts_are_told_in_the_order_of_the_pool(patch: Patch) -> None:
    instead(patch, Starter, "_addresses", lambda right, self, plan: tuple(sorted(right(self, plan))))


def old_failures_are_never_forgotten(patch: Patch) -> None:
    afterwards(patch, Restarts, "__init__", lambda _, self, _options: setattr(self, "_window", inf))


def a_worker_that_ends_is_progress(patch: Patch) -> None:
    patch.setattr(Round, "has_progressed", property(lambda self: bool(self.exits)))


def a_victim_is_as_good_a_cause_as_any(patch: Patch) -> None:
    patch.setattr(round_module, "_weight", lambda end: 0)


def a_flapping_pool_is_not_held(patch: Patch) -> None:
    patch.setattr(Hold, "change", lambda self, current, now: None)


# rounds


def the_oldest_commit_is_handed_over(patch: Patch) -> None:
    def wrong(new, leaving):
        if not leaving:
            return new
        oldest = min(leaving, key=lambda worker: worker.commit)
        return [oldest, *new, *(worker for worker in leaving if worker is not oldest)]

    patch.setattr(rounds, "hand_over", wrong)


def the_root_has_the_oldest_commit(patch: Patch) -> None:
    def wrong(self, plan):
        workers = self._workers.in_seats(launch.seat for launch in plan.launches)
        return min(workers, key=lambda worker: worker.commit)

    patch.setattr(AskingWorkers, "_newest", wrong)


def the_first_round_waits_for_nobody(patch: Patch) -> None:
    patch.setattr(AskingWorkers, "_is_first_complete", lambda *_: True)


def a_shortage_of_slots_goes_on_in_a_round(patch: Patch) -> None:
    def wrong(right, self, wait, of=None):
        if wait is not Wait.SLOTS:
            right(self, wait, of)

    instead(patch, Waits, "end", wrong)


def the_second_shortage_is_not_reported(patch: Patch) -> None:
    def wrong(right, self, now):
        before = self._is_short_told
        settled = right(self, now)
        self._is_short_told = before or self._is_short_told
        if before:
            settled.actions[:] = [
                action for action in settled.actions if not isinstance(action, tell.SlotsLacking)
            ]
        return settled

    instead(patch, Rounds, "_wait_for_more", wrong)


def waits_of_a_round_outlive_it(patch: Patch) -> None:
    patch.setattr(rounds, "ROUND_WAITS", (Wait.MEETING, Wait.LEAVING_UNHEARD, Wait.COMMIT))


def the_last_holders_of_the_state_gather_like_others(patch: Patch) -> None:
    meanwhile(patch, Rounds, "_grow", Bounds, "least", 1000)


def a_broken_round_goes_on_gathering(patch: Patch) -> None:
    def wrong(right, self, cause, now):
        until = self._waits.until(Wait.GATHERING)
        actions = right(self, cause, now)
        if until is not None:
            self._waits.begin(Wait.GATHERING, None, until)
        return actions

    instead(patch, Rounds, "break_off", wrong)


# waits


def a_wait_that_begins_again_keeps_its_time(patch: Patch) -> None:
    def wrong(right, self, wait, of, until, bound=0.0):
        if wait is not Wait.COMMIT or not self.has(wait, of):
            right(self, wait, of, until, bound)

    instead(patch, Waits, "begin", wrong)


def a_stop_of_the_driver_prolongs_nothing(patch: Patch) -> None:
    patch.setattr(Waits, "prolong", lambda self, seconds: None)


def a_stop_of_the_driver_prolongs_cooldowns(patch: Patch) -> None:
    patch.setattr(Wait.COOLDOWN, "is_prolonged", True)


# workers


def dismissed_workers_have_no_time_to_end_well(patch: Patch) -> None:
    meanwhile(patch, Workers, "dismiss", workers, "gently", lambda grace, after=0.0: gently(grace))


def starts_of_a_slot_are_not_counted(patch: Patch) -> None:
    instead(patch, Workers, "next_launch", lambda right, self, *args: right(self, *args)._replace(start=0))


def an_interrupt_kills_before_it_ends_gently(patch: Patch) -> None:
    def wrong(right, interrupt, grace):
        steps = right(interrupt, grace)
        return (
            steps
            if len(steps) < 3
            else (steps[0], steps[2]._replace(after=grace / 2), steps[1]._replace(after=grace))
        )

    instead(patch, lifecycle, "passing_on", wrong)


def a_later_order_hides_the_first(patch: Patch) -> None:
    def wrong(right, self, steps, now):
        self._first_at = None
        return right(self, steps, now)

    instead(patch, Orders, "add", wrong)


def commits_of_an_earlier_training_count(patch: Patch) -> None:
    def wrong(
        right: Callable[..., None], self: Workers, worker: Worker, last_round: int, commit: int, now: float
    ) -> None:
        before = worker.commit
        right(self, worker, last_round, commit, now)
        worker.commit = max(before, worker.commit)

    instead(patch, Workers, "ask", wrong)


# moves


def workers_leave_before_their_substitutes_wait(patch: Patch) -> None:
    instead(patch, Moves, "_ready", lambda right, self, *args: [*right(self, *args), *self._rounds.workers])


def a_lost_substitute_is_not_noticed(patch: Patch) -> None:
    patch.setattr(Moves, "_leave", lambda self, *_: [])


def a_move_that_is_over_goes_on(patch: Patch) -> None:
    patch.setattr(Moves, "finish", lambda self, now: [])


def a_move_is_over_while_workers_are_left(patch: Patch) -> None:
    def wrong(right: Callable[..., Any], self: Moves, now: float) -> Any:
        with pytest.MonkeyPatch.context() as short:
            short.setattr(Workers, "on", lambda self, host: [])
            return right(self, now)

    instead(patch, Moves, "finish", wrong)


def a_host_that_stays_is_not_used_again(patch: Patch) -> None:
    patch.setattr(Cooldown, "lift", lambda self: None)


def a_given_up_move_is_remembered(patch: Patch) -> None:
    forgetting(patch, Moves, "_end", "_move")


def a_moved_host_is_never_pardoned(patch: Patch) -> None:
    for name in ("finish", "_leave"):
        afterwards(patch, Moves, name, lambda _, self, *_args: _forget_moves(self))


def _forget_moves(moves: Moves) -> None:
    for host in moves._pool:
        host.was_moved = False


MODULE_BUGS: Sequence[ModuleBug] = (
    ModuleBug("actions", a_stop_of_all_workers_stops_nobody, "was not told that the job ends", 0),
    ModuleBug("causes", code_and_signal_change_places, "ended so", 17),
    ModuleBug("codec", times_are_rounded_in_the_journal, "leads elsewhere", 3, "idle turns"),
    ModuleBug("codec", zero_becomes_none_in_the_journal, "turn ", 3, "replay"),
    ModuleBug(
        "codec", actions_of_other_classes_are_equal, "a spoilt journal is replayed", 0, "spoilt journals"
    ),
    ModuleBug("codec", missing_actions_are_not_noticed, "a spoilt journal is replayed", 0, "spoilt journals"),
    ModuleBug("engine", a_beat_with_news_counts_as_idle, "leads elsewhere", 3, "idle turns"),
    ModuleBug("engine", an_idle_summary_forgets_the_next_look, "leads elsewhere", 3, "idle turns"),
    ModuleBug(
        "engine", a_second_failure_of_discovery_is_not_reported, "a failure of discovery is not told once", 4
    ),
    ModuleBug("engine", a_signal_of_the_user_reaches_one_host, "get the user's signal", 32),
    ModuleBug("engine", a_used_port_is_used_again, "rank 0 gets port", 20),
    ModuleBug("events", an_event_has_no_encoding, "is none of Began", 4, "replay"),
    ModuleBug("events", a_beat_says_by_default_that_the_training_is_done, "the job never ends", 1675),
    ModuleBug("facts", least_and_available_slots_change_places, "workers are not the least", 0),
    ModuleBug("facts", retry_and_continuation_change_places, "is no report of a host", 16),
    ModuleBug("fabric", near_hosts_stay_apart, "near hosts have neighbouring ranks", 0, "stories"),
    ModuleBug("health", the_last_beat_does_not_end_the_watch, "is killed for nothing", 126),
    ModuleBug("health", a_worker_has_the_time_of_its_round_twice, "a broken round is not left", 60),
    ModuleBug(
        "health", a_drain_begins_anew_in_each_turn, "is drained, and workers live there", 535, "takeovers"
    ),
    ModuleBug("health", a_stop_of_the_driver_ends_no_silence, "is asked again", 0, "stories"),
    ModuleBug("workers", the_oldest_transitions_are_remembered, "has a story that lacks its end", 3),
    ModuleBug("lifecycle", a_state_of_the_group_is_reported_late, "the newest round is", 4),
    ModuleBug(
        "lifecycle",
        each_interrupt_begins_the_time_for_killing_anew,
        "whoever interrupts again and again still waits",
        0,
    ),
    ModuleBug("lifecycle", a_job_lasts_until_its_hosts_are_closed, "it lasted -", 2),
    ModuleBug("moves", workers_leave_before_their_substitutes_wait, "leave, and", 53),
    ModuleBug("moves", a_lost_substitute_is_not_noticed, "gives the host its workers back", 0, "stories"),
    ModuleBug("moves", a_move_that_is_over_goes_on, "and its move goes on", 135),
    ModuleBug("moves", a_move_is_over_while_workers_are_left, "has moved, and ", 97),
    ModuleBug("moves", a_host_that_stays_is_not_used_again, "whose cool-down is over", 161),
    ModuleBug("moves", a_given_up_move_is_remembered, "has moved, and nobody began it", 71),
    ModuleBug("moves", a_moved_host_is_never_pardoned, "are left out for a move, and needed", 389),
    ModuleBug("fabric", no_network_is_fast_enough, "a faster network is chosen", 0, "stories"),
    # A suspected host is not in the next plan, so few other worlds probe a silent one.
    ModuleBug("hosts", the_first_failed_probe_is_final, "which heals", 485, "elastic without suspicion"),
    ModuleBug(
        "hosts", probing_does_not_wait_for_silent_hosts, "which heals", 485, "elastic without suspicion"
    ),
    ModuleBug("hosts", answers_about_an_earlier_agent_count, "two agents of", 16),
    ModuleBug("hosts", findings_about_a_lost_host_stay, "nobody has reached", 44),
    ModuleBug("hosts", an_address_in_reach_of_one_host_is_enough, "and has not reached it", 0),
    ModuleBug("hosts", a_host_has_the_address_of_its_neighbour, "nobody has reached", 0),
    ModuleBug("policy", other_workers_have_no_exit_grace, "has no time to end its training", 3),
    ModuleBug("policy", the_third_failure_excludes_a_host, "fails again, and is not excluded", 125),
    ModuleBug(
        "policy", the_suspect_is_struck_in_place_of_the_culprit, "a late cause does not turn", 0, "stories"
    ),
    ModuleBug("policy", the_others_wait_for_a_suspected_host, "and the others wait for it", 39),
    ModuleBug("policy", a_suspected_host_is_left_whatever_the_others_have, "and the others can't go on", 16),
    ModuleBug("policy", workers_of_a_host_that_returns_may_stay_away, "neither ask for places", 332),
    ModuleBug("policy", a_suspicion_ends_with_the_host_alone, "no worker is started in", 10),
    ModuleBug("policy", one_lost_host_is_pardoned, "is needed, and excluded for good", 11),
    ModuleBug("policy", the_host_to_keep_is_left_out, "has the state", 425, "takeovers"),
    ModuleBug("hosts", a_host_that_comes_back_keeps_its_rendezvous, "has not tried the rendezvous", 4),
    ModuleBug("hosts", a_new_order_of_the_list_is_ignored, "and listed as", 5),
    ModuleBug("hosts", a_ready_host_keeps_its_old_failure, "is well again, and its old failure", 394),
    ModuleBug("round", the_last_host_lends_its_port, "rank 0 gets port", 23),
    ModuleBug("round", hosts_are_told_in_the_order_of_the_pool, "is told the hosts", 75),
    ModuleBug("round", old_failures_are_never_forgotten, "restarts, and 2 were allowed", 1066),
    ModuleBug("round", a_worker_that_ends_is_progress, "in a row made no progress", 108),
    ModuleBug(
        "roles", a_failed_worker_takes_earlier_roles_along, "a worker of another unit is stopped", 4, "roles"
    ),
    ModuleBug(
        "round", a_victim_is_as_good_a_cause_as_any, "a victim is named, and there was a cause", 14, "static"
    ),
    ModuleBug("round", a_flapping_pool_is_not_held, "workers are stopped for a change after", 125),
    ModuleBug("rounds", the_oldest_commit_is_handed_over, "newest commit hands it over", 0, "stories"),
    ModuleBug("rounds", the_root_has_the_oldest_commit, "the root has not the newest commit", 16),
    ModuleBug("rounds", the_first_round_waits_for_nobody, "the first round does not wait for", 4),
    ModuleBug("rounds", a_shortage_of_slots_goes_on_in_a_round, "the engine wants ticks without end", 3),
    ModuleBug("rounds", the_second_shortage_is_not_reported, "slots, and nobody is told", 16),
    ModuleBug("rounds", waits_of_a_round_outlive_it, "the job never ends", 9),
    ModuleBug(
        "rounds", the_last_holders_of_the_state_gather_like_others, "the state is not handed over", 165
    ),
    ModuleBug("rounds", a_broken_round_goes_on_gathering, "the first round does not wait for", 378),
    ModuleBug("waits", a_wait_that_begins_again_keeps_its_time, "the round had no time for a commit", 8),
    ModuleBug("waits", a_stop_of_the_driver_prolongs_nothing, "are not given up", 0, "stories"),
    ModuleBug(
        "waits",
        a_stop_of_the_driver_prolongs_cooldowns,
        "sleeps beyond the end of a cool-down",
        84,
        "takeovers",
    ),
    ModuleBug("workers", dismissed_workers_have_no_time_to_end_well, "and stopped at once", 4),
    ModuleBug("workers", starts_of_a_slot_are_not_counted, "is called 0", 4),
    ModuleBug("workers", a_hanging_worker_that_is_stopped_counts_as_stopped, "not told to end", 609),
    ModuleBug("workers", commits_of_an_earlier_training_count, "the round had no time for a commit", 33),
    ModuleBug("workers", a_later_order_hides_the_first, "was told to end", 1431),
    ModuleBug("workers", an_interrupt_kills_before_it_ends_gently, "does not end with SIGKILL", 0),
)
