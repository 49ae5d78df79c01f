"""The engine, by histories of events: what it wants done, and how the job ends."""

import signal

import pytest

from hvlaunch.errors import (
    ConnectFailed,
    HostLost,
    HostsFailed,
    NotEnoughSlots,
    StartTimeout,
    UnknownHost,
    Unreachable,
    WorkingDirectoryMissing,
)
from hvlaunch.gloo import actions as do
from hvlaunch.gloo import events as on
from hvlaunch.gloo.actions import Step
from hvlaunch.gloo.engine import Phase
from tests.unit.gloo.history import PORT, History, facts, spec

GENTLE = [Step(signal.SIGTERM, 0.0), Step(signal.SIGKILL, 10.0)]
AT_ONCE = [Step(signal.SIGKILL, 0.0)]


def lost(host: str) -> on.HostGone:
    return on.HostGone(host, HostLost("lost: silent", host=host))


def test_a_job_that_goes_well() -> None:
    job = History(spec("a:2,b:2"))
    connects = job.connect()
    assert [action.host.name for action in job.of(do.Connect, connects)] == ["a", "b"]
    assert job.of(do.Probe) == [
        do.Probe("b", "a", ["10.0.0.1"], 9001),
        do.Probe("a", "b", ["10.0.0.2"], 9002),
    ]
    assert not job.of(do.Start)
    job.wire()
    starts = job.of(do.Start)
    assert [(start.host, [place.rank for place in start.places]) for start in starts] == [
        ("a", [0, 1]),
        ("b", [2, 3]),
    ]
    for host, slot in (("b", 1), ("a", 0), ("a", 1)):
        assert job.exit(host, slot) == []
    assert job.exit("b", 0) == [do.Release("a"), do.Release("b")]
    assert job.close() == [do.Finish(job.result)]
    assert job.result.exit_code == 0
    assert [end.rank for end in job.result.exits] == [0, 1, 2, 3]
    assert job.engine.phase is Phase.DONE
    assert job.engine.deadline is None


def test_workers_are_told_how_their_own_host_sees_the_network() -> None:
    job = History(spec("a:1,b:1"))
    job.connect({"b": facts(2, addresses={"enp1": ["10.0.0.2"]})})
    job.play(on.RendezvousReached("a", None, ["10.9.9.9"]), on.RendezvousReached("b", "10.0.0.100"))
    job.play(on.HostProbed("b", "a", "10.0.0.1"), on.HostProbed("a", "b", "10.0.0.2"))
    first, second = (start.network for start in job.of(do.Start))
    assert (first.master_addr, first.master_port, first.interface) == ("10.0.0.1", 20001, "eth0")
    assert (second.master_addr, second.master_port, second.interface) == ("10.0.0.1", 20001, "enp1")
    assert first.rendezvous is None
    assert second.rendezvous == ("10.0.0.100", PORT)
    assert "host a: can't reach the driver's rendezvous (tried 10.9.9.9:4711)" in job.said


def test_workers_of_a_host_that_relays_ask_their_agent() -> None:
    job = History(spec("a:1,b:1"))
    job.connect()
    job.play(on.RendezvousReached("a", "127.0.0.1", ["10.9.9.9"], 40123))
    job.play(on.RendezvousReached("b", "10.0.0.100"))
    job.play(on.HostProbed("b", "a", "10.0.0.1"), on.HostProbed("a", "b", "10.0.0.2"))
    first, second = (start.network for start in job.of(do.Start))
    assert first.rendezvous == ("127.0.0.1", 40123)
    assert second.rendezvous == ("10.0.0.100", PORT)
    assert "can't reach" not in job.said


def test_one_host_stays_on_its_loopback() -> None:
    job = History(spec("a:2")).start()
    assert not job.of(do.Probe)
    (start,) = job.of(do.Start)
    assert (start.network.master_addr, start.network.interface) == ("127.0.0.1", "lo")


def test_two_names_of_one_machine_are_told_once() -> None:
    job = History(spec("a:1,b:1,c:1"))
    twin = {"boot_id": "x", "addresses": {"eth0": ["10.0.0.1"]}}
    job.connect({"a": facts(1, **twin), "b": facts(2, boot_id="x"), "c": facts(3, **twin)})
    assert job.said.count("hosts a, c are one machine") == 1
    assert "b" not in job.said.partition("are one machine")[0]


