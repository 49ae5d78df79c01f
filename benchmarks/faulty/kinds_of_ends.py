"""Signals at random to all that a job consists of, while it is being ended."""

import contextlib
import signal
import time
from collections.abc import Callable

from benchmarks.faulty.kind import CLOSING, GRACE, LEASE, LOST, Kind, Must
from benchmarks.faulty.scene import Missed, Scene

__all__ = ["KINDS"]

SIGNALS = ("STOP", "CONT", "TERM", "INT", "HUP", "KILL")
FOR_GOOD = ("STOP", "KILL")
"""Guardian and agent of one host do not get both: nobody would be left to end the workers."""
DEAF, AT_HVLAUNCH = 0.7, 0.3
"""How many hosts have a worker that does not listen, and how many signals go to hvlaunch itself."""
OVERSEEN = GRACE + LEASE + 20.0
"""Seconds after which a guardian kills an agent that is stopped."""


def _at_hvlaunch(scene: Scene, name: str) -> None:
    number = signal.Signals[f"SIG{name}"]
    if name in ("TERM", "INT", "HUP"):
        scene.codes.add(128 + number)
    elif name == "KILL":
        scene.codes.add(-number)
    scene.send(number)
    if name == "STOP":
        scene.codes.add(69)  # a host that is lost meanwhile may be what it hears of first
        scene.pause(0.1, LEASE)
        scene.send(signal.SIGCONT)


def _at_host(scene: Scene, name: str, overseers: dict[str, str]) -> str:
    """A worker, or the agent, or its guardian: who it was."""
    host = scene.random.choice(scene.used)
    who = scene.random.choice(("workers", "agents", "guardians"))
    if name in FOR_GOOD and who != "workers" and overseers.setdefault(host.name, who) != who:
        return "nobody"
    here, scene.host = scene.host, host
    try:
        found = getattr(scene, who)()
        victims = [scene.random.choice(found)] if found else []
        if victims:
            scene.kill(name, victims)
        return f"{who} on {host.name}: {victims}"
    finally:
        scene.host = here


def _signals(begin: Callable[[Scene], None]) -> Callable[[Scene], None]:
    """Some workers are deaf, with children that are; the job comes to its end, and the signals come while it does."""

    def play(scene: Scene) -> None:
        story = scene.folder / "signals"
        scene.find(Scene.workers)
        for host in scene.used:
            if scene.random.random() < DEAF:
                scene.order(scene.random.choice(("deaf", "children")), f"{host.name}.0")
                scene.obeyed(f"{host.name}.0")
        begin(scene)
        overseers: dict[str, str] = {}
        for _ in range(scene.random.randint(1, 5)):
            scene.pause(0.0, scene.random.choice((0.05, 0.5, GRACE)))
            name = scene.random.choice(SIGNALS)
            with contextlib.suppress(Missed), story.open("a") as notes:
                if scene.random.random() < AT_HVLAUNCH:
                    notes.write(f"{time.time():.3f} {name} to hvlaunch\n")
                    _at_hvlaunch(scene, name)
                else:
                    notes.write(f"{time.time():.3f} {name} to {_at_host(scene, name, overseers)}\n")

    return play


def _fails(scene: Scene) -> None:
    scene.order("exit 5", "b.1")
    scene.obeyed("b.1")


ENDS = Must((143,), within=LOST + CLOSING)
FAILS = Must((5,), within=LOST + CLOSING)
KINDS = [
    Kind(
        "signals at random while the job ends by SIGTERM",
        _signals(Scene.stop),
        ENDS,
        ENDS,
        ENDS,
        loses="all",
        clean=OVERSEEN,
        ends=True,
    ),
    Kind(
        "signals at random while the job ends for a worker that has failed",
        _signals(_fails),
        FAILS,
        mpi=FAILS,
        loses="all",
        clean=OVERSEEN,
        ends=True,
    ),
]
