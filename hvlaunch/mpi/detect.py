"""Which MPI an `mpirun` is, by what it says of itself."""

import re
import shutil
import subprocess
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from hvlaunch.mpi.launcher_errors import NoLauncher, UnknownLauncher

__all__ = ["Kind", "Launcher", "detect", "read_version", "version_text"]

_PATIENCE = 30.0  # seconds; on clusters it may lie on a slow network disk
_SHOWN = 120

_HINT = "--mpirun PATH, or hvlaunch without --mpi, which needs no MPI"
_KNOWN = "Open MPI, IBM Spectrum MPI, MPICH, Intel MPI, MVAPICH"


class Kind(Enum):
    """The launchers that there are; the value is the name for people."""

    OPEN_MPI = "Open MPI"
    SPECTRUM = "IBM Spectrum MPI"
    MPICH = "MPICH"
    INTEL = "Intel MPI"
    MVAPICH = "MVAPICH"
    SRUN = "Slurm's srun"
    JSRUN = "LSF's jsrun"


# The first that is found decides: Spectrum is an Open MPI, MVAPICH and Intel's are MPICHs, and all may say so.
_SAYINGS = (
    (Kind.SPECTRUM, r"Spectrum MPI"),
    (Kind.OPEN_MPI, r"Open MPI|OpenRTE|PRRTE"),
    (Kind.INTEL, r"Intel\(R\) MPI"),
    (Kind.MVAPICH, r"(?i:mvapich)"),
    (Kind.MPICH, r"HYDRA|MPICH"),
)
_VERSION = {
    Kind.MPICH: r"Version:\s+v?(\d+(?:\.\d+)*)",
    Kind.MVAPICH: r"(?i:mvapich2?)[-/ ]v?(\d+(?:\.\d+)*)",
    Kind.INTEL: r"Version (\d+(?:\.\d+)*)",
}
_FIRST_WITH_PRRTE = (5,)
_ANY_VERSION = r"(?:\)|:)\s*v?(\d+(?:\.\d+)+)"


class Launcher(NamedTuple):
    """A launcher as it was found."""

    kind: Kind
    version: tuple[int, ...]
    """Empty where it does not tell."""
    program: str
    """As the user said it: Open MPI finds itself on the hosts by the path that it was started with."""

    def __str__(self) -> str:
        return " ".join([self.kind.value, ".".join(map(str, self.version))]).strip()


def detect(program: str | None, ask: Callable[[str], str | None] | None = None) -> Launcher:
    """The MPI behind `program`, `mpirun` where it is None. `ask` gets what it answers to --version.

    Raises NoLauncher and UnknownLauncher.
    """
    name = program or "mpirun"
    text = (ask or version_text)(name)
    if text is None:
        where = "" if "/" in name else " on PATH"
        raise NoLauncher(f"no {name}{where}: --mpi needs an MPI on this machine", program=name, hint=_HINT)
    found = read_version(text)
    if found is None:
        line = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")[:_SHOWN]
        cause = (
            f"{name} --version printed {line!r}, which does not show which MPI it is; hvlaunch knows {_KNOWN}"
        )
        raise UnknownLauncher(cause, program=name, hint=_HINT, answer=text)
    kind, version = found
    return Launcher(kind, version, name)


def read_version(text: str) -> tuple[Kind, tuple[int, ...]] | None:
    """Kind and version in the answer to --version; None where it is none that we know."""
    kind = next((kind for kind, saying in _SAYINGS if re.search(saying, text)), None)
    if kind is None:
        return None
    if "PRRTE" in text and "Open MPI" not in text:
        return kind, _FIRST_WITH_PRRTE  # its own version is another count
    found = re.search(_VERSION.get(kind, _ANY_VERSION), text)
    return kind, tuple(int(part) for part in found[1].split(".")) if found else ()


def version_text(program: str) -> str | None:
    """What the program answers to --version; None where there is no such program."""
    if shutil.which(program) is None:
        return None
    try:
        answer = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return answer.stdout.decode("utf-8", "replace")
