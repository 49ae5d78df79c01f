"""What is done to links, file systems and processes of test hosts, and undone again."""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.faulty.scene import Missed, Scene, until
from tests.testhosts.hosts import Driver, Host, Process

__all__ = [
    "FOR_GOOD",
    "Play",
    "at_once",
    "bombed",
    "cgroup",
    "cut",
    "cut_driver",
    "discovery",
    "discovery_gone",
    "driver_child",
    "filter_packets",
    "flap",
    "flapping_pool",
    "freeze",
    "in_host",
    "in_host_for",
    "killed",
    "late",
    "leaves_the_pool",
    "limited",
    "nothing",
    "on_gate",
    "paused",
    "power_off",
    "remounted",
    "reset",
    "sent",
    "slow_link",
    "step_clock",
]

Play = Callable[[Scene], None]
Choose = Callable[[Scene], Sequence[Process]]

FOR_GOOD = float("inf")
_CGROUPS = Path("/sys/fs/cgroup")
_numbers = itertools.count()


# Signals


def killed(choose: Choose, name: str = "KILL", *, every: bool = False) -> Play:
    """One of the processes, or every one of them, gets the signal."""

    def play(scene: Scene) -> None:
        found = scene.find(choose)
        scene.kill(name, found if every else [scene.random.choice(found)])

    return play


def at_once(choose: Choose, name: str = "KILL") -> Play:
    """On each host, all of these processes get the signal."""

    def play(scene: Scene) -> None:
        scene.find(choose)
        here = scene.host
        for host in scene.used:
            scene.host = host
            if found := choose(scene):
                host.run(["kill", f"-{name}", "--", *(str(one.pid) for one in found)])
        scene.host = here

    return play


def paused(choose: Choose, least: float, most: float) -> Play:
    """One of the processes is stopped, and goes on after a random time."""

    def play(scene: Scene) -> None:
        one = scene.random.choice(scene.find(choose))
        scene.kill("STOP", [one])
        scene.pause(least, most)
        scene.host.run(["kill", "-CONT", str(one.pid)])

    return play


def sent(*numbers: int, pause: float = 0.0) -> Play:
    """hvlaunch gets these signals, with random pauses of at most so many seconds between them."""

    def play(scene: Scene) -> None:
        for number in numbers:
            scene.send(number)
            if number == signal.SIGCONT:
                continue
            scene.pause(0.0, pause)

    return play


def driver_child(program: str, name: str) -> Play:
    """A program that hvlaunch has started on its own machine gets the signal."""

    def play(scene: Scene) -> None:
        one = scene.random.choice(scene.find(lambda scene: scene.on_driver(program)))
        scene.hosts.driver.run(["kill", f"-{name}", str(one.pid)])

    return play


def bombed(then: Play) -> Play:
    """A worker forks without end, as far as a limit of processes lets it."""

    def play(scene: Scene) -> None:
        group = cgroup(scene, "pids", {"pids.max": "40"}, scene.find(Scene.workers))
        scene.undo.callback(until, lambda: _is_killed(group), 30.0)  # before they could leave the group
        scene.order("bomb", f"{scene.host.name}.0")
        scene.pause(0.5, 2.0)
        then(scene)

    return play


def _is_killed(group: Path) -> bool:
    pids = (group / "cgroup.procs").read_text().split()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    return not pids


def nothing(_: Scene) -> None:
    """The fault is in how the job was started."""


# Links


def cut(least: float, most: float) -> Play:
    """No packet to or from the host for a random time; for good where that is infinite."""

    def play(scene: Scene) -> None:
        scene.host.cut()
        if most == FOR_GOOD:
            scene.undo.callback(scene.host.heal)
            return
        scene.pause(least, most)
        scene.host.heal()

    return play


def cut_driver(least: float, most: float) -> Play:
    """The same for the driver's own link."""

    def play(scene: Scene) -> None:
        _driver_link(scene, False)
        scene.undo.callback(_driver_link, scene, True)
        if most != FOR_GOOD:
            scene.pause(least, most)
            _driver_link(scene, True)

    return play


def _driver_link(scene: Scene, connected: bool) -> None:
    scene.hosts.keeper.ask("link", "driver", connected)


