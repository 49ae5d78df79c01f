"""The errors of hvlaunch, named after the condition; each carries its facts and its exit code.

A message is one line, `host HOST: CAUSE; try: HINT`. The command line prints it unchanged and exits with
`exit_code`; docs/reference/exit-codes.md lists the codes.
"""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.named_tuples import NamedTuple

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "AgentFailed",
    "BadEnvironment",
    "BadHost",
    "BadUsage",
    "ChannelGarbled",
    "CheckFailed",
    "ConnectFailed",
    "Defect",
    "DiscoveryFailed",
    "GaveUp",
    "HostError",
    "HostFault",
    "HostKeyChanged",
    "HostKeyRevoked",
    "HostKeyUnknown",
    "HostLost",
    "HostsFailed",
    "HvlaunchError",
    "JobHung",
    "LeaseImpossible",
    "LeasesTaken",
    "NoFreePort",
    "NoPython",
    "NotEnoughSlots",
    "NotEnoughSlotsInTime",
    "PermissionDenied",
    "Problem",
    "ProtocolBroken",
    "SentAway",
    "SlotsUnlikely",
    "StartTimeout",
    "UnknownHost",
    "Unreachable",
    "WorkingDirectoryMissing",
]

EXIT_USAGE = 2
EXIT_HOSTS = 69
EXIT_INTERNAL = 70
EXIT_NOT_WRITTEN = 74
"""EX_IOERR of sysexits.h."""
EXIT_TOO_FEW = 75
EXIT_HUNG = 76
EXIT_NO_PROGRESS = 77

_SHOWN = 100
"""Maximum number of characters of a quoted word."""


class Problem(NamedTuple):
    """An error as plain data, for the engine, for records and for displays."""

    kind: str
    """Class name of the error."""
    cause: str
    """The cause, in one line."""
    exit_code: int
    """Exit code of the command line."""
    host: str | None = None
    """The host of the problem, if it is about one host."""
    hint: str | None = None
    """Advice for the user, if any."""
    other: str | None = None
    """The second host of a problem between two hosts."""
    addresses: tuple[str, ...] = ()
    """The addresses that were tried."""
    path: str | None = None
    """The missing directory."""
    errors: tuple[Problem, ...] = ()
    """The errors of several hosts."""
    host_key: tuple[str, str] | None = None
    """Type and fingerprint of an unknown host key."""

    def __str__(self) -> str:
        prefix = f"host {self.host}: " if self.host else ""
        hint = f"; try: {self.hint}" if self.hint else ""
        return f"{prefix}{self.cause}{hint}"


class HvlaunchError(Exception):
    """Base class of all errors of hvlaunch."""

    exit_code = EXIT_INTERNAL
    """Exit code of the command line: 70, unless the kind of error has its own."""

    def __init__(self, cause: str, *, host: str | None = None, hint: str | None = None) -> None:
        super().__init__(cause)
        self.cause = cause
        """The cause, in one line."""
        self.host = host
        """The host of the error, or None if it is not about a single host."""
        self.hint = hint
        """Advice for the user, or None."""

    def __str__(self) -> str:
        return str(self.problem)

    @property
    def problem(self) -> Problem:
        """The error as data."""
        return Problem(type(self).__name__, self.cause, self.exit_code, self.host, self.hint)

    def __reduce__(self) -> tuple[object, ...]:
        """Support copy and pickle: subclasses have other constructors, so an error is restored from its fields."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    def about(self, host: str, cause: str) -> Self:
        """Return a copy of this error, with all its fields, for another host and cause."""
        import copy  # noqa: PLC0415 (where something went wrong)

        error = copy.copy(self)
        error.host, error.cause, error.args = host, cause, (cause,)
        return error


class BadUsage(HvlaunchError):
    """The command line, or a file of options, asks for something impossible; no worker was started.

    Try: `hvlaunch --show-config` shows the source of each option.
    """

    exit_code = EXIT_USAGE
    """2: wrong usage."""


class BadHost(BadUsage):
    """A host of `-H` or of the hostfile can't be read.

    Try: `host`, `user@host:slots`, `gpu[01-04]:8` or `[fe80::1]:4`; the other forms are under hostfiles/README.md#hosts.
    """

    def __init__(self, cause: str, *, word: str, source: str, line: int | None = None) -> None:
        position = f"{source}:{line}" if line is not None else source
        # A whole file given by mistake would flood the terminal.
        shown = word if len(word) <= _SHOWN else word[:_SHOWN] + "…"
        super().__init__(f"{position}: {shown!r}: {cause}")
        self.word = word
        """The faulty word."""
        self.source = source
        """`-H`, or the hostfile."""
        self.line = line
        """The hostfile's line, from 1."""


