"""The HTTP key-value server of a job, its client, and progress reports of workers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvlaunch.rendezvous.client import Client
    from hvlaunch.rendezvous.telling import progress

__all__ = ["Client", "progress"]


def __getattr__(
    name: str,
) -> Any:  # imported when it is asked for: the driver, which needs no client, starts faster
    if name == "Client":
        from hvlaunch.rendezvous.client import Client  # noqa: PLC0415 (see above)

        return Client
    if name == "progress":
        from hvlaunch.rendezvous.telling import progress  # noqa: PLC0415 (see above)

        return progress
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
