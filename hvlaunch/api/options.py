"""The options of a job as Python has them. Made of the table in hvlaunch/cli/options/table.py by `make options-page`: change that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Literal, TypedDict

__all__ = ["GivenOptions", "LauncherOptions"]


@dataclass(frozen=True, kw_only=True)
class LauncherOptions:
    """What a job is started with; None is what docs/reference/options.md says of an option that is not given."""

    hosts: str | Sequence[str] | Mapping[str, int] | None = None
    """Hosts and their slots, separated by commas. Such as `"a:4,b:4"`, `["a:4", "b:4"]` or `{"a": 4, "b": 4}`. Default: the hosts of the scheduler's job around hvlaunch, else this machine with `-np` slots."""
    hostfile: str | PathLike[str] | None = None
    """File with one host on each line."""
    pool: str | None = None
    """Warm pool whose hosts the job uses."""
    slots_per_host: int | Literal["auto", "gpu"] | None = None
    """Slots of hosts for which none are given. Default: the number of the host's GPUs, else 1."""
    force_slots: bool | None = None
    """Use numbers of slots that look like a mistake."""
    avoid_suspects: bool | None = None
    """Use hosts last that have failed in earlier jobs."""
    no_scheduler: bool | None = None
    """Ignore the scheduler's job around hvlaunch."""
    check: bool | None = None
    """Compare the hosts before the workers start."""
    skip_bad_hosts: bool | None = None
    """Continue without hosts that fail before the workers start."""
    network_interfaces: str | Sequence[str] | None = None
    """Network interfaces for the workers. Default: found by trying: each host connects to the others' addresses."""
    nccl: Literal["off", "auto"] | None = None
    """Choose the adapters for NCCL and Gloo. Default: off."""
    rank_order: Literal["given", "fabric", "measured"] | None = None
    """Order of the hosts by rank. Default: given."""
    rendezvous_relay: Literal["auto", "always", "never"] | None = None
    """How workers reach the rendezvous server. Default: auto."""
    rendezvous_port: int | None = None
    """This machine's port for the rendezvous server. Default: a free port."""
    rendezvous_bind: str | None = None
    """This machine's address for the rendezvous server. Default: this machine's addresses that its hosts can use."""
    worker_port_range: str | tuple[int, int] | None = None
    """Ports of the workers, on every host. Default: any."""
    bind: Literal["none", "numa", "socket", "core", "cache", "gpu"] | None = None
    """Processors for each worker: numa, socket, core, cache or gpu. Default: none."""
    gpus_per_worker: int | None = None
    """Number of GPUs that each worker sees. Default: all GPUs of the host."""
    lease_gpus: bool | None = None
    """Start on free GPUs alone, and keep other jobs off them."""
    lease_slots: int | None = None
    """The same for hosts without GPUs, of N slots each. Default: GPUs, with `--lease-gpus`."""
    wait: bool | None = None
    """Wait until enough GPUs or slots are free."""
    fair_wait: float | None = None
    """Time after which the job that has waited longest comes first, in seconds. Default: 600 s."""
    max_idle: str | None = None
    """Stop a job whose GPUs have all done nothing for so long. Default: no limit."""
    lease_directory: str | PathLike[str] | None = None
    """Directory of the locks on each host. Default: '/var/tmp/hvlaunch-leases'."""
    np: int | None = None
    """Number of workers. Default: one in every slot."""
    cwd: str | PathLike[str] | None = None
    """Working directory of the workers. Default: this directory."""
    sync: bool | None = None
    """Copy the project to the hosts, and start workers in the copy."""
    sync_dir: str | PathLike[str] | None = None
    """Directory to copy in place of the project; implies `--sync`."""
    sync_to: str | None = None
    """Fixed place of the copy on the hosts; implies `--sync`. Default: a place in `~/.cache`."""
    sync_limit: int | str | None = None
    """Most that a copy may have. Default: 1 GB."""
    setup: str | None = None
    """Command that builds an environment on each host."""
    setup_key: str | Sequence[str] | None = None
    """File that asks for another environment if it changes."""
    bring: str | Sequence[str] | None = None
    """Copy a file or a directory to the hosts first."""
    collect: str | Sequence[str] | None = None
    """Bring files back from the workers' directory."""
    collect_limit: int | str | None = None
    """Most that comes back, from all hosts together. Default: 10 GB."""
    preset: str | None = None
    """Start a program as it needs: vllm, ray, jax and others."""
    templates: bool | None = None
    """Fill in words such as `{rank}` of the command."""
    role: str | None = None
    """A command with workers of its own."""
    role_policy: str | None = None
    """Response to a failed worker of a role. Default: `end`."""
    role_for: str | None = None
    """Preset for a role, as `--for` for a job."""
    role_env: str | None = None
    """Environment variable for the workers of a role."""
    end_with_role: str | None = None
    """Role that ends the job when its workers have ended with 0. Default: the job ends when all roles have."""
    ready_port: int | None = None
    """Port of a service on rank 0's host."""
    ready_url: str | None = None
    """URL of a service, as on rank 0's host."""
    nproc_per_node: int | Literal["auto", "cpu", "gpu"] | None = None
    """Number of workers on each host, or gpu, auto or cpu. Default: `-np`, else one in every slot."""
    container: str | None = None
    """Run the workers in a new container of this image."""
    in_container: str | None = None
    """Run the workers in this container, which runs already."""
    mount: str | None = None
    """File or directory of the hosts for the new container. Default: DST is SRC."""
    runtime: Literal["docker", "podman", "apptainer"] | None = None
    """Program that runs the container. Default: the first that a host has; apptainer for an image that ends with `.sif`."""
    env: Mapping[str, str | int | float] | Sequence[str] | None = None
    """Environment variable for the workers. Such as `{"NAME": "value"}`, or `["NAME"]` for one that is set here."""
    env_file: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None
    """File of variables, `NAME=VALUE` on each line."""
    forward_env: Literal["all", "conda", "pip", "uv"] | None = None
    """Pass on `all` variables, or build an environment. Default: only `PATH`, `PYTHONPATH`, `NCCL_*` and some others."""
    output_dir: str | PathLike[str] | None = None
    """Directory for files with each worker's output."""
    prefix: str | None = None
    """Text before each line of a worker. Default: '[{rank}]<{stream}>: '."""
    prefix_timestamp: bool | None = None
    """Put the time before the prefix."""
    color: Literal["auto", "always", "never"] | None = None
    """Colour of prefixes, one for each rank. Default: auto."""
    ranks: str | Sequence[int] | None = None
    """Ranks whose output is shown. Default: all."""
    merge: bool | None = None
    """Print equal lines of several ranks once."""
    events: str | PathLike[str] | None = None
    """File to append a JSON object to for each event."""
    report: str | PathLike[str] | None = None
    """File for the failure report: `.json`, or `.html`."""
    notify: str | None = None
    """Send word of failures, hangs, recoveries and the end."""
    notify_on: str | None = None
    """Events for --notify. Default: failed,hung,recovered,done."""
    quiet: bool | None = None
    """Print only output, errors and failure report."""
    verbose: bool | None = None
    """Print what hvlaunch does, and its tracebacks."""
    ssh_port: int | None = None
    """Port of sshd on hosts for which none is given. Default: that of the ssh configuration, else 22."""
    ssh_identity_file: str | PathLike[str] | None = None
    """Private key to log in with."""
    ssh_user: str | None = None
    """User name on hosts for which none is given. Default: that of the ssh configuration, else yours."""
    ssh_config: str | PathLike[str] | None = None
    """Configuration file of ssh. Default: `~/.ssh/config` and the system's."""
    host_keys: Literal["strict", "accept-new", "off"] | None = None
    """What to do where known_hosts has no key. Default: strict."""
    ssh_client: Literal["paramiko", "openssh"] | None = None
    """Program that speaks ssh. Default: paramiko."""
    forward_agent: bool | None = None
    """Let programs on the hosts use your ssh agent."""
    connect_limit: int | None = None
    """Most connections made to a host at a time. Default: 8."""
    remote_python: str | None = None
    """Python >= 3.8 for hvlaunch on the hosts. Default: the path of the Python here, else python3, else python."""
    start_timeout: float | None = None
    """Time to connect to all hosts, in seconds. Default: 60 s."""
    grace: float | None = None
    """Time between asking a worker to stop and killing it, in seconds. Default: 10 s."""
    settle: float | None = None
    """Time that a failure waits for its cause, in seconds. Default: 2 s."""
    hang_timeout: float | None = None
    """Time without progress after which a job hangs, in seconds. Default: 60 s."""
    on_hang: Literal["warn", "stop", "restart"] | None = None
    """What follows when a job hangs. Default: warn."""
    lease: float | None = None
    """Silence after which hvlaunch and a host give each other up, in seconds. Default: 10 s."""
    reconnect_timeout: float | None = None
    """Time that a host waits for a connection that was lost, in seconds. Default: 5 s."""
    spill: int | str | None = None
    """Output that a host keeps while its connection is lost. Default: 64M."""
    end_with_rank: int | None = None
    """Rank that ends the job when it exits. Default: the job ends when all ranks have."""
    min_np: int | None = None
    """Least number of workers of an elastic job. Default: `-np`, else 1."""
    max_np: int | None = None
    """Largest number of workers. Default: one in every slot."""
    host_discovery_script: str | None = None
    """Command that prints the current hosts."""
    max_restarts: int | None = None
    """Number of failures that do not end the job. Default: no limit."""
    spares: int | None = None
    """Workers that wait to replace a failed one. Default: 0."""
    replicas: int | None = None
    """Copies of each host's commits on other hosts. Default: 1."""
    save_to: str | PathLike[str] | None = None
    """Directory on disk for commits. Default: none."""
    save_every: float | None = None
    """Time between two saves to --save-to, in seconds. Default: 600 s."""
    preload: str | None = None
    """Modules that are imported before a worker restarts."""
    evict_slow: str | None = None
    """Move the workers of a slow host to a spare."""
    cooldown: tuple[float, float] | None = None
    """How long a failing host is excluded, in seconds. Default: for good."""
    elastic_timeout: float | None = None
    """Time to wait for enough slots, in seconds. Default: 600 s."""
    reset_timeout: float | None = None
    """Time to leave a round that has ended, in seconds. Default: 60 s."""
    restart_window: float | None = None
    """Time that failures count for `--max-restarts`, in seconds. Default: 3600 s."""
    worker_timeout: float | None = None
    """Time that a worker may be silent, in seconds. Default: 30 s."""
    suspect_after: float | None = None
    """Silence of a host after which the others go on without it, in seconds. Default: 1.5 s."""
    commit_timeout: float | None = None
    """Time that a round may last without a commit, in seconds. Default: no limit."""
    drain_timeout: float | None = None
    """Time to a commit where a host leaves, in seconds. Default: 30 s."""
    exit_grace: float | None = None
    """Time for others to end when one worker is done, in seconds. Default: 300 s."""
    discovery_interval: float | None = None
    """Time between two looks for changed hosts, in seconds. Default: 1 s."""
    discovery_timeout: float | None = None
    """Time for the discovery script to end, in seconds. Default: 30 s."""
    nnodes: int | str | None = None
    """Number of hosts to use, or the fewest and the most. Default: all hosts."""
    tee: Literal["0", "1", "2", "3"] | None = None
    """Streams to show and to keep in files."""
    redirects: Literal["0", "1", "2", "3"] | None = None
    """Streams to keep in files, and not to show."""
    include: str | None = None
    """Hosts to use, perhaps with the numbers of their GPUs."""
    exclude: str | None = None
    """Hosts not to use, or GPUs of hosts by number."""
    map_by: str | None = None
    """How workers are dealt out to hosts: slot, node or ppr:N:node. Default: slot."""
    horovod: bool | None = None
    """The command uses Horovod (`hvd.init`)."""
    fusion_threshold_mb: int | None = None
    """Most that tensors sent at once may have, in MB. Default: 128."""
    cycle_time_ms: float | None = None
    """Time between two looks for tensors, in ms. Default: 1."""
    cache_capacity: int | None = None
    """Most tensors whose names are cached. Default: 1024."""
    hierarchical_allreduce: bool | None = None
    """Allreduce within hosts, then between them."""
    hierarchical_allgather: bool | None = None
    """Allgather within hosts, then between them."""
    torus_allreduce: bool | None = None
    """Allreduce in two rings at once."""
    autotune: bool | None = None
    """Find the best of these while training."""
    autotune_log_file: str | None = None
    """File for what autotune finds. Default: none."""
    autotune_warmup_samples: int | None = None
    """Samples that autotune skips. Default: 3."""
    autotune_steps_per_sample: int | None = None
    """Steps of one sample. Default: 10."""
    autotune_bayes_opt_max_samples: int | None = None
    """Most samples that autotune takes. Default: 20."""
    autotune_gaussian_process_noise: float | None = None
    """Noise of a sample that autotune expects. Default: 0.8."""
    timeline_filename: str | None = None
    """File for a timeline of all that Horovod does. Default: none."""
    timeline_mark_cycles: bool | None = None
    """Mark cycles in the timeline."""
    stall_check: bool | None = None
    """Look for ranks that wait for others."""
    stall_check_warning_time_seconds: int | None = None
    """Wait after which Horovod warns, in seconds. Default: 60."""
    stall_check_shutdown_time_seconds: int | None = None
    """Wait after which Horovod ends the worker, in seconds. Default: 0, which is never."""
    mpi_threads_disable: bool | None = None
    """Use one thread with MPI."""
    num_nccl_streams: int | None = None
    """NCCL streams. Default: 1."""
    thread_affinity: int | None = None
    """Processor of Horovod's thread. Default: any processor."""
    gloo_timeout_seconds: int | None = None
    """Time that workers wait for each other, in seconds. Default: 30."""
    log_level: Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"] | None = None
    """What Horovod's library logs. Default: WARNING."""
    log_with_timestamp: bool | None = None
    """Time in each line of Horovod's log."""
    tcp: bool | None = None
    """Let NCCL use TCP, and no InfiniBand."""
    disable_cache: bool | None = None
    """Nothing, for horovodrun's sake: there is no cache."""
    job_name: str | None = None
    """The job's name, for `hvlaunch jobs` and similar commands."""
    config_file: str | None = None
    """File of options, as YAML or TOML."""
    profile: str | None = None
    """Profile in the files of options to use as well."""
    isolated: bool | None = None
    """Ignore variables, and files that are not named."""


