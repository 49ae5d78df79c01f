"""Faults of processes: signals to each of them, workers that end badly, and what can't be killed."""

import signal

from benchmarks.faulty import doings as do
from benchmarks.faulty.kind import (
    ANY,
    LEASE,
    LOST,
    MPI,
    UNKILLABLE,
    WELL,
    Kind,
    Must,
    failed,
    goes_on,
    lost,
)
from benchmarks.faulty.scene import Missed, Scene

__all__ = ["KINDS"]

WHILE_THERE = ("starting", "running", "ending")


def _stop(scene: Scene) -> None:
    scene.pause(0.0, 1.0)
    scene.stop()


def _stopped(first: do.Play) -> do.Play:
    """A fault, and then the job is asked to end."""

    def play(scene: Scene) -> None:
        first(scene)
        _stop(scene)

    return play


def _both(scene: Scene) -> None:
    pythons = [*scene.find(Scene.agents), *scene.guardians()]
    scene.kill("KILL", pythons)


def _stopped_and_driver_killed(scene: Scene) -> None:
    scene.kill("STOP", scene.find(Scene.guardians))
    scene.send(signal.SIGKILL)


def _driver_too_late(scene: Scene) -> None:
    scene.send(signal.SIGSTOP)
    scene.pause(LEASE + 2.0, LEASE + 4.0)
    scene.send(signal.SIGCONT)


def _driver_in_time(scene: Scene) -> None:
    scene.send(signal.SIGSTOP)
    scene.pause(0.1, 0.6 * LEASE)
    scene.send(signal.SIGCONT)


def _ordered(verb: str, then_stop: bool = False) -> do.Play:
    """One worker on the host gets the order; it has been heard when the worker says so."""

    def play(scene: Scene) -> None:
        scene.find(Scene.workers)
        scene.order(verb, f"{scene.host.name}.0")
        if not scene.obeyed(f"{scene.host.name}.0"):
            raise Missed("no worker has done it")
        if then_stop:
            _stop(scene)

    return play


def _frozen_for_good(scene: Scene) -> None:
    """What is frozen can't be killed: hvlaunch says so, and it goes when it thaws."""
    do.freeze(Scene.workers, do.FOR_GOOD)(scene)
    scene.stop()
    scene.ends(UNKILLABLE + 20.0)
    scene.undo.close()


WORKERS = [
    *(
        Kind(
            f"a worker gets {name}",
            do.killed(Scene.workers, name.removeprefix("SIG")),
            failed(128 + getattr(signal, name), name),
            goes_on(rf"on host {{host}} was killed by {name}"),
            failed(128 + getattr(signal, name), name) if name in ("SIGKILL", "SIGSEGV") else None,
            WHILE_THERE,
        )
        for name in (
            "SIGKILL",
            "SIGSEGV",
            "SIGABRT",
            "SIGTERM",
            "SIGINT",
            "SIGHUP",
            "SIGBUS",
            "SIGQUIT",
        )
    ),
    Kind(
        "all workers of a host are killed",
        do.killed(Scene.workers, every=True),
        failed(137, "SIGKILL"),
        goes_on("host {host}"),
        moments=WHILE_THERE,
    ),
    Kind(
        "all workers of the job are killed at once",
        do.at_once(Scene.workers),
        Must((137,), "failed first.*SIGKILL"),
        goes_on("SIGKILL"),
    ),
    Kind(
        "a worker pauses (SIGSTOP, SIGCONT)",
        do.paused(Scene.workers, 0.1, 3.0),
        WELL,
        goes_on(),
        WELL,
        WHILE_THERE,
    ),
    Kind(
        "a worker is stopped for good",
        do.killed(Scene.workers, "STOP"),
        None,
        goes_on("host {host} is stopped|host {host} has been silent"),
    ),
    Kind(
        "a worker is stopped, and the job is ended",
        _stopped(do.killed(Scene.workers, "STOP")),
        Must((143,), "SIGTERM"),
        ends=True,
    ),
    Kind(
        "a worker exits with 5",
        _ordered("exit 5"),
        failed(5, "exit code 5"),
        goes_on("on host {host} ended with exit code 5"),
        failed(5, "exit code 5"),
    ),
    Kind(
        "a worker runs out of memory (MemoryError)",
        _ordered("memory"),
        failed(1, "exit code 1"),
        goes_on("host {host} ended with exit code 1"),
    ),
    Kind("a worker closes its stdout and stderr", _ordered("mute"), WELL, goes_on(), WELL),
    Kind(
        "a worker ignores SIGTERM and SIGINT, and the job is ended",
        _ordered("deaf", then_stop=True),
        Must((143,), "SIGTERM"),
        Must((143,), "SIGTERM"),
        Must((143,), "SIGTERM"),
        ends=True,
    ),
    Kind(
        "a worker starts 30 deaf children in sessions of their own, and the job is ended",
        _ordered("children", then_stop=True),
        Must((143,), "SIGTERM"),
        Must((143,), "SIGTERM"),
        ends=True,
    ),
    Kind(
        "a fork bomb under a limit of processes, and the job is ended",
        do.bombed(_stop),
        Must((143,), "SIGTERM", UNKILLABLE),
        Must((143,), "SIGTERM", UNKILLABLE),
        ends=True,
    ),
    Kind("a worker prints 20 MB at once", _ordered("flood"), WELL, goes_on(), WELL),
    Kind("a worker prints a line of 3 MB without an end", _ordered("long"), WELL, goes_on()),
]

