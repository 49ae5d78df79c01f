"""Options of hvlaunch that stand behind the command, where they are the command's own."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path, PurePath

from hvlaunch.errors import BadUsage
from hvlaunch.hosts.parse import parse_hosts

__all__ = ["misplaced"]

_FLAGS = {
    "-np": "np",
    "--num-proc": "np",
    "-H": "hosts",
    "--hosts": "hosts",
    "-hostfile": "hostfile",
    "--hostfile": "hostfile",
}
"""Those that programs rarely have themselves, and what they are called."""

_LAUNCHERS = {"horovodrun", "hvlaunch", "mpiexec", "mpiexec.hydra", "mpirun", "orterun", "prterun"}


def misplaced(command: Sequence[str], given: Iterable[str]) -> str | None:
    """The warning for such an option with its value, if it was not given before the command too."""
    before = {*given, "hosts"} if "hostfile" in given else {*given}
    for index, (flag, value) in enumerate(pairwise(command)):
        if PurePath(flag).name in _LAUNCHERS:
            return None
        name = _FLAGS.get(flag)
        if index > 0 and name is not None and name not in before and _LIKELY[name](value):
            program = PurePath(command[0]).name
            return (
                f"{flag} {value} belongs to {program}, since it stands behind the command; options of hvlaunch come before: "
                f"hvlaunch {flag} {value} {program} ..."
            )
    return None


def _are_hosts(text: str) -> bool:
    """Several, or with slots: `-H x` may be anything."""
    try:
        return ("," in text or ":" in text) and bool(parse_hosts(text))
    except BadUsage:
        return False


_LIKELY: dict[str, Callable[[str], bool]] = {
    "np": str.isdecimal,
    "hosts": _are_hosts,
    "hostfile": lambda text: Path(text).is_file(),
}
