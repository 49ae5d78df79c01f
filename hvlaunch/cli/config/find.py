"""Where files of options are: the project's, found upwards, and the user's own. Each job asks, so this is quick."""

import errno
import os
import re
import stat
from collections.abc import Mapping

__all__ = ["PYPROJECT", "project_file", "user_file"]

PYPROJECT = "pyproject.toml"

_OWN_NAME = "hvlaunch.toml"
_LARGEST = 1 << 20
_KEY = re.compile(rb"""(?<![\w-])hvlaunch["']?[ \t]*[].=]""")
_TABLE = re.compile(
    rb"""(?m)^[ \t]*(?:\[[ \t]*)?["']?tool["']?[ \t]*(?:\.[ \t]*["']?hvlaunch["']?[ \t]*[].=]|[]=])"""
)
"""Each way to begin the table tool.hvlaunch: only then a pyproject.toml is worth parsing.

Another user may have written the text, so neither takes longer than the text is long.
"""


def project_file(directory: str, home: str) -> str | None:
    """The file of the first directory that has one, from this one upwards; not above the home directory.

    What is above may be an automounter's, which asks the network for each name.
    """
    while True:
        own, shared = os.path.join(directory, _OWN_NAME), os.path.join(directory, PYPROJECT)  # noqa: PTH118 (quick)
        if os.path.lexists(own):
            return own
        if _may_have_options(shared):
            return shared
        parent = os.path.dirname(directory)  # noqa: PTH120 (quick)
        if directory in (parent, home):
            return None
        directory = parent


def user_file(environ: Mapping[str, str]) -> str | None:
    """The user's own file, which may not be there."""
    directory = environ.get("XDG_CONFIG_HOME", "")
    if not directory.startswith("/"):
        home = environ.get("HOME", "")
        if not home.startswith("/"):
            return None
        directory = f"{home}/.config"
    path = f"{directory}/hvlaunch/config.toml"
    return path if os.path.lexists(path) else None


def _may_have_options(path: str) -> bool:
    try:
        descriptor = _opened(path)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        text = os.read(descriptor, _LARGEST)
        return b"hvlaunch" in text and bool(_KEY.search(text)) and bool(_TABLE.search(text))
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _opened(path: str) -> int:
    """Raises OSError; also for another user's link, which may lead to what takes forever to open."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP or os.lstat(path).st_uid not in (os.getuid(), 0):
            raise
        return os.open(path, flags)
