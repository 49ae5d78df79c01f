"""What a job is and how it ended: the data that the command line and the controllers exchange.

Every field is documented beside it, unless its name says everything. Times are in seconds.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, FrozenInstanceError, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hvlaunch.errors import Problem
from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "LONG_LEASE",
    "RECONNECT_TIMEOUT",
    "Bind",
    "BringOptions",
    "Call",
    "CollectOptions",
    "ColorPolicy",
    "ConsoleOptions",
    "ContainerOptions",
    "DetachPolicy",
    "ElasticOptions",
    "Host",
    "HostKeyPolicy",
    "JobResult",
    "JobSpec",
    "LauncherName",
    "LeaseOptions",
    "Look",
    "MPIOptions",
    "MapPolicy",
    "NcclPolicy",
    "OnHang",
    "RankOrder",
    "RelayPolicy",
    "RestartLimit",
    "Role",
    "RolePolicy",
    "SSHClient",
    "SSHOptions",
    "StdinPolicy",
    "Templates",
    "WorkerExit",
]

RECONNECT_TIMEOUT = 5.0
"""Default of JobSpec.reconnect_timeout, in seconds."""
LONG_LEASE = 30.0
"""Lease in seconds, unless the user sets one, of what can go on without a host or is to outlast a laptop's sleep."""

HostKeyPolicy = Literal["strict", "accept-new", "off"]
"""`strict` refuses unknown host keys, `accept-new` records them, `off` checks nothing."""
SSHClient = Literal["paramiko", "openssh"]
"""paramiko runs in this process; openssh is the ssh binary."""
StdinPolicy = Literal["0", "all", "none"]
"""Ranks that read hvlaunch's stdin: rank 0, all ranks, or none."""
ColorPolicy = Literal["auto", "always", "never"]
RolePolicy = Literal["end", "restart", "restart-all"]
"""Response to a failure: end the job, restart the worker alone, or restart all workers of its role."""
LauncherName = Literal["mpirun", "srun", "jsrun"]
RelayPolicy = Literal["auto", "always", "never"]
"""Relay through agents to the rendezvous: if a host can't reach it, always, or never."""
Bind = Literal["none", "numa", "socket", "core", "cache", "gpu"]
"""Processors of a worker: any, those of a NUMA node or socket, cores or a cache of its own, those near its GPU."""
MapPolicy = Literal["slot", "node"]
"""Distribution of workers: fill the slots of one host after the other, or take hosts in turn."""
NcclPolicy = Literal["off", "auto"]
"""Whether hvlaunch chooses the adapters for NCCL and Gloo."""
RankOrder = Literal["given", "fabric", "measured"]
"""Order of hosts by rank: as given, or near hosts side by side, by their hardware or also by times between them."""
OnHang = Literal["warn", "stop", "restart"]
"""Response to a hang: a message, the end of the job, or a new round."""
DetachPolicy = Literal["never", "at start", "on hangup"]
"""When the driver leaves its terminal: never, once the workers run, or when the terminal closes."""
Look = Literal["cause", "unclear", "consequence", "silent"]
"""Classification of a worker's end by its last words.

An error of its own, a mixture, the loss of other workers, or no words at all.
"""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that the user named. None means not given; the default is set elsewhere."""

    name: str
    """Name as the user wrote it, without user and slots: shown in messages, and HVLAUNCH_HOST of workers."""
    slots: int | None = None
    """Maximum number of workers on the host."""
    user: str | None = None
    """User for the SSH login."""
    port: int | None = None
    """Port of sshd."""
    identity: str | None = None
    """Path of a private key."""
    python: str | None = None
    """Interpreter for the agent on this host."""
    address: str | None = None
    """Address to connect to in place of the name."""


class _Data:
    """The methods of a frozen dataclass. dataclass itself would compile them for each class, 5 ms at every start."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init__(self, **values: object) -> None:
        for name, field_ in self.__dataclass_fields__.items():
            if name not in values and field_.default_factory is not MISSING:
                values[name] = field_.default_factory()
            # Defaults are attributes of the class: nothing has to be set for them.
            elif name not in values and field_.default is MISSING:
                raise TypeError(f"{self.__class__.__name__} without {name}")
        if unknown := values.keys() - self.__dataclass_fields__.keys():
            raise TypeError(f"{self.__class__.__name__} has no {', '.join(unknown)}")
        vars(self).update(values)  # the defaults are attributes of the class

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def _values(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __eq__(self, other: object) -> bool:
        return self.__class__ is other.__class__ and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(tuple(self._values().values()))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self._values().items())
        return f"{self.__class__.__name__}({values})"


