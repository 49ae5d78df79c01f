"""The keys of a job: our private keys, in files and ssh agents, and the hosts' public ones."""

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvlaunch.errors import HostError
from hvlaunch.ssh.host_keys import KnownHosts
from hvlaunch.ssh.settings import HostSettings

if TYPE_CHECKING:  # 100 ms, for a keyring that a local job makes in vain
    from paramiko.pkey import PKey

    from hvlaunch.ssh.agent_client import AgentClient
    from hvlaunch.ssh.identity import Identity

__all__ = ["Keyring", "Offer", "Offers"]


@dataclass(frozen=True, slots=True)
class Offer:
    """A key that we can sign with. `label` names it in messages."""

    label: str
    key: "PKey"


@dataclass(frozen=True, slots=True)
class Offers:
    """The keys to try with a host, in order, and a few words on each that can't be tried."""

    keys: tuple[Offer, ...]
    skipped: tuple[str, ...]


class Keyring:
    """Identity files, ssh agents and known_hosts files: each is read once, however many hosts ask.

    Thread-safe; one is shared by all hosts of a job.
    """

    def __init__(self) -> None:
        self.known_hosts = KnownHosts()
        self._lock = threading.Lock()
        self._identities: dict[str, Identity] = {}
        self._agents: dict[str, AgentClient | None] = {}

    def offers(self, host: str, settings: HostSettings) -> Offers:
        """Our keys: those that were asked for or that an agent holds for an identity file, then other ones.

        `host` is for messages. Raises HostError where the identity asked for is missing or can't be read.
        """
        with self._lock:
            identities = [self._identity(path) for path in settings.identity_files]
            agent = self._agent(settings.identity_agent)
        held = {key.blob: Offer(f"{key.comment} (agent)", key) for key in agent.get_keys()} if agent else {}
        skipped: list[str] = []
        if settings.identity_agent is not None and agent is None:
            skipped.append(f"no ssh agent answers at {settings.identity_agent}")
        first: list[Offer] = []
        last: list[Offer] = []
        for identity in identities:
            asked_for = identity.path == settings.identity
            if identity.public is not None and identity.public in held:
                first.append(held.pop(identity.public))
            elif identity.keys:
                (first if asked_for else last).extend(Offer(identity.path, key) for key in identity.keys)
            elif asked_for and not identity.encrypted:
                cause = f"the private key {identity.path} can't be used: {identity.problem}"
                raise HostError(cause, host=host, hint=f"ssh-keygen -y -f {identity.path}")
            elif not identity.missing:
                skipped.append(f"{identity.path}: {identity.problem}")
        others = () if settings.identities_only else held.values()
        return Offers((*first, *others, *last), tuple(skipped))

    def close(self) -> None:
        """Hang up on the ssh agents; may be repeated."""
        with self._lock:
            for agent in self._agents.values():
                if agent is not None:
                    agent.close()
            self._agents.clear()

    def _identity(self, path: str) -> "Identity":
        from hvlaunch.ssh.identity import read_identity  # noqa: PLC0415  (paramiko)

        if path not in self._identities:
            self._identities[path] = read_identity(path)
        return self._identities[path]

    def _agent(self, path: str | None) -> "AgentClient | None":
        from paramiko.ssh_exception import SSHException  # noqa: PLC0415  (100 ms)

        from hvlaunch.ssh.agent_client import AgentClient  # noqa: PLC0415  (paramiko)

        if path is not None and path not in self._agents:
            try:
                self._agents[path] = AgentClient(path)
            except (OSError, SSHException):
                self._agents[path] = None
        return None if path is None else self._agents[path]
