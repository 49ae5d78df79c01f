"""The processes of workers, as /proc has them."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Iterable, List, Optional

__all__ = ["command_of", "descendants", "parents", "read_text"]

_LONGEST = 200


def read_text(path: str) -> Optional[str]:
    """A file of /proc; None where it can't be read, or is no more."""
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return None


def parents() -> Dict[int, int]:
    """The parent of each process here. What starts or ends meanwhile may be missing."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = read_text("/proc/%s/stat" % name)
            if stat is not None:
                found[int(name)] = int(stat.rpartition(")")[2].split()[1])
    return found


def descendants(roots: Iterable[int], known: Dict[int, int]) -> Dict[int, List[int]]:
    """By root, it and all below it that are not below another root, the nearest first."""
    children: Dict[int, List[int]] = {}
    for pid, parent in known.items():
        children.setdefault(parent, []).append(pid)
    found: Dict[int, List[int]] = {root: [root] for root in roots if root in known}
    for tree in found.values():
        for pid in tree:
            tree.extend(child for child in sorted(children.get(pid, ())) if child not in found)
    return found


def command_of(pid: int) -> str:
    """What it runs, for people; of a process without arguments its name."""
    line = read_text("/proc/%d/cmdline" % pid) or ""
    words = line.replace("\0", " ").strip() or (read_text("/proc/%d/comm" % pid) or "?").strip()
    plain = "".join(char if char.isprintable() else "?" for char in words)
    return plain if len(plain) <= _LONGEST else plain[: _LONGEST - 3] + "..."
