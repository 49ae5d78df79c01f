"""Names of environment variables that belong to one machine, login or process, and patterns for such names."""

import fnmatch
import functools
from collections.abc import Callable, Collection, Mapping

__all__ = [
    "OUTER_RANK_VARIABLES",
    "OWN_VARIABLES",
    "host_environ",
    "is_pattern",
    "matcher",
    "without_outer_rank",
]


def is_pattern(text: str) -> bool:
    return any(mark in text for mark in "*?[")


@functools.cache
def matcher(*patterns: str) -> Callable[[str], bool]:
    """Return a test for names that match one of the patterns: `*`, `?`, `[...]`, as for file names."""
    # Most patterns are names, or beginnings with a `*`. Compiling a regular expression of them takes 1 ms.
    names = frozenset(pattern for pattern in patterns if not is_pattern(pattern))
    beginnings = tuple(
        pattern[:-1] for pattern in patterns if pattern[-1:] == "*" and not is_pattern(pattern[:-1])
    )
    others = [pattern for pattern in patterns if is_pattern(pattern) and pattern[:-1] not in beginnings]

    def matches(name: str) -> bool:
        if name in names or name.startswith(beginnings):
            return True
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in others)

    return matches


OUTER_RANK_VARIABLES = (
    # A job of hvlaunch or torchrun.
    "HVLAUNCH_*",
    "HOROVOD_ELASTIC",
    "TORCHELASTIC_USE_AGENT_STORE",
    # Slurm sets these for each task, and for a batch script and the shell of `srun --pty` too.
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_GTIDS",
    "SLURM_TASK_PID",
    # mpirun, jsrun.
    "OMPI_COMM_WORLD_*",
    "MV2_COMM_WORLD_*",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "PMI_*",
    "PMIX_*",
    "JSM_NAMESPACE_*",
)
"""Patterns of variables with this process's rank in an outer job: every worker would read the same rank."""


def without_outer_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that hold for this process alone."""
    is_outer_rank = matcher(*OUTER_RANK_VARIABLES)
    return {name: value for name, value in environ.items() if not is_outer_rank(name)}


OWN_VARIABLES = (
    # The driver's GPUs are not the host's.
    "*CUDA_VISIBLE_DEVICES",
    # This machine, this user and this shell.
    "BASH_FUNC_*",
    "OLDPWD",
    "PWD",
    "SHLVL",
    "_",
    "HOSTNAME",
    "HOST",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "MAIL",
    # This terminal and this session.
    "TERM",
    "TERM_*",
    "TERMCAP",
    "TERMINFO*",
    "COLORTERM",
    "COLUMNS",
    "LINES",
    "STY",
    "WINDOW",
    "WINDOWID",
    "TMUX*",
    "SSH_*",
    "XDG_*",
    "DBUS_*",
    "DISPLAY",
    "WAYLAND_DISPLAY",
    "XAUTHORITY",
    "GPG_*",
    "SUDO_*",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "LISTEN_*",
    "NOTIFY_SOCKET",
)
"""Patterns of names."""

_PLACES = ("TMPDIR", "TMP", "TEMP")
"""Directories that each host has; `--env all` passes them on nevertheless."""


def host_environ(environ: Mapping[str, str], passed_on: Collection[str]) -> dict[str, str]:
    """Return the environment of workers on this machine in a job with other hosts.

    Other hosts get only variables in `passed_on` from here, and have such variables of their own.
    """
    is_own = matcher(*OWN_VARIABLES, *_PLACES)
    return {name: value for name, value in environ.items() if is_own(name) or name in passed_on}
