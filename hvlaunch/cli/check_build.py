"""The report of `--check-build`: parts of this installation, for bug reports."""

import itertools
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple

from hvlaunch import __version__
from hvlaunch.errors import HvlaunchError

__all__ = ["Part", "check_build", "launcher_version", "package_version", "parts", "ssh_version"]

# Seconds: the binary may be on a slow network disk.
_SSH_PATIENCE = 10.0
_EXTRA = "pip install 'hvlaunch[{}]'"


def package_version(name: str) -> str | None:
    """Return a package's version without importing it; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def ssh_version(program: str = "ssh") -> str | None:
    """Return the ssh binary's name for itself, such as OpenSSH_9.2p1; None without an answer."""
    try:
        answer = subprocess.run(
            [program, "-V"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SSH_PATIENCE,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # OpenSSH prints its version to stderr, other programs to stdout.
    match = re.match(r"[^\s,]+", answer.stderr or answer.stdout)
    return match[0] if match else None


def launcher_version(name: str) -> str | None:
    """Return the MPI behind mpirun, or another launcher's path; None if it is missing or unknown."""
    if name != "mpirun":
        return shutil.which(name)
    from hvlaunch.mpi import detect  # noqa: PLC0415 (no other question needs it)

    try:
        return str(detect(None))
    except HvlaunchError:
        return None


class Part(NamedTuple):
    """A part of an installation."""

    group: str
    name: str
    version: str | None
    """Version, or path; None if it is missing."""
    note: str
    hint: str | None = None
    """The next step without this part, unless few users need the part."""


def parts(
    # Arguments, so that tests decide what is installed.
    version_of: Callable[[str], str | None] = package_version,
    ssh: Callable[[], str | None] = ssh_version,
    launcher: Callable[[str], str | None] = launcher_version,
) -> list[Part]:
    """Return the parts, by group."""
    return [
        Part("controllers", "gloo", __version__, "hvlaunch itself starts the workers"),
        Part("controllers", "mpirun", launcher("mpirun"), "for --mpi"),
        Part("controllers", "srun", launcher("srun"), "for --srun, in a job of Slurm"),
        Part("controllers", "jsrun", launcher("jsrun"), "for --jsrun, in a job of LSF"),
        Part("ssh", "paramiko", version_of("paramiko"), "the client in use"),
        Part("ssh", "ssh", ssh(), "reads ~/.ssh/config for paramiko", "install OpenSSH's client"),
        Part("rendezvous", "httptools", version_of("httptools"), "reads requests"),
        Part("rendezvous", "uvloop", version_of("uvloop"), "a faster event loop", _EXTRA.format("uvloop")),
        Part("rendezvous", "prometheus", version_of("prometheus-client"), "the rendezvous' metrics"),
        Part("files of options", "PyYAML", version_of("PyYAML"), "reads YAML", _EXTRA.format("yaml")),
        Part("watching", "textual", version_of("textual"), "hvlaunch top, full screen", _EXTRA.format("top")),
        Part(
            "watching",
            "py-spy",
            version_of("py-spy"),
            "stacks with frames of C and C++",
            _EXTRA.format("stacks"),
        ),
        Part("training", "torch", version_of("torch"), "on this machine; the hosts use their own"),
    ]


def check_build(
    version_of: Callable[[str], str | None] = package_version,
    ssh: Callable[[], str | None] = ssh_version,
    launcher: Callable[[str], str | None] = launcher_version,
) -> str:
    """Return the report, with [X] before each installed part. The arguments are as in parts()."""
    lines = [
        f"hvlaunch {__version__}, Python {platform.python_version()} ({sys.executable}), {platform.platform()}"
    ]
    for group, members in itertools.groupby(parts(version_of, ssh, launcher), lambda part: part.group):
        lines += ["", f"{group}:", *map(_line, members)]
    return "\n".join(lines)


def _line(part: Part) -> str:
    note = part.note if part.version or part.hint is None else f"{part.note}; {part.hint}"
    return f"  [{'X' if part.version else ' '}] {part.name:<10} {part.version or 'not found':<18} {note}"