def _fields_only(**_flags: bool) -> Callable[[type], type]:
    """Like dataclass, for subclasses of _Data."""
    return dataclass(init=False, eq=False, repr=False)


if TYPE_CHECKING:
    from dataclasses import dataclass as _options
else:
    _options = _fields_only


@_options(frozen=True, kw_only=True)
class SSHOptions(_Data):
    """SSH settings for all hosts. A host's own settings precede them, and ~/.ssh/config follows."""

    port: int | None = None
    """Port of sshd on every host."""
    user: str | None = None
    """User for the login."""
    identity: Path | None = None
    """Path of a private key."""
    config: Path | None = None
    """Configuration file in place of ~/.ssh/config."""
    host_keys: HostKeyPolicy = "strict"
    """Handling of unknown host keys."""
    client: SSHClient = "paramiko"
    """SSH client."""
    forward_agent: bool = False
    """Let programs on the hosts use the local ssh agent; only the ssh binary can do it."""
    connect_limit: int = 8
    """Maximum number of connections to one address that are made at the same time."""
    remote_agent: str | None = None
    """Program that runs a command on a host in place of ssh: `PROGRAM HOST COMMAND`."""


class SyncOptions(NamedTuple):
    """The working tree that hosts get a copy of."""

    root: str
    """Its directory on this machine."""
    below: str
    """Where workers start, from the root on."""
    limit: int
    """Most bytes that it may have."""
    job: Path | None = None
    """Directory of an earlier job whose snapshot is used in place of the tree."""
    to: str | None = None
    """A fixed place on the hosts, from the home directory on."""


class Templates(NamedTuple):
    """A command with places such as `{rank}`, and variables with such places for its workers: see hosts/templates.py."""

    words: tuple[str, ...]
    """The whole command; words without places are escaped()."""
    env: Mapping[str, str]
    """Variables; one whose value is empty for a worker is not set for it."""
    ports: tuple[str, ...]
    """Names of ports: each host keeps a free port for each of them."""
    slots: Mapping[str, int]
    """Slots that the user gave the hosts, where --per-host starts only one worker."""
    counts_gpus: bool = False
    """Whether hosts without such slots count their GPUs."""


class Role(NamedTuple):
    """A part of a job's workers with a command and a world of their own. hosts/roles.py gives its workers their places."""

    name: str
    workers: tuple[tuple[str, int], ...]
    """Its hosts and their numbers of workers, in order of rank."""
    templates: Templates
    """Its command, and variables for its workers."""
    gpus: int | None = None
    """GPUs of each worker; None shows all."""
    policy: RolePolicy = "end"

    @property
    def size(self) -> int:
        return sum(count for _, count in self.workers)


class RestartLimit(NamedTuple):
    """The limit of restarts of a worker or a role; ElasticOptions has the same fields for rounds."""

    max_restarts: int | None = None
    restart_window: float = 3600.0


class CollectOptions(NamedTuple):
    """Files that come back from hosts."""

    glob: str
    """Pattern of paths below the workers' directory."""
    directory: str
    """Directory of this machine for them."""


class BringOptions(NamedTuple):
    """Files that hosts get before workers start."""

    host: str | None
    """The host that has them; None for this machine."""
    source: str
    """Their path there."""
    path: str
    """Where hosts get them."""


