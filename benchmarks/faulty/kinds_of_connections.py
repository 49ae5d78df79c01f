"""Faults of connections: lost, stuck or refused while the job is connecting, starting, running, changing its round or ending."""

from benchmarks.faulty import doings as do
from benchmarks.faulty.kind import (
    JUMP,
    LATE,
    LEASE,
    LOST,
    MPI,
    OPENSSH,
    OWN,
    PROCESS,
    RELAY,
    RESTARTS,
    SOON,
    WELL,
    Form,
    Kind,
    Must,
    goes_on,
)
from benchmarks.faulty.scene import Scene

__all__ = ["KINDS"]

BEGINNING = ("connecting", "starting")
THERE = ("running", "ending")
BACK = Must((0,), "connected again", LEASE + SOON, always=True)
"""No worker is lost, and no line."""
MAYBE = Must((0, 69), "hosts? [abc].*: ", LATE)
"""Before an agent is known, there is no session yet."""
STOPPED = Must((143,), within=LOST)
BY_SSH = (OWN, RELAY, JUMP, OPENSSH, RESTARTS, PROCESS)


def _while_the_round_changes(fault: do.Play) -> do.Play:
    def play(scene: Scene) -> None:
        do.killed(Scene.workers)(scene)
        scene.pause(0.0, 2.0)
        fault(scene)

    return play


def _while_it_is_stopped(fault: do.Play) -> do.Play:
    def play(scene: Scene) -> None:
        scene.stop()
        scene.pause(0.0, 0.15)
        fault(scene)

    return play


def kinds(name: str, fault: do.Play, *only: Form) -> list[Kind]:
    """The fault at each moment of a job of these forms."""
    mpi = MPI in only
    return [
        Kind(name, fault, BACK, goes_on("connected again"), BACK if mpi else None, THERE, only=only),
        Kind(
            f"{name}, while the job begins",
            fault,
            MAYBE,
            goes_on("", 69),
            MAYBE if mpi else None,
            BEGINNING,
            loses="all",
            clean=LOST,
            only=only,
        ),
        Kind(
            f"{name}, while the job is stopped",
            _while_it_is_stopped(fault),
            STOPPED,
            STOPPED,
            STOPPED if mpi else None,
            loses="all",
            clean=LOST,
            only=only,
            ends=True,
        ),
    ]


KINDS = [
    *kinds("the sshd of a connection is killed", do.killed(Scene.sessions), *BY_SSH),
    *kinds("the sshd of all connections is killed at once", do.at_once(Scene.sessions), *BY_SSH),
    *kinds("the sshd of a connection is stopped for good", do.killed(Scene.sessions, "STOP"), *BY_SSH),
    *kinds("hvlaunch's connection to a host is reset", do.reset, OWN, RELAY, MPI, RESTARTS, PROCESS),
    *kinds("the jump host's sshd is killed", do.on_gate(do.killed(Scene.sessions, every=True)), JUMP),
    *kinds("the ssh of a host is killed (--ssh-client openssh)", do.driver_child("ssh", "KILL"), OPENSSH),
    *kinds("the ssh of a host is stopped (--ssh-client openssh)", do.driver_child("ssh", "STOP"), OPENSSH),
    Kind(
        "the sshd of a connection is killed, while the round changes",
        _while_the_round_changes(do.killed(Scene.sessions)),
        elastic=goes_on(),
        loses="host",
    ),
    Kind(
        "the sshd of all connections is killed at once, while the round changes",
        _while_the_round_changes(do.at_once(Scene.sessions)),
        elastic=goes_on(),
        loses="host",
    ),
    Kind(
        "the sshd of a connection pauses",
        do.paused(Scene.sessions, 0.1, 0.6 * LEASE),
        WELL,
        goes_on(),
        moments=("starting", "running"),
    ),
    Kind(
        "all connections of the host are reset",
        do.filter_packets("INPUT -p tcp -j REJECT --reject-with tcp-reset", seconds=1.0),
        Must((0,), within=LEASE + SOON),
        goes_on(),
        moments=THERE,
    ),
    Kind(
        "the jump host is switched off",
        do.on_gate(do.power_off()),
        Must((69,), "hosts? [abc]", LOST),
        only=(JUMP,),
        moments=("starting", "running"),
        loses="all",
        clean=LOST,
    ),
    Kind(
        "the jump host's link is cut for a while",
        do.on_gate(do.cut(0.2, 0.6 * LEASE)),
        WELL,
        only=(JUMP,),
        moments=("running",),
    ),
]
