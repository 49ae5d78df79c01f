"""Faults of networks: a host's link and the driver's, cut for a while or for good, and links that are bad."""

from benchmarks.faulty import doings as do
from benchmarks.faulty.kind import (
    ANY,
    LATE,
    LEASE,
    LOST,
    OWN,
    PROCESS,
    RELAY,
    RESTARTS,
    WELL,
    Kind,
    Must,
    goes_on,
    lost,
)
from benchmarks.faulty.scene import Scene

__all__ = ["KINDS"]

STARTED = ("starting", "running")
IN_TIME = 0.8 * LEASE
OURS = (OWN, RELAY, RESTARTS, PROCESS)
"""Jobs whose connections are hvlaunch's own: ssh's, mpirun's and a jump host's send again when they like, which may be late."""
FOR_GOOD = do.FOR_GOOD
GONE = "silent for|no answer|not answer|timed out|time-out|could not|can't|unreachable|within"
NONE_STARTED = "the agents of only 0 of 3 hosts"
"""A launcher starts nothing before all of its daemons are there: it alone knows which one does not answer."""


def all_lost(words: str = "silent for") -> Must:
    return Must((69,), f"hosts? [abc].*: .*({words})", LOST)


def _cut_too_long(scene: Scene) -> None:
    do.cut(LEASE + 2.0, LEASE + 5.0)(scene)


def _shut_out(scene: Scene) -> None:
    """The host can't open connections to the driver: its agent has to relay."""
    do.filter_packets("OUTPUT -d {driver} -p tcp --syn -j DROP")(scene)


