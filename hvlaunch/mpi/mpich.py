"""MPICH's mpirun, which is Hydra; MVAPICH's is the same with another name."""

from hvlaunch.errors import BadUsage
from hvlaunch.mpi.command import Command, Request, host_list, ssh_arguments

__all__ = ["SPARE", "mpich", "one_interface", "output_files"]

_LOOPBACKS = ("localhost", "127.0.0.1", "::1")

SPARE = {"HVLAUNCH_SPARE": ""}
"""Of the variables named by -genvlist, Hydra (4.0.2) forgets the one that is last in its own environment."""


def mpich(request: Request) -> Command:
    """Hydra hands on everything unless told which; ssh's words go by the environment, for want of a flag."""
    _check_names(request)
    argv = [request.program, "-np", str(request.np), "-hosts", host_list(request.room)]
    env: dict[str, str] = {}
    if request.tag:
        argv.append("-prepend-rank")
    argv += output_files(request)
    argv += request.binding or ("-bind-to", "none")
    if words := ssh_arguments(request):
        argv += ["-launcher", "ssh"]
        env["HYDRA_LAUNCHER_EXTRA_ARGS"] = " ".join(words)
    if request.interfaces:
        argv += ["-iface", one_interface(request, "MPICH")]
    if request.cwd is not None:
        argv += ["-wdir", request.cwd]
    argv += ["-genvlist", ",".join(request.env)] if request.env else ["-genvnone"]
    return Command((*argv, *request.extra, *request.command), {**env, **SPARE})


def _check_names(request: Request) -> None:
    """Hydra tells the other hosts to connect to this one by the name that it has in the list. Raises BadUsage."""
    if len(request.room) > 1 and any(name in _LOOPBACKS for name, _ in request.room):
        raise BadUsage(
            "localhost can't be used together with other hosts: MPICH's hosts connect to this machine by its name in -H",
            hint="this machine's own name",
        )


def output_files(request: Request) -> list[str]:
    """Hydra makes no directories, so there is one file for each rank and stream in the one that is there."""
    if request.output is None:
        return []
    files = [f"{request.output}/rank.%r.{stream}" for stream in ("stdout", "stderr")]
    return ["-outfile-pattern", files[0], "-errfile-pattern", files[1]]


def one_interface(request: Request, launcher: str) -> str:
    """Raises BadUsage where there are several."""
    if len(request.interfaces) > 1:
        raise BadUsage(
            f"{launcher} takes only one network interface, not {', '.join(request.interfaces)}",
            hint="--network-interfaces with one name",
        )
    return request.interfaces[0]
