"""Names that turn out to be one machine. Pure."""

from collections.abc import Mapping

from hvlaunch.console.fold import fold_hosts
from hvlaunch.gloo.actions import Action, Say
from hvlaunch.gloo.events import HostFacts

__all__ = ["say_shared", "shared_machines"]


def say_shared(facts: Mapping[str, HostFacts]) -> list[Action]:
    """Tell the user of them."""
    return [
        Say(f"{fold_hosts(names)} are one machine, and each uses all of its slots there")
        for names in shared_machines(facts)
    ]


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
