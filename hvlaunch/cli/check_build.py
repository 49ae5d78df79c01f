"""The report of `--check-build`: parts of this installation, for bug reports."""

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata

from hvlaunch import __version__
from hvlaunch.errors import HvlaunchError

__all__ = ["check_build", "launcher_version", "package_version", "ssh_version"]

# Seconds: the binary may be on a slow network disk.
_SSH_PATIENCE = 10.0


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


def check_build(
    # Arguments, so that tests decide what is installed.
    version_of: Callable[[str], str | None] = package_version,
    ssh: Callable[[], str | None] = ssh_version,
    launcher: Callable[[str], str | None] = launcher_version,
) -> str:
    """Return the report, with [X] before each installed part."""
    return "\n".join(
        [
            f"hvlaunch {__version__}, Python {platform.python_version()} ({sys.executable}), {platform.platform()}",
            "",
            "controllers:",
            _line("gloo", __version__, "hvlaunch itself starts the workers"),
            _line("mpirun", launcher("mpirun"), "for --mpi"),
            _line("srun", launcher("srun"), "for --srun, in a job of Slurm"),
            _line("jsrun", launcher("jsrun"), "for --jsrun, in a job of LSF"),
            "",
            "ssh:",
            _line("paramiko", version_of("paramiko"), "the client in use"),
            _line("ssh", ssh(), "reads ~/.ssh/config for paramiko"),
            "",
            "rendezvous:",
            _line("httptools", version_of("httptools"), "reads requests"),
            _line("uvloop", version_of("uvloop"), "a faster event loop; pip install 'hvlaunch[uvloop]'"),
            _line("prometheus", version_of("prometheus-client"), "the rendezvous' metrics"),
            "",
            "files of options:",
            _line("PyYAML", version_of("PyYAML"), "reads YAML; pip install 'hvlaunch[yaml]'"),
            "",
            "training:",
            _line("torch", version_of("torch"), "on this machine; the hosts use their own"),
        ]
    )


def _line(name: str, version: str | None, note: str) -> str:
    return f"  [{'X' if version else ' '}] {name:<10} {version or 'not found':<18} {note}"
