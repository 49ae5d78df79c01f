"""Whether there is IPv6 here to test with."""

import socket

__all__ = ["has_ipv6"]


def has_ipv6() -> bool:
    """Whether ::1 is this machine's. In many containers it is not, though the kernel has IPv6."""
    if not socket.has_dualstack_ipv6():
        return False
    with socket.socket(socket.AF_INET6) as own:
        try:
            own.bind(("::1", 0))
        except OSError:
            return False
    return True
