"""The contract of the loop: one turn is an event on its way from its source to its acknowledgement.

The loop (loop.py) is the only consumer of one queue. For each batch of events it takes six steps, in this order:

1. **events**: take the waiting events from the queue. Each is an Arrival: the event with its source, an agent's frame
   or a change at the rendezvous. If none arrives before a deadline of the engine, the event is a Tick.
2. **decide**: the engine handles each event, and returns actions. An event with its actions is a Turn.
3. **record**: write the turns to the journal. A turn without actions may wait up to 0.05 s for others, since a single
   write for many turns is cheaper. A turn with actions is written, with all waiting turns, before the next step.
4. **show**: watchers (narrator, recorder, hang watch) see each recorded turn. They change nothing in the job.
5. **acknowledge**: mark the frame of each recorded turn as acked. The next frame to its agent reports the number of the
   last acked frame, and the agent drops its copies.
6. **carry out**: do the actions: connect, send frames, stop workers, finish.

The order lets the driver be killed between any two steps and another driver take its job over:

- *Record before show and before carry out.* The successor replays the journal, and its engine decides the same. An action
  without a recorded event could never be decided again; a message shown before the record would be shown twice.
- *Carry out after record.* The successor repeats actions that the killed driver may not have reached. Repeating is safe:
  frames are numbered, and an agent drops a frame with a number it has.
- *Acknowledge after record.* An agent repeats its frames without acknowledgement to the successor. A frame acked before
  its event was recorded would be lost with the driver. A frame recorded and not acked comes twice, and is dropped by its
  number.
- *Acknowledge before carry out.* A `bye` then carries the newest acknowledgement, and the agent ends at once.

Output makes no turns: the printer acknowledges its frames when they are written (host_link.py). Without a record (a local
job) each frame is acked when it is received, since no driver could use it later.

Two events are exceptions. `Began` is carried out before it is recorded: until then no agent exists that a successor
could find, and connecting starts sooner. HostStage events reach only the watchers
(`is_decided` is false), and the journal does not have them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.named_tuples import NamedTuple

__all__ = ["Arrival", "FrameSource", "Turn"]


class FrameSource(Protocol):
    """The link of a frame."""

    number: int
    """Number of the connection to the host, counted over the job."""
    offset: float | None
    """Seconds from the host's clock to the driver's; None if unknown."""

    hello: Mapping[str, Any]
    """The first frame to its agent."""

    def acknowledge(self, frame: int) -> None:
        """Mark this frame as acked: the agent need not send it again."""


class Arrival(NamedTuple):
    """An event with its source: an agent's frame, a change at the rendezvous, or neither."""

    event: on.Event
    source: FrameSource | None = None
    frame: int = 0
    """Number of the frame in the lasting stream, from 1; 0 for no frame."""
    version: int = 0
    """Version of the change at the rendezvous; 0 for no change."""

    def acknowledge(self) -> None:
        """Mark the event's frame as acked, if any."""
        if self.source is not None:
            self.source.acknowledge(self.frame)


class Turn(NamedTuple):
    """An event, its time in seconds of the driver's clock, and the engine's actions."""

    at: float
    arrival: Arrival
    actions: Sequence[do.Action]
    is_decided: bool = True
    """True if the engine has handled the event; only such turns are recorded."""
    is_idle: bool = False
    """True if the turn changed only state that a compacted event also carries."""
