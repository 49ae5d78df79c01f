"""The `start` frame: a round's workers of one host. What they share is in it once."""

from typing import Any

from hvlaunch.agent.quick import dumps
from hvlaunch.driver.program.keys import Keys
from hvlaunch.driver.program.worker_env import default_env, elastic_env, identity_env, shared_env
from hvlaunch.engine.actions import Start
from hvlaunch.hosts.local import may_be_taken_over
from hvlaunch.hosts.placement import Placement
from hvlaunch.job import JobSpec
from hvlaunch.rendezvous.round_messages import worker_id

__all__ = ["gets_stdin", "start_frame"]


def start_frame(start: Start, spec: JobSpec, *, job_id: str, keys: Keys) -> tuple[dict[str, Any], bytes]:
    """Header and body, which carries the command and all environment: none of it is on a command line."""
    workers = [
        {
            "slot": launch.slot,
            "start": launch.start,
            "env": {
                **identity_env(
                    launch.place,
                    worker=worker_id(start.host, launch.slot, launch.start),
                    job_id=job_id,
                    round_number=start.round,
                    token=keys.token,
                    scratch=start.facts.scratch,
                ),
                **elastic_env(spec.elastic),
            },
            "stdin": gets_stdin(launch.place, spec),
        }
        for launch in start.launches
    ]
    # Where another driver may come, another user of this machine could have its port before it does, and be told the token.
    is_sealed = start.facts.peer_address is None and may_be_taken_over(spec)
    shared = shared_env(
        start.network, spec.env, keys.certificate, spec.worker_ports, spec.lease, is_sealed=is_sealed
    )
    if start.host in spec.visible_gpus:
        shared["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.visible_gpus[start.host]))
    body = {
        "argv": spec.command,
        "defaults": default_env(start.facts.cpus, len(start.launches)),
        "env": shared,
        "result": spec.call is not None,
        "workers": workers,
    }
    return {"type": "start", "round": start.round}, dumps(body).encode("ascii")


def gets_stdin(place: Placement, spec: JobSpec) -> bool:
    """Whether the worker reads what the driver's stdin has; the others, and all of an elastic job, read an empty one."""
    if spec.elastic is not None:
        return False
    return spec.stdin == "all" or (spec.stdin == "0" and place.rank == 0)
