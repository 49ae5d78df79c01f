"""Faults of an elastic world, and their times."""

import signal
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from hvlaunch.engine import events as on
from hvlaunch.engine.round import FRUITLESS_IN_A_ROW
from hvlaunch.errors import HostLost

if TYPE_CHECKING:
    from tests.simulation.elastic_workers import Process
    from tests.simulation.elastic_world import ElasticWorld, SimHost

__all__ = ["LATE", "PULSES", "plan_faults"]

MOST = 6
CUTS = (0.4, 0.9, 2.4)
"""Lengths of cuts, in leases."""
NOTICED = 2.0
"""Seconds until the driver knows of a host's silence."""
LATE, PULSES = 5.0, 4
"""Seconds of delay after which the driver knows that it was stopped, and pings per lease."""
HEALED = 50.0
KNOWN = 6.0
"""Seconds for which earlier findings may be reported."""


def plan_faults(world: "ElasticWorld") -> None:
    """Choose faults and their times; all are healed in the end."""
    kinds = [kill, kill, fail, hang, stick, lose_agent, part, power_off, cut, spoil, slow]
    kinds += [kill_while_placing, fall_asleep, refuse_start, cut_own_link, cut_pair, fill, leave_early, stray]
    kinds += [stay, outlive, lose_beats, hang_in_a_cut]
    if world.options.discovers:
        kinds += [remove, add, resize, reorder, flap, flap, empty, fail_discovery]
    for _ in range(world.random.randint(0, MOST)):
        fault = world.random.choice(kinds)
        world.at(world.random.random() * HEALED * 0.8, lambda fault=fault: note(world, fault))  # type: ignore[misc]
    if world.random.random() < 0.04:
        when = world.random.random() * HEALED
        for _ in range(world.random.randint(1, 3)):
            world.at(when, lambda: interrupt(world))
            when += world.random.random() * 3
    world.at(HEALED, lambda: heal(world))
    _plan_rare(world)


def _plan_rare(world: "ElasticWorld") -> None:
    """Plan further faults, each by a choice of its own, so that the other faults of each seed stay as they are."""
    rare: dict[str, Callable[[ElasticWorld], bool]] = {"hangs": be_judged, "signals": signal_workers}
    if world.options.commit_timeout is not None and world.kind == "in-process":
        rare["stalls"] = stall
    if world.options.discovers:
        rare["discovery"] = fail_discovery_twice
    if world.options.discovers and world.kind == "in-process":
        rare["replacement"] = replace_hosts
        rare["growth"] = lose_state_while_growing
    if world.options.cooldown is None and len(world.hosts) > 2:
        rare["losses"] = lose_hosts_in_turn
    if world.kind == "in-process":
        rare["moves"] = move
        rare["strays"] = stray_again_and_again
    if world.suspects:
        rare["suspicion"] = suspect_falsely
    for name, fault in rare.items():
        apart = Random(f"{world.seed} {name}")
        # Few worlds have hosts to spare for the last two.
        if apart.random() < (0.3 if name in ("replacement", "growth", "moves") else 0.1):
            world.at(apart.random() * HEALED, lambda fault=fault: note(world, fault))  # type: ignore[misc]
    apart = Random(f"{world.seed} order")
    if world.options.discovers and apart.random() < 0.2:
        world.at(apart.random(), lambda: note(world, reorder))
    apart = Random(f"{world.seed} impatience")
    if apart.random() < 0.03:
        world.at(apart.random() * HEALED, lambda: note(world, lose_patience))


def suspect_falsely(world: "ElasticWorld") -> bool:
    """Let the driver suspect a host that is well."""
    host = Random(f"{world.seed} {world.now}").choice(list(world.hosts.values()))
    world.faults_detail = host.name
    if host.link != "ready" or not host.reachable or host.is_quiet:
        return False
    world.suspect(host)
    return True


def note(world: "ElasticWorld", fault: "Callable[[ElasticWorld], bool]") -> None:
    if world.result is None and fault(world):
        world.faults.append(fault.__name__)
        world.history.append(f"{world.now:7.2f} *** {fault.__name__}: {world.faults_detail}")


def a_worker(world: "ElasticWorld") -> "Process | None":
    living = [process for host in world.hosts.values() for process in host.processes if process.live]
    chosen = world.random.choice(living) if living else None
    world.faults_detail = str(chosen)
    return chosen


