"""Broken frames by seed, and what must hold whatever they are; benchmarks/fuzz_frames.py goes on for as long as one likes.

A session plays one who sends frames: first those that bring its other side to some point, and at each point broken ones. One
that is refused there would end the session: that it is refused in the right way is seen on a copy of what checks it, and the
session goes on as if it had not come, until one of them really ends it. One that is taken is sent, and acted on. So a hundred
broken frames cost little more than one. Only frames that were changed are counted.
"""

from tests.security.fuzz.door import call_session, door_session, stranger_session
from tests.security.fuzz.orders import order_session
from tests.security.fuzz.ranks import rank_session
from tests.security.fuzz.reports import driver_session, launched_session

__all__ = ["SESSIONS"]

SESSIONS = {
    "an agent to a driver": driver_session,
    "an agent of a launcher to a driver": launched_session,
    "a driver to an agent": order_session,
    "a launcher's process to its agent": rank_session,
    "a caller behind the door's handshake": door_session,
    "a stranger at the door": stranger_session,
    "a stranger whom an agent calls": call_session,
}
"""By who sends to whom: plays a seed, and gives how many broken frames, or broken handshakes, there were."""
