"""The command line of each launcher, from one request that is in no launcher's dialect. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hvlaunch.errors import BadUsage
from hvlaunch.mpi import Kind, LauncherProgram
from hvlaunch.named_tuples import NamedTuple

__all__ = ["LaunchRequest", "LauncherCommand", "build", "rankfile", "ssh_arguments"]

_MANY_HOSTS = 64
"""From this number of hosts on, a launcher's tree of ssh connections is made flat. Source: Horovod."""
_PRRTE = 5
_LOOPBACKS = ("localhost", "127.0.0.1", "::1")
_SPARE = {"HVLAUNCH_SPARE": ""}
_MVAPICH_UNBOUND = {"MV2_ENABLE_AFFINITY": "0", "MVP_ENABLE_AFFINITY": "0"}


class LauncherCommand(NamedTuple):
    """A command line, and variables for the launcher itself."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Variables to append to the launcher's environment, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """The processes to start, and where. None or an empty value: the user did not choose."""

    program: str
    """The launcher, as the user calls it."""
    command: tuple[str, ...]
    """The command that each process runs."""
    hosts: tuple[tuple[str, int], ...]
    """The hosts in use, each with its number of processes; ranks count host by host."""
    slots: tuple[tuple[str, int], ...] = ()
    """All hosts that the user named, with all their slots, for processes that MPI_Comm_spawn starts; empty if equal to `hosts`."""
    env: tuple[str, ...] = ()
    """Names of variables to hand on; their values are in the launcher's own environment."""
    cwd: str | None = None
    port: int | None = None
    user: str | None = None
    identity: str | None = None
    ssh_words: tuple[str, ...] = ()
    """More words for ssh."""
    interfaces: tuple[str, ...] = ()
    binding: tuple[str, ...] = ()
    """Flags that replace hvlaunch's choice, which is to bind no process to processors."""
    extra: tuple[str, ...] = ()
    """The user's own flags, last of all."""
    tag: bool = False
    """The launcher prefixes each line of output with its rank."""
    timestamp: bool = False
    output: str | None = None
    """A directory in which the launcher writes each rank's output."""
    root: bool = False
    """The launcher runs as root."""
    cores: tuple[tuple[str, int], ...] = ()
    """Processors by host, if a scheduler reports them."""
    rankfile: str | None = None
    """Path of a file that places each rank, for jsrun."""

    @property
    def np(self) -> int:
        return sum(count for _, count in self.hosts)

    @property
    def room(self) -> tuple[tuple[str, int], ...]:
        """The hosts on which processes may start, now or later; the first are filled first."""
        return self.slots or self.hosts


def build(launcher: LauncherProgram, request: LaunchRequest) -> LauncherCommand:
    """Return the launcher's command line. Raises BadUsage for a request that the launcher can't carry out."""
    if launcher.kind is Kind.OPEN_MPI:
        # A version that does not show is taken for 4, whose flags are the older ones.
        has_prrte = bool(launcher.version) and launcher.version[0] >= _PRRTE
        return _open_mpi_5(request) if has_prrte else _open_mpi_4(request)
    return _BUILDERS[launcher.kind](request)


def ssh_arguments(request: LaunchRequest) -> tuple[str, ...]:
    """Words for the ssh that the launcher calls; empty if ssh needs no option. Raises BadUsage for a word with a space."""
    words: list[str] = []
    if request.port is not None:
        words += ["-p", str(request.port)]
    if request.user is not None:
        words += ["-l", request.user]
    if request.identity is not None:
        words += ["-i", request.identity]
    words += request.ssh_words
    for word in words:
        if any(char.isspace() for char in word):
            raise BadUsage(
                f"{word!r}: must not have a space, since a launcher passes ssh's options on as one string",
                hint="set it in ~/.ssh/config",
            )
    return tuple(words)


def _host_list(hosts: Sequence[tuple[str, int]]) -> str:
    """`a:4,b:2`"""
    return ",".join(f"{name}:{count}" for name, count in hosts)


# Open MPI: 4 (ORTE) and 5 (PRRTE), which renamed or dropped half of the flags


def _open_mpi_4(request: LaunchRequest, relative_flags: tuple[str, ...] = ()) -> LauncherCommand:
    """Open MPI 4 and its relatives; a relative adds `relative_flags`."""
    argv = _open_mpi_start(request, relative_flags)
    if request.tag:
        argv.append("--tag-output")
    if request.timestamp:
        argv.append("--timestamp-output")
    if request.output is not None:
        argv += ["--output-filename", request.output]
    argv += request.binding or ("--bind-to", "none", "--map-by", "slot")
    if len(request.room) >= _MANY_HOSTS:
        argv += ["--mca", "plm_rsh_no_tree_spawn", "true"]
        argv += ["--mca", "plm_rsh_num_concurrent", str(len(request.room))]
    if words := ssh_arguments(request):
        argv += ["--mca", "plm_rsh_args", " ".join(words)]
    if request.interfaces:
        names = ",".join(request.interfaces)
        # oob is the daemons' own channel: without it they may connect by an interface that is not routed.
        argv += ["--mca", "btl_tcp_if_include", names, "--mca", "oob_tcp_if_include", names]
    return LauncherCommand((*argv, *_open_mpi_end(request)), {})


