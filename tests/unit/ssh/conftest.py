"""A real sshd on 127.0.0.1 as the current user, with keys and known_hosts files of its own."""

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvlaunch.errors import HostError
from hvlaunch.job import Host, SSHOptions
from hvlaunch.ssh import Channel
from hvlaunch.ssh.by_paramiko import ParamikoClient
from hvlaunch.ssh.by_paramiko.connection import ParamikoConnection
from hvlaunch.ssh.keyring import Keyring
from hvlaunch.ssh.streams import ConnectLimit
from tests.testhosts.places import wait_until

SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
PATIENCE = 60.0


def connect(
    host: Host, options: SSHOptions, *, timeout: float, keyring: Keyring | None = None
) -> ParamikoConnection:
    """A connection that shares nothing but the keyring, if any; who is sent away comes back at once."""
    if keyring is None:
        with contextlib.closing(Keyring()) as own:
            return connect(host, options, timeout=timeout, keyring=own)
    connect_limit = ConnectLimit(options.connect_limit, sleep=lambda _: None)
    return ParamikoClient(
        options, timeout=timeout, keyring=lambda: keyring, connect_limit=connect_limit
    ).connect(host)


def gone(process: psutil.Process) -> bool:
    """Ended, though perhaps its parent does not know yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill_sshds(processes: Iterable[psutil.Process]) -> None:
    """Kill the sshd processes among them; one sshd's end may end the others, and the commands."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith("sshd"):
                process.kill()


def agent_answers(path: Path) -> bool:
    """Whether an ssh-agent listens there; its socket is there some time before."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def read_all(channel: Channel) -> bytes:
    pieces = []
    while piece := channel.read():
        pieces.append(piece)
    return b"".join(pieces)


def in_thread(action: Callable[[], object]) -> tuple[threading.Thread, list[BaseException | None]]:
    """Run `action` in a thread; the list gets what it raises, or None."""
    ended: list[BaseException | None] = []

    def work() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, ended


def keygen(path: Path, kind: str = "ed25519", *words: str, passphrase: str = "") -> Path:
    """A new key. A large one takes a second to make, and a passphrase of many rounds (-a) a tenth, each time."""
    quick = [*(("-b", "2048") if kind == "rsa" else ()), *(("-a", "1") if passphrase else ())]
    fixed = ["ssh-keygen", "-q", "-t", kind, *quick, "-N", passphrase, "-C", path.name, "-f", path]
    subprocess.run([*fixed, *words], check=True)
    return path


def public(path: Path) -> str:
    """Type and key, without the comment."""
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


@dataclass
class Sshd:
    """One sshd, and the ssh configuration that a user of it would have."""

    folder: Path
    key_types: tuple[str, ...] = ("ed25519",)
    words: tuple[str, ...] = ()
    """More lines for sshd_config."""
    port: int = 0
    process: "subprocess.Popen[bytes] | None" = None
    config: list[str] = field(default_factory=list)
    """Lines of the user's ssh configuration, before our own."""

    @property
    def known_hosts(self) -> Path:
        return self.folder / "home" / ".ssh" / "known_hosts"

    @property
    def key(self) -> Path:
        """The user's key, which is authorized."""
        return self.folder / "id"

    @property
    def name(self) -> str:
        """As in known_hosts."""
        return f"[127.0.0.1]:{self.port}"

    def host_key(self, kind: str) -> str:
        return public(self.folder / f"host_{kind}")

    def know(self, *lines: str) -> None:
        self.known_hosts.parent.mkdir(parents=True, exist_ok=True)
        self.known_hosts.write_text("".join(line + "\n" for line in lines))

    def options(self, **words) -> SSHOptions:
        config = self.folder / "ssh_config"
        mine = [
            f"UserKnownHostsFile {self.known_hosts}",
            "GlobalKnownHostsFile none",
            "IdentityAgent none",
            f"IdentityFile {self.key}",
        ]
        config.write_text("".join(line + "\n" for line in [*self.config, *mine]))
        return SSHOptions(**{"config": config, "port": self.port, "user": user(), **words})

    def host(self, **words) -> Host:
        return Host(**{"name": "127.0.0.1", **words})

    def start(self) -> None:
        for kind in self.key_types:
            keygen(self.folder / f"host_{kind}", kind)
        keygen(self.key)
        (self.folder / "authorized").write_text(public(self.key) + "\n")
        self._serve()
        self.know(f"{self.name} {self.host_key(self.key_types[0])}")

    def authorize(self, key: Path) -> None:
        with (self.folder / "authorized").open("a") as file:
            file.write(public(key) + "\n")

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def _serve(self) -> None:
        for _ in range(5):  # the free port may be taken by the time sshd binds it
            self.port = free_port()
            lines = [
                *self.words,  # sshd takes the first of each
                f"Port {self.port}",
                "ListenAddress 127.0.0.1",
                *(f"HostKey {self.folder}/host_{kind}" for kind in self.key_types),
                f"AuthorizedKeysFile {self.folder}/authorized",
                f"PidFile {self.folder}/pid",
                "StrictModes no",
                "UsePAM no",
                "PasswordAuthentication no",
                "KbdInteractiveAuthentication no",
                "PermitRootLogin prohibit-password",
                "MaxStartups 1000",
                "SetEnv SHLVL=2",  # bash then leaves ~/.bashrc alone, which may print or take long
            ]
            config = self.folder / "sshd_config"
            config.write_text("".join(line + "\n" for line in lines))
            assert SSHD is not None
            log = (self.folder / "log").open("ab")
            self.process = process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", config], stderr=log, stdin=subprocess.DEVNULL
            )
            log.close()
            wait_until(lambda: process.poll() is not None or self._listens(process.pid), "sshd to listen")  # noqa: B023 (wait_until() returns before the next)
            if process.poll() is None:
                return
        pytest.fail("sshd does not start: " + (self.folder / "log").read_text()[-500:])

    def _listens(self, pid: int) -> bool:
        """It itself, and not another who took the port before: its pid is written when it has."""
        try:
            return (self.folder / "pid").read_text() == f"{pid}\n"
        except FileNotFoundError:
            return False