class GivenOptions(TypedDict, total=False):
    """The same, as keywords of a call."""

    hosts: str | Sequence[str] | Mapping[str, int] | None
    hostfile: str | PathLike[str] | None
    pool: str | None
    slots_per_host: int | Literal["auto", "gpu"] | None
    force_slots: bool | None
    avoid_suspects: bool | None
    no_scheduler: bool | None
    check: bool | None
    skip_bad_hosts: bool | None
    network_interfaces: str | Sequence[str] | None
    nccl: Literal["off", "auto"] | None
    rank_order: Literal["given", "fabric", "measured"] | None
    rendezvous_relay: Literal["auto", "always", "never"] | None
    rendezvous_port: int | None
    rendezvous_bind: str | None
    worker_port_range: str | tuple[int, int] | None
    bind: Literal["none", "numa", "socket", "core", "cache", "gpu"] | None
    gpus_per_worker: int | None
    lease_gpus: bool | None
    lease_slots: int | None
    wait: bool | None
    fair_wait: float | None
    max_idle: str | None
    lease_directory: str | PathLike[str] | None
    np: int | None
    cwd: str | PathLike[str] | None
    sync: bool | None
    sync_dir: str | PathLike[str] | None
    sync_to: str | None
    sync_limit: int | str | None
    setup: str | None
    setup_key: str | Sequence[str] | None
    bring: str | Sequence[str] | None
    collect: str | Sequence[str] | None
    collect_limit: int | str | None
    preset: str | None
    templates: bool | None
    role: str | None
    role_policy: str | None
    role_for: str | None
    role_env: str | None
    end_with_role: str | None
    ready_port: int | None
    ready_url: str | None
    nproc_per_node: int | Literal["auto", "cpu", "gpu"] | None
    container: str | None
    in_container: str | None
    mount: str | None
    runtime: Literal["docker", "podman", "apptainer"] | None
    env: Mapping[str, str | int | float] | Sequence[str] | None
    env_file: str | PathLike[str] | Sequence[str | PathLike[str]] | None
    forward_env: Literal["all", "conda", "pip", "uv"] | None
    output_dir: str | PathLike[str] | None
    prefix: str | None
    prefix_timestamp: bool | None
    color: Literal["auto", "always", "never"] | None
    ranks: str | Sequence[int] | None
    merge: bool | None
    events: str | PathLike[str] | None
    report: str | PathLike[str] | None
    notify: str | None
    notify_on: str | None
    quiet: bool | None
    verbose: bool | None
    ssh_port: int | None
    ssh_identity_file: str | PathLike[str] | None
    ssh_user: str | None
    ssh_config: str | PathLike[str] | None
    host_keys: Literal["strict", "accept-new", "off"] | None
    ssh_client: Literal["paramiko", "openssh"] | None
    forward_agent: bool | None
    connect_limit: int | None
    remote_python: str | None
    start_timeout: float | None
    grace: float | None
    settle: float | None
    hang_timeout: float | None
    on_hang: Literal["warn", "stop", "restart"] | None
    lease: float | None
    reconnect_timeout: float | None
    spill: int | str | None
    end_with_rank: int | None
    min_np: int | None
    max_np: int | None
    host_discovery_script: str | None
    max_restarts: int | None
    spares: int | None
    replicas: int | None
    save_to: str | PathLike[str] | None
    save_every: float | None
    preload: str | None
    evict_slow: str | None
    cooldown: tuple[float, float] | None
    elastic_timeout: float | None
    reset_timeout: float | None
    restart_window: float | None
    worker_timeout: float | None
    suspect_after: float | None
    commit_timeout: float | None
    drain_timeout: float | None
    exit_grace: float | None
    discovery_interval: float | None
    discovery_timeout: float | None
    nnodes: int | str | None
    tee: Literal["0", "1", "2", "3"] | None
    redirects: Literal["0", "1", "2", "3"] | None
    include: str | None
    exclude: str | None
    map_by: str | None
    horovod: bool | None
    fusion_threshold_mb: int | None
    cycle_time_ms: float | None
    cache_capacity: int | None
    hierarchical_allreduce: bool | None
    hierarchical_allgather: bool | None
    torus_allreduce: bool | None
    autotune: bool | None
    autotune_log_file: str | None
    autotune_warmup_samples: int | None
    autotune_steps_per_sample: int | None
    autotune_bayes_opt_max_samples: int | None
    autotune_gaussian_process_noise: float | None
    timeline_filename: str | None
    timeline_mark_cycles: bool | None
    stall_check: bool | None
    stall_check_warning_time_seconds: int | None
    stall_check_shutdown_time_seconds: int | None
    mpi_threads_disable: bool | None
    num_nccl_streams: int | None
    thread_affinity: int | None
    gloo_timeout_seconds: int | None
    log_level: Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"] | None
    log_with_timestamp: bool | None
    tcp: bool | None
    disable_cache: bool | None
    job_name: str | None
    config_file: str | None
    profile: str | None
    isolated: bool | None
