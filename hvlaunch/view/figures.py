"""Figures in few letters, for tables."""

__all__ = ["bar", "cores", "share", "size", "steps"]

_UNITS = ("B", "K", "M", "G", "T", "P")
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def size(count: float | None) -> str:
    """Bytes: `512B`, `1.2G`; `-` where it is not known."""
    if count is None:
        return "-"
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:  # noqa: PLR2004 (four digits are too many)
        count /= 1024
        unit += 1
    return f"{count:.1f}{_UNITS[unit]}" if unit and count < 10 else f"{count:.0f}{_UNITS[unit]}"  # noqa: PLR2004 (as above)


def cores(used: float | None) -> str:
    """CPU in per cent of one core, as top(1) does."""
    return "-" if used is None else f"{used * 100:.0f}%"


def share(part: float | None, whole: float | None = 1.0) -> str:
    """`42%`."""
    return "-" if part is None or not whole else f"{part / whole * 100:.0f}%"


def steps(step: int | None, total: int | None, rate: float | None) -> str:
    """`120/1000 2.5/s`."""
    if step is None:
        return "-"
    of = "" if total is None else f"/{total}"
    return f"{step}{of}" + ("" if rate is None else f" {rate:.3g}/s")


def bar(part: float, width: int) -> str:
    """A bar of so many letters for a share from 0 to 1."""
    eighths = round(max(0.0, min(1.0, part)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(width)