class ContainerOptions(NamedTuple):
    """The container in which each host runs its agent and workers."""

    image: str | None
    """Image of a new container; None for a running one."""
    name: str | None
    """Name of the running container."""
    runtime: str | None
    """Program for the container; None takes the first of each host."""
    mounts: tuple[tuple[str, str, bool], ...]
    """Source, target (empty for the same path), and whether read-only."""


class SetupOptions(NamedTuple):
    """The commands that build an environment on each host before workers start."""

    commands: tuple[str, ...]
    """Texts for the host's shell, to be run in turn."""
    patterns: tuple[str, ...]
    """Names of files that the key of the environment has, if the project has them."""
    files: tuple[str, ...] = ()
    """Files of the key that the project must have."""


@_options(frozen=True, kw_only=True)
class MPIOptions(_Data):
    """Settings for a job that another launcher starts."""

    launcher: LauncherName = "mpirun"
    """Kind of launcher."""
    program: str | None = None
    """Name or path of the launcher, in place of its usual name."""
    args: tuple[str, ...] = ()
    """Flags that the user passes to the launcher."""
    binding: tuple[str, ...] = ()
    """Flags that bind processes to processors; without them no process is bound."""


@_options(frozen=True, kw_only=True)
class ConsoleOptions(_Data):
    """Options of the console."""

    prefix: str = "[{rank}]<{stream}>: "
    """Text before each line of a worker; docs/reference/output.md lists the fields."""
    color: ColorPolicy = "auto"
    """When to use colours."""
    ranks: tuple[range, ...] | None = None
    """Ranks with visible output; None means all ranks."""
    hidden: tuple[Literal["stdout", "stderr"], ...] = ()
    """Streams that are not shown, only written to files."""
    merge: bool = False
    """Print equal lines of several ranks once."""
    labels: tuple[str, ...] = ()
    """Names to show in place of ranks, by rank: those of roles. Empty for jobs without."""
    quiet: bool = False
    """Show only workers' output, errors and the failure report."""


_SUSPENSION = 4.0
"""Seconds: more than a pause in which a user looks at something, and training stands still for less than 5 s."""


@_options(frozen=True, kw_only=True)
class ElasticOptions(_Data):
    """Settings of an elastic job."""

    min_np: int
    """Minimum number of workers in a round."""
    max_np: int | None = None
    """Maximum number of workers in a round; None means no limit."""
    discovery_script: str | None = None
    """Command that prints the pool. Without it and without a hostfile, the job's hosts are the pool."""
    hostfile: Path | None = None
    """Hostfile that is read repeatedly, and may change."""
    is_named: bool = True
    """True if the user named the hostfile on the command line. Only then may it name programs and keys."""
    most_hosts: int | None = None
    """Number of hosts, from the first, that form the pool; None means all discovered hosts."""
    avoided: tuple[str, ...] = ()
    """Names of hosts that come behind all others of the pool, in this order."""
    per_host: int | None = None
    """Slots of each discovered host: 0 means one per GPU, None takes the number from discovery."""
    discovery_interval: float = 1.0
    """Seconds between two runs of the discovery."""
    discovery_timeout: float = 30.0
    """Maximum duration of one run."""
    elastic_timeout: float = 600.0
    """Maximum time with too few slots for a round."""
    reset_timeout: float = 60.0
    """Maximum time for a worker to ask for a new place after its round has ended."""
    max_restarts: int | None = None
    """Maximum number of failures within `restart_window` that a new round follows; None means no limit."""
    restart_window: float = 3600.0
    """Period for `max_restarts`."""
    evict_slow: float | None = None
    """Factor from which a slow host's workers are moved to a spare; None for never."""
    spares: int = 0
    """Workers beyond max_np that start and wait as replacements."""
    replicas: int = 1
    """Copies of each host's commits of hvlaunch.torch.checkpoint on other hosts."""
    save_to: str | None = None
    """Directory on disk for commits, the same on all hosts; None for none."""
    save_every: float = 600.0
    """Seconds between two saves there."""
    preload: tuple[str, ...] = ()
    """Modules that a process for each slot imports in advance, for the slot's next worker; `auto` means those of the script."""
    cooldown: tuple[float, float] | None = None
    """First and longest time for which a failing host is excluded; None excludes it for ever."""
    worker_timeout: float = 30.0
    """Maximum time between two heartbeats of a worker, after its first."""
    suspect_after: float = 1.5
    """Time without a sign of life after which the others go on without a host; 0 means `JobSpec.lease`."""
    commit_timeout: float | None = None
    """Maximum time without a commit in a round; None means no limit."""
    drain_timeout: float = 30.0
    """Time for the workers of a leaving host to reach their next commit."""
    exit_grace: float = 300.0
    """Time for the other workers to finish after the first worker has ended with 0."""

    @property
    def suspension(self) -> float:
        """Time that a worker may be stopped by SIGSTOP: its agent knows the reason of its silence."""
        return min(_SUSPENSION, self.worker_timeout)

    @property
    def discovers(self) -> bool:
        """True if the pool may change."""
        return self.discovery_script is not None or self.hostfile is not None


