"""Slurm's variables, and what `srun` and `scontrol` mean in an allocation. Pure."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from hvlaunch.cli.environment import SET_BY_HVLAUNCH
from hvlaunch.cli.jobs.slurm.directives import BatchOptions, GivenOption, expanded, read_number, read_options
from hvlaunch.errors import BadUsage
from hvlaunch.gloo.batch import Allocated
from hvlaunch.hosts.parse import host_set, parse_hosts
from hvlaunch.hosts.templates import escaped
from hvlaunch.hosts.variables import matcher

__all__ = ["SlurmStep", "exported", "job_variables", "patterns_of", "scontrol", "step_of", "task_variables"]

_QUIETLY = frozenset(
    [
        *(
            "kill-on-bad-exit",
            "unbuffered",
            "mpi",
            "exact",
            "overlap",
            "cpu-bind",
            "gpu-bind",
            "mem-bind",
            "jobid",
        ),
        *(
            "wait",
            "exclusive",
            "gres",
            "gpus",
            "gpus-per-node",
            "cpus-per-task",
            "mem",
            "quiet",
            "verbose",
            "input",
        ),
    ]
)
"""Options of srun without use here that change no result."""
_REFUSED = {
    "pty": "workers have no terminal",
    "multi-prog": "a step has one command; a script can look at SLURM_PROCID",
}
_OF_A_TASK = re.compile(r"%\d*[tnN]")


class SlurmStep(NamedTuple):
    """A step: a job of hvlaunch within the allocation."""

    command: tuple[str, ...]
    counts: tuple[tuple[str, int], ...]
    """Hosts and their numbers of tasks, in the order of ranks."""
    cwd: str | None
    variables: Mapping[str, str]
    """Variables with places, for each task."""
    exports: str
    """The value of --export."""
    gpus_per_task: int | None = None
    is_labelled: bool = False
    by_node: bool = False
    files: tuple[str | None, str | None] = (None, None)
    """Files for stdout and stderr; None for the script's own."""
    has_own_files: bool = False
    """True if each task, or each host, has a file of its own: then the names have places."""
    unused: tuple[str, ...] = ()


def job_variables(
    options: BatchOptions, job: Mapping[str, str], hosts: Sequence[Allocated]
) -> dict[str, str]:
    """Return the variables of a batch script; `job` has those of the job itself, such as its number."""
    names = [host.node for host in hosts]
    tasks = _shares(options.tasks, len(hosts), options.ntasks_per_node)
    nodes = {
        "SLURM_JOB_NODELIST": host_set(names),
        "SLURM_NODELIST": host_set(names),
        "SLURM_JOB_NUM_NODES": str(len(names)),
        "SLURM_NNODES": str(len(names)),
        "SLURM_TASKS_PER_NODE": _folded(tasks),
        "SLURM_JOB_CPUS_PER_NODE": _folded([host.cpus for host in hosts]),
        "SLURM_CPUS_ON_NODE": str(hosts[0].cpus),
        "SLURMD_NODENAME": names[0],
        # The script itself is task 0 on the first node, as under Slurm.
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_CLUSTER_NAME": "hvlaunch",
        "SLURM_JOB_PARTITION": options.partition,
    }
    asked = {
        "SLURM_NTASKS": options.tasks if options.ntasks or options.ntasks_per_node else None,
        "SLURM_NTASKS_PER_NODE": options.ntasks_per_node,
        "SLURM_CPUS_PER_TASK": options.cpus_per_task,
        "SLURM_GPUS_ON_NODE": options.gpus_per_node,
        "SLURM_GPUS_PER_NODE": options.gpus_per_node,
        "SLURM_GPUS_PER_TASK": options.gpus_per_task,
    }
    variables = {**job, **nodes, **{name: str(value) for name, value in asked.items() if value is not None}}
    if "SLURM_NTASKS" in variables:
        variables["SLURM_NPROCS"] = variables["SLURM_NTASKS"]
    # For what the script itself runs; each step sets the GPUs of its own hosts.
    leased = hosts[0].leased
    if options.gpus_per_node and leased is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(leased)
    return variables


def patterns_of(job: Mapping[str, str], node: str) -> dict[str, str]:
    """Return the values of the letters in patterns of output files."""
    return {
        "j": job["SLURM_JOB_ID"],
        "J": job["SLURM_JOB_ID"],
        "A": job.get("SLURM_ARRAY_JOB_ID", job["SLURM_JOB_ID"]),
        # The number is what Slurm writes for a job that is no array.
        "a": job.get("SLURM_ARRAY_TASK_ID", "4294967294"),
        "x": job["SLURM_JOB_NAME"],
        "u": job["SLURM_JOB_USER"],
        "N": node,
        "n": "0",
        "t": "0",
        "s": "batch",
    }


