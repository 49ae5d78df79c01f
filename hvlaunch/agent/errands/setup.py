"""Runs the commands of --setup on this host, unless they have succeeded with the same key before.

An entry of the cache has the environment that the commands build, under the key's name:

- `env`, the environment. It is built in place, since its programs have absolute paths;
- `complete`, which is written last: an environment without it is removed, and built anew;
- `lock` and `users`, as agent/cache.py says. Another job with the same key waits for the lock, and then has nothing to do.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import select
import shutil
import stat
import subprocess
import sys
import time

from hvlaunch.agent.cache import drop_old, locked, own_directory, own_use
from hvlaunch.agent.facts import PACKAGES, packages_of
from hvlaunch.agent.wire.frames import flag, mapping, or_null, record, several, text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Tuple

    from hvlaunch.agent.errands import ErrandStream

__all__ = ["ARGUMENTS", "RESULT", "run"]

_PATH = text(4096, raw=True)
ARGUMENTS = record(
    {
        "commands": several(text(1 << 16, raw=True), 16),
        "patterns": several(_PATH, 256),  # names of files for the key, as far as the tree has such files
        "files": several(_PATH, 256),  # files for the key; a missing file is an error
        "directory": _PATH,  # where the commands run
        "root": _PATH,  # the outermost directory with such files
        "project": _PATH,  # two projects with equal files have environments of their own
        "env": mapping(text(1 << 16, raw=True), text(1 << 20, raw=True), 1 << 16),
    }
)
RESULT = record(
    {
        "code": whole(0, 255),  # of the first failed command
        "is_new": flag,
        "environment": or_null(_PATH),
        "packages": or_null(PACKAGES),  # of its Python
    }
)

_FORMAT = 1
_HEARTBEAT = 5.0  # seconds between signs of life
_LOOK = 0.1
_LONGEST_LINE = 2000
_READ_SIZE = 1 << 16
_NOT_FOR_SETUP = ("PYTHONPATH", "PYTHONHOME")  # pip would take their packages for installed


def run(arguments: Dict[str, Any], stream: ErrandStream) -> Dict[str, Any]:
    """Return the exit code of the commands, and the environment that they have built, if any."""
    environments = own_directory("environments")
    name = _key(arguments)
    entry = os.path.join(environments, name)
    due = 0.0

    def wait() -> None:
        nonlocal due
        if time.monotonic() >= due:
            stream.write(b"wait\n")
            due = time.monotonic() + _HEARTBEAT
        time.sleep(_LOOK)

    with locked(entry, wait):
        os.makedirs(os.path.join(entry, "users"), 0o700, exist_ok=True)
        drop_old(environments, lambda entry: [entry])
        is_new = not _is_complete(entry)
        code = _build(entry, arguments, stream) if is_new else 0
        if code == 0:
            with open(os.path.join(entry, "users", own_use()), "w"):
                pass
    environment = os.path.join(entry, "env")
    if code != 0 or not _has_python(environment):
        return {"code": code, "is_new": is_new, "environment": None, "packages": None}
    packages = packages_of(os.path.join(environment, "bin", "python"))
    return {"code": 0, "is_new": is_new, "environment": environment, "packages": packages}


def _key(arguments: Dict[str, Any]) -> str:
    """Return the name of the entry: the same for the same commands, files and project, Python and architecture."""
    files = sorted(_files(arguments))
    python = "%s %d.%d" % (sys.implementation.name, *sys.version_info[:2])
    parts = [_FORMAT, arguments["commands"], files, arguments["project"], python, os.uname().machine]
    return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()[:16]


def _files(arguments: Dict[str, Any]) -> Iterator[Tuple[str, str]]:
    """Yield path and hash of each file of the key. Raises OSError for a named file that is missing."""
    root, directory = arguments["root"], arguments["directory"]
    for file in arguments["files"]:
        yield file, _hash(os.path.join(directory, file))
    while True:
        for name in sorted(os.listdir(directory)):
            path = os.path.join(directory, name)
            is_named = any(fnmatch.fnmatchcase(name, pattern) for pattern in arguments["patterns"])
            if is_named and os.path.isfile(path):
                yield os.path.relpath(path, root), _hash(path)
        if not directory.startswith(root + os.sep):
            return
        directory = os.path.dirname(directory)


def _hash(path: str) -> str:
    # O_NONBLOCK: a FIFO would block here, and a device would have no end.
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("%s is not a regular file" % path)
        digest = hashlib.sha256()
        for data in iter(lambda: file.read(1 << 20), b""):
            digest.update(data)
    return digest.hexdigest()


def _has_python(environment: str) -> bool:
    return os.access(os.path.join(environment, "bin", "python"), os.X_OK)


def _is_complete(entry: str) -> bool:
    """True if the commands have succeeded, and their Python has not gone: the host's Python may have been replaced."""
    try:
        with open(os.path.join(entry, "complete")) as file:
            has_python = file.read() == "python"
    except OSError:
        return False
    return not has_python or _has_python(os.path.join(entry, "env"))


