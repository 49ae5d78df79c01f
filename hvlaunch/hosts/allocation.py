"""Hosts and slots of the scheduler's job around hvlaunch. Pure, except for reading the scheduler's files."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hvlaunch.errors import BadUsage
from hvlaunch.hosts.hostfile import parse_hostfile
from hvlaunch.hosts.parse import MAX_SLOTS, is_address, parse_hosts
from hvlaunch.job import Host

__all__ = ["Allocation", "allocation", "lsf_slots"]

_HINT = "--no-scheduler, or -H"
_SHOWN = 100
"""Characters of a value in a message."""
_MOST_DIGITS = 9
_RUN = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_GPUS = re.compile(r"(?:[^,:]+:)?(\d+)(?:\([^)]*\))?")

_Read = Callable[[str], str]


class Allocation(NamedTuple):
    """Hosts that a scheduler allocated."""

    origin: str
    """Name in messages: `Slurm job 123`."""
    hosts: tuple[Host, ...]
    remote_agent: str | None = None
    """Program that runs a command on a host in place of ssh: `PROGRAM HOST COMMAND`."""


def allocation(environ: Mapping[str, str], read: _Read | None = None) -> Allocation | None:
    """Return the allocation in the environment; None outside of a scheduler's job. `read` reads a file.

    Raises BadUsage if the scheduler's variables or files are malformed.
    """
    # An argument, so that tests need no files.
    read = read or _read
    for look in (_slurm, _lsf, _pbs, _sge, _mpi_operator):
        allocated = look(environ, read)
        if allocated is not None:
            if not allocated.hosts:
                raise BadUsage(f"{allocated.origin} has no hosts", hint=_HINT)
            return allocated
    return None


def _slurm(environ: Mapping[str, str], _read: _Read) -> Allocation | None:
    """Read sbatch(1)'s output variables. Slots are tasks if the user asked for several, else GPUs, else tasks."""
    job, nodes = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NODELIST")
    if not job or not nodes:
        return None
    origin = f"Slurm job {job}"
    hosts = parse_hosts(nodes)
    tasks = _per_node(origin, environ.get("SLURM_TASKS_PER_NODE") or f"1(x{len(hosts)})", len(hosts))
    gpus = _gpus(origin, environ)
    # Slurm sets a task per node by default, which says nothing about the number of workers.
    asked = "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
    slots = [count if gpus == 0 or (asked and count > 1) else gpus for count in tasks]
    return Allocation(origin, _hosts(zip((host.name for host in hosts), slots, strict=True)))


def _per_node(origin: str, text: str, nodes: int) -> list[int]:
    """Expand `2(x3),1` to 2, 2, 2, 1."""
    counts: list[int] = []
    for word in text.split(","):
        match = _RUN.fullmatch(word)
        count, repeats = (None, None) if match is None else (_number(match[1]), _number(match[2] or "1"))
        if count is None or repeats is None or len(counts) > nodes:
            raise BadUsage(
                f"{origin}: SLURM_TASKS_PER_NODE={text[:_SHOWN]} can't be read; it should look like 2(x3),1",
                hint=_HINT,
            )
        # The bound keeps a malformed `1(x999999999)` from taking the memory.
        counts += [count] * min(repeats, nodes + 1)
    if len(counts) != nodes:
        raise BadUsage(
            f"{origin}: SLURM_TASKS_PER_NODE={text[:_SHOWN]} does not have {nodes} nodes, as SLURM_JOB_NODELIST has",
            hint=_HINT,
        )
    return counts


def _gpus(origin: str, environ: Mapping[str, str]) -> int:
    """Return the GPUs of a node, from `4`, `a100:4` or `a100:2,v100:2`; this node's if no number is given for every node."""
    text = environ.get("SLURM_GPUS_PER_NODE") or environ.get("SLURM_GPUS_ON_NODE") or ""
    matches = [_GPUS.fullmatch(word) for word in text.split(",")]
    counts = [_number(match[1]) for match in matches if match is not None]
    if None in counts:
        raise BadUsage(f"{origin}: {text[:_SHOWN]} GPUs on each node can't be", hint=_HINT)
    return sum(count for count in counts if count is not None)