def test_hosts_without_a_boot_id_are_not_taken_for_one() -> None:
    job = History(spec("a:1,b:1"))
    job.connect({"a": facts(1), "b": facts(1)})
    assert "one machine" not in job.said


def test_np_below_the_slots_contacts_only_the_hosts_it_needs() -> None:
    job = History(spec("a:2,b:2,c:2", np=3))
    job.names = ["a", "b"]
    job.start()
    assert [action.host.name for action in job.of(do.Connect)] == ["a", "b"]
    assert [place.rank for start in job.of(do.Start) for place in start.places] == [0, 1, 2]


def test_too_many_processes_is_known_before_anything_is_contacted() -> None:
    with pytest.raises(NotEnoughSlots) as caught:
        History(spec("a:2,b:2", np=5))
    assert (caught.value.wanted, caught.value.available) == (5, 4)


def test_slots_left_out_are_the_gpus_and_unneeded_hosts_are_released_at_once() -> None:
    job = History(spec("a,b", np=4))
    actions = job.connect({"a": facts(1, gpus=4), "b": facts(2, gpus=4)})
    assert job.of(do.Release, actions) == [do.Release("b")]
    job.play(on.RendezvousReached("a", "10.0.0.100"))
    assert [len(start.places) for start in job.of(do.Start)] == [4]


def test_more_processes_than_gpus() -> None:
    job = History(spec("a,b", np=9))
    job.connect({"a": facts(1, gpus=4), "b": facts(2, gpus=4)})
    job.close()
    assert isinstance(job.result.error, NotEnoughSlots)
    assert job.result.exit_code == 2


# Connecting


def test_every_host_that_fails_is_named() -> None:
    job = History(spec("a:1,b:1,c:1"))
    job.play(on.Began())
    assert job.play(on.HostFailed("c", UnknownHost("no such name", host="c"))) == []
    assert job.play(on.HostConnected("b"), on.HostReady("b", facts(2))) == []
    actions = job.play(on.HostFailed("a", ConnectFailed("refused", host="a")))
    assert actions == [do.Release("b")]
    job.close()
    error = job.result.error
    assert isinstance(error, HostsFailed)
    assert [one.host for one in error.errors] == ["a", "c"]
    assert job.result.exit_code == 69
    assert not job.of(do.Start)


def test_the_start_timeout_names_who_is_late_and_how_far_it_got() -> None:
    job = History(spec("a:1,b:1,c:1", start_timeout=60.0))
    job.play(on.Began(), on.HostConnected("a"), on.HostReady("a", facts(1)), on.HostConnected("b"))
    actions = job.wait()
    assert job.now == pytest.approx(160.5)
    assert actions == [do.Abandon("b"), do.Abandon("c"), do.Release("a")]
    job.close()
    error = job.result.error
    assert isinstance(error, HostsFailed)
    assert all(isinstance(one, StartTimeout) for one in error.errors)
    assert "agent does not answer within 60 s" in str(error.errors[0])
    assert "no connection within 60 s" in str(error.errors[1])


def test_what_comes_late_from_an_abandoned_host_changes_nothing() -> None:
    job = History(spec("a:1"))
    job.play(on.Began())
    job.wait()
    assert job.result.exit_code == 69
    assert job.play(on.HostReady("a", facts(1)), on.HostFailed("a", ConnectFailed("closed", host="a"))) == []


def test_a_working_directory_that_is_not_there() -> None:
    job = History(spec("a:1,b:1"))
    job.connect({"b": facts(2, cwd_error="No such file or directory")})
    job.close()
    error = job.result.error
    assert isinstance(error, WorkingDirectoryMissing)
    assert (error.host, error.path, error.exit_code) == ("b", "/work", 2)
    assert not job.of(do.Start)


def test_a_host_lost_between_hello_and_start() -> None:
    job = History(spec("a:1,b:1"))
    job.connect()
    assert job.play(lost("b")) == [do.Release("a")]
    job.close()
    assert isinstance(job.result.error, HostLost)
    assert not job.of(do.Start)