def flap(seconds: float) -> Play:
    """The host's link comes and goes."""

    def play(scene: Scene) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            scene.host.cut()
            scene.pause(0.1, 1.0)
            scene.host.heal()
            scene.pause(0.1, 1.0)

    return play


def late(ms: float, seconds: float) -> Play:
    """Packets to and from the host are so many milliseconds late for some time."""

    def play(scene: Scene) -> None:
        scene.host.delay(ms)
        scene.pause(seconds)
        scene.host.delay(0)

    return play


def filter_packets(*rules: str, seconds: float = FOR_GOOD, on_driver: bool = False) -> Play:
    """Rules of iptables on the host, or in the driver place; {driver} and {other} are addresses."""

    def play(scene: Scene) -> None:
        place: Host | Driver = scene.hosts.driver if on_driver else scene.host
        other = next(host for host in scene.used if host is not scene.host)
        done = []
        for tool, name in (("iptables", "address"), ("ip6tables", "address6")):
            for rule in rules:
                words = rule.format(
                    driver=getattr(scene.hosts.driver, name),
                    other=getattr(other, name),
                    host=getattr(scene.host, name),
                ).split()
                place.run([tool, "-w", "-A", *words], check=True)
                done.append((tool, words))
        scene.host.touched = True

        def undo() -> None:
            while done:
                tool, words = done.pop()
                place.run([tool, "-w", "-D", *words])

        scene.undo.callback(undo)
        if seconds != FOR_GOOD:
            scene.pause(seconds)
            undo()

    return play


def reset(scene: Scene) -> None:
    """A connection of hvlaunch's own with the host is reset, both ways. Raises Missed where there is none."""
    query = ["ss", "-Htnp", "state", "established", "dst", scene.host.address]
    lines = scene.hosts.driver.run(query, check=True).stdout.splitlines()
    ours = [line.split()[2:4] for line in lines if f"pid={scene.job.pid}," in line]
    if not ours:
        raise Missed("there is no connection")
    near, far = (end.rpartition(":")[2] for end in scene.random.choice(ours))
    place = ["dst", scene.host.address, "dport", far, "sport", near]
    scene.hosts.driver.run(["ss", "-K", *place], check=True)


def slow_link(rate: str, seconds: float) -> Play:
    """What the host sends goes at that rate only."""

    def play(scene: Scene) -> None:
        shape = ["tbf", "rate", rate, "burst", "8kbit", "limit", "200000"]
        scene.host.run(["tc", "qdisc", "add", "dev", "eth0", "root", *shape], check=True)
        scene.host.touched = True
        scene.pause(seconds)
        scene.host.run(["tc", "qdisc", "del", "dev", "eth0", "root"])

    return play


def on_gate(play: Play) -> Play:
    """The same on the jump host."""

    def there(scene: Scene) -> None:
        here, scene.host = scene.host, scene.hosts["gate"]
        try:
            play(scene)
        finally:
            scene.host = here

    return there


def power_off(*, restore_after: float | None = None) -> Play:
    def play(scene: Scene) -> None:
        scene.host.kill()
        if restore_after is not None:
            scene.pause(restore_after)
            scene.host.restore()
        else:
            scene.undo.callback(scene.host.restore)

    return play


# Files and limits


def in_host(script: str, undo: str = "") -> Play:
    """A shell runs it on the host, as root."""

    def play(scene: Scene) -> None:
        scene.host.touched = True
        scene.host.run(["sh", "-c", script])
        if undo:
            scene.undo.callback(scene.host.run, ["sh", "-c", undo])

    return play


def in_host_for(script: str, again: str, least: float, most: float) -> Play:
    """The same, and after a random time it runs `again`."""

    def play(scene: Scene) -> None:
        in_host(script)(scene)
        scene.pause(least, most)
        in_host(again.replace("{address6}", scene.host.address6))(scene)

    return play


def step_clock(scene: Scene) -> None:
    """time.time() of those that were started by FOLDER/stepping is a day early, then a day late, then right again."""
    for seconds in (86400, -86400, 0):
        (scene.folder / "offset").write_text(str(seconds))
        scene.pause(0.2, 2.0)


