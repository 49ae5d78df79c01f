"""Hosts for tests, on one Linux machine: each with its own address, name, processes, /tmp, homes and sshd.

    with TestHosts(["a", "b"]) as hosts:
        hosts.driver.run(["ssh", "a", "hostname"])
        hosts["b"].cut()
        assert hosts["a"].user_processes() == []

A host is a set of namespaces (network, PID, mount, UTS, IPC) on a bridge that is itself in a
network namespace: nothing gets out, and any number of instances run side by side. The driver place
is on the same bridge, without a PID namespace, so that what runs there can be signalled as usual.
keeper.py owns the namespaces; they end with this process, however it ends.

Needs root, iproute2, util-linux (nsenter), OpenSSH's client and server; nothing outside the
standard library. Hosts see the machine's file system, but for /tmp, /run, /dev/shm, /etc/ssh, the
files under /etc that name hosts and users, and what `hide` names.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.testhosts.keeper_client import PATH, KeeperClient, TestHostsError
from tests.testhosts.places import Driver, Host, Process, boot, generate_keys, wait_until

__all__ = ["Driver", "Host", "Process", "TestHosts", "TestHostsError", "missing", "wait_until"]

CHECKOUT = Path(__file__).resolve().parents[2]
PRIVATE = ("/tmp", "/run", "/dev/shm", "/etc/ssh")  # each host has its own, and it starts out empty
TOOLS = ("ip", "nsenter", "unshare", "ssh", "ssh-keygen", "sshd")
EXAMPLES = """\
examples:
  %(prog)s a b                     a shell next to hosts a and b: try `ssh a`
  %(prog)s 4 -- ssh d hostname     one command, with hosts a, b, c and d; its exit code is returned
  %(prog)s a --user bob -- ssh bob@a id

Everything is taken down when the shell or the command ends.
"""


def missing() -> str | None:
    """Why test hosts can't be made here, in one line; None where they can."""
    needs = "needs root, iproute2 and sshd"
    if not sys.platform.startswith("linux"):
        return f"{needs}: this is {sys.platform}, not Linux"
    if os.geteuid() != 0:
        return f"{needs}: not root"
    if absent := [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]:
        return f"{needs}: not installed: {', '.join(absent)}"
    trial = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"{needs}: {trial.stderr.strip()}" if trial.returncode != 0 else None


@dataclass(frozen=True, slots=True)
class User:
    """Someone who can log in to the hosts with the driver's key."""

    name: str
    uid: int
    shell: str

    def passwd_line(self, home: str | Path) -> str:
        return f"{self.name}:x:{self.uid}:{self.uid}:{self.name}:{home}:{self.shell}\n"


