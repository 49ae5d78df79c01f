"""Which start of this machine it is: its monotonic clock, and what its kernel knew, are those of one start alone."""

from pathlib import Path

__all__ = ["boot_id"]


def boot_id() -> str:
    """Changes when this machine boots; empty where it is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
