"""The kinds of requests that a client can make, for what is true of all."""

from collections.abc import Callable

from hvlaunch.rendezvous.client import Client

__all__ = ["calls"]


def calls(client: Client) -> tuple[Callable[[str, str], object], ...]:
    """Each takes a scope and a key."""
    return (
        client.get,
        client.delete,
        lambda scope, key: client.put(scope, key, b""),
        lambda scope, key: client.wait(scope, key, 1),
    )
