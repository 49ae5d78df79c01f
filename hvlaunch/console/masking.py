"""Masked values and command lines, for `--dry-run` and reports: text that may be a secret is hidden. Pure."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

__all__ = ["MASK", "masked", "masked_value", "masked_words"]

MASK = "****"

_HIDDEN_NAME = re.compile(
    r"(?i)TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|(_|^)PASS$|._PWD$|KEY|CREDENTIAL|AUTH|COOKIE|JWT|BEARER|WEBHOOK|DSN$"
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_IN_URL = re.compile(r"(?<=://)(?:[^/:@\s]*:[^\s@]+|[^/\s?#]+)(?=@)")
_SECRET_WORD = r"(?:token(?!izer)|secret|passw|passphrase|api[_-]?key|access[_-]?key|account[_-]?key|signature|credential|bearer)"  # noqa: S105
_ASSIGNED = re.compile(
    rf"""(?i)((?:{_SECRET_WORD}[\w.-]{{0,40}}|[?&](?:key|sig|auth|pwd)|\bpwd)["']?\s{{0,2}}[=:]\s{{0,2}}["']?)([^\s;&,"']+)"""
)
_OPTION = re.compile(rf"(?i)--?(?:[\w.-]{{0,40}}{_SECRET_WORD}[\w.-]{{0,40}}|key|pwd)")
_WEBHOOK = re.compile(r"(?<=://)([^/\s]*)/\S+")
_COUNTED = re.compile(r"-?[0-9.,]{1,8}|(?i:true|false|none|null|yes|no)")
"""Numbers and booleans are not secrets, as in `--max-tokens 512`."""
_START, _END = r"(?<![A-Za-z0-9])", r"(?![A-Za-z0-9])"
_KNOWN = re.compile(
    _START
    + "(?:"
    + "|".join(
        (
            r"gh[pousr]_[A-Za-z0-9]{16,}",
            r"github_pat_\w{16,}",
            r"glpat-[\w-]{16,}",
            r"hf_[A-Za-z0-9]{16,}",
            r"sk-[\w-]{16,}",
            r"[prs]k_(?:live|test)_[A-Za-z0-9]{10,}",
            r"(?:AKIA|ASIA)[A-Z0-9]{12,}",
            r"xox[a-z]-[\w-]{10,}",
            r"AIza[\w-]{30,}",
            r"npm_[A-Za-z0-9]{20,}",
            r"pypi-[\w-]{16,}",
            r"eyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?",
            rf"[0-9a-fA-F]{{32,}}{_END}",
        )
    )
    + ")"
)
_LONG = re.compile(r"[A-Za-z0-9+/]{20,}={0,2}")
_LEAST_LETTERS = 20
_LEAST_BITS = 3.2
_LEAST_CHANGES = 0.3


def masked(name: str, value: str) -> str:
    """Return a variable's value for display: hidden if the name suggests a secret, or else as in masked_value()."""
    return MASK if _HIDDEN_NAME.search(name) else masked_value(value)


def masked_value(value: str) -> str:
    """Return the text with probable secrets hidden.

    These are: user and password in a URL; a value assigned to a name such as `password`; tokens with the prefix
    of a well-known service; private keys; long words of random letters and digits.
    """
    if _PRIVATE_KEY.search(value):
        return MASK
    # URLs first: a password in a URL may also look like an assignment.
    value = _IN_URL.sub(MASK, value)
    value = _ASSIGNED.sub(_hide_assigned, value)
    value = _KNOWN.sub(MASK, value)
    return _LONG.sub(lambda match: MASK if _is_random(match[0]) else match[0], value)


def masked_words(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command with probable secrets hidden, including the word after `--api-key`.

    In an address after `--notify` the path is hidden: whoever knows a webhook's path may use it.
    """
    before = ""
    for word in words:
        is_secret = _OPTION.fullmatch(before) and not word.startswith("-") and not _COUNTED.fullmatch(word)
        shown = _WEBHOOK.sub(rf"\1/{MASK}", word) if before == "--notify" else word
        yield MASK if is_secret else masked_value(shown)
        before = word


def _hide_assigned(match: re.Match[str]) -> str:
    return match[0] if _COUNTED.fullmatch(match[2]) else match[1] + MASK


def _is_random(word: str) -> bool:
    """Return True if the word looks random. A `/` separates words, except in base64."""
    parts = [word] if word.endswith("=") or "+" in word else word.split("/")
    return any(len(part) >= _LEAST_LETTERS and _has_entropy(part) for part in parts)


def _has_entropy(word: str) -> bool:
    kinds = [char.isdigit() + 2 * char.isupper() for char in word]
    changes = sum(kind != next_kind for kind, next_kind in pairwise(kinds)) / len(word)
    bits = -sum(count / len(word) * math.log2(count / len(word)) for count in Counter(word).values())
    return len(set(kinds)) > 1 and changes >= _LEAST_CHANGES and bits >= _LEAST_BITS
