"""Names that turn out to be one machine. Pure."""

from collections.abc import Mapping

from hvlaunch.gloo.events import HostFacts

__all__ = ["shared_machines"]


def shared_machines(facts: Mapping[str, HostFacts]) -> list[list[str]]:
    """The hosts of which several are one machine, in the order of the hosts.

    One machine has one boot id; containers on it have that too, but not each other's addresses.
    """
    found: dict[object, list[str]] = {}
    for name, told in facts.items():
        if told.boot_id is not None:
            addresses = {(one, *listed) for one, listed in told.addresses.items()}
            found.setdefault((told.boot_id, frozenset(addresses)), []).append(name)
    return [names for names in found.values() if len(names) > 1]