class NotEnoughSlots(BadUsage):
    """`-np` exceeds all slots. A host without a number has a slot per GPU, or a single slot without GPUs.

    Try: a smaller `-np`, or more slots (`host:N`).
    """

    def __init__(self, needed: int, available: int, option: str = "") -> None:
        """`option` is the user's limit on the slots of each host, if any."""
        noun = "slot" if available == 1 else "slots"
        limited = f" ({option})" if option else ""
        super().__init__(
            f"{needed} workers were asked for, but the hosts have only {available} {noun}{limited}",
            hint=f"-np {available}, or more {'hosts' if option else 'slots (host:N)'}",
        )
        self.needed = needed
        """Number of workers."""
        self.available = available
        """Number of slots."""


class NotEnoughSlotsInTime(HvlaunchError):
    """An elastic job had fewer than `--min-np` slots for `--elastic-timeout`.

    Try: more hosts, a smaller `--min-np`, or a longer `--elastic-timeout`; run the discovery script by hand.
    """

    exit_code = EXIT_TOO_FEW
    """75: too few slots for too long."""

    def __init__(self, needed: int, available: int, seconds: float, why: str = "") -> None:
        super().__init__(
            f"too few slots for {seconds:g} s (--elastic-timeout): {available} of {needed} (--min-np){why}",
            hint="more hosts, a smaller --min-np, or a longer --elastic-timeout",
        )
        self.needed = needed
        """Minimum number of slots for a round."""
        self.available = available
        """Number of slots at the end."""
        self.seconds = seconds
        """Duration of the wait."""


class JobHung(HvlaunchError):
    """No rank made progress for `--hang-timeout`, and `--on-hang stop` ended the job; `cause` names the ranks that wait for each other.

    Try: the steps in docs/guides/hangs.md.
    """

    exit_code = EXIT_HUNG
    """76: the job hung."""

    def __init__(self, seconds: float, detail: str) -> None:
        super().__init__(f"the job is hung: no rank has made progress for {seconds:.0f} s; {detail}")
        self.seconds = seconds
        """Seconds without progress."""


class GaveUp(HvlaunchError):
    """The rounds of an elastic job fail, and no worker is known as the cause.

    All `restarts` are used up, or the workers failed `times` in a row without progress, mostly those of a `suspect`.

    Try: the failure report has the first failure of each round.
    """

    exit_code = 1
    """1: the workers failed; 77 if they did so again and again without progress."""

    def __init__(self, *, restarts: int | None = None, times: int = 0, suspect: str | None = None) -> None:
        if restarts is not None:
            super().__init__(f"no restart is left (--max-restarts {restarts})")
        else:
            first = "" if suspect is None else f", mostly those on host {suspect}"
            super().__init__(f"the workers failed {times} times in a row without progress{first}")
            self.exit_code = EXIT_NO_PROGRESS


class BadEnvironment(BadUsage):
    """A variable for the workers can't be set: `=` or a NUL byte in its name, or more than 128 KiB.

    Try: a file for a large value, and its path in the variable.
    """

    def __init__(self, name: str, cause: str) -> None:
        super().__init__(f"variable {name}: {cause}")
        self.name = name
        """Name of the variable."""


class DiscoveryFailed(HvlaunchError):
    """The first run of `--host-discovery-script` failed, or exceeded `--discovery-timeout`; `cause` ends with its last stderr.

    Try: the script by hand, with `env -i PATH="$PATH"`.
    """

    exit_code = EXIT_HOSTS
    """69: no hosts were found."""


