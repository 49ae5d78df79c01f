"""A job's secrets and names: all of chance that there is in a driver, drawn once, before the job begins."""

import os
from typing import NamedTuple

__all__ = ["Keys"]


def _random_word(size: int) -> str:
    """`size` random bytes in hexadecimal; what the secrets module does, without its imports (10 ms)."""
    return os.urandom(size).hex()


class Keys(NamedTuple):
    """`token` opens the rendezvous, `probe_token` only tells its `nonce`; `job_id` is for people and programs."""

    token: str
    probe_token: str
    nonce: str
    job_id: str
    beacons: str
    """What the nonces of the hosts' beacons begin with, which tell them to everybody: no part of another key."""

    def __repr__(self) -> str:
        """Without what is secret."""
        return f"Keys(job_id={self.job_id!r})"

    @classmethod
    def new(cls) -> "Keys":
        return cls(
            token=_random_word(32),
            probe_token=_random_word(16),
            nonce=_random_word(16),
            job_id=_random_word(6),
            beacons=_random_word(12),
        )

    def beacon(self, number: int) -> str:
        """The nonce of a beacon, by the number of the connection to its host."""
        return f"{self.beacons}{number:08x}"
