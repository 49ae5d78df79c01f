"""Faults around hvlaunch: who reads its output, where its files are, and what its discovery script does."""

import signal

from benchmarks.faulty import doings as do
from benchmarks.faulty.kind import GRACE, LATE, RECOVERY, SOON, WELL, Kind, Must, goes_on
from benchmarks.faulty.scene import Scene

__all__ = ["KINDS"]

STUCK = SOON + GRACE
"""Nobody reads: what is not taken within the grace after the end is dropped."""


def _nobody_reads(then: do.Play) -> do.Play:
    def play(scene: Scene) -> None:
        scene.readers["stdout"].pace = 0
        scene.order("yes", f"{scene.host.name}.0")
        scene.pause(0.5, 3.0)
        then(scene)

    return play


def _exits(scene: Scene) -> None:
    """A worker beside the one that prints."""
    scene.order("exit 5", f"{scene.another.name}.0")
    scene.obeyed(f"{scene.another.name}.0")


def _closed(name: str) -> do.Play:
    """The program that reads the stream ends."""

    def play(scene: Scene) -> None:
        scene.readers[name].close()

    return play


def _slow(scene: Scene) -> None:
    scene.readers["stdout"].pace = 20_000
    scene.order("flood", f"{scene.host.name}.0")
    scene.pause(2.0, 4.0)
    scene.readers["stdout"].pace = None


def _full(scene: Scene) -> None:
    """No room where hvlaunch writes its files."""
    scene.fill_disk()
    scene.pause(4.0)  # until the files need another page


SCRIPTS = {
    "fails": "exit 3",
    "is killed": "kill -9 $$",
    "prints without end": "exec yes",
    "prints nonsense": "head -c 4000 /dev/urandom",
    "never ends": "exec sleep 600",
    "prints nothing": ":",
    "leaves a child with its stdout": "sleep 600 & cat {pool}",
    "ignores SIGTERM and hangs": "trap '' TERM INT; while :; do sleep 1; done",
    "prints a host that is not there": "cat {pool}; echo nosuch:1",
    "prints each host twice": "cat {pool} {pool}",
    "prints other slots each time": 'sed "s/:.*/:$((1 + $(date +%N | cut -c1) % 3))/" {pool}',
}

KINDS = [
    Kind(
        "nobody reads stdout, and the job is ended",
        _nobody_reads(Scene.stop),
        Must((143,), "SIGTERM", STUCK),
        Must((143,), "SIGTERM", STUCK),
        loses="all",
        ends=True,
    ),
    Kind(
        "nobody reads stdout, and a worker exits with 5",
        _nobody_reads(_exits),
        Must((5,), "exit code 5", STUCK),
        loses="all",
        ends=True,
    ),
    Kind(
        "nobody reads stdout, and hvlaunch is killed",
        _nobody_reads(do.sent(signal.SIGKILL)),
        Must((-9,)),
        Must((-9,)),
        loses="all",
        ends=True,
        clean=LATE,
    ),
    Kind("stdout is read slowly for a while", _slow, WELL, goes_on()),
    Kind(
        "who reads stdout ends (| head)",
        _closed("stdout"),
        Must((141, -13)),
        Must((141, -13)),
        Must((141, -13)),
        ("connecting", "starting", "running"),
        loses="all",
        ends=True,
    ),
    Kind(
        "who reads stderr ends",
        _closed("stderr"),
        Must((0, 74, 141)),
        Must((0, 74, 141), within=RECOVERY),
        moments=("connecting", "running"),
        loses="all",
    ),
    Kind(
        "no room for files of output",
        _full,
        Must((74,), "could not be written|no space|No space", LATE),
        Must((74,), "could not be written|no space|No space", RECOVERY),
        options=("--output-filename", "{disk}/output"),
    ),
    *(
        Kind(
            f"the discovery script {what}",
            do.discovery(script, 4.0),
            elastic=goes_on(),
            moments=("starting", "running"),
            options=("--discovery-timeout", "2"),
        )
        for what, script in SCRIPTS.items()
    ),
    Kind("the discovery script is gone", do.discovery_gone, elastic=goes_on()),
    Kind(
        "a host leaves the pool, and comes back",
        do.leaves_the_pool(0.5, 4.0),
        elastic=goes_on(),
        moments=("starting", "running"),
    ),
    Kind(
        "the pool flaps for 6 s",
        do.flapping_pool(6.0),
        elastic=goes_on(within=RECOVERY),
        moments=("starting", "running"),
    ),
]