def test_a_host_lost_while_others_still_connect() -> None:
    job = History(spec("a:1,b:1"))
    job.play(on.Began(), on.HostConnected("a"), on.HostReady("a", facts(1)), lost("a"))
    job.play(on.HostConnected("b"), on.HostReady("b", facts(2)))
    job.close()
    assert isinstance(job.result.error, HostLost)


def test_what_a_kernel_lacks_is_said() -> None:
    job = History(spec("a:1"))
    job.connect({"a": facts(1, trouble="no subreaper")})
    assert "host a: no subreaper" in job.said


# Starting early


def ready(name: str, number: int) -> list[on.Event]:
    return [
        on.HostConnected(name),
        on.HostReady(name, facts(number)),
        on.RendezvousReached(name, "10.0.0.100"),
    ]


def early() -> History:
    """Hosts a and b are ready and have found each other, c still connects; b's workers were started."""
    job = History(spec("a:1,b:2,c:1"))
    job.play(on.Began(), *ready("a", 1))
    assert job.of(do.Probe, job.play(*ready("b", 2))) == [
        do.Probe("b", "a", ["10.0.0.1"], 9001),
        do.Probe("a", "b", ["10.0.0.2"], 9002),
    ]
    assert job.play(on.HostProbed("b", "a", "10.0.0.1")) == []
    (start,) = job.play(on.HostProbed("a", "b", "10.0.0.2"))
    assert isinstance(start, do.Start)
    assert (start.host, [one.rank for one in start.places], start.places[0].size) == ("b", [1, 2], 4)
    assert start.network.master_addr == "10.0.0.1"
    assert (start.network.master_port, start.network.interface) == (20001, "eth0")
    return job


def test_workers_start_while_other_hosts_still_connect() -> None:
    job = early()
    assert not job.of(do.Start, job.play(*ready("c", 3)))
    job.play(on.HostProbed("c", "a", "10.0.0.1"))
    starts = job.of(do.Start, job.play(on.HostProbed("b", "c", "10.0.0.3")))
    assert [start.host for start in starts] == ["a", "c"]
    for host, slot in (("a", 0), ("b", 0), ("b", 1), ("c", 0)):
        job.exit(host, slot)
    job.close()
    assert job.result.exit_code == 0
    assert [end.rank for end in job.result.exits] == [0, 1, 2, 3]


def test_workers_that_end_well_before_the_others_start_do_not_end_the_job() -> None:
    job = early()
    assert job.exit("b", 0) == job.exit("b", 1) == []
    job.play(*ready("c", 3), on.HostProbed("c", "a", "10.0.0.1"), on.HostProbed("b", "c", "10.0.0.3"))
    job.exit("a", 0)
    job.exit("c", 0)
    job.close()
    assert job.result.exit_code == 0


def test_workers_that_were_started_early_are_stopped_when_a_host_fails() -> None:
    job = early()
    actions = job.play(on.HostFailed("c", ConnectFailed("refused", host="c")))
    assert do.Stop("b", GENTLE) in actions
    for slot in (0, 1):
        job.exit("b", slot, None, signal.SIGTERM, after=0.1)
    job.close()
    assert isinstance(job.result.error, ConnectFailed)
    assert job.result.exit_code == 69


def test_a_worker_that_fails_early_ends_the_job() -> None:
    job = early()
    job.exit("b", 0, 7)
    actions = job.exit("b", 1, None, signal.SIGTERM, after=0.1)
    assert actions == [do.Abandon("c"), do.Release("a"), do.Release("b")]
    job.close()
    assert job.result.exit_code == 7


def test_nothing_starts_early_where_the_first_choice_was_not_reached() -> None:
    job = History(spec("a:1,b:1,c:1"))
    two = facts(1, addresses={"eth0": ["10.0.0.1"], "ib0": ["10.1.0.1"]})
    job.play(on.Began(), on.HostReady("a", two), *ready("b", 2))
    job.play(on.HostProbed("b", "a", "10.1.0.1"), on.HostProbed("a", "b", "10.0.0.2"))
    assert not job.of(do.Start)


# Probing


def all_reach_the_rendezvous(job: History) -> None:
    job.play(*(on.RendezvousReached(name, "10.0.0.100") for name in job.names))


