"""Good values, from the file of --expect: for each check a value, or the least and the most."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hvlaunch.check import Check, Finding, Values

__all__ = ["Expectation", "expectations_of", "unexpected"]

_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGTP]?)(iB|B)?")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_LIMITS = ("min", "max")


class Expectation(NamedTuple):
    """A check with its good value."""

    check: Check
    text: str | None = None
    """The value itself; None for limits."""
    least: float | None = None
    most: float | None = None


def expectations_of(tree: Mapping[str, Any], checks: Iterable[Check]) -> list[Expectation]:
    """Return the expectations of a file, from its values as text. Raises ValueError."""
    by_name = {check.name: check for check in checks}
    expectations = []
    for name, value in tree.items():
        check = by_name.get(name)
        if check is None:
            raise ValueError(f"unknown name {name!r}; the names are {', '.join(by_name)}")
        if isinstance(value, str):
            expectations.append(Expectation(check, value))
            continue
        if not isinstance(value, Mapping) or not value or not value.keys() <= {*_LIMITS}:
            raise ValueError(f"{name}: it must be a value, or {{min = ..., max = ...}}")
        least, most = (_amount(str(value[limit])) if limit in value else None for limit in _LIMITS)
        if (least is None) != ("min" not in value) or (most is None) != ("max" not in value):
            raise ValueError(f"{name}: min and max must be numbers, such as 8, 0.5 or 64G")
        expectations.append(Expectation(check, None, least, most))
    return expectations


def _amount(text: str) -> float | None:
    """Return a number, or a size in bytes: 64G and 64GiB are powers of 1024, 64GB of 1000; None for another text."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        return None
    base = 1000 if match[3] == "B" else 1024
    return float(match[1]) * float(base ** _POWERS[match[2].upper()])


def unexpected(expectations: Iterable[Expectation], values: Mapping[str, Values]) -> Iterator[Finding]:
    """Yield an error for each unexpected or missing value."""
    for check, text, least, most in expectations:
        for host, of_host in values.items():
            value = check.value(of_host)
            shown = "none" if value is None else check.show(value)
            number = _number_of(value)
            if text is not None:
                is_good = text in (shown, str(value)) or (number is not None and number == _amount(text))
                good = text
            else:
                is_good = number is not None and (least is None or number >= least)
                is_good = is_good and (most is None or number is None or number <= most)
                limits = (("least", least), ("most", most))
                good = " and ".join(
                    f"at {word} {_shown(check, limit)}" for word, limit in limits if limit is not None
                )
            if not is_good:
                yield Finding(host, "error", check.name, f"{shown} here, {good} expected")


def _shown(check: Check, limit: float) -> str:
    try:
        return check.show(limit)
    except TypeError:
        return f"{limit:g}"  # the value itself has more than a number


def _number_of(value: Any) -> float | None:
    """Return the number of a value; of an offset with its uncertainty, how far it is from 0."""
    if isinstance(value, tuple) and isinstance(value[0], float):
        return abs(value[0])
    return value if isinstance(value, int | float) else None