def _open_mpi_5(request: LaunchRequest) -> LauncherCommand:
    """PRRTE's own parameters are --prtemca; single dashes before long flags, --tag-output and --timestamp-output are gone."""
    argv = _open_mpi_start(request)
    output = ["tag"] * request.tag + ["timestamp"] * request.timestamp
    output += [] if request.output is None else [f"dir={request.output}"]
    if output:
        argv += ["--output", ",".join(output)]
    argv += request.binding or ("--bind-to", "none", "--map-by", "slot")
    if len(request.room) >= _MANY_HOSTS:
        argv += ["--prtemca", "plm_ssh_no_tree_spawn", "1"]
        argv += ["--prtemca", "plm_ssh_num_concurrent", str(len(request.room))]
    if words := ssh_arguments(request):
        argv += ["--prtemca", "plm_ssh_args", " ".join(words)]
    if request.interfaces:
        names = ",".join(request.interfaces)
        argv += ["--mca", "btl_tcp_if_include", names, "--prtemca", "prte_if_include", names]
    return LauncherCommand((*argv, *_open_mpi_end(request)), {})


def _open_mpi_start(request: LaunchRequest, relative_flags: tuple[str, ...] = ()) -> list[str]:
    # Open MPI refuses to run as root without this flag.
    root = ["--allow-run-as-root"] if request.root else []
    return [request.program, *root, *relative_flags, "-np", str(request.np), "-H", _host_list(request.room)]


def _open_mpi_end(request: LaunchRequest) -> tuple[str, ...]:
    """The end of every command of the family: directory, environment, the user's flags, the command."""
    directory = () if request.cwd is None else ("--wdir", request.cwd)
    names = [word for name in request.env for word in ("-x", name)]
    return (*directory, *names, *request.extra, *request.command)


def _spectrum(request: LaunchRequest) -> LauncherCommand:
    """IBM Spectrum MPI: an Open MPI of before 5, with a transport of its own."""
    # Workers talk by Gloo or NCCL, so MPI itself may use TCP: -tcp needs no adapter of a certain make.
    return _open_mpi_4(request, relative_flags=("-tcp",))


# Hydra: MPICH's mpirun, and its relatives of Intel and MVAPICH


def _mpich(request: LaunchRequest) -> LauncherCommand:
    """MPICH's mpirun, which is Hydra."""
    _check_host_names(request)
    argv = [request.program, "-np", str(request.np), "-hosts", _host_list(request.room)]
    env: dict[str, str] = {}
    if request.tag:
        argv.append("-prepend-rank")
    argv += _hydra_output_files(request)
    argv += request.binding or ("-bind-to", "none")
    if words := ssh_arguments(request):
        argv += ["-launcher", "ssh"]
        # Hydra has no flag for ssh's words.
        env["HYDRA_LAUNCHER_EXTRA_ARGS"] = " ".join(words)
    if request.interfaces:
        argv += ["-iface", _only_interface(request, "MPICH")]
    if request.cwd is not None:
        argv += ["-wdir", request.cwd]
    # Without a list Hydra hands on the whole environment.
    argv += ["-genvlist", ",".join(request.env)] if request.env else ["-genvnone"]
    # Of the variables named by -genvlist, Hydra (4.0.2) forgets the last in its own environment: a spare comes last.
    return LauncherCommand((*argv, *request.extra, *request.command), {**env, **_SPARE})


def _check_host_names(request: LaunchRequest) -> None:
    """Raises BadUsage if other hosts would have to connect to this one by a name of the loopback."""
    # Hydra tells the other hosts to connect to this one by its name in the list of hosts.
    if len(request.room) > 1 and any(name in _LOOPBACKS for name, _ in request.room):
        raise BadUsage(
            "localhost can't be used together with other hosts: MPICH's hosts connect to this machine by its name in -H",
            hint="this machine's own name",
        )


def _hydra_output_files(request: LaunchRequest) -> list[str]:
    # Hydra makes no directories: each rank and stream has a file in the directory that exists.
    if request.output is None:
        return []
    files = [f"{request.output}/rank.%r.{stream}" for stream in ("stdout", "stderr")]
    return ["-outfile-pattern", files[0], "-errfile-pattern", files[1]]


def _only_interface(request: LaunchRequest, launcher: str) -> str:
    """Return the one network interface. Raises BadUsage if the user named several."""
    if len(request.interfaces) > 1:
        raise BadUsage(
            f"{launcher} takes only one network interface, not {', '.join(request.interfaces)}",
            hint="--network-interfaces with one name",
        )
    return request.interfaces[0]


