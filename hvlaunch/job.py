"""What a job is and how it ended: all that the command line and the controllers pass to each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from hvlaunch.errors import Problem

__all__ = [
    "RECONNECT_TIMEOUT",
    "Call",
    "ColorPolicy",
    "ConsoleOptions",
    "DetachPolicy",
    "ElasticOptions",
    "Host",
    "HostKeyPolicy",
    "JobResult",
    "JobSpec",
    "LauncherName",
    "Look",
    "MPIOptions",
    "MapPolicy",
    "OnHang",
    "RelayPolicy",
    "SSHClient",
    "SSHOptions",
    "StdinPolicy",
    "WorkerExit",
]

RECONNECT_TIMEOUT = 5.0
"""Seconds."""

HostKeyPolicy = Literal["strict", "accept-new", "off"]
SSHClient = Literal["paramiko", "openssh"]
StdinPolicy = Literal["0", "all", "none"]
ColorPolicy = Literal["auto", "always", "never"]
LauncherName = Literal["mpirun", "srun", "jsrun"]
RelayPolicy = Literal["auto", "always", "never"]
MapPolicy = Literal["slot", "node"]
"""How workers are dealt out: they fill the slots of one host after the other, or go to one host after the other."""
OnHang = Literal["warn", "stop", "restart"]
DetachPolicy = Literal["never", "at start", "on hangup"]
"""When the driver leaves its terminal: not at all; as soon as the workers run; when the terminal is closed."""
Look = Literal["cause", "unclear", "consequence", "silent"]
"""What a worker's end looks like by its last words: an error of its own; something of both; the loss of other workers;
or there are no words that tell."""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that the user named. A field that is None was not given, and has its default elsewhere."""

    name: str
    """As the user wrote it, without user and slots: its name in messages and in HVLAUNCH_HOST."""
    slots: int | None = None
    user: str | None = None
    port: int | None = None
    identity: str | None = None
    """Path of a private key."""
    python: str | None = None
    """The interpreter for the agent on this host."""
    address: str | None = None
    """Where to connect, in place of the name."""


class _Data:
    """What dataclass would make for each class by compiling it, which takes 2 ms at every start."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def _values(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __eq__(self, other: object) -> bool:
        return self.__class__ is other.__class__ and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(tuple(self._values().values()))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self._values().items())
        return f"{self.__class__.__name__}({values})"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SSHOptions(_Data):
    """Settings for all hosts; a host's own settings come first, then these, then ~/.ssh/config."""

    port: int | None = None
    user: str | None = None
    identity: Path | None = None
    config: Path | None = None
    host_keys: HostKeyPolicy = "strict"
    client: SSHClient = "paramiko"
    """Which SSH client: paramiko in this process, or the ssh binary."""
    forward_agent: bool = False
    """Whether programs on the hosts may use the ssh agent here; only the ssh binary can do it."""
    connect_limit: int = 8
    """How many connections to one address may be made at the same time."""
    remote_agent: str | None = None
    """A program that runs a command on a host, in place of ssh: `PROGRAM HOST COMMAND`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class MPIOptions(_Data):
    """For a job that another launcher starts: mpirun, srun or jsrun."""

    launcher: LauncherName = "mpirun"
    program: str | None = None
    """Name or path, in place of the launcher's usual name."""
    args: tuple[str, ...] = ()
    """The user's own flags for it."""
    binding: tuple[str, ...] = ()
    """Flags that bind processes to processors; without them none is bound."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ConsoleOptions(_Data):
    """What the user sees, and how."""

    prefix: str = "[{rank}]<{stream}>: "
    """Before each line of a worker; docs/output.md has the fields."""
    color: ColorPolicy = "auto"
    ranks: tuple[range, ...] | None = None
    """The ranks whose output is shown; None is all."""
    hidden: tuple[Literal["stdout", "stderr"], ...] = ()
    """The streams whose output is not shown: it is in files alone."""
    merge: bool = False
    """Print equal lines of several ranks once."""
    quiet: bool = False
    """Only workers' output, errors and the failure report."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ElasticOptions(_Data):
    """The settings of an elastic job; times are in seconds."""

    min_np: int
    """The fewest workers of a round."""
    max_np: int | None = None
    """The most workers of a round; None is no limit."""
    discovery_script: str | None = None
    """The command that prints the pool; without it, and without a hostfile, the job's hosts are the pool."""
    hostfile: Path | None = None
    """A hostfile that is read again and again, so that it may change."""
    is_named: bool = True
    """Whether the user has named the hostfile, and no file of options that nobody named: then it may name programs and keys."""
    most_hosts: int | None = None
    """The pool is the first so many hosts of those that are found; None is all of them."""
    per_host: int | None = None
    """How many slots each host that is found has; 0 is one for each of its GPUs, None is what is said of it."""
    discovery_interval: float = 1.0
    discovery_timeout: float = 30.0
    elastic_timeout: float = 600.0
    """How long there may be too few slots."""
    reset_timeout: float = 60.0
    """How long a worker may take to ask for a place again when its round has ended."""
    max_restarts: int | None = None
    """The most failures within `restart_window` that are followed by a new round; None is no limit."""
    restart_window: float = 3600.0
    spares: int = 0
    """Workers beyond max_np that are started, and wait until one is needed."""
    cooldown: tuple[float, float] | None = None
    """How long a failing host is excluded, at first and at most; None is for ever."""
    worker_timeout: float = 30.0
    """How long a worker that has sent a beat may send no other."""
    commit_timeout: float | None = None
    """How long a round may go on without a commit; None is for ever."""
    drain_timeout: float = 30.0
    """How long the workers of a host that leaves the pool may take to reach their next commit."""
    exit_grace: float = 300.0
    """How long the others may go on when the first worker has ended with 0."""

    @property
    def discovers(self) -> bool:
        """Whether the pool may change."""
        return self.discovery_script is not None or self.hostfile is not None


