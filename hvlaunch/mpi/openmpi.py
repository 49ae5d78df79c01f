"""Open MPI's mpirun: 4 (ORTE) and 5 (PRRTE), which renamed or dropped half of the flags."""

from hvlaunch.mpi.command import MANY_HOSTS, Command, Request, host_list, ssh_arguments

__all__ = ["open_mpi", "open_mpi_4", "open_mpi_5", "shared"]

_PRRTE = 5


def open_mpi(request: Request, version: tuple[int, ...]) -> Command:
    """The command line for a version; one that does not tell is taken for 4, whose flags are the older ones."""
    return open_mpi_5(request) if version and version[0] >= _PRRTE else open_mpi_4(request)


def open_mpi_4(request: Request, own: tuple[str, ...] = ()) -> Command:
    """`own` are flags of a relative's."""
    argv = _opening(request, own)
    if request.tag:
        argv.append("--tag-output")
    if request.timestamp:
        argv.append("--timestamp-output")
    if request.output is not None:
        argv += ["--output-filename", request.output]
    argv += request.binding or ("--bind-to", "none", "--map-by", "slot")
    if len(request.room) >= MANY_HOSTS:
        argv += ["--mca", "plm_rsh_no_tree_spawn", "true"]
        argv += ["--mca", "plm_rsh_num_concurrent", str(len(request.room))]
    if words := ssh_arguments(request):
        argv += ["--mca", "plm_rsh_args", " ".join(words)]
    if request.interfaces:
        names = ",".join(request.interfaces)
        argv += ["--mca", "btl_tcp_if_include", names, "--mca", "oob_tcp_if_include", names]
    return Command((*argv, *shared(request)), {})


def open_mpi_5(request: Request) -> Command:
    """PRRTE's own parameters are --prtemca; single dashes before long flags, --tag-output and its like are gone."""
    argv = _opening(request)
    output = ["tag"] * request.tag + ["timestamp"] * request.timestamp
    output += [] if request.output is None else [f"dir={request.output}"]
    if output:
        argv += ["--output", ",".join(output)]
    argv += request.binding or ("--bind-to", "none", "--map-by", "slot")
    if len(request.room) >= MANY_HOSTS:
        argv += ["--prtemca", "plm_ssh_no_tree_spawn", "1"]
        argv += ["--prtemca", "plm_ssh_num_concurrent", str(len(request.room))]
    if words := ssh_arguments(request):
        argv += ["--prtemca", "plm_ssh_args", " ".join(words)]
    if request.interfaces:
        names = ",".join(request.interfaces)
        argv += ["--mca", "btl_tcp_if_include", names, "--prtemca", "prte_if_include", names]
    return Command((*argv, *shared(request)), {})


def shared(request: Request) -> tuple[str, ...]:
    """The end that all of the family have in common: directory, environment, the user's flags, the command."""
    where = () if request.cwd is None else ("--wdir", request.cwd)
    names = [word for name in request.env for word in ("-x", name)]
    return (*where, *names, *request.extra, *request.command)


def _opening(request: Request, own: tuple[str, ...] = ()) -> list[str]:
    root = ["--allow-run-as-root"] if request.root else []
    return [request.program, *root, *own, "-np", str(request.np), "-H", host_list(request.room)]
