"""What can go wrong, named after the condition; each error carries its facts and its exit code.

Messages are one line, `host HOST: CAUSE; try: HINT`. The command line prints them as they are
and exits with `exit_code`; docs/exit-codes.md lists the codes.
"""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "AgentFailed",
    "BadEnvironment",
    "BadHost",
    "BadUsage",
    "ChannelGarbled",
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

_SHOWN = 100
"""Characters of a word that a message quotes."""


class Problem(NamedTuple):
    """An error as plain data: what decides and what looks on need no exception."""

    kind: str
    """The name of the error's class."""
    cause: str
    """What happened."""
    exit_code: int
    """What the command line exits with."""
    host: str | None = None
    """Where it happened, if on one host."""
    hint: str | None = None
    """What to try."""
    other: str | None = None
    """The second host, where the problem is between two."""
    addresses: tuple[str, ...] = ()
    """What was tried."""
    path: str | None = None
    """The directory that is missing on the host."""
    errors: tuple[Problem, ...] = ()
    """One for each host, where several failed."""
    host_key: tuple[str, str] | None = None
    """Its type and its fingerprint, where nobody knows whether it is the host's."""

    def __str__(self) -> str:
        where = f"host {self.host}: " if self.host else ""
        hint = f"; try: {self.hint}" if self.hint else ""
        return f"{where}{self.cause}{hint}"


class HvlaunchError(Exception):
    """The base of all errors of hvlaunch."""

    exit_code = EXIT_INTERNAL
    """What the command line exits with: 70, where a kind of error has no code of its own."""

    def __init__(self, cause: str, *, host: str | None = None, hint: str | None = None) -> None:
        super().__init__(cause)
        self.cause = cause
        """What happened."""
        self.host = host
        """Where it happened; None where that is no single host."""
        self.hint = hint
        """What to try; None where there is nothing."""

    def __str__(self) -> str:
        return str(self.problem)

    @property
    def problem(self) -> Problem:
        """The same as data."""
        return Problem(type(self).__name__, self.cause, self.exit_code, self.host, self.hint)

    def __reduce__(self) -> tuple[object, ...]:
        """What copy and pickle go by: an error is its fields, since each kind is made of others."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    def about(self, host: str, cause: str) -> Self:
        """The same error, with all other fields that its kind has, as one of `host`."""
        import copy  # noqa: PLC0415 (where something went wrong)

        error = copy.copy(self)
        error.host, error.cause, error.args = host, cause, (cause,)
        return error


class BadUsage(HvlaunchError):
    """The command line, or a file that it names, asks for something impossible."""

    exit_code = EXIT_USAGE
    """2: wrong usage."""


class BadHost(BadUsage):
    """A host that can't be read, on the command line or in a hostfile."""

    def __init__(self, cause: str, *, word: str, source: str, line: int | None = None) -> None:
        where = f"{source}:{line}" if line is not None else source
        shown = word if len(word) <= _SHOWN else word[:_SHOWN] + "…"
        super().__init__(f"{where}: {shown!r}: {cause}")
        self.word = word
        """The part that is wrong."""
        self.source = source
        """`-H`, or the hostfile."""
        self.line = line
        """The hostfile's line, from 1."""


class NotEnoughSlots(BadUsage):
    """More workers were asked for than there are slots."""

    def __init__(self, needed: int, available: int) -> None:
        noun = "slot" if available == 1 else "slots"
        super().__init__(
            f"{needed} workers were asked for, but the hosts have only {available} {noun}",
            hint=f"-np {available}, or more slots (host:N)",
        )
        self.needed = needed
        """How many workers were asked for."""
        self.available = available
        """How many slots the hosts have."""


class NotEnoughSlotsInTime(HvlaunchError):
    """An elastic job had too few slots for a round, for longer than it may wait."""

    exit_code = EXIT_TOO_FEW
    """75: too few slots for too long."""

    def __init__(self, needed: int, available: int, seconds: float, why: str = "") -> None:
        super().__init__(
            f"too few slots for {seconds:g} s (--elastic-timeout): {available} of {needed} (--min-np){why}",
            hint="more hosts, a smaller --min-np, or a longer --elastic-timeout",
        )
        self.needed = needed
        """How many slots a round needs at least."""
        self.available = available
        """How many slots there were at the end."""
        self.seconds = seconds
        """How long the job has waited."""


class JobHung(HvlaunchError):
    """No worker has got on for a long time; `cause` says which wait for which."""

    exit_code = EXIT_HUNG
    """76: the job hung."""

    def __init__(self, seconds: float, detail: str) -> None:
        super().__init__(f"the job hangs: no rank has got on for {seconds:.0f} s; {detail}")
        self.seconds = seconds
        """How long no worker has got on."""


class GaveUp(HvlaunchError):
    """The rounds of an elastic job fail, and no worker that failed of itself is known.

    All `restarts` are used up, or the workers failed `times` in a row and got nowhere in between.
    """

    exit_code = 1
    """1: the workers failed."""

    def __init__(self, *, restarts: int | None = None, times: int = 0) -> None:
        if restarts is not None:
            super().__init__(f"no restart is left (--max-restarts {restarts})")
        else:
            super().__init__(f"the workers failed {times} times in a row without progress")


