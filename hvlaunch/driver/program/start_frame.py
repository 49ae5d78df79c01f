"""The `start` frame: the workers of a round on one host, with their environment (docs/reference/environment.md)."""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hvlaunch.agent.quick import dumps
from hvlaunch.driver.program import Keys
from hvlaunch.engine.actions import HostAddress, HostNetwork, Start
from hvlaunch.engine.hosts import LOOPBACK, SOCKETS
from hvlaunch.hosts.local import may_be_taken_over
from hvlaunch.hosts.placement import Launch, Placement
from hvlaunch.job import ElasticOptions, JobSpec, Role, Templates
from hvlaunch.rendezvous.messages import worker_id

if TYPE_CHECKING:
    from hvlaunch.hosts.roles import RoleAddresses

__all__ = [
    "default_env",
    "elastic_env",
    "environment_env",
    "gets_stdin",
    "gpus_by_slot",
    "identity_env",
    "role_env",
    "shared_env",
    "start_frame",
]


def start_frame(start: Start, spec: JobSpec, *, job_id: str, keys: Keys) -> tuple[dict[str, Any], bytes]:
    """Return header and body. The body holds the command and the environment, neither of which is on a command line."""
    role = None if start.launches[0].role is None else spec.roles[start.launches[0].role.number]
    gpus = spec.gpus_per_worker if role is None else role.gpus
    # Common values stand in the body once: a host may have hundreds of workers.
    workers = [
        {
            "slot": launch.slot,
            "start": launch.start,
            "env": {
                **identity_env(
                    launch.place if launch.role is None else launch.role.place,
                    worker=worker_id(start.host, launch.slot, launch.start),
                    job_id=job_id,
                    round_number=start.round,
                    token=keys.token,
                    scratch=start.facts.scratch,
                ),
                **elastic_env(spec.elastic),
                **gpu_env(gpus or (None if role is not None else gpus)),
                **({} if role is None else role_env(launch, role, len(spec.roles))),
            },
            # A worker that is restarted would get the middle of it.
            "stdin": gets_stdin(launch.place, spec) and (role is None or launch.start == 0),
        }
        for launch in start.launches
    ]
    # Between two drivers another user of this machine could take the rendezvous' port, and would be sent the token: TLS
    # proves the server's identity.
    is_sealed = start.facts.peer_address is None and may_be_taken_over(spec)
    shared = shared_env(
        start.network, spec.env, keys.certificate, spec.worker_ports, spec.lease, is_sealed=is_sealed
    )
    if start.host in spec.visible_gpus:
        shared["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.visible_gpus[start.host]))
    if spec.leases is not None and spec.leases.slots is None:
        leased = start.facts.leased if spec.leases.given is None else spec.leases.given.get(start.host)
        if leased is not None:
            shared["CUDA_VISIBLE_DEVICES"] = ",".join(leased)
    if role is not None:
        from hvlaunch.hosts.roles import RoleAddresses  # noqa: PLC0415 (few jobs have roles)

        by_host = {name: (address, ports) for name, address, _, ports in start.job_hosts}
        addresses = RoleAddresses(spec.roles, by_host)
        shared.update({name: text for name, text in addresses.variables().items() if len(text) < _LONGEST})
        _fill_in(workers, role.templates, start, keys.secret, addresses)
    elif spec.templates is not None:
        _fill_in(workers, spec.templates, start, keys.secret)
    first, last = {}, {}
    if (environment := start.facts.environment) is not None:
        shared.update(environment_env(environment))
        first["PATH"] = f"{environment}/bin"
    if start.facts.sources:
        first["PYTHONPATH"] = ":".join(start.facts.sources)
    if start.facts.library is not None:
        last["PYTHONPATH"] = start.facts.library
    body: dict[str, Any] = {
        "argv": spec.command,
        "cwd": start.facts.directory,
        "defaults": default_env(
            start.facts.cpus, len(start.launches) if role is None else start.launches[0].place.local_size
        ),
        "env": shared,
        "result": spec.call is not None,
        "workers": workers,
        **({"first": first} if first else {}),
        **({"last": last} if last else {}),
    }
    if spec.elastic is not None and spec.elastic.preload:
        from hvlaunch.driver.program import standby_program  # noqa: PLC0415 (few jobs preload modules)

        body["preload"] = {"modules": spec.elastic.preload, "program": standby_program()}
    if spec.is_bound:
        body["bind"] = {
            "mode": spec.bind,
            "gpus_per_worker": spec.gpus_per_worker,
            "slots": _sharers(start, spec),
        }
        if spec.has_gpus:
            body["bind"]["gpus"] = gpus_by_slot(spec.roles, start.host)
    return {"type": "start", "round": start.round}, dumps(body).encode("ascii")


def _fill_in(
    workers: Sequence[dict[str, Any]],
    templates: Templates,
    start: Start,
    secret: str,
    roles: "RoleAddresses | None" = None,
) -> None:
    """Give each worker its own command, and the variables with places."""
    from hvlaunch.hosts.templates import Expansion, Neighbour, WorkerPlace  # noqa: PLC0415 (few jobs have places)

    network = start.network
    # Without hosts the worker starts for a later round (hvlaunch.torch.elastic), whose hosts nobody knows yet.
    hosts = [Neighbour(name, address, ports) for name, address, _, ports in network.hosts] or [
        Neighbour(start.host, network.master_addr, (0,) * len(templates.ports))
    ] * max(launch.place.group_size for launch in start.launches)
    for worker, launch in zip(workers, start.launches, strict=True):
        at, own_ports = launch.place, tuple[object, ...]()
        if roles is not None and launch.role is not None:
            at, own_ports = launch.role.place, roles.ports(launch.role.name, launch.role.place.rank)
            hosts = [Neighbour(*host) for host in roles.hosts(launch.role.name)]
        expansion = Expansion(
            templates,
            WorkerPlace(
                at,
                master_addr=network.master_addr,
                master_port=network.master_port,
                hosts=tuple(hosts),
                scratch=start.facts.scratch,
                secret=secret,
                of_role=None if roles is None else roles.value,
                own_ports=own_ports,
            ),
            start.facts.gpus if templates.counts_gpus else None,
        )
        worker["argv"] = expansion.command()
        worker["env"].update(expansion.variables())


def gets_stdin(place: Placement, spec: JobSpec) -> bool:
    """True if the worker reads the driver's stdin. Other workers, and those of elastic jobs, read an empty stdin."""
    if spec.elastic is not None:
        return False
    return spec.stdin == "all" or (spec.stdin == "0" and place.rank == 0)


_LONGEST = 130_000
"""Characters for the names of nearly 2,000 hosts: a variable has at most 131,072 bytes."""


def default_env(cpus: int, local_size: int) -> dict[str, str]:
    """Return the defaults of variables that neither the user nor the host has set."""
    return {"OMP_NUM_THREADS": str(max(1, cpus // local_size)), "PYTHONUNBUFFERED": "1"}


def gpu_env(per_worker: int | None) -> dict[str, str]:
    """Return the variables by which libraries count the worker's own GPUs from 0, as with torchrun's --virtual-local-rank."""
    # NCCL's groups of torch 2.15 take the GPU of LOCAL_RANK, and so do most scripts: any other number is out of range.
    return {} if per_worker is None else {"LOCAL_RANK": "0", "HVLAUNCH_OWN_GPUS": str(per_worker)}


def role_env(launch: Launch, role: Role, roles: int) -> dict[str, str]:
    """Return the variables of a role's worker that depend on its role and the number of its start."""
    number = 0 if launch.role is None else launch.role.number
    # Groups of two roles, or of a role before and after its restart, must not meet at the rendezvous. A worker that is restarted
    # alone stays in its group.
    begins = launch.start if role.policy == "restart-all" else 0
    return {
        "ROLE_NAME": role.name,
        "HVLAUNCH_ROUND": str(begins * roles + number),
        "TORCHELASTIC_RESTART_COUNT": str(launch.start),
    }


def gpus_by_slot(roles: Sequence[Role], host: str) -> list[int | None]:
    """Return the number of GPUs for each slot of the host; None for workers that see all."""
    counts = (dict(role.workers).get(host, 0) for role in roles)
    return [role.gpus for role, count in zip(roles, counts, strict=True) for _ in range(count)]


def environment_env(path: str) -> dict[str, str]:
    """Return the variables by which programs find the environment that --setup has built on the host."""
    return {"VIRTUAL_ENV": path, "UV_PROJECT_ENVIRONMENT": path}


def _sharers(start: Start, spec: JobSpec) -> int:
    """Return the number of workers that share the host: in an elastic job, the most that the host can ever have."""
    here = max(max(launch.slot + 1, launch.place.local_size) for launch in start.launches)
    if spec.elastic is None:
        return here
    # A later round may fill the other slots, and the masks of earlier workers stay.
    slots = next((host.slots for host in spec.hosts if host.name == start.host), None)
    return max(here, slots or spec.slots_per_host or spec.elastic.per_host or 1)


class Fingerprinted(Protocol):
    """The certificate of the rendezvous, by which workers know it."""

    @property
    def fingerprint(self) -> str: ...


def shared_env(
    network: HostNetwork,
    user_env: Mapping[str, str],
    certificate: Fingerprinted,
    ports: tuple[int, int] | None = None,
    lease: float = 0.0,
    *,
    is_sealed: bool = False,
) -> dict[str, str]:
    """Return the common variables of a host's workers. The user's own address, port and interface take precedence.

    `ports` are the lowest and highest port for workers; None allows any. `lease` is the time in seconds for which a worker
    repeats a request to a silent rendezvous. `is_sealed`: use TLS on a loopback too. The certificate is made only if used.
    """
    env = {"MASTER_ADDR": network.master_addr, "MASTER_PORT": str(network.master_port)}
    if network.variables is not None:
        env.update(network.variables)
    elif network.interface is not None:
        env.update(dict.fromkeys(SOCKETS, network.interface))
    # The user's variables after those of the network, and before hvlaunch's own, which workers depend on.
    env.update(user_env)
    if network.address:
        env["HVLAUNCH_ADDRESS"] = network.address
    if hosts := _hosts(network.hosts):
        env["HVLAUNCH_HOSTS"] = hosts
    if ports is not None:
        env["HVLAUNCH_WORKER_PORTS"] = "{}-{}".format(*ports)
    env["HOROVOD_CONTROLLER"] = env["HOROVOD_CPU_OPERATIONS"] = "gloo"
    if network.rendezvous is not None:
        address, port = network.rendezvous
        host = _in_brackets(address)
        # On a loopback no other machine can listen in: a plain connection saves the certificate.
        if address == LOOPBACK and not is_sealed:
            env["HVLAUNCH_RENDEZVOUS"] = f"http://{host}:{port}"
        else:
            env["HVLAUNCH_RENDEZVOUS"] = f"https://{host}:{port}"
            env["HVLAUNCH_RENDEZVOUS_CERT"] = certificate.fingerprint
        env["HVLAUNCH_LEASE"] = f"{lease:g}"
        env["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = address
        env["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
    return env


@functools.lru_cache(maxsize=1)
def _hosts(hosts: tuple[HostAddress, ...]) -> str:
    """Return the hosts of a round as text; empty if too long for a variable."""
    text = ",".join(f"{name}={_in_brackets(address)}:{workers}" for name, address, workers, _ in hosts)
    return text if len(text) < _LONGEST else ""


def _in_brackets(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def identity_env(
    place: Placement, *, worker: str, job_id: str, round_number: int, token: str, scratch: str
) -> dict[str, str]:
    """Return the worker's own variables. `worker` is its id, `scratch` the job's private directory on its host."""
    ranks = {
        "RANK": place.rank,
        "SIZE": place.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_SIZE": place.local_size,
        "CROSS_RANK": place.cross_rank,
        "CROSS_SIZE": place.cross_size,
    }
    torch = {
        "RANK": place.rank,
        "WORLD_SIZE": place.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "GROUP_RANK": place.group_rank,
        "GROUP_WORLD_SIZE": place.group_size,
        "NODE_RANK": place.group_rank,
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": place.size,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": round_number,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": job_id,
        "TORCHELASTIC_ERROR_FILE": f"{scratch}/{worker.partition('/')[2].replace('/', '.')}.error.json",
    }
    identity = {
        "HVLAUNCH_JOB_ID": job_id,
        "HVLAUNCH_ROUND": round_number,
        "HVLAUNCH_HOST": place.host,
        "HVLAUNCH_WORKER": worker,
        "HVLAUNCH_TOKEN": token,
        "HVLAUNCH_SCRATCH": scratch,
        "HOROVOD_HOSTNAME": place.host,
    }
    both = {f"{prefix}_{name}": value for prefix in ("HVLAUNCH", "HOROVOD") for name, value in ranks.items()}
    return {name: str(value) for name, value in (identity | both | torch).items()}


def elastic_env(options: ElasticOptions | None) -> dict[str, str]:
    """Return the additional variables of an elastic job's worker."""
    if options is None:
        return {}
    return {
        "HVLAUNCH_ELASTIC": "1",
        "HVLAUNCH_WORKER_TIMEOUT": f"{options.worker_timeout:g}",
        "HOROVOD_ELASTIC": "1",
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts or 0),
        **({} if options.save_to is None else {"HVLAUNCH_SAVED_COMMITS": options.save_to}),
    }
