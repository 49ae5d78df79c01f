"""The places of test hosts: a host, the driver's, and what runs in them."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.testhosts.keeper_client import PATH, KeeperClient, TestHostsError

__all__ = ["Driver", "Host", "Place", "Process", "boot", "generate_keys", "wait_until"]

T = TypeVar("T")
Mounts = Sequence[Sequence[str]]  # as keeper.make_mounts takes them

SSHD_PROGRAMS = {"sshd", "sshd-session", "sshd-auth"}
SSHD_CONFIG = """\
HostKey /run/sshd/host_key
PidFile /run/sshd/sshd.pid
AuthorizedKeysFile /run/sshd/authorized_keys
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PrintMotd no
Subsystem sftp internal-sftp
"""


def wait_until(condition: Callable[[], T | None], what: str, timeout: float = 60.0) -> T:
    """Ask for `condition` until it is true, and return what it said.

    Raises TimeoutError with `what` (a description: "the host answers") after `timeout` seconds. A question that reads all processes
    of some hosts, or asks a browser, takes about a seventh of a processor, and no question is asked less often than four times a second.
    """
    first = begun = time.monotonic()
    deadline = begun + timeout
    while not (answer := condition()):
        now = time.monotonic()
        if now > deadline:
            raise TimeoutError(f"not within {timeout:g} s: {what} (last answer: {answer!r})")
        # The longer it takes, the less a moment matters.
        time.sleep(min(0.25, max(0.005, 6 * (now - begun), (now - first) / 50)))
        begun = time.monotonic()
    return answer


@dataclass(frozen=True, slots=True)
class Process:
    """One process, with its ids as its own host counts them (the driver place: as the machine does)."""

    pid: int
    ppid: int
    comm: str
    argv: tuple[str, ...]
    exe: str

    def __str__(self) -> str:
        return f"{self.pid} (child of {self.ppid}) {' '.join(self.argv) or self.comm}"


def read_process(proc: Path, pid: int) -> Process | None:
    """What a /proc says of a process; None where it has ended (a zombie is an exit code, not a process)."""
    folder = proc / str(pid)
    try:
        head, _, tail = (folder / "stat").read_text(errors="replace").rpartition(")")
        state, ppid = tail.split()[:2]
        if state in "ZX" and len(list((folder / "task").iterdir())) <= 1:
            return None
        argv = (folder / "cmdline").read_text(errors="replace").split("\0")[:-1]
        exe = "" if state == "Z" else str((folder / "exe").readlink()).removesuffix(" (deleted)")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Process(pid, int(ppid), head.partition("(")[2], tuple(argv), exe)


class Place:
    """What a host and the driver place share: an address, and commands that run there. `number` 0 is the driver."""

    own_pids = True
    namespaces: tuple[str, ...] = ("mnt", "net", "uts", "ipc", "pid")

    def __init__(self, keeper: KeeperClient, number: int, name: str) -> None:
        self.keeper = keeper
        self.name = name
        self.pid = 0
        """Of its first process, as this machine counts; 0 while it is off."""
        self.address = f"10.77.{1 + (number - 1) // 250}.{1 + (number - 1) % 250}"
        self.address6 = f"fd77::{number:x}"
        if number == 0:
            self.address, self.address6 = "10.77.0.1", "fd77::1:0"
        self.touched = False
        """Whether it was changed (cut, delay, kill, host key, sshd) since it was made or repaired."""
        self.folder = keeper.state / name
        self.mounts: Mounts = ()
        self._started: weakref.WeakSet[subprocess.Popen[Any]] = weakref.WeakSet()
        self.interface = {
            "port": f"p{number}",
            "mac": f"02:77:00:00:{number >> 8:02x}:{number & 255:02x}",
            "addresses": [f"{self.address}/16", *([f"{self.address6}/64 nodad"] if has_ipv6() else [])],
        }

    @property
    def env(self) -> dict[str, str]:
        """The environment of commands that are given none."""
        raise NotImplementedError

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command here; `options` are subprocess.Popen's. If it still runs at the end, it is killed.

        The process is the command itself in the driver place, and on a host nsenter, which waits for the command.
        """
        if not self.pid:
            raise TestHostsError(f"host {self.name} is off")
        flags = {"mnt": "mount"}
        enter = [f"--{flags.get(kind, kind)}=/proc/{self.pid}/ns/{kind}" for kind in self.namespaces]
        where = str(cwd if cwd is not None else self.default_cwd())
        process = subprocess.Popen(
            ["nsenter", *enter, "--", "env", "-C", where, "--", *argv],
            env=self.env if env is None else env,
            **options,
        )
        self._started.add(process)
        return process

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 60.0,
        check: bool = False,
        input: str | None = None,  # noqa: A002 - as subprocess.run has it
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command here to its end, in a session of its own, its text captured; `options` as of popen().

        Raises subprocess.TimeoutExpired (its process group is killed) and, if `check`, CalledProcessError.
        """
        settings = {
            "stdin": subprocess.DEVNULL if input is None else subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "start_new_session": True,
            **options,
        }
        with self.popen(argv, **settings) as process:
            try:
                out, err = process.communicate(input, timeout=timeout)
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        done = subprocess.CompletedProcess(list(argv), process.returncode, out, err)
        if check:
            done.check_returncode()
        return done

    def cut(self) -> None:
        """Lose every packet to and from the place from now on, silently; its link stays up."""
        self.touched = True
        self.keeper.ask("link", self.name, False)

    def heal(self) -> None:
        """Undo cut()."""
        self.keeper.ask("link", self.name, True)

    def end_commands(self) -> None:
        for process in list(self._started):
            if process.poll() is None:
                process.kill()
                process.wait()

    def default_cwd(self) -> str:
        raise NotImplementedError

    def spec(self) -> dict[str, Any]:
        """What the keeper needs to boot it."""
        return {
            "name": self.name,
            "own_pids": self.own_pids,
            "mounts": self.mounts,
            "interface": self.interface,
            "command": [],
        }


class Driver(Place):
    """Where the launcher runs: on the hosts' bridge, in the machine's PID space, with a `home` of its own."""

    own_pids = False
    namespaces = ("mnt", "net", "uts")

    def __init__(self, keeper: KeeperClient) -> None:
        super().__init__(keeper, 0, "driver")
        self.home = self.folder / "home"

    @property
    def env(self) -> dict[str, str]:
        """This process's own, with another HOME and no ssh agent."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SSH_")}
        return {**inherited, "HOME": str(self.home)}

    def processes(self) -> list[Process]:
        """Every process in the driver place."""
        pids = self.keeper.ask("members", self.name)
        return [process for pid in pids if (process := read_process(Path("/proc"), pid))]

    def default_cwd(self) -> str:
        return str(Path.cwd())