AGENTS = [
    *(
        Kind(
            f"an agent gets {name}",
            do.killed(Scene.agents, name.removeprefix("SIG")),
            lost(name),
            goes_on("host {host}"),
            moments=WHILE_THERE,
            loses="host",
        )
        for name in ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "SIGHUP", "SIGINT")
    ),
    Kind(
        "an agent pauses for less than the lease",
        do.paused(Scene.agents, 0.1, 0.7 * LEASE),
        WELL,
        goes_on(),
        moments=ANY,
    ),
    Kind(
        "an agent is stopped for good",
        do.killed(Scene.agents, "STOP"),
        lost("silent"),
        goes_on("host {host}.*silent"),
        moments=WHILE_THERE,
        loses="host",
        clean=LOST,
    ),
    Kind(
        "the agents of all hosts are killed at once",
        do.at_once(Scene.agents),
        Must((69,), "hosts? [abc].*: .*SIGKILL"),
        goes_on("hosts? [abc]"),
        loses="all",
    ),
    Kind(
        "a guardian is killed",
        do.killed(Scene.guardians),
        lost("guardian was killed"),
        goes_on("host {host}"),
        moments=WHILE_THERE,
        loses="host",
        clean=LOST,
    ),
    Kind(
        "a guardian gets SIGTERM",
        do.killed(Scene.guardians, "TERM"),
        lost("SIGTERM|guardian"),
        goes_on("host {host}"),
        moments=WHILE_THERE,
        loses="host",
        clean=LOST,
    ),
    Kind(
        "a guardian is stopped for good",
        do.killed(Scene.guardians, "STOP"),
        WELL,
        goes_on(),
        moments=WHILE_THERE,
        clean=LOST,
    ),
    Kind(
        "a guardian is stopped, and hvlaunch is killed",
        _stopped_and_driver_killed,
        Must((-9,)),
        Must((-9,)),
        loses="all",
        clean=LOST,
        ends=True,
    ),
    Kind(
        "agent and guardian are killed at once",
        _both,
        lost("killed|SIGKILL|closed|ended"),
        goes_on("host {host}"),
        moments=WHILE_THERE,
        loses="host",
        clean=LOST,
        leaves=".",
    ),
    Kind(
        "somebody on a host types: pkill -9 python",
        do.in_host("pkill -9 python"),
        failed(137, "SIGKILL"),
        goes_on("on host {host} was killed by SIGKILL"),
    ),
    Kind(
        "all of Python on a host is killed, agent and guardian too",
        do.killed(Scene.pythons, every=True),
        lost("killed|SIGKILL|closed|ended"),
        goes_on("host {host}"),
        moments=WHILE_THERE,
        loses="host",
        clean=LOST,
        leaves=".",
    ),
]

DRIVER = [
    *(
        Kind(
            f"hvlaunch gets {signal.Signals(number).name}",
            do.sent(number),
            Must((128 + number, -number)),  # by the signal itself, where Python has not begun yet
            Must((128 + number, -number)),
            Must((128 + number, -number)),
            ANY,
            ends=True,
        )
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    ),
    Kind(
        "hvlaunch gets SIGINT twice",
        do.sent(signal.SIGINT, signal.SIGINT, pause=1.5),
        Must((130,)),
        Must((130,)),
        Must((130,)),
        ANY,
        loses="all",
        ends=True,
    ),
    Kind(
        "hvlaunch gets SIGTERM, and is killed",
        do.sent(signal.SIGTERM, signal.SIGKILL, pause=1.5),
        Must((-9, 143)),
        Must((-9, 143)),
        Must((-9, 143)),
        ANY,
        loses="all",
        clean=LOST,
        ends=True,
    ),
    *(
        Kind(
            f"hvlaunch gets {signal.Signals(number).name}",
            do.sent(number),
            Must((-number,)),
            Must((-number,)),
            Must((-number,)),
            ANY,
            loses="all",
            clean=LOST,
            ends=True,
        )
        for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGQUIT)
    ),
    Kind(
        "hvlaunch gets SIGUSR1 and SIGUSR2",
        do.sent(signal.SIGUSR1, signal.SIGUSR2, pause=0.2),
        WELL,
        goes_on(),
    ),
    Kind(
        "hvlaunch pauses for less than the lease (SIGSTOP, SIGCONT)",
        _driver_in_time,
        WELL,
        goes_on(),
        WELL,
        ANY,
    ),
    Kind(
        "hvlaunch pauses for longer than the lease",
        _driver_too_late,
        Must((69,), "heard nothing from the driver|silent"),
        goes_on("heard nothing|silent"),
        loses="all",
    ),
    Kind(
        "mpirun is killed",
        do.driver_child("mpirun.openmpi", "KILL"),
        mpi=Must((69, 137), "mpirun|host"),
        only=(MPI,),
        loses="all",
        clean=LOST,
        moments=("starting", "running"),
    ),
]

FROZEN = [
    Kind("the workers of a host are frozen for a while", do.freeze(Scene.workers, 2.0), WELL, goes_on()),
    Kind(
        "the whole host is frozen for less than the lease",
        do.freeze(None, 0.6 * LEASE),
        WELL,
        goes_on(),
        moments=("starting", "running"),
    ),
    Kind(
        "the whole host is frozen for longer than the lease",
        do.freeze(None, LEASE + 3.0),
        lost("silent"),
        goes_on("host {host}.*silent"),
        loses="host",
        clean=LOST,
    ),
    Kind(
        "the workers of a host are frozen, and the job is ended",
        _frozen_for_good,
        Must((143,), "host {host}: .*can't be killed|SIGTERM", UNKILLABLE),
        ends=True,
        clean=LOST,
    ),
]

KINDS = [*WORKERS, *AGENTS, *DRIVER, *FROZEN]
