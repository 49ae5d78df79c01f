"""What all ways to the GPUs have in common."""

from __future__ import annotations

__all__ = ["THROTTLES", "NoGpus"]

THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Of nvmlDeviceGetCurrentClocksThrottleReasons, less those that are none: idle, and clocks that somebody has set."""


class NoGpus(Exception):
    """There is no way to ask for them."""