def test_a_host_that_cannot_reach_another() -> None:
    job = History(spec("a:1,b:1,c:1"))
    job.connect()
    all_reach_the_rendezvous(job)
    job.play(on.HostProbed("b", "a", "10.0.0.1"), on.HostProbed("c", "a", "10.0.0.1"))
    job.play(on.HostProbed("a", "b", "10.0.0.2"))
    assert job.play(on.HostProbed("b", "c", None))
    job.close()
    error = job.result.error
    assert isinstance(error, Unreachable)
    assert (error.host, error.other, list(error.addresses), error.exit_code) == ("b", "c", ["10.0.0.3"], 69)
    assert not job.of(do.Start)


def test_the_best_address_that_all_reach_is_taken_after_a_moment() -> None:
    two = facts(1, addresses={"eth0": ["10.0.0.1"], "ib0": ["10.1.0.1"]})
    job = History(spec("a:1,b:1,c:1"))
    job.connect({"a": two})
    all_reach_the_rendezvous(job)
    job.play(on.HostProbed("a", "b", "10.0.0.2"), on.HostProbed("b", "c", "10.0.0.3"))
    job.play(on.HostProbed("b", "a", "10.0.0.1"), on.HostProbed("b", "a", "10.1.0.1"))
    assert job.play(on.HostProbed("c", "a", "10.1.0.1")) == []
    before = job.now
    job.wait()
    assert job.now - before == pytest.approx(0.3)
    assert [start.network.master_addr for start in job.of(do.Start)] == ["10.1.0.1"] * 3
    assert [start.network.interface for start in job.of(do.Start)] == ["ib0", "eth0", "eth0"]


def test_hosts_that_have_no_address_in_common_use_what_each_of_them_reaches() -> None:
    two = facts(1, addresses={"eth0": ["10.0.0.1"], "ib0": ["10.1.0.1"]})
    job = History(spec("a:1,b:1,c:1"))
    job.connect({"a": two})
    all_reach_the_rendezvous(job)
    job.play(on.HostProbed("a", "b", "10.0.0.2"), on.HostProbed("b", "c", "10.0.0.3"))
    job.play(on.HostProbed("b", "a", "10.0.0.1"), on.HostProbed("b", "a", None))
    job.play(on.HostProbed("c", "a", "10.1.0.1"), on.HostProbed("c", "a", None))
    assert [start.network.master_addr for start in job.of(do.Start)] == ["10.0.0.1", "10.0.0.1", "10.1.0.1"]


def test_interfaces_that_the_user_names_are_taken_without_trying() -> None:
    two = facts(1, addresses={"eth0": ["10.0.0.1"], "ib0": ["10.1.0.1"]})
    other = facts(2, addresses={"eth0": ["10.0.0.2"], "mlx0": ["10.1.0.2"]})
    job = History(spec("a:1,b:1", network_interfaces=("ib0", "mlx0")))
    job.connect({"a": two, "b": other})
    all_reach_the_rendezvous(job)
    assert not job.of(do.Probe)
    assert [(s.network.master_addr, s.network.interface) for s in job.of(do.Start)] == [
        ("10.1.0.1", "ib0"),
        ("10.1.0.1", "mlx0"),
    ]


def test_an_interface_that_a_host_does_not_have() -> None:
    job = History(spec("a:1,b:1", network_interfaces=("ib0",)))
    job.connect({"a": facts(1, addresses={"ib0": ["10.1.0.1"]})})
    all_reach_the_rendezvous(job)
    job.close()
    assert job.result.exit_code == 2
    assert str(job.result.error).startswith("host b: none of the interfaces ib0 has an address there")


def test_a_host_that_never_answers_about_the_rendezvous_does_not_hold_the_job() -> None:
    job = History(spec("a:1"))
    job.connect()
    assert not job.of(do.Start)
    job.wait()
    assert job.of(do.Start)


# Failures


def test_one_failing_worker_stops_the_rest_and_gives_its_code() -> None:
    job = History(spec("a:2,b:2")).start()
    assert job.exit("b", 1, 7) == [do.Stop("a", GENTLE), do.Stop("b", GENTLE)]
    for host, slot in (("a", 0), ("a", 1), ("b", 0)):
        job.exit(host, slot, None, signal.SIGTERM, after=0.01)
    job.close()
    result = job.result
    assert result.exit_code == 7
    assert result.failure is not None
    assert (result.failure.rank, result.failure.host) == (3, "b")
    assert [end.stopped for end in result.exits] == [True, True, True, False]