def a_host(world: "ElasticWorld") -> "SimHost":
    chosen = world.random.choice(list(world.hosts.values()))
    world.faults_detail = chosen.name
    return chosen


def kill(world: "ElasticWorld") -> bool:
    process = a_worker(world)
    if process is not None:
        world.workers.codes.add(128 + signal.SIGKILL)
        world.workers.end(process, None, signal.SIGKILL)
    return process is not None


def fail(world: "ElasticWorld") -> bool:
    process = a_worker(world)
    if process is not None and not process.is_silent:
        code = world.random.choice([1, 7, 42])
        world.workers.codes.add(code)
        world.workers.end(process, code)
    return process is not None


def hang(world: "ElasticWorld") -> bool:
    """Hang a worker: by SIGSTOP, which the agent reports, or by itself, which is audible once it has beaten."""
    process = a_worker(world)
    if process is not None:
        _stops(world, process)
    return process is not None


def outlive(world: "ElasticWorld") -> bool:
    """Freeze a worker's cgroup, so that no signal ends it."""
    process = a_worker(world)
    if process is None:
        return False
    process.outlives_kill = True
    world.faulty.add(process.host.name)
    _stops(world, process)
    return True


def _stops(world: "ElasticWorld", process: "Process") -> None:
    process.is_silent = True
    world.workers.hung.add(str(process))
    world.workers.codes.add(128 + signal.SIGKILL)

    def told() -> None:
        if process.live and process.host.agent == process.agent:
            world.hear(
                process.host, on.WorkerSuspended(process.host.name, process.born, process.slot, process.start)
            )

    if world.kind == "unmodified" or process.is_done or process.last_round < 0 or world.random.random() < 0.5:
        world.at(world.options.suspension, told)


def stick(world: "ElasticWorld") -> bool:
    process = a_worker(world)
    if process is None:
        return False
    process.is_stuck = True
    world.workers.codes.add(128 + signal.SIGKILL)
    return True


def stray(world: "ElasticWorld") -> bool:
    """Let a worker live and beat, but get stuck before it meets the others of its next round."""
    process = a_worker(world)
    if process is None or world.kind == "unmodified":
        return False
    process.is_stray = True
    world.workers.codes.add(128 + signal.SIGKILL)
    return True


def stray_again_and_again(world: "ElasticWorld") -> bool:
    """Let a worker of each round get stuck before it meets the others, and each new worker take long to start."""
    world.faults_detail = ""
    world.faults += ["stray"] * FRUITLESS_IN_A_ROW
    world.workers.strays = world.workers.late_starts = FRUITLESS_IN_A_ROW + 2
    world.workers.codes.add(128 + signal.SIGKILL)
    return True


def lose_agent(world: "ElasticWorld") -> bool:
    _lose_agent(world, a_host(world))
    return True


def lose_hosts_in_turn(world: "ElasticWorld") -> bool:
    """Lose all hosts, each when the next ones were enough without it, so that only the last one is missed at once."""
    world.faults_detail = ""
    for number, host in enumerate(world.hosts.values()):
        world.at(2.0 * number, lambda host=host: _lose_agent(world, host))  # type: ignore[misc]
    return True


def _lose_agent(world: "ElasticWorld", host: "SimHost") -> None:
    world.faulty.add(host.name)
    world.all_die(host)
    agent = host.killed = host.agent

    def noticed() -> None:
        world.all_die(host, agent)  # whom it was told to start when it was no more
        world.gone(host, agent)

    world.at(world.delay(), noticed)


def part(world: "ElasticWorld") -> bool:
    """End an agent from outside: it stops its workers, reports it, and closes."""
    host = a_host(world)
    agent = host.agent
    if not _parts(world, host):
        return False

    def close() -> None:
        if host.agent == agent and host.link == "ready":
            host.link = "closing"
            world.hear(host, on.HostClosed(host.name))

    world.at(3.0, close)
    return True


def stay(world: "ElasticWorld") -> bool:
    """The same, but the agent does not close, and answers pings without end."""
    host = a_host(world)
    if not _parts(world, host):
        return False
    host.staying = host.agent
    return True