class LeaseOptions(NamedTuple):
    """Leases on the GPUs or slots of hosts that several users share."""

    slots: int | None = None
    """Number of slots of each host, for all users; None leases GPUs."""
    directory: str = "/var/tmp/hvlaunch-leases"  # noqa: S108 (agent/leases.py trusts no file there)
    """Directory of the locks on each host."""
    wait: bool = False
    """Wait until enough are free."""
    fair_wait: float = 600.0
    """Seconds after which a waiting job has the first claim on its hosts."""
    passes_own: bool = False
    """Pass waiting jobs of the same user: the user's queue has made sure that they are not delayed."""
    max_idle: float | None = None
    """Seconds without work of all leased GPUs after which the job is stopped; None for no limit."""
    given: Mapping[str, tuple[str, ...]] | None = None
    """GPUs by host that a batch job around this one holds; None takes leases."""


class QueuedAs(NamedTuple):
    """The job's place in the user's queue."""

    queue: Path
    """Directory of the queue."""
    number: str
    """The number there: `12`, or `12_3` for a task of an array."""
    job_id: str
    """The id that the queue has chosen: the directory of the job can be made only once."""


class Call(NamedTuple):
    """A function that the workers call in place of a user's program."""

    name: str
    """Name of the function in messages."""
    program: Path
    """Program for the workers' Python; each host gets a copy."""
    results: Path
    """Directory for the return values of the workers."""
    is_followed: bool = False
    """True if the job's output is kept from the beginning, for a reader of the job's directory."""


