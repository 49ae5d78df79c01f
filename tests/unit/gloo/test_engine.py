"""The engine with a static job, by histories of events: who is connected to, what is told, and when workers start."""

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.actions import HostAddress
from hvlaunch.engine.course import Phase
from hvlaunch.errors import (
    ConnectFailed,
    NotEnoughSlots,
    UnknownHost,
)
from hvlaunch.job import ElasticOptions
from tests.unit.gloo.history import PORT, History, facts, lost, ready, spec


def test_a_job_that_goes_well() -> None:
    job = History(spec("a:2,b:2"))
    connects = job.connect()
    assert [action.host.name for action in job.of(do.Connect, connects)] == ["a", "b"]
    assert job.of(do.Probe) == [
        do.Probe("b", "a", ("10.0.0.1",), 9001),
        do.Probe("a", "b", ("10.0.0.2",), 9002),
    ]
    assert not job.of(do.Start)
    job.wire()
    starts = job.of(do.Start)
    assert [(start.host, [launch.place.rank for launch in start.launches]) for start in starts] == [
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
    job.connect({"b": facts(2, addresses={"enp1": ("10.0.0.2",)})})
    job.play(on.RendezvousReached("a", None, ("10.9.9.9",)), on.RendezvousReached("b", "10.0.0.100"))
    job.play(on.HostProbed("b", "a", "10.0.0.1"), on.HostProbed("a", "b", "10.0.0.2"))
    first, second = (start.network for start in job.of(do.Start))
    assert (first.master_addr, first.master_port, first.interface) == ("10.0.0.1", 20001, "eth0")
    assert (second.master_addr, second.master_port, second.interface) == ("10.0.0.1", 20001, "enp1")
    assert first.rendezvous is None
    assert second.rendezvous == ("10.0.0.100", PORT)
    assert job.of(tell.RendezvousUnreachable) == [tell.RendezvousUnreachable("a", ("10.9.9.9",), PORT)]


def test_workers_of_a_host_that_relays_ask_their_agent() -> None:
    job = History(spec("a:1,b:1"))
    job.connect()
    job.play(on.RendezvousReached("a", "127.0.0.1", ("10.9.9.9",), 40123))
    job.play(on.RendezvousReached("b", "10.0.0.100"))
    job.play(on.HostProbed("b", "a", "10.0.0.1"), on.HostProbed("a", "b", "10.0.0.2"))
    first, second = (start.network for start in job.of(do.Start))
    assert first.rendezvous == ("127.0.0.1", 40123)
    assert second.rendezvous == ("10.0.0.100", PORT)
    assert not job.of(tell.RendezvousUnreachable)


def test_one_host_stays_on_its_loopback() -> None:
    job = History(spec("a:2")).start()
    assert not job.of(do.Probe)
    (start,) = job.of(do.Start)
    assert (start.network.master_addr, start.network.interface) == ("127.0.0.1", "lo")


def test_two_names_of_one_machine_are_told_once() -> None:
    job = History(spec("n1:1,n2:1,n3:1"))
    twin = {"boot_id": "x", "addresses": {"eth0": ("10.0.0.1",)}}
    job.connect({"n1": facts(1, **twin), "n2": facts(2, boot_id="x"), "n3": facts(3, **twin)})
    assert job.of(tell.SharedMachine) == [tell.SharedMachine(("n1", "n3"))]


def test_hosts_without_a_boot_id_are_not_taken_for_one() -> None:
    job = History(spec("a:1,b:1"))
    job.connect({"a": facts(1), "b": facts(1)})
    assert not job.of(tell.SharedMachine)


def test_np_below_the_slots_contacts_only_the_hosts_it_needs() -> None:
    job = History(spec("a:2,b:2,c:2", np=3))
    job.names = ["a", "b"]
    job.start()
    assert [action.host.name for action in job.of(do.Connect)] == ["a", "b"]
    assert [launch.place.rank for start in job.of(do.Start) for launch in start.launches] == [0, 1, 2]


def test_too_many_processes_is_known_before_anything_is_contacted() -> None:
    with pytest.raises(NotEnoughSlots) as caught:
        History(spec("a:2,b:2", np=5))
    assert (caught.value.needed, caught.value.available) == (5, 4)


def test_slots_left_out_are_the_gpus_and_unneeded_hosts_are_released_at_once() -> None:
    job = History(spec("a,b", np=4))
    actions = job.connect({"a": facts(1, gpus=4), "b": facts(2, gpus=4)})
    assert job.of(do.Release, actions) == [do.Release("b")]
    job.play(on.RendezvousReached("a", "10.0.0.100"))
    assert [len(start.launches) for start in job.of(do.Start)] == [4]


def test_more_processes_than_gpus() -> None:
    job = History(spec("a,b", np=9))
    job.connect({"a": facts(1, gpus=4), "b": facts(2, gpus=4)})
    job.close()
    assert job.problem.kind == "NotEnoughSlots"
    assert job.result.exit_code == 2


# Connecting


def test_every_host_that_fails_is_named() -> None:
    job = History(spec("a:1,b:1,c:1"))
    job.play(on.Began())
    assert job.play(on.HostFailed("c", UnknownHost("no such name", host="c").problem)) == []
    assert job.play(on.HostConnected("b"), on.HostReady("b", facts(2))) == []
    actions = job.play(on.HostFailed("a", ConnectFailed("refused", host="a").problem))
    assert actions == [do.Release("b")]
    job.close()
    error = job.problem
    assert error.kind == "HostsFailed"
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
    error = job.problem
    assert error.kind == "HostsFailed"
    assert all(problem.kind == "StartTimeout" for problem in error.errors)
    assert "agent does not answer within 60 s" in str(error.errors[0])
    assert "no connection within 60 s" in str(error.errors[1])


def test_what_comes_late_from_an_abandoned_host_changes_nothing() -> None:
    job = History(spec("a:1"))
    job.play(on.Began())
    job.wait()
    assert job.result.exit_code == 69
    assert (
        job.play(on.HostReady("a", facts(1)), on.HostFailed("a", ConnectFailed("closed", host="a").problem))
        == []
    )


def test_a_working_directory_that_is_not_there() -> None:
    job = History(spec("a:1,b:1"))
    job.connect({"b": facts(2, cwd_error="No such file or directory")})
    job.close()
    error = job.problem
    assert error.kind == "WorkingDirectoryMissing"
    assert (error.host, error.path, error.exit_code) == ("b", "/work", 2)
    assert not job.of(do.Start)


def test_a_host_lost_between_hello_and_start() -> None:
    job = History(spec("a:1,b:1"))
    job.connect()
    assert job.play(lost("b")) == [do.Release("a")]
    job.close()
    assert job.problem.kind == "HostLost"
    assert not job.of(do.Start)


def test_a_host_lost_while_others_still_connect() -> None:
    job = History(spec("a:1,b:1"))
    job.play(on.Began(), on.HostConnected("a"), on.HostReady("a", facts(1)), lost("a"))
    job.play(on.HostConnected("b"), on.HostReady("b", facts(2)))
    job.close()
    assert job.problem.kind == "HostLost"


def test_what_a_kernel_lacks_is_said() -> None:
    job = History(spec("a:1"))
    job.connect({"a": facts(1, trouble="no subreaper")})
    assert job.of(tell.KernelLacks) == [tell.KernelLacks("a", "no subreaper")]


# Probing


def test_workers_start_when_all_hosts_have_met_and_know_all_of_them() -> None:
    job = History(spec("a:1,b:2,c:1"))
    job.play(on.Began(), *ready("a", 1), *ready("b", 2))
    assert not job.of(do.Probe)
    assert not job.of(do.Start)
    job.play(*ready("c", 3), on.HostProbed("b", "a", "10.0.0.1"), on.HostProbed("c", "a", "10.0.0.1"))
    job.play(on.HostProbed("a", "b", "10.0.0.2"))
    starts = job.of(do.Start, job.play(on.HostProbed("b", "c", "10.0.0.3")))
    everyone = (
        HostAddress("a", "10.0.0.1", 1),
        HostAddress("b", "10.0.0.2", 2),
        HostAddress("c", "10.0.0.3", 1),
    )
    assert [(start.network.address, start.network.hosts) for start in starts] == [
        ("10.0.0.1", everyone),
        ("10.0.0.2", everyone),
        ("10.0.0.3", everyone),
    ]


def test_a_host_without_an_address_that_all_reach_is_known_by_the_first_that_one_reaches() -> None:
    job = History(spec("a:1,b:1,c:1"))
    two = facts(1, addresses={"eth0": ("10.0.0.1",), "ib0": ("10.1.0.1",)})
    job.play(on.Began(), on.HostReady("a", two), *ready("b", 2), *ready("c", 3))
    all_reach_the_rendezvous(job)
    job.play(on.HostProbed("b", "a", "10.1.0.1"), on.HostProbed("c", "a", "10.0.0.1"))
    job.play(on.HostProbed("a", "b", "10.0.0.2"), on.HostProbed("b", "c", "10.0.0.3"))
    job.play(on.HostProbed("b", "a", None), on.HostProbed("c", "a", None))
    starts = job.of(do.Start)
    assert [start.network.master_addr for start in starts[1:]] == ["10.1.0.1", "10.0.0.1"]
    assert {start.network.hosts[0].address for start in starts} == {"10.1.0.1"}


def test_one_host_is_known_by_its_loopback() -> None:
    job = History(spec("localhost:2"))
    job.play(
        on.Began(), on.HostConnected("localhost"), on.HostReady("localhost", facts(1, peer_address=None))
    )
    (start,) = job.of(do.Start)
    assert start.network.hosts == (HostAddress("localhost", "127.0.0.1", 2),)


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
    error = job.problem
    assert error.kind == "Unreachable"
    assert (error.host, error.other, list(error.addresses), error.exit_code) == ("b", "c", ["10.0.0.3"], 69)
    assert not job.of(do.Start)


def test_the_best_address_that_all_reach_is_taken_after_a_moment() -> None:
    two = facts(1, addresses={"eth0": ("10.0.0.1",), "ib0": ("10.1.0.1",)})
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
    two = facts(1, addresses={"eth0": ("10.0.0.1",), "ib0": ("10.1.0.1",)})
    job = History(spec("a:1,b:1,c:1"))
    job.connect({"a": two})
    all_reach_the_rendezvous(job)
    job.play(on.HostProbed("a", "b", "10.0.0.2"), on.HostProbed("b", "c", "10.0.0.3"))
    job.play(on.HostProbed("b", "a", "10.0.0.1"), on.HostProbed("b", "a", None))
    job.play(on.HostProbed("c", "a", "10.1.0.1"), on.HostProbed("c", "a", None))
    assert [start.network.master_addr for start in job.of(do.Start)] == ["10.0.0.1", "10.0.0.1", "10.1.0.1"]


def test_interfaces_that_the_user_names_are_taken_without_trying() -> None:
    two = facts(1, addresses={"eth0": ("10.0.0.1",), "ib0": ("10.1.0.1",)})
    other = facts(2, addresses={"eth0": ("10.0.0.2",), "mlx0": ("10.1.0.2",)})
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
    job.connect({"a": facts(1, addresses={"ib0": ("10.1.0.1",)})})
    all_reach_the_rendezvous(job)
    job.close()
    assert job.result.exit_code == 2
    assert str(job.result.error).startswith("host b: none of the interfaces ib0 has an address on it")


def test_a_host_that_never_answers_about_the_rendezvous_does_not_hold_the_job() -> None:
    job = History(spec("a:1"))
    job.connect()
    assert not job.of(do.Start)
    job.wait()
    assert job.of(do.Start)


def test_slots_that_must_be_a_mistake_are_refused_when_the_processors_are_known() -> None:
    job = History(spec("a:1,b:129"))
    job.connect({"a": facts(1, cpus=1), "b": facts(2, cpus=16)})
    job.close()
    error = job.problem
    assert (error.kind, error.host, error.exit_code) == ("SlotsUnlikely", "b", 2)
    assert error.cause == "129 slots, but 16 processors"
    assert not job.of(do.Start)


@pytest.mark.parametrize(
    ("text", "changes", "special"),
    [
        ("a:64", {}, {"cpus": 1}),
        ("a:128", {}, {"cpus": 16}),
        ("a:2222", {"force_slots": True}, {"cpus": 1}),
        ("a", {"np": 100}, {"cpus": 1, "gpus": 100}),
    ],
)
def test_slots_that_may_be_meant_are_used(
    text: str, changes: dict[str, object], special: dict[str, object]
) -> None:
    job = History(spec(text, **changes)).start({"a": facts(1, **special)})
    assert job.of(do.Start)


def test_in_an_elastic_job_such_a_host_is_not_used() -> None:
    job = History(spec("a:1,b:2222", elastic=ElasticOptions(min_np=1)))
    job.connect()
    assert [fact.problem.kind for fact in job.of(tell.HostNotUsable)] == ["SlotsUnlikely"]
    job.wire()
    assert [start.host for start in job.of(do.Start)] == ["a"]