def step_of(
    words: Sequence[str], environ: Mapping[str, str], hosts: Sequence[Allocated], number: int
) -> SlurmStep:
    """Return the step of the words behind `srun`. `environ` is the script's. Raises BadUsage."""
    given, command = read_options(words, "srun: ", program="srun")
    by_name = {option.name: option for option in given}
    for name, cause in _REFUSED.items():
        if name in by_name:
            raise by_name[name].error(cause)
    if not command:
        raise BadUsage("srun: no command to run")
    chosen = _hosts(by_name, hosts)
    per_node = _number(by_name, "ntasks-per-node", environ, "SLURM_NTASKS_PER_NODE")
    asked_nodes = _number(by_name, "nodes")
    ntasks = _number(by_name, "ntasks")
    if ntasks is None and (asked_nodes or len(chosen)) == len(hosts) and "ntasks-per-node" not in by_name:
        ntasks = _number({}, "", environ, "SLURM_NTASKS")
    nodes = asked_nodes or (
        min(len(chosen), ntasks if per_node is None or "ntasks" in by_name else -(-ntasks // per_node))
        if ntasks
        else len(chosen)
    )
    if nodes > len(chosen):
        raise BadUsage(f"srun: {nodes} nodes were asked for, and the job has {len(chosen)}")
    ntasks = ntasks or nodes * (per_node or 1)
    shares = _shares(max(ntasks, nodes), nodes, per_node)
    chosen = chosen[:nodes]
    names = [host.node for host in chosen]
    variables = {
        "SLURM_PROCID": "{rank}",
        "SLURM_LOCALID": "{local_rank}",
        "SLURM_NODEID": "{node_rank}",
        "SLURMD_NODENAME": "{host}" if [host.host for host in chosen] == names else "{host_ip}",
        "SLURM_STEP_ID": str(number),
        "SLURM_STEPID": str(number),
        "SLURM_STEP_NODELIST": host_set(names),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(sum(shares)),
        "SLURM_STEP_TASKS_PER_NODE": _folded(shares),
        "SLURM_TASKS_PER_NODE": _folded(shares),
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(sum(shares)),
        "SLURM_NPROCS": str(sum(shares)),
        "SLURM_LAUNCH_NODE_IPADDR": hosts[0].address,
        "SLURM_SRUN_COMM_HOST": hosts[0].address,
    }
    files = tuple(by_name[name].value if name in by_name else None for name in ("output", "error"))
    has_own_files = any(name is not None and _OF_A_TASK.search(name) for name in files)
    output, error = (_file(name, environ, number, has_places=has_own_files) for name in files)
    unused = [option.name for option in given if option.name not in _QUIETLY and option.name not in _USED]
    return SlurmStep(
        command=tuple(command),
        counts=tuple((host.host, share) for host, share in zip(chosen, shares, strict=True)),
        cwd=by_name["chdir"].value if "chdir" in by_name else None,
        variables=variables,
        exports=by_name["export"].value if "export" in by_name else environ.get("SLURM_EXPORT_ENV", "ALL"),
        gpus_per_task=_number(by_name, "gpus-per-task", environ, "SLURM_GPUS_PER_TASK"),
        is_labelled="label" in by_name,
        by_node="distribution" in by_name and by_name["distribution"].value.startswith("cyclic"),
        files=(output, error),
        has_own_files=has_own_files,
        unused=tuple(f"--{name}" for name in dict.fromkeys(unused)),
    )


_USED = frozenset(
    [
        *(
            "nodes",
            "ntasks",
            "ntasks-per-node",
            "nodelist",
            "exclude",
            "relative",
            "chdir",
            "export",
            "label",
        ),
        *("distribution", "output", "error", "gpus-per-task", "job-name", "open-mode"),
    ]
)


def task_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the script's own values of variables that hvlaunch sets for its workers, as variables with places."""
    is_ours = matcher(*SET_BY_HVLAUNCH[1:])
    return {name: escaped(value) for name, value in environ.items() if is_ours(name)}


def scontrol(words: Sequence[str], environ: Mapping[str, str], job: Mapping[str, str]) -> str:
    """Return the output of `scontrol`. Raises BadUsage for all but its `show` of names and of the job."""
    match [word for word in words if not word.startswith("-")]:
        case ["show", "hostname" | "hostnames", *names]:
            text = names[0] if names else environ.get("SLURM_JOB_NODELIST", job.get("SLURM_JOB_NODELIST", ""))
            return "".join(f"{host.name}\n" for host in parse_hosts(text))
        case ["show", "hostlist" | "hostlistsorted", names]:
            return f"{host_set(name for name in names.split(',') if name)}\n"
        case ["show", "job" | "jobs", *_]:
            fields = {
                "JobId": "SLURM_JOB_ID",
                "JobName": "SLURM_JOB_NAME",
                "Partition": "SLURM_JOB_PARTITION",
                "NodeList": "SLURM_JOB_NODELIST",
                "NumNodes": "SLURM_JOB_NUM_NODES",
                "WorkDir": "SLURM_SUBMIT_DIR",
            }
            return " ".join(f"{name}={job.get(variable, '')}" for name, variable in fields.items()) + "\n"
        case _:
            raise BadUsage(
                f"scontrol {' '.join(words)}: only `show hostnames`, `hostlist` and `job` are here"
            )


def _hosts(by_name: Mapping[str, GivenOption], hosts: Sequence[Allocated]) -> list[Allocated]:
    """Return the hosts for --nodelist, --exclude and --relative."""
    chosen = list(hosts)
    for name in ("nodelist", "exclude"):
        if name in by_name:
            option = by_name[name]
            names = [host.name for host in parse_hosts(option.value)]
            for unknown in [text for text in names if all(text not in (h.host, h.node) for h in hosts)]:
                raise option.error(
                    f"{unknown} is no host of the job; its hosts are {host_set(h.node for h in hosts)}"
                )
            keeps = name == "nodelist"
            chosen = [h for h in chosen if (h.host in names or h.node in names) is keeps]
    if "relative" in by_name:
        option = by_name["relative"]
        if not option.value.isdigit() or int(option.value) >= len(chosen):
            raise option.error(f"must be a number below {len(chosen)}")
        chosen = chosen[int(option.value) :]
    if not chosen:
        raise by_name["exclude"].error("no host is left")
    return chosen


def _number(
    by_name: Mapping[str, GivenOption],
    name: str,
    environ: Mapping[str, str] | None = None,
    variable: str = "",
) -> int | None:
    """Return the number of an option, else of a variable, else None. Raises BadUsage."""
    if name in by_name:
        option = by_name[name]
        return read_number(option, option.value.partition("-")[0].rpartition(":")[2])
    value = (environ or {}).get(variable, "")
    return int(value) if value.isdigit() and int(value) else None


def _shares(tasks: int, nodes: int, per_node: int | None) -> list[int]:
    """Return the tasks of each node: full nodes first with a number for each node, else evenly."""
    if per_node is not None and -(-tasks // per_node) == nodes:
        return [per_node] * (nodes - 1) + [tasks - per_node * (nodes - 1)]
    return [tasks // nodes + (index < tasks % nodes) for index in range(nodes)]


def _folded(counts: Sequence[int]) -> str:
    """Return `2(x3),1` for 2, 2, 2, 1."""
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)


def _file(name: str | None, environ: Mapping[str, str], number: int, *, has_places: bool) -> str | None:
    """Return the name of an output file of a step, with places for `%t`, `%n` and `%N`."""
    if name is None:
        return None
    job = environ.get("SLURM_JOB_ID", "")
    values = {
        "j": job,
        "J": f"{job}.{number}",
        "A": environ.get("SLURM_ARRAY_JOB_ID", job),
        "s": str(number),
        "a": environ.get("SLURM_ARRAY_TASK_ID", "4294967294"),
        "x": environ.get("SLURM_JOB_NAME", ""),
        "u": environ.get("SLURM_JOB_USER", ""),
        "t": "{rank}",
        "n": "{node_rank}",
        "N": "{host}",
    }
    return expanded(escaped(name) if has_places else name, values)


def exported(value: str, base: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the value of --export: `ALL`, `NONE`, names, and NAME=VALUE."""
    words = value.split(",")
    variables = dict(base) if "ALL" in words else {}
    for word in words:
        name, equals, text = word.partition("=")
        if equals:
            variables[name] = text
        elif name in environ and name not in ("ALL", "NONE", "NIL"):
            variables[name] = environ[name]
    return variables
