"""Slurm's srun, inside an allocation."""

from hvlaunch.errors import BadUsage
from hvlaunch.mpi.command import Command, Request, ssh_arguments

__all__ = ["srun"]


def srun(request: Request) -> Command:
    """The step's processes have srun's whole environment, as users of Slurm expect; so nothing of it needs a name.

    Uneven hosts are an `arbitrary` distribution, for which a host is named once for each of its processes.
    Raises BadUsage for what is only for ssh.
    """
    if ssh_arguments(request):
        raise BadUsage("srun does not use ssh, so flags for ssh can't be used with it", hint="--gloo")
    counts = {count for _, count in request.hosts}
    argv = [request.program, "--ntasks", str(request.np), "--nodes", str(len(request.hosts))]
    if len(counts) == 1:
        names = [name for name, _ in request.hosts]
        argv += [
            "--ntasks-per-node",
            str(counts.pop()),
            "--distribution",
            "block",
            "--nodelist",
            ",".join(names),
        ]
    else:
        names = [name for name, count in request.hosts for _ in range(count)]
        argv += ["--distribution", "arbitrary", "--nodelist", ",".join(names)]
    argv += request.binding or ("--cpu-bind", "none")
    argv += ["--export", "ALL", "--input", "none"]
    if request.cwd is not None:
        argv += ["--chdir", request.cwd]
    if request.tag:
        argv.append("--label")
    if request.output is not None:
        argv += [
            "--output",
            f"{request.output}/rank.%t.stdout",
            "--error",
            f"{request.output}/rank.%t.stderr",
        ]
    return Command((*argv, *request.extra, *request.command), {})