class BadEnvironment(BadUsage):
    """A variable that no process can be started with."""

    def __init__(self, name: str, cause: str) -> None:
        super().__init__(f"variable {name}: {cause}")
        self.name = name
        """Which variable."""


class DiscoveryFailed(HvlaunchError):
    """The script that is to find the hosts failed; the cause ends with what it said on stderr."""

    exit_code = EXIT_HOSTS
    """69: no hosts were found."""


class HostError(HvlaunchError):
    """Something is wrong with one host: it can't be reached, refuses us, or was lost."""

    exit_code = EXIT_HOSTS
    """69: a host can't be used."""

    def __init__(self, cause: str, *, host: str, hint: str | None = None) -> None:
        # The cause may quote the host: a second line of it would look like a message of hvlaunch's own.
        super().__init__(" ".join(cause.split("\n")), host=host, hint=hint)


class UnknownHost(HostError):
    """The name resolves to no address."""


class ConnectFailed(HostError):
    """No SSH connection: refused, reset, no route, or the other side does not speak SSH."""


class SentAway(ConnectFailed):
    """The host's sshd closes connections before it says anything: too many at once (MaxStartups), or it refuses us."""


class StartTimeout(HostError):
    """The host did not get ready within --start-timeout."""


class HostKeyUnknown(HostError):
    """The host's key is in no known_hosts file."""

    def __init__(self, cause: str, *, host: str, hint: str, key_type: str, fingerprint: str) -> None:
        super().__init__(cause, host=host, hint=hint)
        self.key_type = key_type
        """As in `ssh-ed25519`."""
        self.fingerprint = fingerprint
        """As `ssh-keygen -l` shows it: `SHA256:…`. Empty where it is not known."""

    @property
    def problem(self) -> Problem:
        """The same as data, with the host's key where it is one that nobody knows."""
        known = (self.key_type, self.fingerprint) if self.fingerprint else None
        return super().problem._replace(host_key=known if type(self) is HostKeyUnknown else None)


class HostKeyChanged(HostKeyUnknown):
    """The host shows another key than the known_hosts file has: a new machine, or an attack."""


class HostKeyRevoked(HostKeyUnknown):
    """The host shows a key that a known_hosts file marks @revoked."""


class PermissionDenied(HostError):
    """No authentication method was accepted."""

    def __init__(self, cause: str, *, host: str, hint: str, tried: Sequence[str]) -> None:
        super().__init__(cause, host=host, hint=hint)
        self.tried = tuple(tried)
        """The keys that were offered, by name."""


class NoFreePort(HostError):
    """The ports that --worker-port-range names are all in use on the host, but for one at most."""

    def __init__(self, *, host: str) -> None:
        super().__init__(
            "fewer than two ports of --worker-port-range are free",
            host=host,
            hint="a wider --worker-port-range",
        )


class NoPython(HostError):
    """None of the interpreters tried on the host is a Python >= 3.8."""


class AgentFailed(HostError):
    """The agent did not start, or spoke something else; `cause` quotes what the host printed."""


class HostFault(HostError):
    """A fault of hvlaunch itself, in what it does for one host."""

    exit_code = EXIT_INTERNAL
    """70: a fault of hvlaunch itself."""


class HostLost(HostError):
    """The host was there, and is gone: its channel closed, its agent died, or it is silent for a lease."""


class ProtocolBroken(HostLost):
    """What an agent sent is no frame, or none that it may send now: who speaks there is not to be trusted."""


class ChannelGarbled(HostLost):
    """What an agent sent has something in it that it did not send."""


class Unreachable(HostError):
    """A host can't connect to another host of the job."""

    def __init__(self, cause: str, *, host: str, other: str, addresses: Sequence[str], hint: str) -> None:
        super().__init__(cause, host=host, hint=hint)
        self.other = other
        """The host that can't be reached from `host`."""
        self.addresses = tuple(addresses)
        """The addresses of `other` that were tried."""

    @property
    def problem(self) -> Problem:
        """The same as data, with `other` and `addresses`."""
        return super().problem._replace(other=self.other, addresses=self.addresses)


class WorkingDirectoryMissing(HostError):
    """The workers' directory is not there, or can't be entered, on the host."""

    exit_code = EXIT_USAGE
    """2: wrong usage."""

    def __init__(self, cause: str, *, host: str, path: str, hint: str) -> None:
        super().__init__(cause, host=host, hint=hint)
        self.path = path
        """The directory."""

    @property
    def problem(self) -> Problem:
        """The same as data, with `path`."""
        return super().problem._replace(path=self.path)


class SlotsUnlikely(HostError):
    """The host was given so many slots that the number is most likely a mistake, a port for example."""

    exit_code = EXIT_USAGE
    """2: wrong usage."""


class Defect(HvlaunchError):
    """A fault of hvlaunch itself, which ends the job."""


class HostsFailed(HvlaunchError):
    """Several hosts failed."""

    exit_code = EXIT_HOSTS
    """That of the first of `errors`."""

    def __init__(self, errors: Sequence[Problem]) -> None:
        self.errors = tuple(errors)
        """The problem of each, in the order of the hosts."""
        super().__init__("\n".join(str(error) for error in self.errors))
        self.exit_code = self.errors[0].exit_code

    @property
    def problem(self) -> Problem:
        """The same as data, with `errors`."""
        return super().problem._replace(errors=self.errors)
