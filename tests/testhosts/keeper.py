"""The keeper of test hosts: one process that owns their namespaces, so that they end when it ends.

testhosts.py starts it as a program of its own and sends requests, one JSON list a line: a verb and
its arguments. Each is answered by one JSON object: {"result": …} or {"error": "…"}. It knows
nothing of ssh: a place (a host, or the driver's) is described by its mounts, its network interface
and the command that boots it.

The keeper's own network namespace holds the bridge. It ends, and takes everything with it, when
its stdin closes, when the process that started it is gone, or on SIGTERM; if it is killed, the
kernel kills the first process of every place (PDEATHSIG), and a PID namespace ends with that.
"""

import collections
import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Keeper", "processes_in_network", "relay"]

Json = dict[str, Any]

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
WORLD_WRITABLE = {"/tmp", "/dev/shm"}
SETTLE = 30.0  # seconds for a place to boot

libc = ctypes.CDLL(None, use_errno=True)


class KeeperError(Exception):
    """A place can't be made as asked; the text says why."""


def system_call(name: str, *args: Any) -> None:
    if getattr(libc, name)(*args) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{args}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    system_call("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode())


def ip(*commands: str, pass_fds: tuple[int, ...] = ()) -> None:
    """Run iproute2's `ip` on these commands, in the network namespace that the caller is in."""
    batch = "".join(f"{command}\n" for command in commands)
    done = subprocess.run(
        ["ip", "-batch", "-"], input=batch, capture_output=True, text=True, pass_fds=pass_fds, check=False
    )
    if done.returncode != 0:
        raise KeeperError(f"ip: {done.stderr.strip()} (of: {'; '.join(commands)})")


def set_sysctl(path: str, value: int) -> None:
    with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6 has no such file
        Path("/proc/sys/net", path).write_text(str(value))


def network_of(pid: int | str) -> str:
    return str(Path("/proc", str(pid), "ns", "net").readlink())


def processes_in_network(namespace: str) -> Iterator[int]:
    """Processes of this machine whose network namespace is `namespace` (`net:[4026531840]`)."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if network_of(entry.name) == namespace:
                    yield int(entry.name)


def kill_network(pid: int) -> None:
    """Kill every process in the network namespace of the process `pid`, but for that one."""
    try:
        network = network_of(pid)
    except FileNotFoundError:
        return
    while others := [other for other in processes_in_network(network) if other != pid]:
        for other in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)


def relay(one: int, other: int, delay: float) -> None:
    """Carry frames between two TAP devices, each `delay` seconds late. Never returns."""
    late: collections.deque[tuple[float, int, bytes]] = collections.deque()
    opposite = {one: other, other: one}
    while True:
        timeout = max(0.0, late[0][0] - time.monotonic()) if late else None
        for fd in select.select([one, other], [], [], timeout)[0]:
            late.append((time.monotonic() + delay, opposite[fd], os.read(fd, 65536)))
        while late and late[0][0] <= time.monotonic():
            _, fd, frame = late.popleft()
            with contextlib.suppress(OSError):
                os.write(fd, frame)


def open_tap(name: str) -> int:
    try:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise KeeperError(f"a delay needs /dev/net/tun: {error.strerror}") from error
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return fd


def make_mounts(mounts: list[list[str]]) -> None:
    """Mount each [kind, source, target] in order; sources are what they were before the first mount.

    Kinds: proc, sysfs, tmpfs (of no source), bind, and absent (target is a file that will not be there).
    """
    sources = {
        index: os.open(source, os.O_PATH) for index, (kind, source, _) in enumerate(mounts) if kind == "bind"
    }
    layered: set[Path] = set()
    for index, (kind, _, target) in enumerate(mounts):
        if kind == "bind":
            source = f"/proc/self/fd/{sources[index]}"
            ensure_target(Path(target), like=Path(source))
            mount(source, target, "", MS_BIND | MS_REC)
        elif kind == "absent":
            folder = Path(target).parent
            if folder not in layered:
                lay_over(folder, layer=Path("/run", f"absent.{index}"))
                layered.add(folder)
            Path(target).unlink()
        else:
            options = "" if kind != "tmpfs" else "mode=1777" if target in WORLD_WRITABLE else "mode=755"
            mount(kind, target, kind, 0, options)
    for fd in sources.values():
        os.close(fd)


def ensure_target(target: Path, like: Path) -> None:
    if like.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()


def lay_over(folder: Path, layer: Path) -> None:
    """Lay an overlay over the directory: what is removed from it is gone in this mount namespace only."""
    upper, work = layer / "upper", layer / "work"
    upper.mkdir(parents=True)
    work.mkdir()
    mount("overlay", str(folder), "overlay", 0, f"lowerdir={folder},upperdir={upper},workdir={work}")


def make_network(interface: Json, bridge: int) -> None:
    """Make eth0, its other end on the bridge in the namespace `bridge` (a file descriptor)."""
    port, own = interface["port"], os.open("/proc/self/ns/net", os.O_RDONLY)
    set_sysctl("ipv6/conf/default/accept_dad", 0)
    ip(
        f"link add eth0 address {interface['mac']} type veth peer name {port} netns /proc/self/fd/{bridge}",
        pass_fds=(bridge,),
    )
    # A neighbour that stays silent is asked for hours, not three times: a cut is then silence, not "no route to host".
    for family in ("ipv4", "ipv6"):
        for kind in ("ucast_solicit", "mcast_solicit"):
            set_sysctl(f"{family}/neigh/eth0/{kind}", 10_000)
    addresses = [f"address add {address} dev eth0" for address in interface["addresses"]]
    ip("link set lo up", *addresses, "link set eth0 up")
    system_call("setns", bridge, CLONE_NEWNET)
    ip(f"link set {port} master br0 up")
    system_call("setns", own, CLONE_NEWNET)
    os.close(own)


def boot(place: Json) -> None:
    """Become a place: its namespaces, mounts, name and network; then run its command."""
    system_call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    system_call("prctl", PR_SET_NAME, place["name"].encode()[:15], 0, 0, 0)
    bridge = os.open("/proc/self/ns/net", os.O_RDONLY)
    system_call("unshare", CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWIPC)
    mount("", "/", "", MS_REC | MS_PRIVATE)
    os.chdir("/")
    make_mounts(place["mounts"])
    socket.sethostname(place["name"])
    make_network(place["interface"], bridge)
    os.close(bridge)
    if place["command"]:
        done = subprocess.run(place["command"], capture_output=True, text=True, check=False, timeout=SETTLE)
        if done.returncode != 0:
            raise KeeperError(f"{place['command']}: {done.stderr.strip() or f'ended with {done.returncode}'}")


def live_as_init(place: Json, report: int) -> None:
    """The first process of a place, in a fresh child: boot, say so on `report`, and reap for ever."""
    try:
        quiet = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(quiet, fd)
        os.closerange(3, report)
        os.closerange(report + 1, 1024)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        boot(place)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children, orphans included
        os.write(report, b"up")
        os.close(report)
        while True:
            signal.pause()
    except (KeeperError, subprocess.TimeoutExpired) as error:
        os.write(report, str(error).encode())
    except BaseException:  # noqa: BLE001 - a forked child must never return into its parent's code
        os.write(report, traceback.format_exc().encode())
    finally:
        os._exit(1)


class Keeper:
    """Places by name, and what is done to their links. Each public method is a verb of the protocol."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.places: dict[str, Json] = {}
        self.pids: dict[str, int] = {}
        self.relays: dict[str, int] = {}
        self.cut: set[str] = set()
        self.own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        system_call("unshare", CLONE_NEWNET)
        set_sysctl("ipv6/conf/all/disable_ipv6", 1)
        set_sysctl("ipv6/conf/default/disable_ipv6", 1)
        ip("link add br0 type bridge mcast_snooping 0", "link set br0 up")

    def start(self, places: list[Json]) -> dict[str, int]:
        """Boot these places, all at once; their first processes' pids."""
        reports = {place["name"]: self._fork(place) for place in places}
        failed = {}
        for name, report in reports.items():
            with os.fdopen(report, "rb") as stream:
                answer = stream.read().decode(errors="replace")
            if answer != "up":
                failed[name] = answer or "its first process was killed"
                os.waitpid(self.pids.pop(name), 0)
        if failed:
            raise KeeperError("; ".join(f"{name} did not start: {why}" for name, why in failed.items()))
        return {name: self.pids[name] for name in reports}

    def members(self, name: str) -> list[int]:
        """Processes in the network namespace of a place, but for its first."""
        first = self.pids[name]
        return [pid for pid in processes_in_network(network_of(first)) if pid != first]

    def link(self, name: str, connected: bool) -> None:
        """Connect a host's port to the bridge or take it off: its carrier stays, its frames go nowhere."""
        (self.cut.discard if connected else self.cut.add)(name)
        port = self._port(name)
        bridge = f"br-{port}" if name in self.relays else "br0"
        ip(f"link set {port} master {bridge}" if connected else f"link set {port} nomaster")

    def delay(self, name: str, seconds: float) -> None:
        """Make every frame to and from the host late by `seconds`; 0 takes the detour away."""
        port = self._port(name)
        self._drop_relay(name)
        if seconds > 0:
            near, far = open_tap(f"n-{port}"), open_tap(f"f-{port}")
            ip(
                f"link add br-{port} type bridge mcast_snooping 0",
                f"link set br-{port} up",
                f"link set n-{port} master br-{port} up",
                f"link set f-{port} master br0 up",
            )
            self.relays[name] = os.fork()
            if self.relays[name] == 0:
                try:
                    system_call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    relay(near, far, seconds)
                finally:
                    os._exit(1)
            os.close(near)
            os.close(far)
        self.link(name, name not in self.cut)

    def power_off(self, name: str) -> None:
        """Kill every process of a host, its link taken away first, so that nobody hears of it."""
        with contextlib.suppress(
            KeeperError
        ):  # there is no link any more where somebody killed the first process
            ip(f"link delete {self._port(name)}")
        self._drop_relay(name)
        self._kill(self.pids.pop(name))
        self.cut.discard(name)

    def close(self) -> None:
        """End every place and every process in one, and remove the state directory."""
        for name, pid in self.pids.items():
            if not self.places[name]["own_pids"]:
                kill_network(pid)
            os.kill(pid, signal.SIGKILL)
        for pid in (*self.pids.values(), *self.relays.values()):
            self._kill(pid)
        shutil.rmtree(self.state, ignore_errors=True)

    def _fork(self, place: Json) -> int:
        report, child_report = os.pipe()
        if place["own_pids"]:
            system_call("unshare", CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            live_as_init(place, child_report)
        system_call("setns", self.own_pids, CLONE_NEWPID)
        os.close(child_report)
        self.pids[place["name"]] = pid
        self.places[place["name"]] = place
        return report

    def _port(self, name: str) -> str:
        return str(self.places[name]["interface"]["port"])

    def _drop_relay(self, name: str) -> None:
        if pid := self.relays.pop(name, None):
            self._kill(pid)
            ip(f"link delete br-{self._port(name)}")

    @staticmethod
    def _kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def answer(keeper: Keeper, request: list[Any]) -> Json:
    verb, *arguments = request
    try:
        return {"result": getattr(keeper, verb)(*arguments)}
    except KeeperError as error:
        return {"error": str(error)}
    except Exception:  # noqa: BLE001 - whatever it is, the one who asked shall see it
        return {"error": traceback.format_exc()}


def serve(keeper: Keeper, owner: int) -> None:
    """Answer requests until stdin closes or the process behind the pidfd `owner` is gone."""
    pending = b""
    while True:
        if owner in select.select([0, owner], [], [])[0]:
            return
        received = os.read(0, 65536)
        if not received:
            return
        *lines, pending = (pending + received).split(b"\n")
        for line in lines:
            os.write(1, json.dumps(answer(keeper, json.loads(line))).encode() + b"\n")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    owner = os.pidfd_open(os.getppid())
    keeper = Keeper(sys.argv[1])
    try:
        serve(keeper, owner)
    except BrokenPipeError:
        pass  # the one who asked is gone
    finally:
        keeper.close()


if __name__ == "__main__":
    main()