def remounted(where: str, options: str, *, fill: bool = False, seconds: float = FOR_GOOD) -> Play:
    """A file system of the host gets these options; filled, there is no room left in it."""
    again = f"mount -o remount,rw,exec,size=50% {where}; rm -f {where}/fill"
    do = f"mount -o remount,{options} {where}"
    if fill:
        do += f"; head -c 100000000 /dev/zero > {where}/fill"

    def play(scene: Scene) -> None:
        in_host(do)(scene)
        if seconds != FOR_GOOD:
            scene.pause(seconds)
            scene.host.run(["sh", "-c", again])
        else:
            scene.undo.callback(scene.host.run, ["sh", "-c", again])

    return play


def cgroup(scene: Scene, controller: str, settings: dict[str, str], processes: Sequence[Process]) -> Path:
    """The host's processes in a control group of their own, until it is undone.

    Empty `processes` stand for all, sshd that listens included, so that whatever logs in is in it too.
    """
    group = _CGROUPS / controller / f"hvlaunch-faults-{os.getpid()}-{next(_numbers)}"
    group.mkdir()
    scene.undo.callback(_dissolve, group)
    for name, value in settings.items():
        (group / name).write_text(value)
    scene.host.touched = True
    pids = [str(one.pid) for one in processes]
    if not pids:
        pids = scene.host.run(["sh", "-c", "cd /proc; ls -d [0-9]*"]).stdout.split()
        pids.remove("1")
    enter = 'cd "$1" && shift; for pid; do echo $pid > cgroup.procs; done 2>/dev/null'
    scene.host.run(["sh", "-c", enter, "sh", str(group), *pids])
    return group


def _dissolve(group: Path) -> None:
    """What is in it goes to the group above, also what was started meanwhile."""
    until(lambda: _is_dissolved(group), 30.0)


def _is_dissolved(group: Path) -> bool:
    if group.exists():
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (group.parent / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            group.rmdir()
    return not group.exists()


def limited(
    controller: str, choose: Choose | None = None, seconds: float = FOR_GOOD, **settings: str
) -> Play:
    """The chosen processes, or all of the host's, are in a control group with these settings (`_` for `.`)."""

    def play(scene: Scene) -> None:
        chosen = scene.find(choose) if choose else []
        group = cgroup(
            scene, controller, {name.replace("_", ".", 1): text for name, text in settings.items()}, chosen
        )
        if seconds != FOR_GOOD:
            scene.pause(seconds)
            _dissolve(group)

    return play


def freeze(choose: Choose | None, seconds: float) -> Play:
    """They are frozen, as by a container's pause, and thaw after some time."""

    def play(scene: Scene) -> None:
        chosen = scene.find(choose) if choose else []
        group = cgroup(scene, "freezer", {}, chosen)
        (group / "freezer.state").write_text("FROZEN")
        scene.undo.callback((group / "freezer.state").write_text, "THAWED")
        if seconds != FOR_GOOD:
            scene.pause(seconds)
            (group / "freezer.state").write_text("THAWED")

    return play


# The pool


def leaves_the_pool(least: float, most: float) -> Play:
    """The host is not in the pool for some time."""

    def play(scene: Scene) -> None:
        assert scene.pool is not None
        scene.pool.leave(scene.host.name)
        scene.pause(least, most)
        scene.pool.join(scene.host.name)

    return play


def discovery(script: str, seconds: float) -> Play:
    """The discovery script is another one for some time."""

    def play(scene: Scene) -> None:
        assert scene.pool is not None
        scene.pool.write(script)
        scene.undo.callback(scene.pool.write)
        scene.pause(seconds)
        scene.pool.write()

    return play


def discovery_gone(scene: Scene) -> None:
    """There is no script any more, for some time."""
    assert scene.pool is not None
    (scene.folder / "discover.sh").unlink()
    scene.pause(2.0, 4.0)
    scene.pool.write()


def flapping_pool(seconds: float) -> Play:
    """The host comes and goes."""

    def play(scene: Scene) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            leaves_the_pool(0.1, 1.0)(scene)
            scene.pause(0.1, 1.0)

    return play
