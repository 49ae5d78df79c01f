"""Points in time, as `hvlaunch logs --since` has them."""

import re
from datetime import datetime, timedelta

from hvlaunch.cli.options.option import BadValue

__all__ = ["since"]

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SPAN = re.compile(r"([0-9]{1,9})([smhd])")
_TIME = re.compile(r"[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?")


def since(text: str, now: datetime) -> float:
    """Seconds since 1970: `10m` ago, `14:30` of today (or else of yesterday), or `2026-11-22 14:30`; times are local.

    `now` has a time zone. Raises BadValue.
    """
    if (span := _SPAN.fullmatch(text)) is not None:
        return now.timestamp() - int(span[1]) * _SECONDS[span[2]]
    try:
        if _TIME.fullmatch(text):
            today = datetime.fromisoformat(f"{now:%Y-%m-%d} {text.zfill(len(text) + (text[1] == ':'))}")
            found = today.replace(tzinfo=now.tzinfo)
            return (found if found <= now else found - timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise BadValue(
            f"{text!r} is neither a time such as 14:30 or 2026-11-22T14:30, nor 10m or 2h"
        ) from None