class TestHosts:
    """Hosts by name while the `with` block lasts: hosts["a"], hosts.driver.

    names: the hosts' names, or how many. users: more users of every host, besides root, each
    `name` or `name:login-shell` (root may be named, for its shell). hide: per host, files and
    directories that are not there (a directory is there, and empty). share: directories under /tmp
    that hosts have in common with this machine; the checkout and this Python are always shared.

    Raises TestHostsError where the hosts can't be made.
    """

    __test__ = False

    def __init__(
        self,
        names: Sequence[str] | int,
        *,
        users: Sequence[str] = (),
        hide: Mapping[str, Sequence[str]] | None = None,
        share: Sequence[str] = (),
    ) -> None:
        self.names = _names(names) if isinstance(names, int) else list(names)
        for name in self.names:
            if (
                not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name)
                or name == "driver"
                or self.names.count(name) > 1
            ):
                raise TestHostsError(f"not a name for one more test host: {name}")
        if unknown := set(hide or {}) - set(self.names):
            raise TestHostsError(f"hide names no host of these: {', '.join(sorted(unknown))}")
        self._hide = dict(hide or {})
        self._share = _masked([str(CHECKOUT), sys.prefix, sys.base_prefix, *share])
        self._users = _users(users)

    def __enter__(self) -> "TestHosts":  # noqa: PYI034 - typing.Self is Python 3.11
        if why := missing():
            raise TestHostsError(why)
        self.state = Path(tempfile.mkdtemp(prefix="testhosts-"))
        self.keeper = KeeperClient(self.state)
        self.driver = Driver(self.keeper)
        self._hosts = {name: Host(self.keeper, number, name) for number, name in enumerate(self.names, 1)}
        try:
            self._make_files()
            boot(self.keeper, [self.driver, *self])
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def repair(self) -> None:
        """Bring every host that was changed back to how it was made, and the driver's link."""
        if self.driver.touched:
            self.driver.heal()
        for host in self:
            host.repair()

    def close(self) -> None:
        """End every process and namespace, and remove every file; `with` does it at its end."""
        for place in (self.driver, *self):
            place.end_commands()
        self.keeper.close()
        shutil.rmtree(self.state, ignore_errors=True)

    def _make_files(self) -> None:
        own_key = self.driver.home / ".ssh" / "id_ed25519"
        generate_keys([own_key, *(host.sshd / "host_key" for host in self)])
        own_key.parent.chmod(0o700)
        for host in self:
            host.make_files(
                {user.name: user.uid for user in self._users}, own_key.with_suffix(".pub").read_text()
            )
            host.mounts = self._host_mounts(host)
        known = "".join(f"{','.join(host.aliases)} {host.host_key}\n" for host in self)
        (own_key.parent / "known_hosts").write_text(known)
        self._write_etc()
        self.driver.mounts = [
            *_sysfs(),
            ["tmpfs", "", "/etc/ssh"],
            *self._etc_mounts(self.driver.folder / "passwd"),
        ]

    def _write_etc(self) -> None:
        named = [(place.address, place.address6, place.name) for place in (self.driver, *self)]
        lines = [f"{address}\t{name}\n{address6}\t{name}-ipv6\n" for address, address6, name in named]
        (self.state / "hosts").write_text(
            "127.0.0.1\tlocalhost\n::1\tip6-localhost ip6-loopback\n" + "".join(lines)
        )
        (self.state / "resolv.conf").touch()  # no name server: unknown names fail at once
        (self.state / "shadow").write_text(
            "".join(f"{user.name}:*:19000:0:99999:7:::\n" for user in self._users)
        )
        ours = {user.name for user in self._users}
        theirs = [
            line
            for line in Path("/etc/passwd").read_text().splitlines(True)
            if line.split(":")[0] not in ours
        ]
        on_hosts = [user.passwd_line(f"/run/home/{user.name}") for user in self._users]
        (self.state / "passwd").write_text("".join([*on_hosts, *theirs]))
        at_driver = self._users[0].passwd_line(self.driver.home)
        (self.driver.folder / "passwd").write_text("".join([at_driver, *theirs]))

    def _etc_mounts(self, passwd: Path) -> list[list[str]]:
        files = {name: self.state / name for name in ("hosts", "resolv.conf", "shadow")} | {"passwd": passwd}
        return [["bind", str(file), os.path.realpath(f"/etc/{name}")] for name, file in files.items()]

    def _host_mounts(self, host: Host) -> list[list[str]]:
        hidden = self._hide.get(host.name, ())
        return [
            ["proc", "", "/proc"],
            *_sysfs(),
            *(["tmpfs", "", folder] for folder in PRIVATE),
            *(["bind", folder, folder] for folder in self._share),
            *self._etc_mounts(self.state / "passwd"),
            ["bind", str(host.folder / "boot_id"), "/proc/sys/kernel/random/boot_id"],
            ["bind", str(host.sshd), "/run/sshd"],
            ["bind", str(host.home), "/run/home"],
            *(["tmpfs" if Path(path).is_dir() else "absent", "", path] for path in hidden),
        ]


def _names(count: int) -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return (
        list(letters[:count]) if count <= len(letters) else [f"h{number}" for number in range(1, count + 1)]
    )


def _users(words: Sequence[str]) -> list[User]:
    """Root first, then the others in order."""
    named = [word.partition(":") for word in ("root", *words)]
    shells = {name: shell or "/bin/bash" for name, _, shell in named}
    return [User(name, 2000 + i if i else 0, shell) for i, (name, shell) in enumerate(shells.items())]


def _masked(folders: Sequence[str]) -> list[str]:
    """Those that hosts would not see, for being under a directory that is private to each."""
    real = dict.fromkeys(os.path.realpath(folder) for folder in folders)
    return [folder for folder in real if any(Path(folder).is_relative_to(private) for private in PRIVATE)]


def _sysfs() -> list[list[str]]:
    """A /sys that shows the place's own network devices, and the machine's cgroups."""
    groups = "/sys/fs/cgroup"
    return [["sysfs", "", "/sys"], *([["bind", groups, groups]] if Path(groups).is_dir() else [])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="testhosts", description="Hosts for tests, on this machine, with real sshd's."
    )
    verbs = parser.add_subparsers(metavar="up", required=True)
    up = verbs.add_parser(
        "up",
        help="bring hosts up, and run a shell or a command next to them (up --help for examples)",
        epilog=EXAMPLES,
        usage="%(prog)s HOST [HOST ...] [--user NAME[:SHELL]] [-- COMMAND ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    up.add_argument("hosts", nargs="+", metavar="HOST", help="names of hosts, or one number: how many")
    up.add_argument(
        "--user", action="append", default=[], metavar="NAME[:SHELL]", help="one more user; may be repeated"
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code of the shell or command."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    command = arguments[end + 1 :]
    options = _parser().parse_args(arguments[:end])
    names = int(options.hosts[0]) if len(options.hosts) == 1 and options.hosts[0].isdigit() else options.hosts
    try:
        with TestHosts(names, users=options.user) as hosts:
            if not command:
                sys.stderr.write(
                    f"{' '.join(hosts.names)}: up until this shell ends; try: ssh {hosts.names[0]}\n"
                )
            signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the command
            code = hosts.driver.popen(command or [os.environ.get("SHELL", "/bin/sh")]).wait()
    except TestHostsError as error:
        sys.stderr.write(f"testhosts: {error}\n")
        return 1
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
