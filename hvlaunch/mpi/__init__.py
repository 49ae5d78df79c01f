"""The user's launcher on this machine, the MPI behind an `mpirun`, and the launcher's variables for the ranks of processes."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from hvlaunch.errors import BadUsage
from hvlaunch.job import MPIOptions
from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "ALL_NAMES",
    "Kind",
    "LauncherProgram",
    "Names",
    "NoLauncher",
    "ProcessRanks",
    "UnknownLauncher",
    "detect",
    "find",
    "names_of",
    "ranks_of",
    "read_version",
    "shell_shim",
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


class Names(NamedTuple):
    """The names of a launcher's variables; empty for a missing variable."""

    rank: str
    size: str
    local_rank: str
    local_size: str


_OPEN_MPI = Names(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
_MVAPICH = Names(
    "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
)
_HYDRA = Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = Names("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "")
_JSM = Names(
    "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"
)
_PMIX = Names("PMIX_RANK", "", "", "")

# A job inside of another job finds the variables of both: only those of its own launcher count.
_OF = {
    Kind.OPEN_MPI: (_OPEN_MPI, _PMIX),
    Kind.SPECTRUM: (_OPEN_MPI, _PMIX),
    Kind.MPICH: (_HYDRA,),
    Kind.INTEL: (_HYDRA,),
    Kind.MVAPICH: (_MVAPICH, _HYDRA),
    Kind.SRUN: (_SLURM, _PMIX, _HYDRA),
    Kind.JSRUN: (_JSM, _OPEN_MPI, _PMIX),
}

_MOST_DIGITS = 9

ALL_NAMES = frozenset(name for families in _OF.values() for family in families for name in family if name)


class ProcessRanks(NamedTuple):
    """A process's ranks and sizes from its launcher; None for a missing variable."""

    rank: int
    size: int | None
    local_rank: int | None
    local_size: int | None


def names_of(kind: Kind) -> Sequence[Names]:
    """Return the launcher's variables, the most reliable first."""
    return _OF[kind]


def ranks_of(kind: Kind, environ: Mapping[str, str]) -> ProcessRanks | None:
    """Return the ranks in a process's environment; None without a rank."""
    for names in names_of(kind):
        rank = _number(environ, names.rank)
        if rank is not None:
            size, local_rank, local_size = (_number(environ, name) for name in names[1:])
            return ProcessRanks(rank, size, local_rank, local_size)
    return None


def shell_shim(kind: Kind) -> tuple[str, ...]:
    """Return words of a shell that set torch's variables for the command behind, for a pasted command."""
    names = names_of(kind)[0]
    sources = zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), names, strict=True)
    exports = " ".join(f"{name}=${source}" for name, source in sources if source)
    return ("sh", "-c", f'export {exports}; exec "$@"', "sh")


def _number(environ: Mapping[str, str], name: str) -> int | None:
    # isdigit() alone would permit digits of other scripts, and int() is slow for a million digits.
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None
