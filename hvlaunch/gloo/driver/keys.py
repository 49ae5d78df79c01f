"""A job's secrets, and how such words are made."""

import os
from dataclasses import dataclass, field

__all__ = ["Keys", "random_word"]


def random_word(size: int) -> str:
    """`size` random bytes in hexadecimal; what the secrets module does, without its imports (10 ms)."""
    return os.urandom(size).hex()


@dataclass(frozen=True, slots=True)
class Keys:
    """A job's secrets: `token` opens the rendezvous, `probe_token` only tells its `nonce`."""

    token: str = field(repr=False)
    probe_token: str = field(repr=False)
    nonce: str

    @classmethod
    def new(cls) -> "Keys":
        return cls(token=random_word(32), probe_token=random_word(16), nonce=random_word(16))