def _intel(request: LaunchRequest) -> LauncherCommand:
    """Intel MPI's mpirun: a Hydra with flags of its own."""
    counts = {count for _, count in request.hosts}
    argv = [request.program]
    if request.tag:
        argv.append("-prepend-rank")
    argv += _hydra_output_files(request)
    if words := ssh_arguments(request):
        argv += ["-bootstrap", "ssh", "-bootstrap-exec-args", " ".join(words)]
    if request.interfaces:
        argv += ["-iface", _only_interface(request, "Intel MPI")]
    if request.cwd is not None:
        argv += ["-wdir", request.cwd]
    argv += ["-genvlist", ",".join(request.env)] if request.env else ["-genvnone"]
    argv += request.binding
    # The library pins processes to cores unless told otherwise; workers have threads.
    env = _SPARE if request.binding else {"I_MPI_PIN": "0", **_SPARE}
    if len(counts) == 1:
        names = ",".join(name for name, _ in request.hosts)
        argv += ["-hosts", names, "-ppn", str(counts.pop()), "-n", str(request.np), *request.extra]
        return LauncherCommand((*argv, *request.command), env)
    # With uneven slots each host is an argument set of its own; Hydra numbers ranks in the order of the sets.
    argv += request.extra
    for index, (name, count) in enumerate(request.hosts):
        argv += [":"] if index else []
        argv += ["-n", str(count), "-host", name, *request.command]
    return LauncherCommand(tuple(argv), env)


def _mvapich(request: LaunchRequest) -> LauncherCommand:
    """MVAPICH's mpirun: MPICH's Hydra, with a binding of the library's own."""
    if request.binding:
        return _mpich(request)
    # The library binds processes to cores in MPI_Init, whatever Hydra was told; workers have threads.
    command = _mpich(replace(request, env=(*request.env, *_MVAPICH_UNBOUND)))
    return LauncherCommand(command.argv, {**_MVAPICH_UNBOUND, **command.env})


# Launchers of schedulers, inside an allocation


def _srun(request: LaunchRequest) -> LauncherCommand:
    """Slurm's srun. Raises BadUsage for flags for ssh."""
    if ssh_arguments(request):
        raise BadUsage("srun does not use ssh, so flags for ssh can't be used with it", hint="--gloo")
    counts = {count for _, count in request.hosts}
    argv = [request.program, "--ntasks", str(request.np), "--nodes", str(len(request.hosts))]
    if len(counts) == 1:
        names = ",".join(name for name, _ in request.hosts)
        argv += ["--ntasks-per-node", str(counts.pop()), "--distribution", "block", "--nodelist", names]
    else:
        # An `arbitrary` distribution has the name of a host once for each of its processes.
        names = ",".join(name for name, count in request.hosts for _ in range(count))
        argv += ["--distribution", "arbitrary", "--nodelist", names]
    argv += request.binding or ("--cpu-bind", "none")
    # The whole environment of srun is handed on, as users of Slurm expect, so request.env needs no flag.
    argv += ["--export", "ALL", "--input", "none"]
    if request.cwd is not None:
        argv += ["--chdir", request.cwd]
    if request.tag:
        argv.append("--label")
    if request.output is not None:
        argv += ["--output", f"{request.output}/rank.%t.stdout"]
        argv += ["--error", f"{request.output}/rank.%t.stderr"]
    return LauncherCommand((*argv, *request.extra, *request.command), {})


def _jsrun(request: LaunchRequest) -> LauncherCommand:
    """LSF's jsrun, in a cluster with the Job Step Manager. Raises BadUsage for flags for ssh, and for --binding-args."""
    if ssh_arguments(request):
        raise BadUsage("jsrun does not use ssh, so flags for ssh can't be used with it", hint="--gloo")
    if request.binding:
        raise BadUsage(
            "--binding-args can't be used with jsrun, whose rankfile binds the ranks", hint="leave it out"
        )
    argv = [request.program, "--erf_input", request.rankfile or ""]
    if request.cwd is not None:
        argv += ["--chdir", request.cwd]
    if request.tag:
        argv += ["--stdio_mode", "prepended"]
    if request.output is not None:
        argv += ["--stdio_stdout", f"{request.output}/rank.%t.stdout"]
        argv += ["--stdio_stderr", f"{request.output}/rank.%t.stderr"]
    argv += [word for name in request.env for word in ("--env", name)]
    return LauncherCommand((*argv, *request.extra, *request.command), {})


def rankfile(request: LaunchRequest) -> str:
    """Return jsrun's explicit resource file: each rank has its share of its host's processors, and sees all GPUs.

    Raises BadUsage if a host has more ranks than processors.
    """
    lines = ["cpu_index_using: logical", "overlapping_rs: allow", "skip_missing_cpu: allow", ""]
    rank = 0
    for host, count in request.hosts:
        cores = dict(request.cores).get(host, count)
        share = cores // count
        if share == 0:
            raise BadUsage(f"{count} ranks for {cores} processors", host=host, hint=f"-H {host}:{cores}")
        for slot in range(count):
            first = slot * share
            cpus = f"{{{first}-{first + share - 1}}}"
            lines.append(f"rank: {rank}: {{ hostname: {host}; cpu: {cpus} ; gpu: * ; mem: * }}")
            rank += 1
    return "\n".join(lines) + "\n"


_BUILDERS = {
    Kind.SPECTRUM: _spectrum,
    Kind.MPICH: _mpich,
    Kind.INTEL: _intel,
    Kind.MVAPICH: _mvapich,
    Kind.SRUN: _srun,
    Kind.JSRUN: _jsrun,
}
