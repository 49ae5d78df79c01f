"""A job's keys and id: the driver's only random values, drawn before the job begins."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hvlaunch.agent.quick import mac
from hvlaunch.rendezvous.serving.certificate import Certificate

__all__ = ["Keys"]


def _random_word(size: int) -> str:
    """Return `size` random bytes in hexadecimal."""
    # As secrets.token_hex(), without the imports of that module (10 ms).
    return os.urandom(size).hex()


class Keys(NamedTuple):
    """The keys of a job.

    `token` opens the rendezvous; the rendezvous proves its identity to agents by `probe_key`, to workers by `certificate`.
    `entry` admits agents of a launcher, and nothing else. `job_id` is not secret.
    """

    token: str
    probe_key: str
    certificate: Certificate
    entry: str
    job_id: str
    beacons: str
    """The key for deriving the keys of beacons and sessions."""

    def __repr__(self) -> str:
        """Show no secret."""
        return f"Keys(job_id={self.job_id!r})"

    @classmethod
    def new(cls, job_id: str | None = None) -> "Keys":
        return cls(
            token=_random_word(32),
            probe_key=_random_word(32),
            certificate=Certificate(),
            entry=_random_word(32),
            job_id=job_id or _random_word(6),
            beacons=_random_word(32),
        )

    def save(self, path: Path, env: Mapping[str, str]) -> None:
        """Save for a successor, in a file readable by this user alone, with the certificate's private key. Raises OSError.

        `env` is the workers' environment: removing this file removes every secret of the job.
        """
        pem = (self.certificate.key + self.certificate.pem).decode("ascii")
        data = json.dumps({**self._asdict(), "certificate": pem, "env": dict(env)}).encode()
        with os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
        ) as file:
            file.write(data)

    @classmethod
    def load(cls, path: Path) -> tuple["Keys", Mapping[str, str]]:
        """Load the keys and the environment of save(). Raises OSError, ValueError."""
        words = json.loads(path.read_bytes())
        env = words.pop("env", None) if isinstance(words, dict) else None
        if not isinstance(env, dict) or words.keys() != set(cls._fields):
            raise ValueError("not the keys of a job")
        if not all(isinstance(word, str) for word in (*words.values(), *env.values())):
            raise ValueError("not the keys of a job")
        return cls(**{**words, "certificate": Certificate(words["certificate"].encode("ascii"))}), env

    def beacon(self, number: int) -> str:
        """Return the key of a beacon, derived from the number of the connection to its host."""
        return mac(self.beacons.encode("ascii"), b"beacon %d" % number).hex()

    @property
    def secret(self) -> str:
        """A word for programs of the user's that ask each other for one, such as Ray's."""
        return mac(self.beacons.encode("ascii"), b"workers").hex()

    def session(self, number: int) -> str:
        """Return the key of a session, derived from the number of its first connection."""
        # Derived by HMAC: a host that learns its key learns nothing of the others.
        return mac(self.beacons.encode("ascii"), b"session %d" % number).hex()
