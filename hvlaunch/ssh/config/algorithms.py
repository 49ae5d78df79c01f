"""Which algorithms of SSH may be used: Ciphers, MACs, KexAlgorithms, HostKeyAlgorithms, PubkeyAcceptedAlgorithms."""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Algorithms", "allowed"]

_SAME = {"curve25519-sha256": "curve25519-sha256@libssh.org"}
"""Two names of one algorithm: RFC 8731, and the one that paramiko has."""
_HYBRID = "sntrup761x25519-sha512"
_HYBRIDS = ("mlkem768x25519-sha256",)
"""Key exchanges that hold against quantum computers too. An ssh before 9.9 knows only the first; who allows it allows these."""


class Algorithms(NamedTuple):
    """The lists of the ssh configuration, as `ssh -G` prints them; None where it says nothing."""

    ciphers: str | None = None
    macs: str | None = None
    key_exchanges: str | None = None
    host_keys: str | None = None
    signatures: str | None = None
    """For our own keys."""

    @classmethod
    def of(cls, found: Mapping[str, Sequence[str]]) -> "Algorithms":
        """From the configuration's words, in lower case, and their values."""

        def first(*keys: str) -> str | None:
            return next((found[key][0] for key in keys if found.get(key)), None)

        return cls(
            first("ciphers"),
            first("macs"),
            first("kexalgorithms"),
            first("hostkeyalgorithms"),
            first("pubkeyacceptedalgorithms", "pubkeyacceptedkeytypes"),
        )


def allowed(ours: Sequence[str], listed: str | None) -> tuple[str, ...]:
    """Those of `ours` that the list of the configuration allows, in our order; all where there is no list.

    `-` before a list takes away what it has; `+` and `^` take nothing away. `ssh -G` has carried them out already.
    """
    if listed is None or listed.startswith(("+", "^")):
        return tuple(ours)
    names = [_SAME.get(name, name) for name in listed.removeprefix("-").split(",")]
    if listed.startswith("-"):
        return tuple(name for name in ours if not any(fnmatch.fnmatchcase(name, word) for word in names))
    if any(name.startswith(_HYBRID) for name in names):
        names += _HYBRIDS
    return tuple(name for name in ours if name in names)
