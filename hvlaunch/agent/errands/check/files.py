"""Directories of a job on this host: space, mounts, and a fingerprint of the project's code."""

from __future__ import annotations

import os
import time

from hvlaunch.agent.proc import read_text
from hvlaunch.agent.quick import fingerprint
from hvlaunch.agent.wire.frames import or_null, plain, record, text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Optional, Tuple

__all__ = ["SHAPE", "read"]

_SIZE = whole(0, 1 << 62)
_PLACE = record(
    {
        "problem": or_null(text(300)),
        "free": or_null(_SIZE),
        "inodes_free": or_null(_SIZE),  # None where the file system has no limit
        "type": or_null(text(64)),
        "source": or_null(text(300)),
        "options": or_null(text(500)),
    }
)
SHAPE = record(
    {
        "cwd": _PLACE,
        "scratch": _PLACE,
        "script": or_null(text(64)),  # a hash of the script
        "script_problem": or_null(text(300)),
        "code": or_null(text(64)),  # a hash of the Python files below the directory
        "code_files": or_null(_SIZE),
        "commit": or_null(text(64)),
    }
)
_MOST_FILES, _MOST_BYTES, _MOST_SECONDS = 2000, 32 << 20, 2.0
_MOST_DIRECTORIES = 500
_NO_CODE = ("__pycache__", "node_modules", "site-packages")
_FEW = 16


def read(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Return the part."""
    directory = arguments["directory"]
    part: Dict[str, Any] = {
        "cwd": _place(directory, writes=False),
        "scratch": _place(arguments["scratch"], writes=True),
        **dict.fromkeys(("script", "script_problem", "code", "code_files", "commit")),
    }
    if part["cwd"]["problem"] is None and arguments["script"] is not None:
        try:
            script = _read(os.path.join(directory, arguments["script"]))
            part["script"] = _hash(script)
        except OSError as error:
            part["script_problem"] = plain(error.strerror or str(error), 300)
    if part["cwd"]["problem"] is None and arguments["compares_files"]:
        part["commit"] = _commit(directory)
        part["code"], part["code_files"] = _code(directory)
    return part


def _place(path: str, *, writes: bool) -> Dict[str, Any]:
    place: Dict[str, Any] = dict.fromkeys(("problem", "free", "inodes_free", "type", "source", "options"))
    try:
        status = os.statvfs(path)
        place["free"] = status.f_bavail * status.f_frsize
        place["inodes_free"] = status.f_favail if status.f_files else None
        if not os.access(path, os.R_OK | os.X_OK | (os.W_OK if writes else 0)):
            place["problem"] = "permission denied"
    except OSError as error:
        place["problem"] = plain((error.strerror or str(error)).lower(), 300)
        return place
    source, kind, options = _mount(os.path.realpath(path))
    place["source"], place["type"], place["options"] = (
        plain(source, 300),
        plain(kind, 64),
        plain(options, 500),
    )
    return place


def _mount(path: str) -> Tuple[str, str, str]:
    """Return source, type and options of the mount with this path; proc(5), mountinfo."""
    best = ("", "", "", "")
    for line in (read_text("/proc/self/mountinfo") or "").splitlines():
        words = line.split(" ")
        separator = words.index("-")
        point = words[4].replace("\\040", " ")
        # A later mount on the same point hides the earlier one.
        if (path + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best[0]):
            best = (point, words[separator + 2], words[separator + 1], words[separator + 3])
    return best[1:]


def _read(path: str) -> bytes:
    # O_NONBLOCK: a FIFO would block here.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        # Python takes memory for all that a read may bring.
        return os.read(fd, min(os.fstat(fd).st_size, _MOST_BYTES))
    finally:
        os.close(fd)


def _code(directory: str) -> Tuple[Optional[str], Optional[int]]:
    """Return a hash of names and contents of the Python files, and their number; nothing of a tree that is too large."""
    deadline = time.monotonic() + _MOST_SECONDS
    hashes: List[str] = []
    count = size = 0
    for path in _python_files(directory):
        if path is None:
            return None, None
        contents = _contents(path)
        count += 1
        size += len(contents)
        # Not a part of them: hosts differ in speed, and their hashes must not differ for this reason.
        if count > _MOST_FILES or size > _MOST_BYTES or time.monotonic() > deadline:
            return None, None
        hashes.append("%s %s" % (os.path.relpath(path, directory), _hash(contents)))
    return _hash("\n".join(hashes).encode("utf-8", "surrogateescape")), count


def _hash(data: bytes) -> str:
    return fingerprint(data, _FEW // 2)


def _contents(path: str) -> bytes:
    try:
        return _read(path)
    except OSError:
        return b""  # a link to nothing, which hosts should have in common too


def _python_files(directory: str) -> Iterator[Optional[str]]:
    """Yield the paths in alphabetical order; None for too many directories."""
    for number, (place, folders, names) in enumerate(os.walk(directory)):
        if number > _MOST_DIRECTORIES:
            yield None
            return
        folders[:] = sorted(
            folder
            for folder in folders
            # Environments belong to a host, and are compared by the versions in them.
            if not folder.startswith(".")
            and folder not in _NO_CODE
            and not os.path.exists(os.path.join(place, folder, "pyvenv.cfg"))
        )
        for name in sorted(names):
            if name.endswith(".py"):
                yield os.path.join(place, name)


def _commit(directory: str) -> Optional[str]:
    """Return the commit of the git work tree around the directory."""
    while not os.path.exists(os.path.join(directory, ".git")):
        parent = os.path.dirname(directory)
        if parent == directory:
            return None
        directory = parent
    git = os.path.join(directory, ".git")
    # A further work tree has a file here, and shares the branches of the first.
    git = os.path.join(directory, (read_text(git) or "gitdir: .git").partition("gitdir: ")[2].strip())
    common = os.path.join(git, (read_text(os.path.join(git, "commondir")) or ".").strip())
    head = (read_text(os.path.join(git, "HEAD")) or "").strip()
    if head.startswith("ref: "):
        name = head[len("ref: ") :]
        head = (read_text(os.path.join(common, name)) or "").strip()
        for line in (read_text(os.path.join(common, "packed-refs")) or "").splitlines():
            if not head and line.endswith(" " + name):
                head = line.split(" ")[0]
    return plain(head, 64)[:12] or None
