"""A job's secrets and names: all of chance that there is in a driver, drawn once, before the job begins."""

import json
import os
from pathlib import Path
from typing import NamedTuple

from hvlaunch.agent.quick import mac
from hvlaunch.rendezvous.serving.certificate import Certificate

__all__ = ["KEYS", "Keys"]

KEYS = "keys.json"


def _random_word(size: int) -> str:
    """`size` random bytes in hexadecimal; what the secrets module does, without its imports (10 ms)."""
    return os.urandom(size).hex()


class Keys(NamedTuple):
    """`token` opens the rendezvous, which proves that it is the job's to agents by `probe_key`, to workers by `certificate`.

    `entry` lets agents in that a launcher has started, and nothing more; `job_id` is for people and programs.
    """

    token: str
    probe_key: str
    certificate: Certificate
    entry: str
    job_id: str
    beacons: str
    """What the keys of the hosts' beacons and sessions are made of."""

    def __repr__(self) -> str:
        """Without what is secret."""
        return f"Keys(job_id={self.job_id!r})"

    @classmethod
    def new(cls) -> "Keys":
        return cls(
            token=_random_word(32),
            probe_key=_random_word(32),
            certificate=Certificate(),
            entry=_random_word(32),
            job_id=_random_word(6),
            beacons=_random_word(32),
        )

    def save(self, path: Path) -> None:
        """In a file for this user alone, with the certificate's private key, so that another driver has them. Raises OSError."""
        pem = (self.certificate.key + self.certificate.pem).decode("ascii")
        data = json.dumps({**self._asdict(), "certificate": pem}).encode()
        with os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
        ) as file:
            file.write(data)

    @classmethod
    def load(cls, path: Path) -> "Keys":
        """What save() has written. Raises OSError, ValueError."""
        words = json.loads(path.read_bytes())
        if not isinstance(words, dict) or words.keys() != set(cls._fields):
            raise ValueError("not the keys of a job")
        if not all(isinstance(word, str) for word in words.values()):
            raise ValueError("not the keys of a job")
        return cls(**{**words, "certificate": Certificate(words["certificate"].encode("ascii"))})

    def beacon(self, number: int) -> str:
        """The key of a beacon, by the number of the connection to its host; nothing about the others' can be told by it."""
        return mac(self.beacons.encode("ascii"), b"beacon %d" % number).hex()

    def session(self, number: int) -> str:
        """The key of a session, which its agent alone has beside us, by the number of the connection that began it."""
        return mac(self.beacons.encode("ascii"), b"session %d" % number).hex()
