"""The user's launcher on this machine, and the MPI behind an `mpirun`."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple

from hvlaunch.errors import BadUsage
from hvlaunch.job import MPIOptions

__all__ = [
    "Kind",
    "LauncherProgram",
    "NoLauncher",
    "UnknownLauncher",
    "detect",
    "find",
    "read_version",
    "version_text",
]


_PATIENCE = 30.0  # seconds; on clusters the program may lie on a slow network disk
_SHOWN = 120

_HINT = "--mpirun PATH, or hvlaunch without --mpi, which needs no MPI"
_KNOWN = "Open MPI, IBM Spectrum MPI, MPICH, Intel MPI, MVAPICH"


class NoLauncher(BadUsage):
    """No `mpirun`, `srun` or `jsrun` is in your `PATH`. `program` is its name.

    Try: load its module, or `--mpirun PATH`.
    """

    def __init__(self, cause: str, *, program: str, hint: str) -> None:
        super().__init__(cause, hint=hint)
        self.program = program


class UnknownLauncher(NoLauncher):
    """The program exists, but is no known launcher: `answer`, the output of its `--version`, names no known MPI.

    Try: `--mpirun PATH`.
    """

    def __init__(self, cause: str, *, program: str, hint: str, answer: str) -> None:
        super().__init__(cause, program=program, hint=hint)
        self.answer = answer


class Kind(Enum):
    """The supported launchers; the value is the name for people."""

    OPEN_MPI = "Open MPI"
    SPECTRUM = "IBM Spectrum MPI"
    MPICH = "MPICH"
    INTEL = "Intel MPI"
    MVAPICH = "MVAPICH"
    SRUN = "Slurm's srun"
    JSRUN = "LSF's jsrun"


# The first match decides: Spectrum is an Open MPI, MVAPICH and Intel's are MPICHs, and each may name its relative too.
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

_SCHEDULERS = {
    "srun": (Kind.SRUN, "SLURM_JOB_ID", "Slurm", "salloc or sbatch first"),
    "jsrun": (Kind.JSRUN, "LSB_JOBID", "LSF", "bsub first"),
}


class LauncherProgram(NamedTuple):
    """A launcher of this machine."""

    kind: Kind
    version: tuple[int, ...]
    """Empty if the launcher does not show its version."""
    program: str
    """The program as the user wrote it: Open MPI finds itself on the hosts by the path of its start."""

    def __str__(self) -> str:
        return " ".join([self.kind.value, ".".join(map(str, self.version))]).strip()


def find(
    options: MPIOptions,
    environ: Mapping[str, str] = os.environ,
    which: Callable[[str], str | None] = shutil.which,
) -> LauncherProgram:
    """Return the user's launcher.

    Raises NoLauncher, UnknownLauncher, and BadUsage for a scheduler's launcher outside of a job of this scheduler.
    """
    if options.launcher == "mpirun":
        return detect(options.program)
    kind, variable, scheduler, hint = _SCHEDULERS[options.launcher]
    name = options.launcher
    if which(name) is None:
        raise NoLauncher(f"no {name} on PATH", program=name, hint="--gloo, which needs no launcher")
    if not environ.get(variable):
        raise BadUsage(
            f"--{name} works only inside a job of {scheduler}, and {variable} is not set", hint=hint
        )
    return LauncherProgram(kind, (), name)


def detect(program: str | None, ask: Callable[[str], str | None] | None = None) -> LauncherProgram:
    """Return the MPI launcher `program`, `mpirun` by default. `ask` returns a program's answer to --version.

    Raises NoLauncher and UnknownLauncher.
    """
    name = program or "mpirun"
    text = (ask or version_text)(name)
    if text is None:
        place = "" if "/" in name else " on PATH"
        raise NoLauncher(f"no {name}{place}: --mpi needs an MPI on this machine", program=name, hint=_HINT)
    kind_and_version = read_version(text)
    if kind_and_version is None:
        line = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")[:_SHOWN]
        cause = (
            f"{name} --version printed {line!r}, which does not show which MPI it is; hvlaunch knows {_KNOWN}"
        )
        raise UnknownLauncher(cause, program=name, hint=_HINT, answer=text)
    kind, version = kind_and_version
    return LauncherProgram(kind, version, name)


def read_version(text: str) -> tuple[Kind, tuple[int, ...]] | None:
    """Return kind and version from an answer to --version; None for an unknown launcher."""
    kind = next((kind for kind, saying in _SAYINGS if re.search(saying, text)), None)
    if kind is None:
        return None
    if "PRRTE" in text and "Open MPI" not in text:
        # PRRTE counts its versions differently from Open MPI.
        return kind, _FIRST_WITH_PRRTE
    match = re.search(_VERSION.get(kind, _ANY_VERSION), text)
    return kind, tuple(int(part) for part in match[1].split(".")) if match else ()


def version_text(program: str) -> str | None:
    """Return the program's answer to --version; None for a missing program."""
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
        # A program that can't run is shown like one with an unknown answer: the user needs the same advice.
        return str(error)
    return answer.stdout.decode("utf-8", "replace")