def user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def sshd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if SSHD is None:
        pytest.skip("needs sshd (Debian: openssh-server)")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where root's sshd separates privileges
    return tmp_path_factory.mktemp("sshd")


@pytest.fixture
def make_sshd(sshd_folder: Path) -> Iterator[Callable[..., Sshd]]:
    """Starts sshd's that end with the test."""
    started = []

    def make(**words) -> Sshd:
        started.append(Sshd(Path(tempfile.mkdtemp(dir=sshd_folder)), **words))
        started[-1].start()
        return started[-1]

    yield make
    for sshd in started:
        sshd.stop()


@pytest.fixture(scope="module")
def sshd(sshd_folder: Path) -> Iterator[Sshd]:
    """One sshd for all tests of a module that leave it as it is."""
    server = Sshd(Path(tempfile.mkdtemp(dir=sshd_folder)))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def connection(sshd: Sshd) -> Iterator[ParamikoConnection]:
    connection = connect(sshd.host(), sshd.options(), timeout=PATIENCE)
    yield connection
    connection.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[socket.socket], None]], int]]:
    """Starts servers that do something with each connection; gives their port. They end with the test."""
    closers: list[Callable[[], None]] = []

    def start(handle: Callable[[socket.socket], None]) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        taken: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(listener.accept()[0])
                    handle(taken[-1])

        thread = threading.Thread(target=accept)
        thread.start()

        def close() -> None:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for sock in (listener, *taken):
                sock.close()

        closers.append(close)
        port: int = listener.getsockname()[1]
        return port

    yield start
    for close in closers:
        close()


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    # Less than paramiko's timer for handshakes, which must not stay either.
    wait_until(lambda: set(threading.enumerate()) <= before, "threads to end", timeout=10.0)


def answer(
    sshd: Sshd, *, keyring: Keyring | None = None, host: dict[str, Any] | None = None, **options
) -> str:
    """The output of `echo hello` on the host."""
    connection = connect(sshd.host(**host or {}), sshd.options(**options), timeout=PATIENCE, keyring=keyring)
    with contextlib.closing(connection):
        return read_all(connection.run("echo hello")).decode().strip()


def refusal(
    error: type[HostError], sshd: Sshd, *, host: dict[str, Any] | None = None, timeout=PATIENCE, **options
):
    """The error of connecting, which is one line and names the host."""
    with pytest.raises(error) as caught:
        connect(sshd.host(**host or {}), sshd.options(**options), timeout=timeout)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("host 127.0.0.1: ") or host
    return caught.value


@pytest.fixture
def unused(tmp_path):
    """An sshd that is not started: for those who never get to one."""
    sshd = Sshd(tmp_path)
    keygen(sshd.key)
    sshd.port = free_port()
    return sshd
