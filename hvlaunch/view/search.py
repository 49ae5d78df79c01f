"""Looks for lines in a job's output as it is kept. Pure."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hvlaunch.console.stored import Stored

__all__ = ["newest_lines_with"]

_STREAMS = ("stdout", "stderr")
_LONGEST = 4096
"""Bytes of a line; the rest of it begins another."""


def newest_lines_with(
    items: Iterable[Stored], text: str, ranks: Collection[int] | None, count: int
) -> list[Mapping[str, Any]]:
    """The last `count` lines of these ranks (None: all, and hvlaunch's own) with `text` in them, in small or large letters.

    Each has `time` (seconds since 1970), `rank` (None: hvlaunch's own), `stream` and `text`.
    """
    found: deque[Mapping[str, Any]] = deque(maxlen=count)
    unfinished: dict[tuple[int | None, str], bytes] = {}
    wanted = text.casefold()

    def add(item: Stored, line: bytes) -> None:
        shown = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        if wanted in shown.casefold():
            found.append({"time": item.time, "rank": item.rank, "stream": item.kind, "text": shown})

    for item in items:
        if ranks is not None and item.rank not in ranks:
            continue
        key = item.rank, item.kind.removesuffix(" ended")
        if item.kind in _STREAMS:
            *lines, rest = (unfinished.pop(key, b"") + item.data).split(b"\n")
            if len(rest) > _LONGEST:
                lines, rest = [*lines, rest], b""
            if rest:
                unfinished[key] = rest
        elif item.kind in ("said", "shown"):
            lines = item.data.split(b"\n")
        else:
            lines = [unfinished.pop(key)] if key in unfinished else []
        for line in lines:
            add(item, line)
    for (rank, stream), line in unfinished.items():
        add(
            Stored(
                found[-1]["time"] if found else 0.0, "stderr" if stream == "stderr" else "stdout", rank=rank
            ),
            line,
        )
    return list(found)
