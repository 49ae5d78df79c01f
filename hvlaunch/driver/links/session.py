"""The session with one host's agent: the frames to and fro, whichever connections carry them.

agent/wire/session.py counts them; docs/architecture.md, "Sessions", has the whole.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from hvlaunch.agent.quick import same
from hvlaunch.agent.wire.frames import FRAME_COST, BadFrame
from hvlaunch.agent.wire.session import BY_AGENT, BY_DRIVER, LASTING, Session
from hvlaunch.driver.links.agent_channel import AgentChannel, AgentConnection, Listener
from hvlaunch.driver.links.flow import AckedFrames, Outgoing
from hvlaunch.driver.links.piece_reader import Garbled
from hvlaunch.driver.program.agent_program import AgentProgram
from hvlaunch.engine import events as on
from hvlaunch.job import Host

if TYPE_CHECKING:
    from hvlaunch.agent.wire.frames import Frame
    from hvlaunch.driver.links.renewal import Candidate, Renewal

__all__ = ["HostSession"]

_EXIT_STATUS_WAIT = 2.0
_LEAVE_PATIENCE = 0.2
_HANDSHAKE_PATIENCE = 10.0
_PAUSE = 0.2
_SURELY = -1
_HANDSHAKES = ("challenge", "resumed", "refused")
_TELLING = ("have", "ack", "bye")
"""With these the agent is told what it need not keep: a write of its own would cost as much as the printing of a piece."""


class HostSession:
    """For a host's thread, which reads; a thread of the session's own writes.

    `patience` is how long the agent waits for another connection; `clock` is the driver's.
    """

    def __init__(
        self,
        host: Host,
        program: AgentProgram,
        listener: Listener,
        post: Callable[[on.Event], None],
        clock: Callable[[], float],
        patience: float,
        note: Callable[[int], None] = lambda _number: None,
    ) -> None:
        """`note` is called before the agent is told that it need not keep its frames up to this number."""
        self.status: int | None = None
        """The agent's exit status, once frames() has ended; None where it is not known."""
        self.broken: str | None = None
        """How the last connection broke; None where it ended."""
        self.lost: str | None = None
        """Why there is no other connection in its place."""
        self.is_over = False
        """Whether no other connection is needed: the agent ends on its own account, or has ended."""
        self.has_bye = False
        """Whether the agent has said its last word. It waits until all before that is durable."""
        self.key: str | None = None
        """What proves at another connection that it is ours; None where there can be none."""
        self.scratch: str | None = None
        """The agent's directory, once it is known."""
        self.number = 0
        """That of the frame that frames() gave last, in the lasting stream; 0 where it is of the other."""
        self.acked = AckedFrames()
        """Those that the agent need not keep: whoever has dealt with one adds it."""
        self._host = host
        self._program = program
        self._listener = listener
        self._post = post
        self._clock = clock
        self._patience = patience
        self._note = note
        self._session = Session(BY_DRIVER, BY_AGENT)
        self._counting = threading.Lock()
        """For what the session keeps."""
        self._writing = threading.Lock()
        """For who writes, to whichever channel there is."""
        self._outgoing: Outgoing[Frame] = Outgoing()
        self._connection: AgentConnection | None = None
        self._channel: AgentChannel | None = None
        """Where frames go now; None while the connection is lost."""
        self._reading: AgentChannel | None = None
        self._received = 0
        """How many frames of the lasting stream have come."""
        self._next = 1
        """The number of the next one on this connection, which may have come before."""
        self._told = 0
        """The number of the last one that the agent was told not to keep."""
        self._is_renewed = False
        """Whether it is another than the first, by which the agent was started."""
        self._heard = 0
        self._suspected_at: int | None = None
        """What _heard was when the connection was found to be silent, and another was begun beside it."""
        self._renewing = threading.Lock()
        self._renewal: Renewal | None = None
        self._closed = threading.Event()
        self._written = threading.Event()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    @property
    def is_away(self) -> bool:
        return self._channel is None

    def begin(self, connection: AgentConnection) -> None:
        """Start the agent. Raises HostError."""
        self._connection = connection
        connection.on_call = partial(self.renew, is_sure=True)
        if self._closed.is_set():
            connection.close()
        self._reading = self._channel = connection.start_agent(self._program, self._host, self)

    def greet(self, hello: Mapping[str, Any]) -> None:
        """Send it, before all that was sent already, and from now on all that follows."""
        self.key = hello["session"]
        modules = b""
        if self._connection is not None and not self._connection.has_modules:
            modules = self._program.rare(self._host, is_here=self._connection.remote_address is None)
        self._put_on_channel((dict(hello), b""), ({"type": "modules"}, modules))  # one message on its way
        threading.Thread(target=self._write, name=f"to {self._host.name}", daemon=True).start()

    def take_up(
        self, epoch: int, key: str, scratch: str, connection: AgentConnection, acked: AckedFrames
    ) -> None:
        """Go on with the session of a driver before us, whose connection is lost. All was sent that it has ordered.

        Of what has come since it began, `durable` need not come again.
        """
        self._session = Session(BY_DRIVER, BY_AGENT, epoch)
        self.key, self.scratch = key, scratch
        self._connection = connection
        self.acked = acked
        self._is_renewed = True
        self.broken = "its driver has ended"
        for frame in [({"type": "hello"}, b""), *self._outgoing.take_all()]:
            self._session.sending(frame[0]["type"], frame)
        threading.Thread(target=self._write, name=f"to {self._host.name}", daemon=True).start()

    def send(self, header: Mapping[str, Any], body: bytes = b"", *, relayed: bool = False) -> None:
        """Send a frame, as soon as those before it are through. Never blocks."""
        self._outgoing.put((dict(header), body), relayed=relayed)

    def ping(self, patience: float | None = None) -> None:
        """Let the agent hear from us, and know what we have; and how long to wait for us, if that is not as it was begun with."""
        if patience is not None:
            self.send({"type": "patience", "seconds": patience})
        if self._session.has_news or self.acked.prefix > self._told:
            self.send({"type": "have"})
        self.send({"type": "ping"})

    def acknowledge(self) -> None:
        """Let the agent know at once, where all is durable that has come before its last word."""
        if self._told < self._received - self.has_bye <= self.acked.prefix:
            self.send({"type": "have"})

    def _have(self) -> list[int]:
        """What to tell the agent that it need not keep: never less than before."""
        have = self._session.tell()
        self._told = have[LASTING] = self.acked.prefix
        self._note(self._told)
        return have

    def wait_for_relayed(self, most: int) -> None:
        """Until at most so many relayed frames wait here."""
        self._outgoing.wait_for_relayed(most)

    def leave(self) -> None:
        """Send what waits, and that we leave. Never blocks."""
        self._outgoing.close()

    def close(self) -> None:
        """Give the host up, whatever the threads are doing. May be repeated."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._outgoing.close()
        with self._renewing:
            if self._renewal is not None:
                self._renewal.stop()
        if self._channel is not None:
            self._written.wait(_LEAVE_PATIENCE)
        if self._connection is not None:
            self._connection.close()

    def frames(self) -> "Iterator[Frame]":
        """What the agent sends, to the end. Raises as AgentChannel.frames(), but OSError: that is in `broken`.

        None comes twice. Whoever gets one of the lasting stream adds its number to those that are durable.
        """
        frames: Iterator[Frame] | None = self._go_on() if self._reading is None else self._reading.frames()
        while frames is not None:
            self.broken = None
            try:
                for header, body in frames:
                    if self._is_about_frames(header):
                        continue
                    kind = header["type"]
                    if self._is_new(kind):
                        self.has_bye |= kind == "bye"
                        yield header, body
                    size = 0 if kind == "output" else len(body)  # of output the agent is told with its credit
                    if self._session.received(kind, size + FRAME_COST):
                        self.send({"type": "have"})
            except OSError as error:
                self.broken = self.broken or str(error) or type(error).__name__
            frames = self._go_on() if self._may_go_on() else None
        self.is_over = True

    def _is_new(self, kind: str) -> bool:
        """Whether the frame has not come yet, on another connection; `number` is its number from here on."""
        self.number = 0
        if BY_AGENT.get(kind) != LASTING:
            return True
        number, self._next = self._next, self._next + 1
        if number <= self._received:
            return False
        self.number = self._received = number
        return number not in self.acked

    def _is_about_frames(self, header: Mapping[str, Any]) -> bool:
        """Whether it is for us alone. Raises BadFrame."""
        kind = header["type"]
        if kind in _HANDSHAKES:
            raise BadFrame(f"a frame of type {kind} that was not asked for")
        if kind != "have":
            return False
        with self._counting:
            self._session.taken(header["frames"])
        return True

    def silence(self) -> float | None:
        """Seconds since the first machine on the way acknowledged something; None where that is not known."""
        return None if self._connection is None else self._connection.silence()

    def heard_agent(self) -> None:
        """For channels, as a Listener."""
        self._heard += 1
        self._listener.heard_agent()

    def heard_noise(self, data: bytes) -> None:
        """For channels, as a Listener."""
        self._listener.heard_noise(data)

    def stderr(self) -> str:
        """The last of what the agent, or what was to reach it, wrote to stderr."""
        return "" if self._reading is None else self._reading.stderr().decode("utf-8", "replace").strip()

    # Writing

    def _write(self) -> None:
        while (frame := self._outgoing.get()) is not None:
            self._put_on_channel(frame)
        if not self.is_over:
            self._put_on_channel(({"type": "leave"}, b""))
        self._written.set()

    def _put_on_channel(self, *frames: "Frame") -> None:
        with self._writing:
            with self._counting:
                for frame in frames:
                    self._session.sending(frame[0]["type"], frame)
            if self._channel is None:
                return
            first = frames[0][0]["type"]
            if first in _TELLING:
                have = {"type": "have", "frames": self._have()}
                frames = ((have, b""), *frames[first == "have" :])
            try:
                self._channel.send(*frames)
            except OSError:
                self._channel = None  # the reading side sees the end too, and knows more of its cause

    # Another connection

    def renew(self, *, is_sure: bool = False) -> None:
        """The agent has been silent for long: connect again, beside the connection that there is.

        `is_sure`: it has left that connection, as it knows itself.
        """
        if self._is_ready_for_renewal() and (self._renewal is None or is_sure) and self._channel is not None:
            self._suspected_at = _SURELY if is_sure else self._heard
            self._start_renewal()

    def _is_ready_for_renewal(self) -> bool:
        return (
            not self._closed.is_set()
            and not self.is_over
            and self.key is not None
            and self.scratch is not None
            and self._connection is not None
            and self._connection.can_rejoin
        )

    def _may_go_on(self) -> bool:
        """Whether the connection has ended, and perhaps not the agent.

        Its end has an exit status on its first connection; later ones have their carriers', who wait for an agent that has said bye.
        """
        may_tell = self.has_bye or not self._is_renewed
        if self.broken is None and may_tell and self._reading is not None:
            self.status = self._reading.exit_status(_EXIT_STATUS_WAIT)
        return self.status is None and self._is_ready_for_renewal()

    def _start_renewal(self) -> "Renewal | None":
        """The one under way, or a new one; None after close()."""
        from hvlaunch.driver.links.renewal import Renewal  # noqa: PLC0415 (few connections are lost)

        with self._renewing:
            if self._renewal is None and not self._closed.is_set() and self._connection is not None:
                connect = partial(self._connection.rejoin, self._program, self._host, self.scratch or "")
                self._renewal = Renewal(self._host.name, connect, self._patience, self._give_way)
            return self._renewal

    def _give_way(self) -> None:
        """There is a candidate, or there will be none. The connection that was silent has to go, if it still is."""
        if self._suspected_at in (self._heard, _SURELY):
            self.broken = "it was silent"
            if self._connection is not None:
                self._connection.close()
        elif self._suspected_at is not None:
            self._end_renewal()

    def _end_renewal(self) -> None:
        with self._renewing:
            renewal, self._renewal, self._suspected_at = self._renewal, None, None
        if renewal is not None:
            renewal.stop()

    def _go_on(self) -> "Iterator[Frame] | None":
        """The frames of another connection; None where there is none: `lost` has the cause."""
        began = self._clock()
        self._suspected_at = None
        if self._connection is not None:
            self._connection.close()  # the agent may not know yet
        self._post(on.HostAway(self._host.name, self.broken or "it ended"))
        with self._writing:
            self._channel = None
        while (renewal := self._start_renewal()) is not None:
            frames, patience = self._try(renewal)
            self._end_renewal()
            if frames is not None:
                self.lost = None
                self._post(on.HostBack(self._host.name, self._clock() - began))
                return frames
            if self._clock() >= began + patience:
                return None
            self._closed.wait(_PAUSE)
        return None

    def _try(self, renewal: "Renewal") -> "tuple[Iterator[Frame] | None, float]":
        """The frames of the renewal's connection; else None, and until when another may be better: `lost` has the cause."""
        from hvlaunch.driver.links.renewal import RenewalFailed  # noqa: PLC0415 (as above)

        try:
            return self._resume(renewal.wait()), 0.0
        except RenewalFailed as error:
            self.lost = str(error)
            return None, 0.0
        except (OSError, StopIteration) as error:
            # This connection is lost too, but the agent was there: the next one finds out whether it still is.
            self.lost = f"its agent did not take it: {str(error) or type(error).__name__}"
            return None, inf
        except (BadFrame, Garbled) as error:
            self.lost = f"its agent did not take it: {error}"
            return None, self._patience

    def _resume(self, candidate: "Candidate") -> "Iterator[Frame]":
        """Prove who we are, see that it is our agent, and send what it lacks.

        Raises RenewalFailed, OSError, BadFrame, Garbled, and StopIteration.
        """
        channel = candidate.channel
        watch = threading.Timer(_HANDSHAKE_PATIENCE, candidate.connection.close)
        watch.daemon = True
        watch.start()
        try:
            found, told = self._shake_hands(candidate)
            with self._writing:
                with self._counting:
                    again = self._session.again(found)
                for frame in again:
                    channel.send(frame)
                self._next = told + 1
                self._channel = channel
        except BaseException:
            candidate.connection.close()
            raise
        finally:
            watch.cancel()
        self._connection, self._reading, self._is_renewed = candidate.connection, channel, True
        candidate.ears.listener = self
        self.heard_agent()
        return candidate.frames

    def _shake_hands(self, candidate: "Candidate") -> tuple[list[int], int]:
        """How many frames of ours the agent has, and after which of its own it goes on. Raises as _resume()."""
        from hvlaunch.agent.wire.rejoin import session_proof  # noqa: PLC0415 (few connections are lost)

        key, epoch, have, nonce = (
            self.key or "",
            self._session.epoch,
            self._have(),
            os.urandom(16).hex(),
        )
        proof = session_proof(key, "driver", candidate.nonce, nonce, epoch, *have)
        resume = {"type": "resume", "nonce": nonce, "epoch": epoch, "have": have, "proof": proof}
        candidate.channel.send((resume, b""))
        header, _ = next(candidate.frames)
        if header["type"] == "refused":
            from hvlaunch.driver.links.renewal import RenewalFailed  # noqa: PLC0415 (as above)

            raise RenewalFailed(header["cause"])
        if header["type"] != "resumed":
            raise BadFrame(f"a frame of type {header['type']}, where resumed should be")
        found: list[int] = header["have"]
        if not same(
            header["proof"].encode(), session_proof(key, "agent", candidate.nonce, nonce, *found).encode()
        ):
            raise BadFrame("a wrong proof")
        return found, have[LASTING]