class Call(NamedTuple):
    """A function that the workers call, in place of a program of the user's."""

    name: str
    """What it is called in messages."""
    program: Path
    """What the workers' Python runs: each host gets a copy."""
    results: Path
    """The directory for what the workers return."""
    is_followed: bool = False
    """Whether the job's output is kept from its beginning, for somebody who reads it from its directory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class JobSpec(_Data):
    """All that a controller needs to run a job."""

    command: tuple[str, ...]
    hosts: tuple[Host, ...]
    cwd: str
    """The workers' working directory, on every host."""
    call: Call | None = None
    """The function that `command` calls, if it does."""
    name: str | None = None
    """The user's word for the job, for `hvlaunch jobs` and its like."""
    detach: DetachPolicy = "never"
    allocation: str | None = None
    """The scheduler's job that the hosts are from: `Slurm job 123`; None where the user named them."""
    np: int | None = None
    """How many workers; None is one in every slot. With `elastic`, how many slots the first round waits for."""
    map_by: MapPolicy = "slot"
    visible_gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By host, the GPUs that its workers see (CUDA_VISIBLE_DEVICES); on a host that is not here, all."""
    skip_bad_hosts: bool = False
    """Whether a static job does without the hosts that fail before it starts, if the others have slots enough."""
    end_with_rank: int | None = None
    """The rank whose end is the job's; None: the job ends when all of them have."""
    elastic: ElasticOptions | None = None
    slots_per_host: int | None = None
    """For hosts without slots of their own; None counts the host's GPUs."""
    force_slots: bool = False
    """Whether numbers of slots that are most likely a mistake are meant."""
    env: Mapping[str, str] = field(default_factory=dict)
    """What the user passes on: forwarded by default, from --env-file and -x, merged in that order."""
    stdin: StdinPolicy = "0"
    output_dir: Path | None = None
    console: ConsoleOptions = field(default_factory=ConsoleOptions)
    events: Path | None = None
    """The file that gets one JSON object for each event."""
    report: Path | None = None
    """The file that gets the failure report: JSON or a page, by its name."""
    network_interfaces: tuple[str, ...] = ()
    """Interfaces to use, without trying which can reach the others; on each host the first that has an address."""
    horovod: bool = False
    """Let Horovod's own workers meet at the rendezvous: its scopes are open to the job's hosts, without a token."""
    relay: RelayPolicy = "auto"
    """Whether agents relay to the rendezvous over SSH: where a host can't reach it, always, or never."""
    rendezvous_port: int = 0
    """Where the driver's rendezvous listens; 0 is a free port."""
    rendezvous_bind: str | None = None
    """The address at which it listens beside the loopback; None is whichever the hosts need."""
    worker_ports: tuple[int, int] | None = None
    """The lowest and the highest port that is chosen for workers; None is any."""
    ssh: SSHOptions = field(default_factory=SSHOptions)
    pool: str | None = None
    """The warm pool that has connections to the hosts; None: they are made for this job."""
    mpi: MPIOptions | None = None
    """The launcher that starts the workers; None is hvlaunch itself."""
    remote_python: str | None = None
    start_timeout: float = 60.0
    """Seconds for all of connecting."""
    lease: float = 30.0
    """Seconds of silence after which driver and agent give each other up."""
    reconnect_timeout: float = RECONNECT_TIMEOUT
    """Seconds that an agent whose connection has ended waits for another, before it ends its workers; at most the lease."""
    spill: int = 64 << 20
    """Bytes of output that a host keeps in a file while its connection is lost."""
    fsync: bool = False
    """Whether what is kept for another driver outlives a loss of power of this machine."""
    grace: float = 10.0
    """Seconds between the first signal to a worker that must stop and SIGKILL."""
    settle: float = 2.0
    """Seconds that a failure which looks like a consequence waits for one that does not, before the others are stopped."""
    hang_timeout: float = 60.0
    """Seconds without a line, and without any rank that gets on, after which a job is said to hang; 0 never."""
    on_hang: OnHang = "warn"
    """What follows then. A static job can't be restarted: it ends."""
    verbose: bool = False


