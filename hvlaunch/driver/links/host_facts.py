"""The facts of a host, from its agent's hello."""

from collections.abc import Mapping
from typing import Any

from hvlaunch.engine.events import HostFacts

__all__ = ["host_facts"]


def host_facts(hello: Mapping[str, Any], peer_address: str | None) -> HostFacts:
    """Return the facts that the agent's `hello` tells of its host."""
    facts = hello["facts"]
    gpus = facts.get("gpus")
    return HostFacts(
        addresses={name: tuple(listed) for name, listed in facts["addresses"].items()},
        cpus=facts["cpus"],
        gpus=None if gpus is None else len(gpus),
        scratch=hello["scratch"],
        beacon_port=hello["beacon_port"],
        master_port=hello["master_port"],
        peer_address=peer_address,
        python=facts.get("python"),
        cwd_error=hello["cwd_error"],
        trouble=hello["trouble"],
        boot_id=facts.get("boot_id"),
    )
