"""The order of key exchanges for the ssh that a launcher calls: hvlaunch's own, as where it connects itself."""

import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing

from hvlaunch.mpi.detect import Kind
from hvlaunch.ssh.config.ask_ssh import AskSSH, Questions

__all__ = ["key_exchange_words"]

_FIRST = ("mlkem768x25519-sha256", "curve25519-sha256")
"""sntrup761x25519-sha512, which OpenSSH before 10 has before them, takes both sides 60 ms of a processor, these 2."""
_PATIENCE = 10.0
_CALL_SSH = (Kind.OPEN_MPI, Kind.SPECTRUM, Kind.MPICH, Kind.MVAPICH, Kind.INTEL)
_OTHERWISE = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "COBALT_JOBID")
"""In a scheduler's job launchers may start their processes by the scheduler instead."""
_HOW = ("OMPI_MCA_plm", "OMPI_MCA_orte_rsh", "PRTE_MCA_plm", "HYDRA_", "I_MPI_HYDRA_")
_HOW_WORDS = ("plm", "launcher", "bootstrap", "rsh")
"""The user has chosen how launchers reach hosts."""


def key_exchange_words(
    kind: Kind,
    hosts: Sequence[str],
    ssh_words: Sequence[str],
    flags: Iterable[str],
    environ: Mapping[str, str],
    ask: Callable[[Sequence[str], float], "subprocess.CompletedProcess[str]"] | None = None,
) -> tuple[str, ...]:
    """Words for ssh; none where it is not sure that ssh is called, or what its configuration allows for all `hosts`.

    `ssh_words` are those that it gets as it is, `flags` the user's own for the launcher.
    """
    if kind not in _CALL_SSH or not hosts or any(name in environ for name in _OTHERWISE):
        return ()
    if any(name.startswith(_HOW) for name in environ) or any(
        word in flag for flag in flags for word in _HOW_WORDS
    ):
        return ()
    with closing(AskSSH()) as ask_ssh:
        questions = Questions(ask or ask_ssh)
        try:
            lists = {_listed(questions([*ssh_words, "-G", host], _PATIENCE).stdout) for host in hosts}
        except (OSError, subprocess.SubprocessError):
            return ()
    if len(lists) != 1:
        return ()
    (names,) = lists
    quick = [name for name in _FIRST if name in names]
    if not quick or names[0] in _FIRST:
        return ()
    rest = [name for name in names if name not in quick]
    return ("-o", f"KexAlgorithms={','.join(quick + rest)}")


def _listed(answer: str) -> tuple[str, ...]:
    lines = (line.partition(" ") for line in answer.splitlines())
    return next((tuple(value.split(",")) for key, _, value in lines if key == "kexalgorithms"), ())
