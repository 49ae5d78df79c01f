"""File descriptors: how many connections this process can have."""

import resource

__all__ = ["room_for"]

_RESERVE = 256  # for all else that the process does


def room_for(connections: int) -> bool:
    """Whether there can be so many connections; the soft limit is raised towards the hard one where that is needed.

    Only then, since every process that is started later inherits it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _RESERVE
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return True
    if hard != resource.RLIM_INFINITY and wanted > hard:
        return False
    raised = max(wanted, 2 * soft)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (raised if hard == resource.RLIM_INFINITY else min(raised, hard), hard)
    )
    return True
