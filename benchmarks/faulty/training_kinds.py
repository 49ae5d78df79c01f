"""The faults that training must survive: what is done, and for how long it is so (seconds, from and to) before it is undone.

Those that take their time by themselves last for no more.
"""

from benchmarks.faulty import doings as do
from benchmarks.faulty.scene import Scene

__all__ = ["KINDS"]

Lasts = tuple[float, float]
FOR_GOOD = float("inf")
AT_ONCE: Lasts = (0.0, 0.0)
LEASE = 8.0  # as in soak.py

KINDS: dict[str, tuple[do.Play, Lasts]] = {
    "a worker is killed": (do.killed(Scene.workers), AT_ONCE),
    "a worker crashes (SIGSEGV)": (do.killed(Scene.workers, "SEGV"), AT_ONCE),
    "a worker is stopped (SIGSTOP)": (do.killed(Scene.workers, "STOP"), AT_ONCE),
    "a worker pauses for 1 to 3 s": (do.paused(Scene.workers, 1.0, 3.0), AT_ONCE),
    "an agent is killed": (do.killed(Scene.agents), AT_ONCE),
    "an agent is stopped": (do.killed(Scene.agents, "STOP"), AT_ONCE),
    "an agent pauses for 1 to 5 s": (do.paused(Scene.agents, 1.0, 5.0), AT_ONCE),
    "a guardian is killed": (do.killed(Scene.guardians), AT_ONCE),
    "all of Python on a host is killed": (do.killed(Scene.pythons, every=True), AT_ONCE),
    "the sshd of a connection is killed": (do.killed(Scene.sessions), AT_ONCE),
    "the sshd of a connection is stopped": (do.killed(Scene.sessions, "STOP"), AT_ONCE),
    "a host is switched off": (do.power_off(), (0.0, LEASE + 5.0)),
    "a host is switched off and on": (do.power_off(restore_after=0.0), AT_ONCE),
    "a host's link is cut for longer than the lease": (
        do.cut(FOR_GOOD, FOR_GOOD),
        (LEASE + 1.0, LEASE + 8.0),
    ),
    "a host's link is cut for less than 0.9 of the lease": (do.cut(0.2, 0.9 * LEASE), AT_ONCE),
    "a host's link flaps for 5 s": (do.flap(5.0), AT_ONCE),
    "the driver's link is cut for less than 0.9 of the lease": (do.cut_driver(0.2, 0.9 * LEASE), AT_ONCE),
    "packets are 100 ms late for 4 s": (do.late(100.0, 4.0), AT_ONCE),
    "a tenth of all packets is lost for 5 s": (
        do.filter_packets("INPUT -m statistic --mode random --probability 0.1 -j DROP", seconds=5.0),
        AT_ONCE,
    ),
    "connections are reset": (
        do.filter_packets("INPUT -p tcp -j REJECT --reject-with tcp-reset", seconds=1.0),
        AT_ONCE,
    ),
    "two hosts can't reach each other for 10 s": (
        do.filter_packets("INPUT -s {other} -j DROP", "OUTPUT -d {other} -j DROP", seconds=10.0),
        AT_ONCE,
    ),
    "the host is frozen for 1 to 5 s": (do.freeze(None, FOR_GOOD), (1.0, 5.0)),
    "the host is frozen for longer than the lease": (do.freeze(None, FOR_GOOD), (LEASE + 1.0, LEASE + 6.0)),
    "the workers are frozen for 1 to 5 s": (do.freeze(Scene.workers, FOR_GOOD), (1.0, 5.0)),
    "a host has a tenth of a processor for 5 s": (
        do.limited("cpu", seconds=5.0, cpu_cfs_quota_us="10000"),
        AT_ONCE,
    ),
    "/tmp is full": (do.remounted("/tmp", "size=64k", fill=True), (1.0, 5.0)),
    "a host leaves the pool, and comes back": (do.leaves_the_pool(0.0, 8.0), AT_ONCE),
    "the discovery script fails": (do.discovery("exit 3", 4.0), AT_ONCE),
    "the discovery script prints without end": (do.discovery("exec yes", 4.0), AT_ONCE),
}
