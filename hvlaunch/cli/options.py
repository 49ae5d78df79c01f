"""What the command line said."""

import argparse

from hvlaunch.job import ColorPolicy, HostKeyPolicy, LauncherName, RelayPolicy, SSHClient, StdinPolicy

__all__ = ["Options"]


class Options(argparse.Namespace):
    """The flags as given; what is None was not said. `command` is the user's own, untouched."""

    np: int | None
    hosts: str | None
    hostfile: str | None
    slots_per_host: int | None
    no_scheduler: bool
    network_interfaces: list[str]
    rendezvous_relay: RelayPolicy
    rendezvous_port: int
    worker_port_range: tuple[int, int] | None
    horovod: bool
    min_np: int | None
    max_np: int | None
    host_discovery_script: str | None
    max_restarts: int | None
    spares: int | None
    cooldown: tuple[float, float] | None
    cwd: str | None
    stdin: StdinPolicy
    x: list[str]
    env_file: list[str]
    env: str | None
    output_filename: str | None
    prefix: str
    prefix_timestamp: bool
    color: ColorPolicy
    ranks: tuple[range, ...] | None
    merge: bool
    events: str | None
    verbose: bool
    quiet: bool
    ssh_port: int | None
    ssh_identity_file: str | None
    ssh_user: str | None
    ssh_config: str | None
    host_keys: HostKeyPolicy
    ssh_client: SSHClient
    connect_limit: int
    remote_python: str | None
    start_timeout: float
    lease: float
    grace: float
    launcher: LauncherName | None
    mpirun: str | None
    mpi_args: list[str]
    binding_args: list[str]
    dry_run: bool
    check_build: bool
    command: tuple[str, ...]