class HostError(HvlaunchError):
    """A problem of a single host without an error of its own; the message quotes the host. Base of the errors of hosts.

    Try: `hvlaunch doctor -H HOST`.
    """

    exit_code = EXIT_HOSTS
    """69: a host can't be used."""

    def __init__(self, cause: str, *, host: str, hint: str | None = None) -> None:
        # The cause may quote the host: a second line of it would look like a message of hvlaunch's own.
        super().__init__(" ".join(cause.split("\n")), host=host, hint=hint)


class UnknownHost(HostError):
    """The name has no address here.

    Try: `HostName` in `~/.ssh/config`, `address=` in the hostfile, or a jump host (docs/guides/ssh.md#jump-hosts).
    """


class ConnectFailed(HostError):
    """No SSH connection: refused, reset, no route, or the peer does not speak SSH.

    Try: `ssh -v HOST`; for a warm pool, `hvlaunch pool status`.
    """


class SentAway(ConnectFailed):
    """sshd closed ten connections before its greeting: too many at once (`MaxStartups`), or a refused address.

    Try: `--connect-limit 2`.
    """


class StartTimeout(HostError):
    """The host was not ready within `--start-timeout` (60 s); the message says how far it came.

    Try: the causes in docs/guides/troubleshooting.md#nothing-happens-after-the-start.
    """


class HostKeyUnknown(HostError):
    """No known_hosts file has the host's key.

    Try: compare `fingerprint` with the host's own, then log in once, or accept the key (docs/guides/ssh.md#host-keys).
    """

    def __init__(self, cause: str, *, host: str, hint: str, key_type: str, fingerprint: str) -> None:
        super().__init__(cause, host=host, hint=hint)
        self.key_type = key_type
        """Type of the key, such as `ssh-ed25519`."""
        self.fingerprint = fingerprint
        """Fingerprint as in `ssh-keygen -l`: `SHA256:…`. Empty if unknown."""

    @property
    def problem(self) -> Problem:
        """The error as data, with the key if it is unknown, not changed or revoked."""
        host_key = (self.key_type, self.fingerprint) if self.fingerprint else None
        return super().problem._replace(host_key=host_key if type(self) is HostKeyUnknown else None)


class HostKeyChanged(HostKeyUnknown):
    """The host shows another key than the known_hosts file has: a reinstalled machine, or an attack.

    Try: find out why first, and only then `ssh-keygen -R HOST`.
    """


class HostKeyRevoked(HostKeyUnknown):
    """A known_hosts file marks the host's key `@revoked`.

    Try: give the host a new key: remove the old key, and run `ssh-keygen -A` on the host.
    """


class PermissionDenied(HostError):
    """The host accepted none of the keys in `tried`, and no other method.

    Try: the causes in docs/guides/troubleshooting.md#permission-denied.
    """

    def __init__(self, cause: str, *, host: str, hint: str, tried: Sequence[str]) -> None:
        super().__init__(cause, host=host, hint=hint)
        self.tried = tuple(tried)
        """Names of the offered keys."""


class NoFreePort(HostError):
    """A job needs two free ports of `--worker-port-range` on each host, and the host has fewer.

    Try: a wider `--worker-port-range`; `ss -ltn` lists the ports in use.
    """

    def __init__(self, *, host: str) -> None:
        super().__init__(
            "too few ports of --worker-port-range are free",
            host=host,
            hint="a wider --worker-port-range",
        )


class LeasesTaken(HostError):
    """Too few of the hosts' GPUs or slots are free for `--lease-gpus`; `cause` names the holders.

    Try: `--wait`.
    """

    exit_code = EXIT_TOO_FEW
    """75: too few are free now."""

    def __init__(self, cause: str, *, hint: str = "--wait") -> None:
        super().__init__(cause, host="", hint=hint)

    @property
    def problem(self) -> Problem:
        """The error as data: it is about no single host."""
        return super().problem._replace(host=None)


