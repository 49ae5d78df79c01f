"""Versions as the job's own Python has them, from files: nothing is imported."""

from __future__ import annotations

import os

from hvlaunch.agent.errands.observer.versions import driver_version, versions_of
from hvlaunch.agent.proc import read_text
from hvlaunch.agent.wire.frames import or_null, plain, record, text
from hvlaunch.agent.workers import CannotStart, find

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict

__all__ = ["SHAPE", "read"]

_VERSION = or_null(text(200))
SHAPE = record(
    {
        "executable": _VERSION,
        "missing": or_null(text(300)),  # why the job's program can't be started
        "python": _VERSION,
        "torch": _VERSION,
        "cuda": _VERSION,  # for which torch was built
        "nccl": _VERSION,
        "driver": _VERSION,
        "system": _VERSION,
    }
)


def read(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Return the part."""
    part: Dict[str, Any] = dict.fromkeys(("executable", "missing", "python", "torch", "cuda", "nccl"))
    part["driver"] = driver_version()
    part["system"] = plain(_system(read_text("/etc/os-release") or ""), 200) or None
    if arguments["program"] is None:
        return part
    environ = dict(os.environ, **arguments["env"])
    # From the job's directory on: the user's path may be relative.
    name = os.path.join(arguments["directory"], arguments["program"])
    try:
        path = find(
            name if "/" in arguments["program"] else arguments["program"], environ.get("PATH", os.defpath)
        )
    except CannotStart as error:
        part["missing"] = plain(error.cause, 300)
        return part
    part["executable"] = plain(path, 200)
    part.update(versions_of(path, environ))
    if part["python"] is None:
        problem = "it does not start as a Python" if os.access(path, os.X_OK) else "there is no such program"
        part["missing"] = plain("%s: %s" % (arguments["program"], problem), 300)
    return part


def _system(os_release: str) -> str:
    """Return the name of the distribution from os-release(5); empty if unknown."""
    for line in os_release.splitlines():
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return value.strip("\"'")
    return ""
