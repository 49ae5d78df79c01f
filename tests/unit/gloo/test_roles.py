"""Jobs with roles: what the engine does when a worker of a role ends, and what its workers are given."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from hvlaunch.agent.workers.binding import Gpu, Topology, bindings
from hvlaunch.driver.program import Keys
from hvlaunch.driver.program.start_frame import start_frame
from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.waits import Wait
from hvlaunch.hosts.templates import templates_of
from hvlaunch.job import JobSpec, RestartLimit, Role, RolePolicy
from tests.unit.gloo.history import History, facts, lost, spec

PORTS = {
    name: tuple(range(30000 + 100 * number, 30005 + 100 * number)) for number, name in enumerate("abc", 1)
}


def templates(*words: str, **env: str):
    return templates_of(words, env, {}, is_per_host=True, has_roles=True)


def job(
    train: RolePolicy = "end", gen: RolePolicy = "restart", limit: int | None = None, **changes: object
) -> History:
    """Two trainers on a and b, and three generators: one on b, and two on c."""
    roles = (
        Role("train", (("a", 1), ("b", 1)), templates("t", "{role:gen:all:http}"), 4, train),
        Role("gen", (("b", 1), ("c", 2)), templates("g", "{own_port:http}", A="{rank}"), 1, gen),
    )
    history = History(spec("a:1,b:2,c:2", np=5, roles=roles, role_limit=RestartLimit(limit), **changes))
    special = {
        name: facts(number, more_ports=PORTS[name][: 2 + {"a": 0, "b": 1, "c": 2}[name]])
        for number, name in enumerate("abc", 1)
    }
    return history.start(special)


def ranks(actions: Sequence[do.Action]) -> list[tuple[int, int]]:
    """Return rank and start of each worker that is being started."""
    return [
        (launch.place.rank, launch.start)
        for start in actions
        if isinstance(start, do.Start)
        for launch in start.launches
    ]


def end_all(history: History) -> None:
    for host, slot in (("a", 0), ("b", 0), ("b", 1), ("c", 0), ("c", 1)):
        if history.engine.workers.at((host, slot)) is not None:
            history.exit(host, slot)
    history.close()


def test_each_role_has_a_world_and_an_order_of_its_own() -> None:
    starts = job().of(do.Start)
    assert [(start.host, start.network.master_addr, start.network.master_port) for start in starts] == [
        ("a", "10.0.0.1", 30100),
        ("b", "10.0.0.1", 30100),
        ("b", "10.0.0.2", 30201),
        ("c", "10.0.0.2", 30201),
    ]
    assert [address.name for address in starts[0].network.hosts] == ["a", "b"]
    assert [address.name for address in starts[0].job_hosts] == ["a", "b", "c"]


def test_a_failed_generator_alone_starts_again() -> None:
    history = job()
    first = history.of(do.Start)[-1]
    done = history.exit("c", 1, None, 9)
    assert done == [tell.WorkerRestarting(why.WorkerEnded(4, "c", None, 9, None, "gen:2"), 1, 0.0)]
    (start,) = history.wait()
    assert isinstance(start, do.Start)
    assert start == first._replace(launches=(first.launches[1]._replace(start=1),))
    end_all(history)
    assert history.result.exit_code == 0
    assert [end.ok for end in history.result.exits] == [True] * 5


def test_a_failed_trainer_ends_the_job_and_is_named_by_its_role() -> None:
    history = job()
    done = history.exit("b", 0, 7)
    assert {stop.host for stop in history.of(do.Stop, done)} == {"a", "b", "c"}
    for host, slot in (("a", 0), ("b", 1), ("c", 0), ("c", 1)):
        history.exit(host, slot, None, 15)
    history.close()
    assert history.result.exit_code == 7
    assert history.result.failure is not None
    assert history.result.failure.role == "train:1"


def test_all_trainers_start_again_when_the_last_of_them_has_ended() -> None:
    history = job(train="restart-all")
    done = history.exit("b", 0, None, 9)
    assert [(stop.host, stop.slots) for stop in history.of(do.Stop, done)] == [("a", (0,))]
    assert not history.engine.waits.has(Wait.RESTART, range(2))
    # What a survivor says then is no failure.
    assert history.exit("a", 0, 1, look="cause") == []
    assert ranks(history.wait()) == [(0, 1), (1, 1)]
    end_all(history)
    assert history.result.exit_code == 0


def test_a_worker_that_had_ended_well_starts_again_with_its_role() -> None:
    history = job(train="restart-all")
    history.exit("a", 0)
    history.exit("b", 0, 1)
    assert ranks(history.wait()) == [(0, 1), (1, 1)]


def test_workers_that_fail_at_every_start_wait_longer_and_then_end_the_job() -> None:
    history, delays = job(), []
    for _ in range(4):
        history.exit("c", 0, 3)
        before = history.now
        history.wait()
        delays.append(history.now - before)
    assert delays == [0.0, 1.0, 2.0, 4.0]
    # Failures of another worker count apart.
    assert history.exit("c", 1, 3)[0] == tell.WorkerRestarting(
        why.WorkerEnded(4, "c", 3, None, None, "gen:2"), 1, 0.0
    )
    history.wait()
    done = history.exit("c", 0, 3)
    assert done[0] == tell.JobEnding(why.NoProgress(5))
    for host, slot in (("a", 0), ("b", 0), ("b", 1), ("c", 1)):
        history.exit(host, slot, None, 15)
    history.close()
    assert history.result.exit_code == 77


def test_a_worker_that_ran_for_a_while_starts_again_at_once() -> None:
    history = job()
    for _ in range(7):
        history.now += 20.0
        history.exit("c", 0, 3)
        before = history.now
        history.wait()
        assert history.now == before


def test_restarts_are_limited() -> None:
    history = job(limit=1)
    history.exit("c", 0, 3)
    history.wait()
    done = history.exit("c", 0, 3)
    assert done[0] == tell.JobEnding(why.RestartsUsedUp(1))
    assert {stop.host for stop in history.of(do.Stop, done)} == {"a", "b", "c"}


def test_a_worker_before_its_restart_is_not_the_cause() -> None:
    history = job()
    for _ in range(2):
        history.exit("c", 0, 3, look="cause")
        if not history.engine.waits.has(Wait.RESTART, range(3, 4)) or history.engine.deadline == history.now:
            history.wait()
    history.exit("a", 0, 5)
    for host, slot in (("b", 0), ("b", 1), ("c", 1)):
        history.exit(host, slot, None, 15)
    history.close()
    assert (history.result.exit_code, ranks(history.actions).count((3, 2))) == (5, 0)


def test_the_job_waits_for_a_restart_when_all_others_have_ended() -> None:
    history = job()
    history.exit("c", 0, 3)
    history.wait()
    history.exit("c", 0, 3)
    for host, slot in (("a", 0), ("b", 0), ("b", 1), ("c", 1)):
        assert not history.of(do.Release, history.exit(host, slot))
    assert ranks(history.wait()) == [(3, 2)]
    end_all(history)
    assert history.result.exit_code == 0


def test_an_interrupt_ends_a_job_that_waits_for_a_restart() -> None:
    history = job(train="restart-all")
    history.exit("b", 0, None, 9)
    history.play(on.Interrupted(2))
    for host, slot in (("a", 0), ("b", 1), ("c", 0), ("c", 1)):
        history.exit(host, slot, None, 2)
    history.close()
    assert history.result.exit_code == 130
    assert len(ranks(history.actions)) == 5


@pytest.mark.parametrize("train", ["end", "restart-all"])
def test_services_are_stopped_when_the_role_has_ended_that_ends_the_job(train: RolePolicy) -> None:
    history = job(train=train, end_with_role="train")
    assert not history.of(do.Stop, history.exit("a", 0))
    done = history.exit("b", 0)
    assert done[0] == tell.JobEnding(why.RoleDone("train"))
    assert {stop.host for stop in history.of(do.Stop, done)} == {"a", "b", "c"}
    assert not history.of(do.TakeStacks, done)
    history.exit("b", 1, 3, look="cause", after=1.0)
    history.exit("c", 0, None, 15)
    history.exit("c", 1, None, 15)
    history.close()
    assert history.result.exit_code == 0


def test_the_role_that_ends_the_job_ends_it_while_another_waits_for_its_restart() -> None:
    history = job(end_with_role="train")
    for host, slot in (("b", 1), ("c", 0), ("c", 1)):
        history.exit(host, slot, 3)
        history.wait()
        history.exit(host, slot, 3)
    history.exit("a", 0)
    history.exit("b", 0)
    history.close()
    assert history.result.exit_code == 0


@pytest.mark.parametrize(("gen", "code"), [("restart", 0), ("end", 3)])
def test_a_service_that_failed_just_before_the_end_counts_by_its_policy(gen: RolePolicy, code: int) -> None:
    history = job(gen=gen, end_with_role="train")
    history.exit("a", 0, after=1.0)
    history.exit("b", 0, after=1.0)
    history.exit("b", 1, 3, look="cause")
    for slot in (0, 1):
        history.exit("c", slot, None, 15, after=2.0)
    history.close()
    assert history.result.exit_code == code


def test_a_lost_host_ends_the_job() -> None:
    history = job()
    done = history.play(lost("c"))
    assert {stop.host for stop in history.of(do.Stop, done)} == {"a", "b"}
    for host, slot in (("a", 0), ("b", 0), ("b", 1)):
        history.exit(host, slot, None, 15)
    history.close()
    assert (history.result.exit_code, history.problem.host) == (69, "c")


def test_no_worker_starts_again_in_the_turn_in_which_the_job_ends() -> None:
    history = job()
    history.exit("a", 0, 7, look="consequence")
    history.now += 2.5
    done = history.exit("c", 0, 3)
    assert {stop.host for stop in history.of(do.Stop, done)} == {"b", "c"}
    assert not history.of(do.Start, done)


def test_a_host_that_is_lost_while_its_workers_wait_for_their_restart_ends_the_job() -> None:
    history = job()
    for slot in (0, 1):
        history.exit("c", slot, 3)
        history.wait()
        history.exit("c", slot, 3)
    history.play(lost("c"))
    history.wait()
    for host, slot in (("a", 0), ("b", 0), ("b", 1)):
        history.exit(host, slot, None, 15)
    history.close()
    assert (history.result.exit_code, history.problem.host) == (69, "c")


# What its workers are given


def frame_of(history: History, number: int, start: do.Start | None = None) -> dict[str, Any]:
    job_spec: JobSpec = history.engine._spec
    _, body = start_frame(start or history.of(do.Start)[number], job_spec, job_id="j0b", keys=Keys.new())
    return dict(json.loads(body))


def test_workers_have_the_variables_of_their_role() -> None:
    history = job(train="restart-all", bind="numa")
    train, gen = frame_of(history, 1), frame_of(history, 3)
    (worker,) = train["workers"]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "ROLE_NAME", "HVLAUNCH_ROUND", "HVLAUNCH_RANK")
    assert [worker["env"][name] for name in names] == ["1", "2", "0", "1", "train", "0", "1"]
    assert worker["argv"] == ["t", "10.0.0.2:30202,10.0.0.3:30302,10.0.0.3:30303"]
    assert train["env"]["HVLAUNCH_ROLE_GEN_HTTP"] == worker["argv"][1]
    assert train["env"]["HVLAUNCH_ROLE_TRAIN_HOSTS"] == "10.0.0.1,10.0.0.2"
    assert train["env"]["HVLAUNCH_HOSTS"] == "a=10.0.0.1:1,b=10.0.0.2:1"
    assert [[item["env"][name] for name in names] for item in gen["workers"]] == [
        ["1", "3", "0", "1", "gen", "1", "1"],
        ["2", "3", "0", "1", "gen", "1", "2"],
    ]
    assert [item["argv"] for item in gen["workers"]] == [["g", "30302"], ["g", "30303"]]
    assert [item["env"]["A"] for item in gen["workers"]] == ["1", "2"]
    assert train["bind"] == {"mode": "numa", "gpus_per_worker": None, "slots": 2, "gpus": [4, 1]}
    assert gen["bind"]["gpus"] == [1, 1]


def test_a_role_that_starts_again_meets_elsewhere_and_reads_no_stdin() -> None:
    history = job(train="restart-all", stdin="all")
    before = frame_of(history, 0)["workers"][0]
    history.exit("a", 0, 1)
    history.exit("b", 0, None, 15)
    start = history.of(do.Start, history.wait())[0]
    again = frame_of(history, 0, start)["workers"][0]
    assert (before["stdin"], again["stdin"]) == (True, False)
    assert (again["start"], again["env"]["HVLAUNCH_ROUND"], again["env"]["TORCHELASTIC_RESTART_COUNT"]) == (
        1,
        "2",
        "1",
    )


def test_roles_of_a_host_see_different_gpus() -> None:
    topology = Topology(set(range(8)), {0: set(range(8))})
    topology.gpus = [Gpu("nvidia", "", "", 0, set()) for _ in range(8)]
    shares = bindings(topology, "none", None, 4, {}, [4, None, 1, 0])
    assert [share.variables.get("CUDA_VISIBLE_DEVICES") for share in shares] == ["0,1,2,3", None, "4", ""]