class LeaseImpossible(LeasesTaken):
    """The hosts have too few GPUs or slots for the leases of a job, whoever holds them.

    Try: a smaller `-np`; `hvlaunch hosts -H HOSTS` lists GPUs and slots.
    """

    exit_code = EXIT_USAGE
    """2: wrong usage."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause, hint="hvlaunch hosts -H HOSTS, or a smaller -np")


class NoPython(HostError):
    """The host has no Python 3.8 or newer in the `PATH` of a login without a terminal.

    Try: `--remote-python PATH`, or `python=PATH` in the hostfile.
    """


class AgentFailed(HostError):
    """Login and Python work, but the agent did not start; `cause` quotes the host's output.

    Try: the causes in docs/guides/troubleshooting.md#the-agent-does-not-start-on-a-host.
    """


class CopyFailed(HostError):
    """A host could not get its copy of the working tree (`--sync`, `--bring`); `cause` has its error.

    Try: the rules in docs/guides/copy-the-project.md#what-is-copied.
    """


class ContainerFailed(HostError):
    """The container of a host can't be started: no runtime, no image, or no such container.

    Try: the causes in docs/guides/containers.md#when-it-fails.
    """


class SetupFailed(HostError):
    """The commands of `--setup` or `--env` have failed on a host; `cause` has their exit code and last lines.

    Try: the causes in docs/guides/environments.md#when-it-fails.
    """


class CheckFailed(HostError):
    """With `--check`: a host has a fault that would stop the job; `cause` names the faults.

    Try: the message has a remedy for each fault.
    """


class HostFault(HostError):
    """A defect of hvlaunch on a single host.

    Try: please report it, with the output of `--verbose`.
    """

    exit_code = EXIT_INTERNAL
    """70: a fault of hvlaunch itself."""


class HostLost(HostError):
    """A connected host has gone: its channel closed, its agent died, or it was silent for `--lease`.

    Try: an elastic job survives a lost host (docs/guides/lost-host.md).
    """


class ProtocolBroken(HostLost):
    """The host sent an invalid frame: another program pretends to be the agent, or hvlaunch has a defect.

    Try: please report it, with the output of `--verbose`.
    """


class ChannelGarbled(HostLost):
    """Another program wrote into the agent's messages.

    Try: look for output of the shell's start-up files on the host.
    """


class Unreachable(HostError):
    """`host` can't connect to `other` at any of `addresses`.

    Try: open the firewall (docs/reference/rendezvous.md#what-to-open-in-a-firewall), or `--network-interfaces NAME`.
    """

    def __init__(self, cause: str, *, host: str, other: str, addresses: Sequence[str], hint: str) -> None:
        super().__init__(cause, host=host, hint=hint)
        self.other = other
        """The unreachable host."""
        self.addresses = tuple(addresses)
        """The addresses of `other` that were tried."""

    @property
    def problem(self) -> Problem:
        """The error as data, with `other` and `addresses`."""
        return super().problem._replace(other=self.other, addresses=self.addresses)


class WorkingDirectoryMissing(HostError):
    """The workers' directory does not exist on the host, or can't be entered.

    Try: `--cwd DIR`, or `--sync` (docs/guides/copy-the-project.md).
    """

    exit_code = EXIT_USAGE
    """2: wrong usage."""

    def __init__(self, cause: str, *, host: str, path: str, hint: str) -> None:
        super().__init__(cause, host=host, hint=hint)
        self.path = path
        """The directory."""

    @property
    def problem(self) -> Problem:
        """The error as data, with `path`."""
        return super().problem._replace(path=self.path)


class SlotsUnlikely(HostError):
    """The number of slots is probably a mistake, such as the port in `host:22`.

    Try: `-p 22` for a port; `--force-slots` if the host does have these slots.
    """

    exit_code = EXIT_USAGE
    """2: wrong usage."""


class Defect(HvlaunchError):
    """A defect of hvlaunch; the job has ended.

    Try: please report it, with the output of `--verbose`.
    """


class HostsFailed(HvlaunchError):
    """Several hosts failed; `errors` has the error of each.

    Try: `--skip-bad-hosts`, if the other hosts are enough.
    """

    exit_code = EXIT_HOSTS
    """The exit code of the first error."""

    def __init__(self, errors: Sequence[Problem]) -> None:
        self.errors = tuple(errors)
        """The problems of the hosts, in host order."""
        super().__init__("\n".join(str(error) for error in self.errors))
        self.exit_code = self.errors[0].exit_code

    @property
    def problem(self) -> Problem:
        """The error as data, with `errors`."""
        return super().problem._replace(errors=self.errors)