class PortHolder(NamedTuple):
    """Another user's program that listens on rank 0's MASTER_PORT."""

    port: int
    user: str | None = None
    """The user's name; None if /etc/passwd of that host lacks it."""
    program: str | None = None
    """The program's name and pid; None if the kernel shows them to that user alone."""


class WorkerExit(NamedTuple):
    """How one worker ended."""

    rank: int
    host: str
    code: int | None = None
    """Exit code; None where a signal ended it or it never started."""
    signal: int | None = None
    when: float = 0.0
    """Seconds since the job's first workers were started."""
    max_rss: int | None = None
    """Largest resident size, in bytes."""
    oom_killed: bool = False
    """The kernel's out-of-memory killer ended it, as far as the kernel tells."""
    port_taken_by: int | None = None
    """The uid of another user whose program listens on MASTER_PORT, where this worker, rank 0, was to."""
    port_holder: PortHolder | None = None
    """The program of that user in more detail."""
    stopped: bool = False
    """hvlaunch stopped it, because of another failure or an interrupt."""
    error_file: str | None = None
    """What the worker left in TORCHELASTIC_ERROR_FILE."""
    not_started: str | None = None
    """Why it could not be started; `code` is then 126 or 127, as a shell would say."""
    look: Look = "silent"
    """What its end looks like, by what it wrote last."""
    was_told: bool = False
    """hvlaunch had told it to end before."""

    @property
    def exit_code(self) -> int:
        """As a shell counts it: the code, or 128 + the signal."""
        if self.signal is not None:
            return 128 + self.signal
        return self.code if self.code is not None else 1

    @property
    def ok(self) -> bool:
        return self.code == 0


class JobResult(NamedTuple):
    """How a job ended. `failure` is the worker that is the cause, `error` what else ended the job."""

    exit_code: int
    elapsed: float
    """Seconds since the job's first workers were started; 0 if none was."""
    exits: tuple[WorkerExit, ...] = ()
    failure: WorkerExit | None = None
    """The first failing worker; one that failed later, or was stopped, where only that had an error of its own."""
    first_victim: WorkerExit | None = None
    """The first failing worker, where that is not `failure`."""
    never_started: tuple[int, ...] = ()
    """Ranks of the last round of whose start nothing was heard before the job ended."""
    error: Problem | None = None
    interrupted: int | None = None
    """The signal that the user ended the job with."""
    size: int = 0
    """How many workers the last round had, where a job's controller says so."""
