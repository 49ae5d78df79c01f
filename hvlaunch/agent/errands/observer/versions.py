"""Versions of a worker's Python, torch, CUDA and NCCL from the packages' files, and of the GPUs' driver.

No package is imported. The worker's Python tells its path of modules, and starts without variables for the user's own code.
"""

from __future__ import annotations

import os
import select
import time

from hvlaunch.agent.proc import descendants, parents, read_text
from hvlaunch.agent.quick import signal
from hvlaunch.agent.wire.frames import plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterable, List, Optional, Tuple

__all__ = ["answer", "driver_version", "versions_of"]

_SCRIPT = "import sys;print('hvlaunch','%d.%d.%d'%sys.version_info[:3],*sys.path,sep='\\0')"
_SECONDS = 20.0
_LONGEST = 200
_MOST_GPUS = 64
_KEPT = ("HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONNOUSERSITE")
_NCCL, _INFO = "nvidia_nccl_cu", ".dist-info"


def answer(question: Dict[str, Any]) -> Dict[str, Any]:
    """Return the versions of the first worker with a Python; null for unknown versions."""
    versions: Dict[str, Any] = {
        "kernel": plain(os.uname().release, _LONGEST),
        "machine": plain(os.uname().machine, _LONGEST),
        "driver": driver_version(),
        "gpus": list(_gpus())[:_MOST_GPUS],
        "executable": None,
        **dict.fromkeys(("python", "torch", "cuda", "nccl")),
    }
    trees = descendants([pid for _, pid in question["workers"]], parents())
    for pid in [pid for tree in trees.values() for pid in tree]:
        program = _python_of(pid)
        if program is not None:
            versions["executable"] = plain(program[0], _LONGEST)
            versions.update(versions_of(*program))
            break
    return versions


def driver_version() -> Optional[str]:
    """Return the version of NVIDIA's driver; None without it."""
    # Not by re, here and below: its import takes 5 ms.
    words = (read_text("/proc/driver/nvidia/version") or "").split()
    return next((word for word in words if "." in word and all(map(str.isdigit, word.split(".")))), None)


def _python_of(pid: int) -> Optional[Tuple[str, Dict[str, str]]]:
    """Return the interpreter and the environment of a process; None for other programs, and for processes after their end."""
    words = (read_text("/proc/%d/cmdline" % pid) or "").split("\0")
    lines = (read_text("/proc/%d/environ" % pid) or "").split("\0")
    environ = {name: value for name, equals, value in (line.partition("=") for line in lines) if equals}
    try:
        cwd, program = os.readlink("/proc/%d/cwd" % pid), os.readlink("/proc/%d/exe" % pid)
    except OSError:
        return None
    if not os.path.basename(program).startswith(("python", "pypy")):
        return None
    # By its name, since the file behind the name does not know its virtual environment.
    name = words[0]
    places = [cwd] if "/" in name else environ.get("PATH", "").split(":")
    for path in [os.path.join(cwd, place, name) for place in places if name]:
        if os.path.realpath(path) == program and os.access(path, os.X_OK):
            return path, environ
    return program, environ


def versions_of(python: str, environ: Dict[str, str]) -> Dict[str, Optional[str]]:
    """Return the versions of an interpreter and of its torch in an environment; empty if it does not start."""
    kept = {name: environ[name] for name in _KEPT if name in environ}
    try:
        output = _output([python, "-c", _SCRIPT], dict(kept, PYTHONDONTWRITEBYTECODE="1"))
    except OSError:
        return {}
    _, _, text = output.decode("utf-8", "replace").rpartition("hvlaunch\0")
    version, *places = text.rstrip("\n").split("\0")
    first = [place for place in environ.get("PYTHONPATH", "").split(":") if place.startswith("/")]
    return {"python": plain(version, _LONGEST), **_of_torch([*first, *filter(None, places)])}


def _output(words: List[str], environ: Dict[str, str]) -> bytes:
    """Return the output of a successful program, run in /. Raises OSError, also for a failed or slow program."""
    # Not by subprocess, whose import takes 4 ms on each host. Shims of pyenv search from the current directory on.
    words = ["sh", "-c", 'cd / && exec "$0" "$@"', *words]
    output, end = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate((null, end, null))]
        pid = os.posix_spawn("/bin/sh", words, environ, file_actions=actions, setsigdef=[signal.SIGPIPE])
    finally:
        os.close(null)
        os.close(end)
    deadline = time.monotonic() + _SECONDS
    data = b""
    with open(output, "rb", buffering=0) as file:
        while select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
            more = file.read(1 << 16)
            if not more:
                break
            data += more
        else:
            os.kill(pid, signal.SIGKILL)
    if os.waitpid(pid, 0)[1] != 0:
        raise OSError("%s failed" % words[3])
    return data


def _of_torch(places: List[str]) -> Dict[str, Optional[str]]:
    """Return the versions of torch, and of the CUDA and NCCL for torch."""
    for place in places:
        text = read_text(os.path.join(place, "torch", "version.py"))
        if text is not None:
            return {
                "torch": _assigned("__version__", text),
                "cuda": _assigned("cuda", text),
                "nccl": _nccl(places),
            }
    return {}


def _assigned(name: str, text: str) -> Optional[str]:
    """Return the string that a line of Python assigns to the name: `cuda: Optional[str] = '12.8'`."""
    for line in text.splitlines():
        target, equals, value = line.partition("=")
        quoted = value.strip()
        if equals and target.partition(":")[0].strip() == name and quoted[:1] in ("'", '"'):
            return plain(quoted[1:].partition(quoted[0])[0], _LONGEST) or None
    return None


def _nccl(places: Iterable[str]) -> Optional[str]:
    """Return the version of NCCL's package. Without this package, torch has NCCL inside, of unknown version."""
    for place in places:
        try:
            names = [name for name in os.listdir(place) if name.startswith(_NCCL) and name.endswith(_INFO)]
        except OSError:
            continue
        if names:
            return names[0][: -len(_INFO)].rpartition("-")[2]
    return None


def _gpus() -> Iterable[str]:
    """Yield the models of NVIDIA's GPUs."""
    import re  # noqa: PLC0415 (as above, and few hosts have GPUs)

    folder = "/proc/driver/nvidia/gpus"
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        model = re.search(
            r"(?m)^Model:\s*(.+?)\s*$", read_text(os.path.join(folder, name, "information")) or ""
        )
        if model is not None:
            yield plain(model.group(1), _LONGEST)
