"""What a Python of this host has installed, read from its directories: no process is started, since every start would wait."""

from __future__ import annotations

import os

from hvlaunch.agent.wire.frames import or_null, record, several, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Optional

__all__ = ["PACKAGES", "packages_of"]

_MOST_EDITABLE, _LONGEST_PATH = 64, 4096
_MOST_BYTES = 1 << 16  # of a file of site-packages
PACKAGES = record(
    {"hvlaunch": or_null(text(64)), "editable": several(text(_LONGEST_PATH, raw=True), _MOST_EDITABLE)}
)


def packages_of(program: str) -> Dict[str, Any]:
    """Return the version of hvlaunch, and the source directories of editable installs. `program` is the file of a Python."""
    version: Optional[str] = None
    editable: List[str] = []
    for directory in _directories(os.path.abspath(program)):
        for name in _listed(directory):
            if name.startswith("hvlaunch-") and name.endswith(".dist-info"):
                version = version or name[len("hvlaunch-") : -len(".dist-info")][:64]
            elif name.endswith((".pth", "_finder.py")):
                editable.extend(_sources(os.path.join(directory, name)))
    for source in editable:
        # The metadata of an editable install has the version of its first day.
        for line in _lines(os.path.join(source, "hvlaunch", "__init__.py")):
            if line.startswith("__version__ = "):
                version = line.partition('"')[2].rstrip('"')[:64]
    short = [source for source in dict.fromkeys(editable) if len(source) <= _LONGEST_PATH]
    return {"hvlaunch": version, "editable": short[:_MOST_EDITABLE]}


def _directories(file: str) -> Iterator[str]:
    """Yield the directories of packages of the Python with this file."""
    real = os.path.realpath(file)
    prefix = os.path.dirname(os.path.dirname(file))
    is_virtual = os.path.exists(os.path.join(prefix, "pyvenv.cfg"))
    prefixes = [prefix]
    if not is_virtual:
        prefix = os.path.dirname(os.path.dirname(real))
        prefixes = [prefix, os.path.join(prefix, "local"), os.path.expanduser("~/.local")]
    for prefix in prefixes:
        lib = os.path.join(prefix, "lib")
        names = [name for name in _listed(lib) if name.startswith("python3")]
        # /usr has several; python3 is Debian's common directory.
        named = [name for name in names if name in (os.path.basename(real), "python3")]
        for name in named or names:
            yield os.path.join(lib, name, "site-packages")
            yield os.path.join(lib, name, "dist-packages")


def _listed(directory: str) -> List[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _lines(file: str) -> List[str]:
    try:
        with open(file, errors="replace") as opened:
            return opened.read(_MOST_BYTES).splitlines()
    except (OSError, ValueError):
        return []


def _sources(file: str) -> List[str]:
    """Return the directories that a .pth file, or an import hook of setuptools, adds."""
    lines = _lines(file)
    if file.endswith(".pth"):
        return [line for line in lines if line.startswith("/")]
    # A line of Python: the hook has a dict of packages and their paths.
    mappings = [line for line in lines if line.startswith("MAPPING")]
    return [os.path.dirname(part) for line in mappings for part in line.split("'") if part.startswith("/")]