def _parts(world: "ElasticWorld", host: "SimHost") -> bool:
    """Return whether an agent ends by itself."""
    world.faulty.add(host.name)
    if host.link != "ready" or not host.reachable:
        return False
    host.parting = host.agent
    world.hear(host, on.HostParting(host.name, HostLost("lost: got SIGTERM", host=host.name).problem))
    for process in list(host.processes):
        if process.agent == host.agent:
            world.at(world.delay(), lambda process=process: world.workers.end(process, None, signal.SIGTERM))  # type: ignore[misc]
    world.workers.codes.add(128 + signal.SIGTERM)  # where they outlive all that hvlaunch sends them
    return True


def kill_while_placing(world: "ElasticWorld") -> bool:
    """Kill a worker of the next round before it gets its place."""
    world.faults_detail = ""
    world.workers.kills_while_placing += 1
    world.workers.codes.add(128 + signal.SIGKILL)
    return True


def fall_asleep(world: "ElasticWorld") -> bool:
    """Stop the driver for a while; it finds all messages when it continues."""
    world.faults_detail = ""
    seconds = world.random.choice([3.0, 30.0])
    if seconds < world.spec.lease / PULSES + LATE:
        world.faulty.update(world.hosts)  # the driver can't know that it was stopped
    world.asleep_since = world.asleep_since if world.is_asleep else world.now
    world.asleep_until = max(world.asleep_until, world.now + seconds)
    world.at(seconds, world.wake_up)
    return True


def refuse_start(world: "ElasticWorld") -> bool:
    """Let the command be missing for a moment."""
    host = a_host(world)
    host.refusals = 1
    world.workers.codes.add(127)
    return True


def power_off(world: "ElasticWorld") -> bool:
    host = a_host(world)
    world.faulty.add(host.name)
    host.is_up, host.dead = False, host.agent
    world.all_die(host)
    world.at(NOTICED, lambda: world.notice(host))
    agent = host.agent
    world.at(world.spec.lease, lambda: world.gone(host, agent))
    world.at(world.random.random() * 20, lambda: setattr(host, "is_up", True))
    return True


def cut(world: "ElasticWorld") -> bool:
    """Cut a link for less than the lease, or for more."""
    host = a_host(world)
    return cut_off(world, host, world.random.choice(CUTS) * world.spec.lease)


def hang_in_a_cut(world: "ElasticWorld") -> bool:
    """Hang a worker during a cut that heals within the lease."""
    process = a_worker(world)
    if (
        process is None
        or world.kind == "unmodified"
        or not cut_off(world, process.host, 0.9 * world.spec.lease)
    ):
        return False
    world.at(
        world.random.random() * world.spec.lease / 2, lambda: _stops(world, process) if process.live else None
    )
    return True


def cut_own_link(world: "ElasticWorld") -> bool:
    """Cut the driver's own link, so that it hears no host."""
    world.faults_detail = ""
    seconds = world.random.choice(CUTS) * world.spec.lease
    cut_hosts = [host for host in world.hosts.values() if cut_off(world, host, seconds)]
    return bool(cut_hosts)


def lose_beats(world: "ElasticWorld") -> bool:
    """Lose the beats of all workers for longer than a worker may be silent."""
    world.faults_detail = ""
    world.beats_from = world.now + world.random.uniform(0.6, 1.1) * world.options.worker_timeout
    world.workers.codes.add(
        128 + signal.SIGKILL
    )  # where it comes twice in a row, all may be killed for their silence
    return True


def cut_pair(world: "ElasticWorld") -> bool:
    """Cut two hosts from each other, though both reach the driver."""
    if len(world.hosts) < 2:
        return False
    pair = frozenset(world.random.sample(sorted(world.hosts), 2))
    world.faults_detail = ",".join(sorted(pair))
    world.cut_pairs.add(pair)
    world.faulty |= pair
    world.workers.codes.add(1)
    return True


def fill(world: "ElasticWorld") -> bool:
    """Leave a host's output unread for a while, with its workers' ends behind it."""
    host = a_host(world)
    host.is_full = True
    world.faulty.add(host.name)
    world.at(world.random.choice([4.0, 40.0]), lambda: clear(world, host))
    return True


