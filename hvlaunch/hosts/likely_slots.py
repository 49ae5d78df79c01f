"""Numbers of slots that are most likely something else: a port, as in `-H b:2222`."""

from hvlaunch.errors import SlotsUnlikely

__all__ = ["check_slots", "unlikely"]

_MOST = 1024  # of a host that nothing is known of: more workers than that are on no host
_LEAST = 64  # never refused: many small workers on a small machine are no mistake
_PER_PROCESSOR = 8
_LOWEST_PORT = 1024  # that a user may have: a smaller number of slots is hardly a port


def unlikely(host: str, slots: int, cpus: int | None = None) -> SlotsUnlikely | None:
    """What is wrong with so many slots on a host with so many processors; None for a number that may be right."""
    if slots <= (_MOST if cpus is None else max(_LEAST, _PER_PROCESSOR * cpus)):
        return None
    noun = "processor" if cpus == 1 else "processors"
    cause = (
        f"{slots} slots are more than any host has" if cpus is None else f"{slots} slots, but {cpus} {noun}"
    )
    as_port = f"-p {slots} if that is the port of sshd, " if slots > _LOWEST_PORT else ""
    return SlotsUnlikely(cause, host=host, hint=f"{as_port}--force-slots if so many workers are meant")


def check_slots(host: str, slots: int) -> None:
    """Raises SlotsUnlikely where no host can be meant to have so many."""
    error = unlikely(host, slots)
    if error is not None:
        raise error
