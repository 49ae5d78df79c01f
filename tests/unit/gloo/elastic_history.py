"""Histories of elastic jobs: common beginnings, and summaries of actions."""

from typing import Any

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.job import ElasticOptions
from tests.unit.gloo.history import History, hosts, ready, spec


def elastic(text: str, np: int | None = None, **options: Any) -> History:
    of_spec = {
        name: options.pop(name) for name in ("on_hang", "nccl", "rank_order", "env") if name in options
    }
    values: dict[str, Any] = {"min_np": 1, "cooldown": (4.0, 60.0)} | options
    job = spec(text, elastic=ElasticOptions(**values), np=np, **of_spec)
    history = History(job)
    history.play(on.Began())
    return history


def arrive(job: History, *names: str) -> list[do.Action]:
    """Let the hosts get ready, and reach each other."""
    new: list[do.Action] = []
    for name in names:
        new += job.play(*ready(name, ord(name[-1]) % 32))
    return new + wire(job)


def wire(job: History) -> list[do.Action]:
    new: list[do.Action] = []
    for probe in [action for action in job.actions if isinstance(action, do.Probe)]:
        new += job.play(on.HostProbed(probe.host, probe.target, probe.addresses[0], probe.agent))
    return new


def discovered(text: str) -> on.HostsDiscovered:
    return on.HostsDiscovered(hosts(text))


def places(actions: list[do.Action]) -> dict[str, int]:
    """Return the worker of each rank."""
    return {
        f"{action.launch.host}/{action.launch.slot}": action.launch.place.rank
        for action in actions
        if isinstance(action, do.Assign)
    }


def started(actions: list[do.Action]) -> list[str]:
    return [
        f"{action.host}/{slot}"
        for action in actions
        if isinstance(action, do.Start)
        for slot, *_ in action.launches
    ]


def excluded(job: History) -> list[tuple[str, float | None, str]]:
    """Return each excluded host, its seconds, and the kind of cause."""
    return [
        (exclusion.host, exclusion.seconds, type(exclusion.cause).__name__)
        for exclusion in job.of(tell.HostExcluded)
    ]


def states(job: History) -> list[str]:
    return [action.state for action in job.of(do.GroupState)]


def training(text: str = "a:2,b:2", **options: Any) -> History:
    """Begin round 0 with a worker in every slot, and commit 5."""
    job = elastic(text, **options)
    arrive(job, *(host.name for host in hosts(text)))
    for name, slot in everyone(job):
        job.ask(name, slot)
    assert job.of(do.Assign)
    job.now += 10.0
    for name, slot in everyone(job):
        job.beat(name, slot, 5)
    return job


def everyone(job: History) -> list[tuple[str, int]]:
    first = [start for start in job.of(do.Start) if start.round == 0]
    return [(start.host, slot) for start in first for slot, *_ in start.launches]


def pool(text: str, **options: Any) -> History:
    """Like training(), with discovered hosts."""
    values: dict[str, Any] = {"min_np": 1, "discovery_script": "x"} | options
    job = History(spec("a", elastic=ElasticOptions(**values)))
    job.play(on.Began(), discovered(text))
    arrive(job, *(host.name for host in hosts(text)))
    for name, slot in everyone(job):
        job.ask(name, slot)
    job.now += 10.0
    for name, slot in everyone(job):
        job.beat(name, slot, 5)
    return job
