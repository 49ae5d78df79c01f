"""What the tests of SSH set-ups share: odd hosts, keys for them, and a terminal to type at."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.cluster.jobs import HVLAUNCH, Job
from tests.testhosts.hosts import Host, TestHosts, wait_until

__all__ = ["FLEET", "USERS", "Site", "Typist", "keygen", "make_site", "sign"]

FLEET = [f"n{number}" for number in range(1, 17)]
USERS = [
    "bob",
    *(f"{name}:{path}" for name in ("fish", "zsh", "tcsh", "dash") if (path := shutil.which(name))),
]
PYTHONS = [f"/usr/bin/{name}" for name in ("python3", "python") if Path("/usr/bin", name).exists()]
SEIZE = "import fcntl,os,sys,termios;os.setsid();fcntl.ioctl(0,termios.TIOCSCTTY,0);os.execvp(sys.argv[1],sys.argv[1:])"


def keygen(path: Path, passphrase: str = "") -> Path:
    """A new key pair, ed25519."""
    path.parent.mkdir(parents=True, exist_ok=True)
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", path.name, "-f", str(path)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    return path


def sign(authority: Path, key: Path, *words: str) -> Path:
    """A certificate for the key, signed by the authority; `words` are ssh-keygen's."""
    subprocess.run(["ssh-keygen", "-q", "-s", authority, "-I", "test", *words, f"{key}.pub"], check=True)
    return key.with_name(key.name + "-cert.pub")


class Site:
    """Hosts n1 to n16, `gate`, `inner`, and `bare`, which has no python3 where one looks for it."""

    def __init__(self, hosts: TestHosts) -> None:
        self.hosts = hosts
        self.ssh = hosts.driver.home / ".ssh"
        self.env: dict[str, str] = {}
        self._known = (self.ssh / "known_hosts").read_text()
        self._undo = contextlib.ExitStack()

    def config(self, *lines: str) -> None:
        """The user's ssh configuration."""
        (self.ssh / "config").write_text("".join(f"{line}\n" for line in lines))

    def key(self, name: str = "k", passphrase: str = "") -> Path:
        """A key of the user's that no host knows yet."""
        return keygen(self.ssh / "other" / name, passphrase)

    def sshd(self, host: str, *lines: str) -> Host:
        """The host, with these lines before others in its sshd_config."""
        self.hosts[host].start_sshd(lines)
        return self.hosts[host]

    def only(self, host: str, key: Path) -> None:
        """From now on the host takes that key alone."""
        (self.hosts[host].sshd / "odd").write_text(Path(f"{key}.pub").read_text())
        self.sshd(host, "AuthorizedKeysFile /run/sshd/odd")

    def home(self, host: str, user: str, name: str, text: str) -> Path:
        """A file in a user's home on a host."""
        path = self.hosts[host].home / user / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        self._undo.callback(path.unlink)
        return path

    def agent(self, *keys: Path) -> None:
        """A running ssh agent that holds the keys."""
        path = self.ssh / "agent"
        agent = self.hosts.driver.popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
        self._undo.callback(agent.wait)  # after the other, which is undone first
        self._undo.callback(agent.terminate)
        self.env["SSH_AUTH_SOCK"] = str(path)
        env = {**os.environ, **self.env}

        def answers() -> bool:
            """Its socket is there some time before it listens."""
            listing = subprocess.run(["ssh-add", "-l"], env=env, capture_output=True, check=False)
            return listing.returncode in (0, 1)

        wait_until(answers, "ssh-agent answers")
        for key in keys:
            subprocess.run(["ssh-add", "-q", key], env=env, check=True)

    def run(self, *words: object) -> Job:
        """hvlaunch with these arguments."""
        return Job(self.hosts, words, self.env)

    def close(self) -> None:
        """As it was before the test."""
        self._undo.close()
        self.config()
        self.env.clear()
        (self.ssh / "known_hosts").write_text(self._known)
        shutil.rmtree(self.ssh / "other", ignore_errors=True)
        self.hosts.repair()


@contextlib.contextmanager
def make_site() -> Iterator[Site]:
    hidden = [*PYTHONS, sys.executable]
    with TestHosts([*FLEET, "gate", "inner", "bare"], users=USERS, hide={"bare": hidden}) as hosts:
        yield Site(hosts)


class Typist:
    """hvlaunch on a terminal of its own, at which one types."""

    def __init__(self, site: Site, words: Sequence[str]) -> None:
        self._near, far = os.openpty()
        self.shown = ""
        command = [sys.executable, "-c", SEIZE, *HVLAUNCH, *words]
        env = {**site.hosts.driver.env, **site.env}
        self.process = site.hosts.driver.popen(command, env=env, stdin=far, stdout=far, stderr=far)
        os.close(far)
        os.set_blocking(self._near, False)

    def sees(self, text: str, times: int = 1) -> "Typist":
        """Wait until the terminal has shown the text so many times."""

        def shown() -> bool:
            self._read()
            if self.process.poll() is not None and self.shown.count(text) < times:
                raise AssertionError(f"ended with {self.process.returncode}, and showed: {self.shown}")
            return self.shown.count(text) >= times

        wait_until(shown, f"{text!r} is shown", 60.0)
        return self

    def types(self, text: str) -> "Typist":
        wait_until(lambda: not self.echoes(), "what is typed is hidden")
        os.write(self._near, text.encode())
        return self

    def presses_ctrl_c(self) -> "Typist":
        self.process.send_signal(signal.SIGINT)
        return self

    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self._near)[3] & termios.ECHO)

    def code(self) -> int:
        """Wait for the end, and hang up."""

        def ended() -> bool:
            self._read()
            return self.process.poll() is not None

        wait_until(ended, "hvlaunch ends", 60.0)
        self._read()
        os.close(self._near)
        return self.process.returncode

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            while data := os.read(self._near, 1 << 16):
                self.shown += data.decode(errors="replace")
