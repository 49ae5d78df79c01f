"""Where this user's jobs and pools are kept. Apart, since what asks for a driver loads little else."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # see forked.py
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["POOL_VARIABLE", "pool_path", "state_directory"]

POOL_VARIABLE = "HVLAUNCH_POOL"
"""That of the option --pool."""


def state_directory(environ: Mapping[str, str]) -> str:
    """`$XDG_STATE_HOME/hvlaunch` (XDG Base Directory Specification 0.8); "" where the user has no home."""
    state = environ.get("XDG_STATE_HOME", "")
    if not state.startswith("/"):  # a relative one is to be ignored, as the specification says
        home = os.path.expanduser("~")  # noqa: PTH111 (see above: pathlib takes 5 ms)
        if not home.startswith("/"):
            return ""
        state = f"{home}/.local/state"
    return f"{state}/hvlaunch"


def pool_path(environ: Mapping[str, str], name: str) -> str:
    """Where a warm pool has its directory; "" where there can be none of this name."""
    state = state_directory(environ)
    return f"{state}/pools/{name}" if state and name and "/" not in name and name[0] != "." else ""
