"""Faults of machines: no processes, memory, descriptors or room, file systems that are read-only or noexec, no /proc, slow processors."""

from benchmarks.faulty import doings as do
from benchmarks.faulty.kind import ANY, LATE, LOST, OWN, RESTARTS, WELL, Kind, Must, goes_on
from benchmarks.faulty.scene import Scene

__all__ = ["KINDS"]

EARLY = ("connecting", "starting", "running")
MAYBE = Must((0, 69, 1, 126, 127), r"host {host}|on host {host}", LATE)
"""It goes on, or ends and names the host."""
MAYBE_NOT = goes_on("host {host}", 69, 75)


def _no_more_pids(scene: Scene) -> None:
    """Not one more process on the host."""
    do.limited("pids", pids_max="0")(scene)


def _few_descriptors(scene: Scene) -> None:
    """Whoever logs in from now on may open 16 files."""
    scene.host.start_sshd()
    listener = (scene.host.sshd / "sshd.pid").read_text().strip()
    scene.host.run(["prlimit", "--pid", listener, "--nofile=16:16"], check=True)


def _out_of_memory(scene: Scene) -> None:
    """The workers of the host may have 24 MB, and one of them wants more."""
    do.limited("memory", Scene.workers, memory_limit_in_bytes="24000000")(scene)
    scene.order("eat", f"{scene.host.name}.0")


KINDS = [
    Kind(
        "no more processes may be started on a host (pids)",
        _no_more_pids,
        MAYBE,
        MAYBE_NOT,
        moments=EARLY,
        clean=LOST,
    ),
    Kind(
        "workers use more memory than their control group has (OOM)",
        _out_of_memory,
        Must((137,), "on host {host} failed first.*(SIGKILL|memory)"),
        goes_on("host {host}.*(SIGKILL|memory)"),
    ),
    Kind(
        "a host's logins may open 16 files",
        _few_descriptors,
        MAYBE,
        MAYBE_NOT,
        moments=("connecting",),
        clean=LOST,
    ),
    Kind(
        "hvlaunch may open 16 files",
        do.nothing,
        Must((2,), "files|descriptor"),
        Must((2,), "files|descriptor"),
        moments=("connecting",),
        prefix=("prlimit", "--nofile=16:16"),
        ends=True,
    ),
    Kind(
        "hvlaunch may open 40 files",
        do.nothing,
        Must((0, 2, 69), "files|descriptor", LATE),
        Must((0, 2, 69), "files|descriptor", LATE),
        moments=("connecting",),
        prefix=("prlimit", "--nofile=40:40"),
    ),
    Kind(
        "a host's /tmp is full", do.remounted("/tmp", "size=16k", fill=True), MAYBE, MAYBE_NOT, moments=EARLY
    ),
    Kind(
        "a host's /tmp is read-only",
        do.remounted("/tmp", "ro"),
        MAYBE,
        MAYBE_NOT,
        moments=EARLY,
        leaves="/tmp/hvlaunch-",
        clean=LOST,
    ),
    Kind("a host's /tmp is noexec", do.remounted("/tmp", "noexec"), WELL, goes_on(), moments=EARLY),
    Kind(
        "a host has no /tmp",
        do.in_host("mount -t tmpfs -o mode=000,ro none /tmp"),
        MAYBE,
        MAYBE_NOT,
        moments=EARLY,
        clean=LOST,
    ),
    Kind(
        "a host's /dev/shm is full",
        do.remounted("/dev/shm", "size=4k", fill=True),
        WELL,
        goes_on(),
        moments=EARLY,
    ),
    Kind(
        "a host's home is read-only",
        do.in_host("mount -o bind /run/home /run/home; mount -o remount,bind,ro /run/home"),
        WELL,
        goes_on(),
        moments=EARLY,
    ),
    Kind(
        "a host's /proc is not mounted",
        do.in_host("while umount -l /proc; do :; done"),
        MAYBE,
        MAYBE_NOT,
        moments=EARLY,
        clean=LOST,
    ),
    Kind(
        "a host's /proc is empty",
        do.in_host("mount -t tmpfs none /proc"),
        MAYBE,
        MAYBE_NOT,
        moments=EARLY,
        clean=LOST,
    ),
    Kind(
        "a host has a twentieth of a processor for a while",
        do.limited("cpu", seconds=6.0, cpu_cfs_quota_us="5000"),
        WELL,
        goes_on(),
        moments=ANY,
    ),
    Kind(
        "somebody removes /tmp/hvlaunch-* on a host",
        do.in_host("rm -rf /tmp/hvlaunch-*"),
        WELL,
        goes_on(),
        moments=("running",),
    ),
    Kind(
        "no program can be started on a host (/usr/bin is empty)",
        do.in_host("mount -t tmpfs none /usr/bin"),
        MAYBE,
        MAYBE_NOT,
        moments=EARLY,
        clean=LOST,
    ),
    Kind(
        "a host's wall clock steps by a day, back and forth",
        do.step_clock,
        WELL,
        goes_on(),
        moments=EARLY,
        options=("--remote-python", "{folder}/stepping"),
    ),
    Kind(
        "hvlaunch's wall clock steps by a day, back and forth",
        do.step_clock,
        WELL,
        goes_on(),
        moments=EARLY,
        prefix=("{folder}/stepping",),
    ),
    Kind(
        "a host's monotonic clock is another one (a time namespace)",
        do.nothing,
        WELL,
        goes_on(),
        moments=("connecting",),
        options=("--remote-python", "{folder}/shifted"),
        only=(OWN, RESTARTS),
    ),
]