@_options(frozen=True, kw_only=True)
class JobSpec(_Data):
    """Everything that a controller needs to run a job."""

    command: tuple[str, ...]
    """Program and arguments of every worker."""
    hosts: tuple[Host, ...]
    """Hosts in the order of ranks."""
    cwd: str
    """Working directory of the workers, on every host."""
    templates: Templates | None = None
    """The command with the places of its words; None if it is the same for all workers."""
    sync: SyncOptions | None = None
    """The tree of which each host gets a copy to start workers in, in place of `cwd`; None if the files are there."""
    container: ContainerOptions | None = None
    """The container of agents and workers; None without one."""
    setup: SetupOptions | None = None
    """The commands for an environment of the workers; None if hosts have one."""
    bring: tuple[BringOptions, ...] = ()
    """Files that each host gets before workers start."""
    collect: tuple[CollectOptions, ...] = ()
    """Files that come back from each host when its workers have ended."""
    collect_limit: int | None = None
    """Most bytes that come back, of all hosts together; None means 10 GB."""
    call: Call | None = None
    """Function that `command` calls, if any."""
    options: tuple[tuple[str, ...], ...] = ()
    """Words of each option that was given, for the record of the job; without variables of the workers."""
    name: str | None = None
    """The user's name for the job, for `hvlaunch jobs` and similar commands."""
    detach: DetachPolicy = "never"
    """When the driver leaves its terminal."""
    allocation: str | None = None
    """The scheduler's job that provides the hosts, such as `Slurm job 123`; None if the user named them."""
    np: int | None = None
    """Number of workers; None means one in every slot. With `elastic`, the first round waits for this many slots."""
    map_by: MapPolicy = "slot"
    """Distribution of workers over hosts."""
    visible_gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """GPUs for the workers of a host (CUDA_VISIBLE_DEVICES), by host; other hosts show all their GPUs."""
    bind: Bind = "none"
    """Processors and memory to which each worker is bound."""
    gpus_per_worker: int | None = None
    """Number of GPUs that each worker sees; None shows all."""
    check: bool = False
    """Compare the hosts before workers start; a fault that would stop the job fails its host."""
    queued: QueuedAs | None = None
    """Place in the queue that has started the job; None for a job that its user has started."""
    leases: LeaseOptions | None = None
    """Leases without which no worker starts; None takes none."""
    skip_bad_hosts: bool = False
    """Let a static job start without failed hosts, if the others have enough slots."""
    ready_port: int | None = None
    """Port of the job's service on rank 0's host: the service is ready when it takes a connection."""
    ready_url: str | None = None
    """Address of the service as rank 0's host sees it: the service is ready when it answers without an error."""
    end_with_rank: int | None = None
    """Rank whose end ends the job; None waits for all ranks."""
    elastic: ElasticOptions | None = None
    """Settings of an elastic job; None for a static job."""
    roles: tuple[Role, ...] = ()
    """The roles of a job whose workers have several commands. Ranks of the job count through them, in this order."""
    role_limit: RestartLimit = field(default_factory=RestartLimit)
    """Limit of restarts for each worker, or each role, that is restarted."""
    end_with_role: str | None = None
    """Role whose end ends the job; None waits for all roles."""
    slots_per_host: int | None = None
    """Slots of hosts without a number of their own; None counts the host's GPUs."""
    force_slots: bool = False
    """Accept numbers of slots that look like a mistake."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for the workers: forwarded ones, then --env-file, then -x."""
    stdin: StdinPolicy = "0"
    """Ranks that read hvlaunch's stdin."""
    output_dir: Path | None = None
    """Directory for one file of output per stream and rank."""
    console: ConsoleOptions = field(default_factory=ConsoleOptions)
    """Options of the console."""
    events: Path | None = None
    """File for one JSON object per event."""
    report: Path | None = None
    """File for the failure report, JSON or HTML by its suffix."""
    notify: tuple[str, ...] = ()
    """Commands, web addresses and mailboxes (`mail:ADDRESS`) that get word of the job."""
    notify_on: tuple[str, ...] = ("failed", "hung", "recovered", "done")
    """Events of which they get word."""
    network_interfaces: tuple[str, ...] = ()
    """Interfaces to use without probing; each host uses the first that has an address."""
    nccl: NcclPolicy = "off"
    """Choice of adapters for NCCL and Gloo."""
    rank_order: RankOrder = "given"
    """Order of the hosts by rank."""
    horovod: bool = False
    """Open the rendezvous' Horovod scopes to the job's hosts without a token, for Horovod's own workers."""
    relay: RelayPolicy = "auto"
    """When agents relay to the rendezvous over SSH."""
    rendezvous_port: int = 0
    """Port of the driver's rendezvous; 0 picks a free port."""
    rendezvous_bind: str | None = None
    """Address of the rendezvous besides the loopback; None picks an address that the hosts can reach."""
    worker_ports: tuple[int, int] | None = None
    """Lowest and highest port for workers; None means any port."""
    ssh: SSHOptions = field(default_factory=SSHOptions)
    """SSH settings for all hosts."""
    pool: str | None = None
    """Warm pool with connections to the hosts; None makes new connections."""
    mpi: MPIOptions | None = None
    """Launcher that starts the workers; None means hvlaunch itself."""
    remote_python: str | None = None
    """Interpreter for the agents, unless a host has its own."""
    start_timeout: float = 60.0
    """Maximum time to connect to all hosts."""
    lease: float = 10.0
    """Seconds of silence after which driver and agent give each other up; LONG_LEASE by default for elastic and detached jobs."""
    reconnect_timeout: float = RECONNECT_TIMEOUT
    """Seconds for which an agent without a connection waits before it ends its workers; at most the lease."""
    spill: int = 64 << 20
    """Bytes of output that a host keeps in a file while its connection is lost."""
    fsync: bool = False
    """Sync records for a successor to the disk: they then survive a loss of power of this machine."""
    grace: float = 10.0
    """Seconds between the first signal to a worker and SIGKILL."""
    settle: float = 2.0
    """Seconds for which a probable consequence waits for its cause before the other workers are stopped."""
    hang_timeout: float = 60.0
    """Seconds without output and progress after which a job hangs; 0 means never."""
    on_hang: OnHang = "warn"
    """Response to a hang. A static job ends, because it can't be restarted."""
    verbose: bool = False
    """Print details of hosts and rounds."""

    @property
    def is_bound(self) -> bool:
        """True if agents deal out processors or GPUs. A launcher binds its processes itself."""
        return self.mpi is None and (self.bind != "none" or self.gpus_per_worker is not None or self.has_gpus)

    @property
    def has_gpus(self) -> bool:
        """True if a role deals out GPUs."""
        return any(role.gpus is not None for role in self.roles)


