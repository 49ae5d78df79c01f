"""Intel MPI's mpirun: a Hydra that has gone its own way."""

from hvlaunch.mpi.command import Command, Request, ssh_arguments
from hvlaunch.mpi.mpich import SPARE, one_interface, output_files

__all__ = ["intel"]


def intel(request: Request) -> Command:
    """With uneven slots each host is an argument set of its own, which Hydra numbers in their order."""
    counts = {count for _, count in request.hosts}
    even = len(counts) == 1
    argv = [request.program]
    if request.tag:
        argv.append("-prepend-rank")
    argv += output_files(request)
    if words := ssh_arguments(request):
        argv += ["-bootstrap", "ssh", "-bootstrap-exec-args", " ".join(words)]
    if request.interfaces:
        argv += ["-iface", one_interface(request, "Intel MPI")]
    if request.cwd is not None:
        argv += ["-wdir", request.cwd]
    argv += ["-genvlist", ",".join(request.env)] if request.env else ["-genvnone"]
    argv += request.binding
    env = SPARE if request.binding else {"I_MPI_PIN": "0", **SPARE}
    if even:
        names = ",".join(name for name, _ in request.hosts)
        argv += ["-hosts", names, "-ppn", str(counts.pop()), "-n", str(request.np), *request.extra]
        return Command((*argv, *request.command), env)
    argv += request.extra
    for index, (name, count) in enumerate(request.hosts):
        argv += [":"] if index else []
        argv += ["-n", str(count), "-host", name, *request.command]
    return Command(tuple(argv), env)
