"""The boot id: the monotonic clock and the kernel's memory are valid only within one boot."""

from pathlib import Path

__all__ = ["boot_id"]


def boot_id() -> str:
    """Return the id of this machine's boot, or "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
