"""Options of hvlaunch that stand behind the command, where they are the command's own."""

from collections.abc import Callable, Container, Sequence
from itertools import pairwise
from pathlib import Path, PurePath

from hvlaunch.errors import BadUsage
from hvlaunch.hosts.parse import parse_hosts

__all__ = ["NAMES", "misplaced"]

NAMES = {
    "-np": "np",
    "--np": "np",
    "--num-proc": "np",
    "-H": "hosts",
    "-hosts": "hosts",
    "--hosts": "hosts",
    "-hostfile": "hostfile",
    "--hostfile": "hostfile",
    "-machinefile": "hostfile",
    "--machinefile": "hostfile",
}
"""Options that programs rarely have themselves, and what they are called."""

_LAUNCHERS = {"horovodrun", "hvlaunch", "mpiexec", "mpiexec.hydra", "mpirun", "orterun", "prterun"}


def misplaced(command: Sequence[str], given: Container[str]) -> list[str]:
    """The warning for such an option with its value, if it was not given before the command too."""
    for index, (word, following) in enumerate(pairwise((*command, ""))):
        if PurePath(word).name in _LAUNCHERS:
            break
        flag, equals, value = word.partition("=")
        name = NAMES.get(flag)
        if (
            index > 0
            and name
            and not _is_given(name, given)
            and _LIKELY[name](value if equals else following)
        ):
            program = PurePath(command[0]).name
            typed = word if equals else f"{flag} {following}"
            where = "since it stands behind the command; options of hvlaunch come before"
            return [f"{typed} belongs to {program}, {where}: hvlaunch {typed} {program} ..."]
    return []


def _is_given(name: str, given: Container[str]) -> bool:
    return name in given or (name == "hosts" and "hostfile" in given)


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