class Host(Place):
    """One test host. `home` is the directory of its users' homes, as a path on this machine."""

    def __init__(self, keeper: KeeperClient, number: int, name: str) -> None:
        super().__init__(keeper, number, name)
        self.home = self.folder / "home"
        self.sshd = self.folder / "sshd"
        self.aliases = (name, self.address, f"{name}-ipv6", self.address6)
        self._first_key: dict[Path, bytes] = {}

    @property
    def env(self) -> dict[str, str]:
        """A login's, of root."""
        return {"PATH": PATH, "HOME": "/run/home/root", "USER": "root", "LOGNAME": "root", "LANG": "C.UTF-8"}

    @property
    def host_key(self) -> str:
        """The public host key that sshd shows, as in known_hosts: `ssh-ed25519 AAAA…`."""
        return " ".join((self.sshd / "host_key.pub").read_text().split()[:2])

    def processes(self) -> list[Process]:
        """Every process but the first and the sshd that listens: what people run, and their sshd sessions."""
        proc = Path(f"/proc/{self.pid}/root/proc")
        apart = {1, self._listener()}
        if not self.pid:
            return []
        pids = [int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()]
        return [process for pid in pids if pid not in apart and (process := read_process(proc, pid))]

    def user_processes(self) -> list[Process]:
        """Every process that is neither the first nor any of sshd's."""
        return [process for process in self.processes() if Path(process.exe).name not in SSHD_PROGRAMS]

    def read(self, path: str) -> str:
        """The text of a file as the host sees it. Raises CalledProcessError where it can't be read."""
        return self.run(["cat", path], check=True).stdout

    def sshd_log(self) -> str:
        """What sshd logged since the host's last boot."""
        return (self.sshd / "log").read_text(errors="replace")

    def part(self, other: "Host") -> None:
        """Lose every packet between the two hosts from now on, silently; others reach both. repair() ends it."""
        self.touched = True
        for tool, address in (("iptables", other.address), ("ip6tables", other.address6)):
            for chain, end in (("INPUT", "-s"), ("OUTPUT", "-d")):
                self.run([tool, "-A", chain, end, address, "-j", "DROP"], check=True)

    def delay(self, ms: float) -> None:
        """Make every packet to and from the host `ms` milliseconds late (a round trip: twice that); 0 ends it."""
        self.touched = True
        self.keeper.ask("delay", self.name, ms / 1000)

    def kill(self) -> None:
        """Power off: all its processes are gone at once, and no packet tells anyone."""
        self.touched = True
        if self.pid:
            self.keeper.ask("power_off", self.name)
            self.pid = 0

    def restore(self) -> None:
        """Power on after kill(): name, address, host key, sshd settings and homes as before; a new boot id and /tmp."""
        if not self.pid:
            boot(self.keeper, [self])

    def new_host_key(self) -> None:
        """Change the host key, which the driver's known_hosts does not follow."""
        self.touched = True
        for file in self._first_key:
            file.unlink()
        generate_keys([self.sshd / "host_key"])
        self.stop_sshd()
        self._launch_sshd()

    def stop_sshd(self) -> None:
        """From now on connecting is refused; open connections stay."""
        self.touched = True
        if listener := self._listener():
            self.run(["kill", str(listener)], check=True)
            proc = Path(f"/proc/{self.pid}/root/proc/{listener}")
            wait_until(lambda: not proc.exists(), f"sshd of {self.name} stops")

    def start_sshd(self, extra_config: Sequence[str] = ()) -> None:
        """(Re)start sshd with the standard settings and these lines of sshd_config, which come first and so win.

        Raises TestHostsError with sshd's reason.
        """
        self.stop_sshd()
        self._write_config(extra_config)
        self._launch_sshd()

    def repair(self) -> None:
        """Undo what was done to the host with the methods above; if there was anything, it boots afresh."""
        if self.touched:
            self.kill()
            for file, content in self._first_key.items():
                file.write_bytes(content)
            self._write_config()
            self.restore()
            self.touched = False

    def make_files(self, owners: Mapping[str, int], authorized_key: str) -> None:
        """What it needs before its first boot, its host key being there; `owners` are users by name, with uid."""
        (self.sshd / "authorized_keys").write_text(authorized_key)
        self._first_key = {file: file.read_bytes() for file in self.sshd.glob("host_key*")}
        self._write_config()
        for user, uid in owners.items():
            (self.home / user).mkdir(parents=True)
            os.chown(self.home / user, uid, uid)

    def spec(self) -> dict[str, Any]:
        for stale in ("sshd.pid", "log"):
            (self.sshd / stale).unlink(missing_ok=True)
        (self.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        return {**super().spec(), "command": self._sshd_command()}

    def wait_for_sshd(self) -> None:
        wait_until(self._listener, f"sshd of {self.name} listens")

    def default_cwd(self) -> str:
        return "/"

    def _launch_sshd(self) -> None:
        before = len(self.sshd_log())
        if self.run(self._sshd_command()).returncode != 0:
            why = "; ".join(self.sshd_log()[before:].splitlines())
            raise TestHostsError(f"sshd of {self.name} does not start: {why}")
        self.wait_for_sshd()

    def _sshd_command(self) -> list[str]:
        return [
            shutil.which("sshd", path=PATH) or "sshd",
            "-f",
            "/run/sshd/sshd_config",
            "-E",
            "/run/sshd/log",
        ]

    def _write_config(self, extra: Sequence[str] = ()) -> None:
        (self.sshd / "sshd_config").write_text("".join(f"{line}\n" for line in extra) + SSHD_CONFIG)

    def _listener(self) -> int:
        """The pid that sshd wrote when it began to listen, as the host counts; 0 while none listens."""
        try:
            return int((self.sshd / "sshd.pid").read_text())
        except (FileNotFoundError, ValueError):
            return 0


def boot(keeper: KeeperClient, places: Sequence[Place]) -> None:
    """Boot these places, all at once. Raises TestHostsError."""
    pids = keeper.ask("start", [place.spec() for place in places])
    for place in places:
        place.pid = pids[place.name]
    for place in places:
        if isinstance(place, Host):
            place.wait_for_sshd()


def generate_keys(files: Sequence[Path]) -> None:
    """Make an ed25519 key pair for each file, and its directory."""
    running = []
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testhosts", "-f", str(file)]
        running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
    codes = [process.wait() for process in running]
    if any(codes):
        raise TestHostsError("ssh-keygen failed")


def has_ipv6() -> bool:
    return Path("/proc/sys/net/ipv6").exists()