def test_a_signal_counts_as_128_and_its_number() -> None:
    job = History(spec("a:1")).start()
    job.exit("a", 0, None, signal.SIGKILL)
    job.close()
    assert job.result.exit_code == 137


def test_the_first_failure_is_the_earliest_not_the_first_heard_of() -> None:
    job = History(spec("a:1,b:1")).start()
    job.now += 5.0
    job.exit("a", 0, 1)
    job.exit("b", 0, 9, after=-0.2)
    job.close()
    assert job.result.failure is not None
    assert job.result.failure.rank == 1
    assert job.result.exit_code == 9


@pytest.mark.parametrize(
    ("code", "number", "stopped"),
    [
        (0, None, True),
        (143, None, True),
        (None, 15, True),
        (None, 9, True),
        (1, None, False),
        (None, 11, False),
    ],
)
def test_who_ended_because_it_was_stopped(code: int | None, number: int | None, stopped: bool) -> None:
    job = History(spec("a:2")).start()
    job.exit("a", 0, 7)
    job.exit("a", 1, code, number, after=0.1)
    job.close()
    assert job.result.exits[1].stopped is stopped
    assert job.result.exit_code == 7


def test_a_command_that_cannot_be_started() -> None:
    job = History(spec("a:1,b:1")).start()
    actions = job.play(on.WorkerNotStarted("b", 0, 0, 127, "train: command not found"))
    assert actions == [do.Stop("a", GENTLE), do.Stop("b", GENTLE)]
    job.exit("a", 0, None, signal.SIGTERM, after=0.1)
    job.close()
    assert job.result.exit_code == 127
    assert job.result.failure is not None
    assert job.result.failure.not_started == "train: command not found"


def test_news_of_other_rounds_and_news_that_come_twice_change_nothing() -> None:
    job = History(spec("a:2")).start()
    assert job.play(on.WorkerExited(host="a", round=1, slot=0, code=3, signal=None, at=job.now)) == []
    assert job.play(on.WorkerExited(host="a", round=0, slot=5, code=3, signal=None, at=job.now)) == []
    job.exit("a", 0, 0)
    assert job.exit("a", 0, 5) == []
    job.exit("a", 1, 0)
    job.close()
    assert job.result.exit_code == 0


def test_a_lost_host_ends_the_job() -> None:
    job = History(spec("a:1,b:1")).start()
    assert job.play(lost("b")) == [do.Stop("a", GENTLE)]
    assert job.exit("a", 0, None, signal.SIGTERM, after=0.1) == [do.Release("a")]
    job.close()
    assert job.result.exit_code == 69
    assert job.result.failure is None


def test_a_worker_that_fails_because_its_peers_are_gone_is_not_the_cause() -> None:
    job = History(spec("a:1,b:1")).start()
    job.play(lost("b"))
    job.exit("a", 0, 1, after=0.01)
    job.close()
    assert job.result.exit_code == 69
    assert isinstance(job.result.error, HostLost)
    assert job.result.failure is None


def test_a_host_lost_after_a_failure_leaves_the_failures_code() -> None:
    job = History(spec("a:1,b:1")).start()
    job.exit("a", 0, 7)
    actions = job.play(lost("b"))
    assert do.Release("a") in actions
    job.close()
    assert job.result.exit_code == 7
    assert "host b: lost" in job.said


def test_an_agent_that_is_told_to_end_by_others_ends_the_job_and_is_waited_for() -> None:
    job = History(spec("a:1,b:1")).start()
    parting = on.HostParting("b", HostLost("lost: got SIGTERM", host="b"))
    assert job.play(parting) == [do.Stop("a", GENTLE), do.Stop("b", GENTLE)]
    job.exit("b", 0, None, signal.SIGTERM, after=0.1)
    assert job.exit("a", 0, None, signal.SIGTERM, after=0.1) == [do.Release("a"), do.Release("b")]
    job.close()
    assert job.result.exit_code == 69
    assert job.result.failure is None


def test_all_hosts_lost() -> None:
    job = History(spec("a:1,b:1")).start()
    job.play(lost("a"))
    job.play(lost("b"))
    assert job.result.exit_code == 69


