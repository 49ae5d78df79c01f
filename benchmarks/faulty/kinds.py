"""All kinds of faults, by name."""

from benchmarks.faulty import (
    kinds_of_connections,
    kinds_of_console,
    kinds_of_ends,
    kinds_of_hosts,
    kinds_of_links,
    kinds_of_processes,
)
from benchmarks.faulty.kind import Kind

__all__ = ["KINDS"]

KINDS: dict[str, Kind] = {
    kind.name: kind
    for module in (
        kinds_of_processes,
        kinds_of_ends,
        kinds_of_connections,
        kinds_of_links,
        kinds_of_hosts,
        kinds_of_console,
    )
    for kind in module.KINDS
}