def clear(world: "ElasticWorld", host: "SimHost") -> None:
    if host.is_full:
        host.is_full, host.whole_since = False, world.now


def leave_early(world: "ElasticWorld") -> bool:
    """End a worker with 0 in the middle of its training."""
    process = a_worker(world)
    if process is None or process.is_silent or process.round is None or world.random.random() < 0.8:
        return False
    world.workers.ended_well += 1
    world.workers.end(process, 0)
    return True


def cut_off(world: "ElasticWorld", host: "SimHost", seconds: float) -> bool:
    if host.is_cut:
        return False
    host.is_cut = True
    world.faulty.add(host.name)
    world.at(NOTICED, lambda: world.notice(host))
    agent = host.agent

    def lease_is_over() -> None:
        if host.is_cut:
            world.at(2.0, lambda: world.all_die(host, agent))
            world.gone(host, agent)

    if seconds > world.spec.lease:
        world.at(world.spec.lease, lease_is_over)
    world.at(seconds, lambda: join_again(world, host))
    return True


def join_again(world: "ElasticWorld", host: "SimHost") -> None:
    if host.is_cut:
        host.is_cut, host.whole_since = False, world.now
        world.at(world.delay(NOTICED), lambda: world.notice(host))


def spoil(world: "ElasticWorld") -> bool:
    host = a_host(world)
    host.is_bad = True
    world.workers.codes.add(1)
    return True


def slow(world: "ElasticWorld") -> bool:
    host = a_host(world)
    host.is_slow = True
    world.faulty.add(host.name)
    return True


def remove(world: "ElasticWorld") -> bool:
    host = a_host(world)
    if host.name not in world.listing or len(world.listing) == 1:
        return False
    world.listing.remove(host.name)
    world.discover()
    return True


def add(world: "ElasticWorld") -> bool:
    host = a_host(world)
    if host.name in world.listing:
        return False
    world.listing.insert(world.random.randint(0, len(world.listing)), host.name)
    world.discover()
    return True


def resize(world: "ElasticWorld") -> bool:
    host = a_host(world)
    host.slots = world.random.randint(1, 3)
    world.discover()
    return True


def reorder(world: "ElasticWorld") -> bool:
    world.faults_detail = ""
    world.random.shuffle(world.listing)
    world.discover()
    return True


def flap(world: "ElasticWorld") -> bool:
    """Take a host off the list for a moment, an excluded one if there is any; a worker fails when it is back."""
    excluded = [name for name in world.listing if world.ledger.host(name).until > world.now]
    if len(world.listing) == 1 or (not excluded and not remove(world)):
        return False
    if excluded:
        world.faults_detail = world.random.choice(excluded)
        world.listing.remove(world.faults_detail)
        world.discover()
    name = world.faults_detail

    def back() -> None:
        if name not in world.listing:
            world.listing.append(name)
            world.discover()
        world.at(3.0, lambda: _end_one(world, world.hosts[name]))

    world.at(1.0, back)
    return True


def _end_one(world: "ElasticWorld", host: "SimHost") -> None:
    world.workers.codes.add(1)
    for process in host.processes[:1]:
        world.workers.end(process, 1)


def empty(world: "ElasticWorld") -> bool:
    if not world.is_mute:
        world.tell(on.HostsDiscovered(()))
    return True


def fail_discovery(world: "ElasticWorld") -> bool:
    world.fail_discovery()
    return True


def fail_discovery_twice(world: "ElasticWorld") -> bool:
    """Let the script fail, work, and fail again."""
    world.faults_detail = ""
    world.fail_discovery()
    world.at(1.0, world.discover)
    world.at(2.0, world.fail_discovery)
    world.faults.append("fail_discovery")
    return True


def replace_hosts(world: "ElasticWorld") -> bool:
    """Replace all hosts of a round; in half of the cases when a worker is killed, and only some others have made their next commit."""
    members = world.workers.training()
    hosts = {process.host.name for process in members}
    others = [name for name in world.hosts if name not in hosts]
    if not members or sum(world.hosts[name].slots for name in others) < world.options.min_np:
        return False
    world.faults_detail = ",".join(others)
    if len(members) > 1 and world.random.random() < 0.5:
        killed, *ahead = world.random.sample(members, world.random.randint(2, len(members)))
        world.faults_detail += f", {killed} is killed, {', '.join(map(str, ahead))} are ahead"
        world.workers.commit(ahead)
        world.workers.codes.add(128 + signal.SIGKILL)
        world.workers.end(killed, None, signal.SIGKILL)
    _list(world, others)
    return True