def test_a_host_lost_when_all_have_ended_well_is_only_said() -> None:
    job = History(spec("a:1,b:1")).start()
    job.exit("a", 0)
    job.exit("b", 0)
    job.play(lost("b"), on.HostClosed("a"))
    assert job.result.exit_code == 0
    assert "host b: lost" in job.said


def test_a_host_that_does_not_close_is_abandoned_and_said() -> None:
    job = History(spec("a:1")).start()
    job.exit("a", 0)
    actions = job.wait()
    assert do.Abandon("a") in actions
    assert job.result.exit_code == 0
    assert "host a: does not close" in job.said


def test_processes_that_cannot_be_killed_are_said() -> None:
    job = History(spec("a:1")).start()
    job.exit("a", 0)
    job.play(on.HostClosed("a", left=2))
    assert "host a: 2 processes of the job can't be killed" in job.said


# Interrupts


def test_ctrl_c_is_int_then_term_then_kill() -> None:
    job = History(spec("a:1", grace=10.0)).start()
    actions = job.play(on.Interrupted(signal.SIGINT))
    steps = [Step(signal.SIGINT, 0.0), Step(signal.SIGTERM, 5.0), Step(signal.SIGKILL, 10.0)]
    assert job.of(do.Stop, actions) == [do.Stop("a", steps)]
    job.exit("a", 0, None, signal.SIGINT, after=0.1)
    job.close()
    assert job.result.exit_code == 130
    assert job.result.interrupted == signal.SIGINT
    assert job.result.exits[0].stopped


def test_ctrl_c_twice_kills_at_once() -> None:
    job = History(spec("a:1")).start()
    job.play(on.Interrupted(signal.SIGINT))
    assert job.play(on.Interrupted(signal.SIGINT)) == [do.Stop("a", AT_ONCE)]
    job.exit("a", 0, None, signal.SIGKILL, after=0.1)
    job.close()
    assert job.result.exit_code == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE])
def test_other_signals_are_term_then_kill(number: signal.Signals) -> None:
    job = History(spec("a:1")).start()
    actions = job.play(on.Interrupted(number))
    assert job.of(do.Stop, actions) == [do.Stop("a", GENTLE)]
    job.exit("a", 0, 1, after=0.1)
    job.close()
    assert job.result.exit_code == 128 + number
    assert job.result.failure is None


def test_an_interrupt_while_a_failure_is_being_handled_kills_and_keeps_the_code() -> None:
    job = History(spec("a:2")).start()
    job.exit("a", 0, 7)
    assert job.play(on.Interrupted(signal.SIGINT)) == [do.Stop("a", AT_ONCE)]
    job.exit("a", 1, None, signal.SIGKILL, after=0.1)
    job.close()
    assert job.result.exit_code == 7


def test_an_interrupt_while_connecting_lets_go_of_everything() -> None:
    job = History(spec("a:1,b:1"))
    job.play(on.Began(), on.HostConnected("a"), on.HostReady("a", facts(1)))
    assert job.play(on.Interrupted(signal.SIGINT)) == [do.Abandon("b"), do.Release("a")]
    job.close()
    assert job.result.exit_code == 130


def test_an_interrupt_while_closing_does_not_wait() -> None:
    job = History(spec("a:1")).start()
    job.exit("a", 0)
    actions = job.play(on.Interrupted(signal.SIGINT))
    assert do.Abandon("a") in actions
    assert job.result.exit_code == 0


def test_user_signals_go_to_the_workers_while_there_are_any() -> None:
    job = History(spec("a:1,b:1"))
    assert job.play(on.UserSignal(signal.SIGUSR1)) == []
    job.start()
    assert job.play(on.UserSignal(signal.SIGUSR1)) == [
        do.Signal("a", signal.SIGUSR1),
        do.Signal("b", signal.SIGUSR1),
    ]
    job.play(lost("b"))
    assert job.play(on.UserSignal(signal.SIGUSR2)) == [do.Signal("a", signal.SIGUSR2)]


def test_a_tick_before_its_time_changes_nothing() -> None:
    job = History(spec("a:1"))
    job.play(on.Began())
    assert job.play(on.Tick()) == []