class PortHolder(NamedTuple):
    """A program of another user that listens on rank 0's MASTER_PORT."""

    port: int
    user: str | None = None
    """Name of the user; None if the host's /etc/passwd lacks it."""
    program: str | None = None
    """Name and pid of the program; None if the kernel shows them only to its user."""


class WorkerExit(NamedTuple):
    """How one worker ended."""

    rank: int
    host: str
    code: int | None = None
    """Exit code; None if a signal ended the worker or it never started."""
    signal: int | None = None
    """Signal that ended the worker."""
    when: float = 0.0
    """Seconds since the start of the job's first workers."""
    max_rss: int | None = None
    """Largest resident size in bytes."""
    oom_killed: bool = False
    """True if the kernel reports that its out-of-memory killer ended the worker."""
    port_taken_by: int | None = None
    """The uid of a user whose program listens on MASTER_PORT in place of this worker, rank 0."""
    port_holder: PortHolder | None = None
    """Details of that program."""
    stopped: bool = False
    """True if hvlaunch stopped the worker after another failure or an interrupt."""
    error_file: str | None = None
    """Content of TORCHELASTIC_ERROR_FILE."""
    not_started: str | None = None
    """Reason why it could not start; `code` is then 126 or 127, as in a shell."""
    look: Look = "silent"
    """Classification by the worker's last output."""
    was_told: bool = False
    """True if hvlaunch had asked the worker to end."""
    role: str = ""
    """Its role and its rank there, `gen:1`; empty in jobs without roles."""

    @property
    def exit_code(self) -> int:
        """The code as a shell counts it, or 128 + the signal."""
        if self.signal is not None:
            return 128 + self.signal
        return self.code if self.code is not None else 1

    @property
    def ok(self) -> bool:
        return self.code == 0


class JobResult(NamedTuple):
    """How a job ended."""

    exit_code: int
    elapsed: float
    """Seconds since the start of the job's first workers; 0 without workers."""
    exits: tuple[WorkerExit, ...] = ()
    """Ends of the last round's workers."""
    failure: WorkerExit | None = None
    """The worker that caused the failure.

    Usually the first to fail, but a later or stopped worker if only that worker had an error of its own.
    """
    first_victim: WorkerExit | None = None
    """The first failing worker, if it is not `failure`."""
    never_started: tuple[int, ...] = ()
    """Ranks of the last round without a report of their start."""
    error: Problem | None = None
    """A cause other than a worker, such as a lost host."""
    interrupted: int | None = None
    """Signal by which the user ended the job."""
    size: int = 0
    """Number of workers in the last round, if the controller knows it."""