def _build(entry: str, arguments: Dict[str, Any], stream: ErrandStream) -> int:
    """Run the commands in turn; return the exit code of the first that fails, 0 for none."""
    _clear(entry)
    environment = os.path.join(entry, "env")
    env = {**os.environ, **arguments["env"]}
    for name in _NOT_FOR_SETUP:
        env.pop(name, None)
    env["PATH"] = os.path.join(environment, "bin") + os.pathsep + (env.get("PATH") or os.defpath)
    env["PWD"] = arguments["directory"]
    env["VIRTUAL_ENV"] = env["UV_PROJECT_ENVIRONMENT"] = environment
    env["SETUP_PYTHON"] = sys.executable
    for command in arguments["commands"]:
        code = _run_command(command, arguments["directory"], env, stream)
        if code != 0:
            _clear(entry)
            return code
    new = os.path.join(entry, "complete.new")
    with open(new, "w") as file:
        file.write("python" if _has_python(environment) else "")
    os.rename(new, os.path.join(entry, "complete"))
    return 0


def _clear(entry: str) -> None:
    """Remove what a broken build has left."""
    # The mark first: if this is broken off too, the rest does not count.
    for name in sorted(os.listdir(entry), key=lambda name: name != "complete"):
        path = os.path.join(entry, name)
        if name in ("lock", "users"):
            continue
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def _run_command(command: str, directory: str, env: Dict[str, str], stream: ErrandStream) -> int:
    """Run a command of the shell, and send its output line by line; return its exit code."""
    # In this process group: the errand's end kills the group.
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        cwd=directory,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    output = process.stdout.fileno()
    os.set_blocking(output, False)
    text_so_far = b""
    due = time.monotonic() + _HEARTBEAT
    while True:
        # Before the output is read: a daemon of the command may hold the pipe open for ever.
        has_ended = process.poll() is not None
        data = _read_now(output, 0.0 if has_ended else _LOOK)
        text_so_far += data
        *lines, text_so_far = text_so_far.replace(b"\r", b"\n").split(b"\n")
        if len(text_so_far) > _LONGEST_LINE:
            lines, text_so_far = [*lines, text_so_far], b""
        _send(lines, stream)
        if time.monotonic() >= due:
            stream.write(b"progress\n")
            due = time.monotonic() + _HEARTBEAT
        if has_ended and not data:
            _send([text_so_far], stream)
            code = process.returncode
            return code if code >= 0 else 128 - code


def _read_now(output: int, seconds: float) -> bytes:
    if not select.select([output], [], [], seconds)[0]:
        return b""
    try:
        data = os.read(output, _READ_SIZE)
    except BlockingIOError:
        return b""
    if not data:
        # Closed, and the command goes on: without a pause this would turn round and round.
        time.sleep(seconds)
    return data


def _send(lines: List[bytes], stream: ErrandStream) -> None:
    for line in lines:
        words = line.decode("utf-8", "replace").rstrip()[:_LONGEST_LINE]
        if words:
            stream.write(b"line " + json.dumps(words).encode("ascii") + b"\n")