KINDS = [
    Kind(
        "a host's link is cut for less than 0.8 of the lease",
        do.cut(0.2, IN_TIME),
        WELL,
        goes_on(),
        WELL,
        STARTED,
        only=OURS,
    ),
    Kind(
        "a host's link is cut for less than 0.4 of the lease",
        do.cut(0.2, 0.4 * LEASE),
        WELL,
        goes_on(),
        WELL,
        STARTED,
    ),
    Kind(
        "a host's link is cut for longer than the lease",
        _cut_too_long,
        lost(GONE, LATE),
        goes_on("host {host}"),
        moments=STARTED,
        loses="host",
        clean=LOST,
    ),
    Kind(
        "a host's link is cut for good",
        do.cut(FOR_GOOD, FOR_GOOD),
        lost(GONE, LATE),
        goes_on("host {host}"),
        Must((69,), rf"host {{host}}: .*({GONE})|{NONE_STARTED}", LATE),
        ANY,
        loses="host",
        clean=LOST,
    ),
    Kind("a host's link flaps for 5 s", do.flap(5.0), WELL, goes_on(), moments=STARTED),
    Kind(
        "a host's interface is down for a while",
        do.in_host_for(
            "ip link set eth0 down",
            "ip link set eth0 up; ip -6 address add {address6}/64 dev eth0 nodad",
            0.2,
            IN_TIME,
        ),
        WELL,
        goes_on(),
    ),
    Kind(
        "a host loses its address",
        do.in_host("ip address flush dev eth0"),
        lost(GONE),
        goes_on("host {host}"),
        loses="host",
        clean=LOST,
    ),
    Kind(
        "the driver's link is cut for less than 0.8 of the lease",
        do.cut_driver(0.2, IN_TIME),
        WELL,
        goes_on(),
        WELL,
        STARTED,
        only=OURS,
    ),
    Kind(
        "the driver's link is cut for less than 0.4 of the lease",
        do.cut_driver(0.2, 0.4 * LEASE),
        WELL,
        goes_on(),
        WELL,
        STARTED,
    ),
    Kind(
        "the driver's link is cut for longer than the lease",
        do.cut_driver(LEASE + 2.0, LEASE + 5.0),
        all_lost(),
        goes_on("hosts? [abc]"),
        loses="all",
        clean=LOST,
    ),
    Kind(
        "the driver's link is cut for good",
        do.cut_driver(FOR_GOOD, FOR_GOOD),
        Must((69,), "hosts? [abc].*: ", LATE),
        moments=ANY,
        loses="all",
        clean=LOST,
    ),
    Kind(
        "what the host sends is lost for good",
        do.filter_packets("OUTPUT -j DROP"),
        lost(GONE, LATE),
        goes_on("host {host}"),
        moments=ANY,
        loses="host",
        clean=LOST,
    ),
    Kind(
        "what the host is sent is lost for good",
        do.filter_packets("INPUT -j DROP"),
        lost(GONE, LATE),
        goes_on("host {host}"),
        moments=ANY,
        loses="host",
        clean=LOST,
    ),
    Kind(
        "what the host sends is lost for a while",
        do.filter_packets("OUTPUT -j DROP", seconds=0.5 * LEASE),
        WELL,
        goes_on(),
        moments=STARTED,
    ),
    Kind(
        "what the host is sent is lost for a while",
        do.filter_packets("INPUT -j DROP", seconds=0.5 * LEASE),
        WELL,
        goes_on(),
        moments=STARTED,
    ),
    Kind(
        "5 % of all packets are lost",
        do.filter_packets("INPUT -m statistic --mode random --probability 0.05 -j DROP", seconds=8.0),
        WELL,
        goes_on(),
        WELL,
        ANY,
    ),
    Kind(
        "20 % of all packets are lost",
        do.filter_packets("INPUT -m statistic --mode random --probability 0.2 -j DROP", seconds=8.0),
        Must((0, 69), "host {host}", LATE),
        goes_on(),
        moments=ANY,
        loses="host",
        clean=LOST,
    ),
    Kind("packets are 100 ms late", do.late(100.0, 6.0), WELL, goes_on(), WELL, ANY),
    Kind("packets are 600 ms late", do.late(600.0, 8.0), WELL, goes_on(), moments=ANY),
    Kind(
        "packets of more than 600 bytes are lost (an MTU hole)",
        do.filter_packets(
            "INPUT -m length --length 600:65535 -j DROP", "OUTPUT -m length --length 600:65535 -j DROP"
        ),
        Must((0, 69), "host {host}", LATE),
        goes_on(),
        moments=ANY,
        loses="host",
        clean=LOST,
    ),
    Kind(
        "the host's MTU becomes 600", do.in_host("ip link set eth0 mtu 600"), WELL, goes_on(), moments=STARTED
    ),
    Kind(
        "the host sends at 64 kbit/s for a while", do.slow_link("64kbit", 6.0), WELL, goes_on(), moments=ANY
    ),
    Kind(
        "a firewall refuses new connections to the driver",
        _shut_out,
        WELL,
        goes_on(),
        WELL,
        ANY,
        only=(OWN, RELAY, PROCESS, RESTARTS),
    ),
    Kind(
        "two hosts can't reach each other",
        do.filter_packets("INPUT -s {other} -j DROP", "OUTPUT -d {other} -j DROP"),
        Must((0, 69), "hosts? [abc].*: can't connect to host", LATE),
        goes_on(),
        moments=("connecting", "running"),
    ),
    Kind(
        "a host is switched off",
        do.power_off(),
        lost(GONE + "|reset|refused|close|broke", LATE),
        goes_on("host {host}"),
        lost(GONE, LATE),
        ANY,
        loses="host",
        clean=LOST,
    ),
    Kind(
        "a host is switched off and on",
        do.power_off(restore_after=0.2),
        lost(GONE + "|reset|refused|close|broke", LATE),
        goes_on("host {host}"),
        moments=ANY,
        loses="host",
        clean=LOST,
    ),
    Kind(
        "sshd refuses new connections",
        lambda scene: scene.host.stop_sshd(),
        Must((0, 69), "host {host}: .*refused|can't connect", LATE),
        goes_on(),
        moments=ANY,
    ),
    Kind(
        "a host has another key than before",
        lambda scene: scene.host.new_host_key(),
        Must((0, 69), "host {host}: .*key", LATE),
        goes_on(),
        moments=("connecting", "running"),
    ),
]
