"""Colours: which, and whether."""

from collections.abc import Mapping

from hvlaunch.job import ColorPolicy

__all__ = ["can_redraw", "colored", "paint_message", "paint_prefix", "paint_report"]

_PALETTE = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
"""SGR codes by rank: the sixteen colours that follow the terminal's own theme, without red (trouble), grey and white."""
_RESET = b"\x1b[0m"
_BOLD, _BOLD_RED = "1", "1;31"


def colored(policy: ColorPolicy, *, terminal: bool, environ: Mapping[str, str]) -> bool:
    """Whether to use colours: `auto` where a terminal can show them, and https://no-color.org does not forbid it."""
    if policy == "auto":
        return can_redraw(terminal=terminal, environ=environ) and not environ.get("NO_COLOR")
    return policy == "always"


def can_redraw(*, terminal: bool, environ: Mapping[str, str]) -> bool:
    """Whether it is a terminal that understands escape sequences."""
    return terminal and environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


def paint_prefix(prefix: bytes, ranks: tuple[int, ...]) -> bytes:
    """The rank's colour; several ranks are bold. A colour that a worker has left on ends here: the next line may be another worker's."""
    if not prefix:
        return prefix
    code = _PALETTE[ranks[0] % len(_PALETTE)] if len(ranks) == 1 else 1
    return b"\x1b[0;%dm%b%b" % (code, prefix, _RESET)


def paint_message(prefix: bytes) -> bytes:
    """`hvlaunch: `, before a message of hvlaunch's own."""
    return b"\x1b[0;1m%b%b" % (prefix, _RESET)


def paint_report(text: str) -> str:
    """The failure report, with its headline and its advice in bold."""
    return "\n".join(map(_paint_line, text.split("\n")))


def _paint_line(line: str) -> str:
    if line.startswith("hvlaunch: "):
        return _sgr(_BOLD_RED, line)
    if line.startswith("  Try: "):
        return "  " + _sgr(_BOLD, line[2:])
    return line


def _sgr(code: str, text: str) -> str:
    return f"\x1b[0;{code}m{text}\x1b[0m"
