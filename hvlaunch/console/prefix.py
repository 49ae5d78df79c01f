"""The text before each line of a worker (--prefix)."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvlaunch.console.lines import Stream
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.parse import host_set, number_set
from hvlaunch.job import ConsoleOptions

if TYPE_CHECKING:
    from datetime import datetime

__all__ = ["ASCTIME", "Prefix"]

ASCTIME = "{time:%a %b %e %H:%M:%S %Y}"
"""As asctime(3): horovodrun's -prefix-timestamp puts it before the prefix."""

_FIELDS = ("rank", "host", "local_rank", "time", "stream")
_TIME = "%Y-%m-%d %H:%M:%S"
_MOST_KNOWN = 4096
_TOO_WIDE = re.compile(r"[0-9]{4}")


class Prefix:
    """A template with fields in braces, filled in for a rank or a set of ranks.

    Fields may have a format: `{rank:03}`, `{time:%H:%M:%S}`. A set of ranks ignores formats for numbers.
    """

    def __init__(
        self,
        template: str = ConsoleOptions().prefix,
        *,
        now: "Callable[[], datetime] | None" = None,
        labels: Sequence[str] = (),
    ) -> None:
        """Check the template. `now` returns the local time, by default this machine's. Raises BadUsage.

        `labels` are shown in place of ranks.
        """
        self._labels = labels
        self._template = template
        self._has_time = "time" in _checked(template)
        self._now = now or _now
        self._places: dict[int, tuple[str, int]] = {}
        self._known: dict[tuple[tuple[int, ...], Stream], bytes] = {}

    def learn_places(self, places: Mapping[int, tuple[str, int]]) -> None:
        """Learn host and local_rank of these ranks."""
        self._places.update(places)
        # Cached prefixes may have been made without the hosts.
        self._known.clear()

    def text_for(self, ranks: tuple[int, ...], stream: Stream) -> bytes:
        """Return the prefix of a line written by all of `ranks` (at least one)."""
        key = (ranks, stream)
        text = self._known.get(key)
        if text is None:
            fields = _Fields(lambda name: self._value(name, ranks, stream))
            text = self._template.format_map(fields).encode(errors="surrogateescape")
            # Bounded: with --merge, sets of ranks are as many as subsets.
            if not self._has_time and len(self._known) < _MOST_KNOWN:
                self._known[key] = text
        return text

    def _value(self, name: str, ranks: tuple[int, ...], stream: Stream) -> Any:
        match name:
            case "rank" if self._labels:
                return ",".join(self._labels[rank] for rank in ranks)
            case "rank":
                return ranks[0] if len(ranks) == 1 else number_set(ranks)
            case "local_rank":
                local = {self._place(rank)[1] for rank in ranks}
                return min(local) if len(local) == 1 else number_set(local)
            case "host":
                hosts = dict.fromkeys(self._place(rank)[0] for rank in ranks)
                return next(iter(hosts)) if len(hosts) == 1 else host_set(hosts)
            case "time":
                return self._now()
            case _:
                return stream

    def _place(self, rank: int) -> tuple[str, int]:
        return self._places.get(rank, ("?", 0))


class _Fields(dict[str, "_Field"]):
    """The mapping for str.format_map; it asks `value` only for fields of the template."""

    def __init__(self, value: Callable[[str], Any], *, strict: bool = False) -> None:
        super().__init__()
        self._value = value
        self._strict = strict

    def __missing__(self, name: str) -> "_Field":
        field = self[name] = _Field(self._value(name), strict=self._strict)
        return field


class _Field:
    """A value that accepts formats, but no attributes or indices: a template must not reach into objects."""

    def __init__(self, value: Any, *, strict: bool) -> None:
        self._content = value
        self._strict = strict

    def __format__(self, spec: str) -> str:
        if self._strict and _TOO_WIDE.search(spec):
            raise ValueError(f"a field would have thousands of characters ({spec})")
        if hasattr(self._content, "strftime"):
            return str(self._content.strftime(spec or _TIME))
        try:
            return format(self._content, spec)
        except (ValueError, OverflowError):
            if self._strict:
                raise
            return str(self._content)

    def __str__(self) -> str:
        return format(self, "")

    __repr__ = __str__

    def __getattr__(self, name: str) -> Any:
        # {rank.__class__} must not reach Python's internals.
        raise ValueError(f"a field has no part .{name}")

    def __getitem__(self, name: object) -> Any:
        raise ValueError(f"a field has no part [{name}]")


def _checked(template: str) -> set[str]:
    """Return the names of the template's fields. Raises BadUsage."""
    if "\n" in template or "\r" in template:
        raise BadUsage(f"--prefix {template!r}: must be one line")
    fields = _Fields(_sample, strict=True)
    try:
        template.format_map(fields)
    except KeyError as error:
        fields_hint = ", ".join(f"{{{name}}}" for name in _FIELDS)
        raise BadUsage(
            f"--prefix {template!r}: unknown field {{{error.args[0]}}}", hint=fields_hint
        ) from None
    except ValueError as error:
        hint = "a format of Python, or {{ and }} for braces that are not a field"
        raise BadUsage(f"--prefix {template!r}: {str(error).lower()}", hint=hint) from None
    return set(fields)


def _sample(name: str) -> Any:
    if name not in _FIELDS:
        raise KeyError(name)
    return _now() if name == "time" else 0 if name.endswith("rank") else ""


def _now() -> "datetime":
    from datetime import datetime  # noqa: PLC0415 - most prefixes have no time

    return datetime.now().astimezone()