def _lsf(environ: Mapping[str, str], read: _Read) -> Allocation | None:
    job, slots = environ.get("LSB_JOBID"), lsf_slots(environ, read)
    if not job or slots is None:
        return None
    return Allocation(f"LSF job {job}", _hosts(slots.items()))


def lsf_slots(environ: Mapping[str, str], read: _Read | None = None) -> dict[str, int] | None:
    """Return the slots of LSF's hosts in order; None outside of a job.

    Under CSM the first host is the launch node, which runs no workers. Raises BadUsage.
    """
    if path := environ.get("LSB_DJOB_HOSTFILE"):
        counts = _count((read or _read)(path).split())
    elif text := environ.get("LSB_MCPU_HOSTS"):
        words = text.split()
        if len(words) % 2 or not all(_number(word) is not None for word in words[1::2]):
            raise BadUsage(f"LSB_MCPU_HOSTS={text[:_SHOWN]!r} must be hosts and numbers in turn", hint=_HINT)
        counts = _add((name, int(count)) for name, count in zip(words[::2], words[1::2], strict=True))
    else:
        return None
    if "CSM_ALLOCATION_ID" in environ and len(counts) > 1:
        del counts[next(iter(counts))]
    return counts


def _pbs(environ: Mapping[str, str], read: _Read) -> Allocation | None:
    job, path = environ.get("PBS_JOBID"), environ.get("PBS_NODEFILE")
    if not job or not path:
        return None
    return Allocation(f"PBS job {job}", _hosts(_count(read(path).split()).items()))


def _sge(environ: Mapping[str, str], read: _Read) -> Allocation | None:
    """Read lines of host, slots, queue and processors: sge_pe(5)."""
    job, path = environ.get("JOB_ID"), environ.get("PE_HOSTFILE")
    if not job or not path:
        return None
    rows = [line.split() for line in read(path).splitlines() if line.strip()]
    if not all(len(row) > 1 and _number(row[1]) is not None for row in rows):
        raise BadUsage(f"{path} of Grid Engine job {job} must have lines of a host and its slots", hint=_HINT)
    return Allocation(f"Grid Engine job {job}", _hosts(_add((row[0], int(row[1])) for row in rows).items()))


def _mpi_operator(environ: Mapping[str, str], read: _Read) -> Allocation | None:
    """Read Kubeflow's MPI operator: variables of an MPI name its hostfile and its replacement for ssh."""
    names = (
        "OMPI_MCA_orte_default_hostfile",
        "PRTE_MCA_prte_default_hostfile",
        "HYDRA_HOST_FILE",
        "I_MPI_HYDRA_HOST_FILE",
    )
    path = next((environ[name] for name in names if environ.get(name)), None)
    # Outside Kubernetes these variables are a user's own settings for mpirun.
    if path is None or "KUBERNETES_SERVICE_HOST" not in environ:
        return None
    agent = environ.get("OMPI_MCA_plm_rsh_agent") or environ.get("HYDRA_LAUNCHER_EXEC")
    is_ssh = agent is None or Path(agent.split()[0]).name in ("ssh", "rsh")
    hosts = tuple(parse_hostfile(read(path), path))
    return Allocation("the MPI operator's job", hosts, None if is_ssh else agent)


def _count(names: Iterable[str]) -> dict[str, int]:
    return _add((name, 1) for name in names)


def _add(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    slots: dict[str, int] = {}
    for name, count in pairs:
        slots[name] = slots.get(name, 0) + count
    return slots


def _hosts(slots: Iterable[tuple[str, int]]) -> tuple[Host, ...]:
    return tuple(_named(slots))


def _named(slots: Iterable[tuple[str, int]]) -> Iterator[Host]:
    for name, count in slots:
        # Names end up on ssh's command line, and must not look like options.
        if not is_address(name):
            raise BadUsage(
                f"{name[:_SHOWN]!r}, which the scheduler names, is not the name of a host", hint=_HINT
            )
        if count > MAX_SLOTS:
            raise BadUsage(f"{count} slots on host {name}: more than {MAX_SLOTS}", hint=_HINT)
        if count > 0:
            yield Host(name, slots=count)


def _number(text: str) -> int | None:
    """Return a number from 0; None for other text, or for more digits than a real value has."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadUsage(f"{path}, which the scheduler names: {cause}", hint=_HINT) from None