def lose_state_while_growing(world: "ElasticWorld") -> bool:
    """Kill all workers of a round while others come, of which one is late."""
    hosts = {process.host.name for process in world.workers.training()}
    others = [name for name in world.hosts if name not in world.listing]
    if not hosts or not others:
        return False
    _list(world, [*world.listing, *others])
    world.workers.codes.add(128 + signal.SIGKILL)

    def kill_all() -> None:
        for process in world.workers.training():
            world.workers.end(process, None, signal.SIGKILL)

    world.at(3.0, kill_all)
    return True


def _list(world: "ElasticWorld", names: list[str]) -> None:
    """List these hosts; one of their first workers takes long to start."""
    world.workers.late_starts = 1
    world.listing = names
    world.discover()


def lose_patience(world: "ElasticWorld") -> bool:
    """Let the user interrupt three times, since a worker survives SIGKILL."""
    living = [process for host in world.hosts.values() for process in host.processes if process.live]
    if not living:
        return False
    world.faults_detail = str(living[0])
    living[0].outlives_kill = living[0].is_silent = True
    world.faulty.add(living[0].host.name)
    world.workers.hung.add(str(living[0]))
    for seconds in (0.5, 1.5, 4.5):
        world.at(seconds, lambda: _insist(world))
    return True


def _insist(world: "ElasticWorld") -> None:
    """Interrupt the job, as soon as it has a driver: without one, nothing would ever end the worker."""
    if world.is_driven:
        interrupt(world, signal.SIGINT)
    else:
        world.at(1.0, lambda: _insist(world))


def be_judged(world: "ElasticWorld") -> bool:
    """Report a hang of the whole job."""
    world.tell(on.JobHangs(60.0, (0,), "rank 0 waits"))
    return True


def stall(world: "ElasticWorld") -> bool:
    """Let the workers of the newest round live and beat, and never commit again."""
    world.faults_detail = ""
    world.workers.stalled = max(world.workers.rounds, default=-1)
    world.workers.codes.add(128 + signal.SIGKILL)
    return True


def move(world: "ElasticWorld") -> bool:
    """Let the user move a host's workers, and perhaps lose one of both hosts soon after."""
    names = sorted(world.hosts)
    apart = Random(f"{world.seed} move {world.now}")
    pairs = [(host, to) for host in names for to in (None, *names)]
    # Few requests can be met in a small world, so these are preferred.
    able = [pair for pair in pairs if world.engine.move_refusal(*pair, world.now) is None]
    host, to = apart.choice(able if able and apart.random() < 0.8 else pairs)
    world.faults_detail = f"{host} to {to}"
    world.tell(on.MoveWanted(host, to))
    if apart.random() < 0.6:
        world.at(apart.random() * 15, lambda: note(world, move))
    if apart.random() < 0.3:
        world.at(apart.random() * 3, lambda: note(world, apart.choice([lose_agent, power_off, kill])))
    return True


def signal_workers(world: "ElasticWorld") -> bool:
    """Let the user send the workers a signal that they survive."""
    world.faults_detail = ""
    world.tell(on.UserSignal(signal.SIGUSR1))
    return True


def interrupt(world: "ElasticWorld", number: int | None = None) -> None:
    if world.result is None:
        world.faults.append("interrupt")
        world.tell(on.Interrupted(number or world.random.choice([signal.SIGINT, signal.SIGTERM])))


def heal(world: "ElasticWorld") -> None:
    """Heal all faults, and bring all hosts back."""
    world.history.append(f"{world.now:7.2f} *** healed")
    world.healed_pairs, world.cut_pairs = world.cut_pairs, set()
    world.at(KNOWN, world.healed_pairs.clear)
    for host in world.hosts.values():
        host.slots = host.had
        clear(world, host)
        host.is_up, host.is_bad, host.is_slow = True, False, False
        join_again(world, host)
    if world.options.discovers:
        world.listing = [*world.listing, *(name for name in world.hosts if name not in world.listing)]
        world.discover()
