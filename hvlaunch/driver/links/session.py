"""The session with a host's agent: numbered frames in both directions, their queues, the acknowledged ones, and reconnecting.

A session lasts over successive connections. agent/wire/frames.py counts the frames, and docs/internals describes the
whole.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hvlaunch.agent.quick import same
from hvlaunch.agent.wire.frames import BY_AGENT, BY_DRIVER, FRAME_COST, LASTING, BadFrame, Session
from hvlaunch.driver.links.agent_channel import AgentChannel, AgentConnection, Garbled, Listener
from hvlaunch.driver.program import AgentProgram
from hvlaunch.engine import events as on
from hvlaunch.errors import ConnectFailed, HostError, HostLost, HvlaunchError, StartTimeout
from hvlaunch.job import Host
from hvlaunch.named_tuples import NamedTuple

if TYPE_CHECKING:
    from hvlaunch.agent.wire.frames import Frame

__all__ = ["AckedFrames", "Candidate", "HostSession", "Outgoing", "Renewal", "RenewalFailed"]

_EXIT_STATUS_WAIT = 2.0
_LEAVE_PATIENCE = 0.2
_HANDSHAKE_PATIENCE = 10.0
_PAUSE = 0.2
_SURELY = -1
"""In place of a count: the agent itself has left the connection."""
_HANDSHAKES = ("challenge", "resumed", "refused")
_REPORTING = ("have", "ack", "bye")
"""Frames sent together with the newest acknowledgement: a write of its own would cost as much as printing a piece."""
_MOST_BEYOND = 1 << 14


class AckedFrames:
    """Frames of the lasting stream that the agent need not repeat, by number from 1. For any thread.

    Frames are acked in any order (an event when recorded, output when written); agents hear of the longest unbroken
    run from 1, `prefix`. A frame that is not acked for very long, as when stdout has no reader, is given up.
    """

    def __init__(self, prefix: int = 0, beyond: Iterable[int] = ()) -> None:
        self.prefix = prefix
        self._beyond = {number for number in beyond if number > prefix}
        self._lock = threading.Lock()
        self._close_up()

    def __contains__(self, number: int) -> bool:
        with self._lock:
            return number <= self.prefix or number in self._beyond

    @property
    def is_whole(self) -> bool:
        """True if no frame is missing before the last acked one."""
        with self._lock:
            return not self._beyond

    def add(self, number: int) -> None:
        with self._lock:
            if number == self.prefix + 1:
                self.prefix = number
            elif number > self.prefix:
                self._beyond.add(number)
                # A bound on memory: the frames in the gap are given up.
                if len(self._beyond) > _MOST_BEYOND:
                    self.prefix = min(self._beyond)
            if self._beyond:
                self._close_up()

    def _close_up(self) -> None:
        self._beyond.discard(self.prefix)
        while self.prefix + 1 in self._beyond:
            self.prefix += 1
            self._beyond.remove(self.prefix)


T = TypeVar("T")


class Outgoing(Generic[T]):
    """Two queues of frames to a host. put() never blocks; all methods are for any thread.

    Relayed frames and other frames keep their own order and take turns: neither kind delays the other for long.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._own: deque[T] = deque()
        self._relayed: deque[T] = deque()
        self._own_turn = True
        self._closed = False

    def put(self, frame: T, *, relayed: bool = False) -> None:
        with self._changed:
            (self._relayed if relayed else self._own).append(frame)
            self._changed.notify_all()

    def take_all(self) -> list[T]:
        """Remove and return the waiting frames, without relayed frames."""
        with self._changed:
            frames = list(self._own)
            self._own.clear()
            return frames

    def close(self) -> None:
        """Accept no more frames: get() returns the waiting frames, and then None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_for_relayed(self, most: int) -> None:
        """Block until at most `most` relayed frames wait, or the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._relayed) <= most or self._closed)

    def get(self) -> T | None:
        """Wait for the next frame; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._own or self._relayed or self._closed)
            if not self._own and not self._relayed:
                return None
            # Turns, since a flood of relayed data would otherwise delay an order to stop.
            is_own = bool(self._own) and (self._own_turn or not self._relayed)
            self._own_turn = not is_own
            self._changed.notify_all()
            return (self._own if is_own else self._relayed).popleft()


class HostSession:
    """The frames of a host's agent. The host's thread reads; a thread of the session writes.

    `patience` is the agent's time limit in seconds for another connection; `clock` is the driver's.
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
        """`note` is called with a frame number before the agent may drop its frames up to this number."""
        self.status: int | None = None
        """The agent's exit status, once frames() has ended; None if unknown."""
        self.broken: str | None = None
        """How the last connection broke; None if it ended."""
        self.lost: str | None = None
        """Why no other connection could be made."""
        self.is_over = False
        """True if the agent has ended or is about to: no other connection is needed."""
        self.has_bye = False
        """True if the agent has sent its last word, and waits for the acknowledgement of earlier frames."""
        self.key: str | None = None
        """The key for the proof on later connections; None if no later connection is possible."""
        self.scratch: str | None = None
        """The agent's directory; None before its hello."""
        self.number = 0
        """Number in the lasting stream of the newest frame of frames(); 0 if the frame is of the other stream."""
        self.acked = AckedFrames()
        """Frames that the agent need not keep."""
        self._host = host
        self._program = program
        self._listener = listener
        self._post = post
        self._clock = clock
        self._patience = patience
        self._note = note
        self._session = Session(BY_DRIVER, BY_AGENT)
        self._counting = threading.Lock()
        """Guards the session's counts and stored frames."""
        self._writing = threading.Lock()
        """Guards the channel against two writers."""
        self._outgoing: Outgoing[Frame] = Outgoing()
        self._connection: AgentConnection | None = None
        self._channel: AgentChannel | None = None
        """The channel for sending; None while the connection is lost."""
        self._reading: AgentChannel | None = None
        self._received = 0
        """How many frames of the lasting stream have arrived."""
        self._next = 1
        """Number of the next frame on this connection, which may repeat an earlier one."""
        self._reported = 0
        """The newest acknowledgement sent to the agent."""
        self._is_renewed = False
        """True if the first connection, over which the agent was started, has been replaced."""
        self._heard = 0
        self._suspected_at: int | None = None
        """Value of `_heard` when the connection was silent and another was begun beside it."""
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

    @property
    def is_near(self) -> bool:
        """See AgentConnection."""
        return self._connection is not None and self._connection.is_near

    def begin(self, connection: AgentConnection) -> None:
        """Start the agent. Raises HostError."""
        self._connection = connection
        connection.on_call = partial(self.renew, is_sure=True)
        if self._closed.is_set():
            connection.close()
        self._reading = self._channel = connection.start_agent(self._program, self._host, self)

    def greet(self, hello: Mapping[str, Any]) -> None:
        """Send the hello, then the queued frames."""
        self.key = hello["session"]
        modules = b""
        if self._connection is not None and not self._connection.has_modules:
            modules = self._program.rare(self._host, is_here=self._connection.remote_address is None)
        # One write: both travel in one message.
        self._put_on_channel((dict(hello), b""), ({"type": "modules"}, modules))
        threading.Thread(target=self._write, name=f"to {self._host.name}", daemon=True).start()

    def take_up(
        self, epoch: int, key: str, scratch: str, connection: AgentConnection, acked: AckedFrames
    ) -> None:
        """Continue the session of a killed driver. `connection` is lost; the queue has every frame of its orders.

        The agent need not repeat the frames in `acked`.
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
        """Queue a frame; a relayed one in the queue of relayed frames. Never blocks."""
        self._outgoing.put((dict(header), body), relayed=relayed)

    def ping(self, patience: float | None = None) -> None:
        """Send a sign of life, with news of acked frames.

        `patience` replaces the agent's time limit for another connection.
        """
        if patience is not None:
            self.send({"type": "patience", "seconds": patience})
        if self._session.has_news or self.acked.prefix > self._reported:
            self.send({"type": "have"})
        self.send({"type": "ping"})

    def acknowledge(self) -> None:
        """Acknowledge at once if only the agent's last word remains: the agent waits for this to end."""
        if self._reported < self._received - self.has_bye <= self.acked.prefix:
            self.send({"type": "have"})

    def _have(self) -> list[int]:
        """Return the acknowledgement of both streams, never less than before."""
        # Noted before sending: the agent drops frames at once, and a successor must not ask for these again.
        have = self._session.tell()
        self._reported = have[LASTING] = self.acked.prefix
        self._note(self._reported)
        return have

    def wait_for_relayed(self, most: int) -> None:
        """Block until at most `most` relayed frames are queued."""
        self._outgoing.wait_for_relayed(most)

    def leave(self) -> None:
        """Send the queued frames, then `leave`. Never blocks."""
        self._outgoing.close()

    def close(self) -> None:
        """Give the host up, in any state of the threads. May be repeated."""
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
        """Yield the agent's frames until its end, each once. An OSError ends up in `broken`.

        The caller adds frames of the lasting stream to `acked` after dealing with each. Raises BadFrame, Garbled and
        HostError as AgentChannel.frames() does.
        """
        frames: Iterator[Frame] | None = (
            self._reconnected() if self._reading is None else self._reading.frames()
        )
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
                    # Output does not count: the agent hears of it with its credit.
                    size = 0 if kind == "output" else len(body)
                    if self._session.received(kind, size + FRAME_COST):
                        self.send({"type": "have"})
            except OSError as error:
                self.broken = self.broken or str(error) or type(error).__name__
            frames = self._reconnected() if self._may_reconnect() else None
        self.is_over = True

    def _is_new(self, kind: str) -> bool:
        """True if the frame has not arrived over an earlier connection. Sets `number` to the frame's number."""
        self.number = 0
        if BY_AGENT.get(kind) != LASTING:
            return True
        number, self._next = self._next, self._next + 1
        if number <= self._received:
            return False
        self.number = self._received = number
        return number not in self.acked

    def _is_about_frames(self, header: Mapping[str, Any]) -> bool:
        """True if the frame belongs to the session itself. Raises BadFrame."""
        kind = header["type"]
        if kind in _HANDSHAKES:
            raise BadFrame(f"a frame of type {kind} that was not asked for")
        if kind != "have":
            return False
        with self._counting:
            self._session.taken(header["frames"])
        return True

    def silence(self) -> float | None:
        """Return the seconds since the first machine on the way acknowledged data; None if unknown."""
        return None if self._connection is None else self._connection.silence()

    def heard_agent(self) -> None:
        """Pass on to the link; for channels, as a Listener."""
        self._heard += 1
        self._listener.heard_agent()

    def heard_noise(self, data: bytes) -> None:
        """Pass on to the link; for channels, as a Listener."""
        self._listener.heard_noise(data)

    def stderr(self) -> str:
        """Return the last stderr of the agent, or of the carrier on its way to the agent."""
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
            if first in _REPORTING:
                have = {"type": "have", "frames": self._have()}
                frames = ((have, b""), *frames[first == "have" :])
            try:
                self._channel.send(*frames)
            except OSError:
                # No error here: the reading side sees the end too, and knows more of its cause.
                self._channel = None

    # Another connection

    def renew(self, *, is_sure: bool = False) -> None:
        """Connect again, beside the present connection, since the agent has been silent for long.

        `is_sure`: the agent itself has left the present connection.
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

    def _may_reconnect(self) -> bool:
        """True if the connection has ended, and the agent perhaps has not."""
        # On the first connection an exit status is the agent's. On later connections the carrier has its own, and waits for
        # an agent after bye.
        may_tell = self.has_bye or not self._is_renewed
        if self.broken is None and may_tell and self._reading is not None:
            self.status = self._reading.exit_status(_EXIT_STATUS_WAIT)
        return self.status is None and self._is_ready_for_renewal()

    def _start_renewal(self) -> "Renewal | None":
        """Return the current or a new renewal; None after close()."""
        with self._renewing:
            if self._renewal is None and not self._closed.is_set() and self._connection is not None:
                connect = partial(self._connection.rejoin, self._program, self._host, self.scratch or "")
                self._renewal = Renewal(self._host.name, connect, self._patience, self._give_way)
            return self._renewal

    def _give_way(self) -> None:
        """Close the silent connection if still silent: the renewal has a candidate, or has failed."""
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

    def _reconnected(self) -> "Iterator[Frame] | None":
        """Return the frames of a new connection; None on failure, with the cause in `lost`."""
        began = self._clock()
        self._suspected_at = None
        if self._connection is not None:
            # The agent may not have noticed yet, and would not take another connection.
            self._connection.close()
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
        """Return the frames of the renewal's connection; on failure None and the seconds for further attempts.

        `lost` has the cause of a failure.
        """
        try:
            return self._resume(renewal.wait()), 0.0
        except RenewalFailed as error:
            self.lost = str(error)
            return None, 0.0
        except (OSError, StopIteration) as error:
            # This connection is lost too, but the agent was there: the next connection finds out if it still is.
            self.lost = f"its agent refused the connection: {str(error) or type(error).__name__}"
            return None, inf
        except (BadFrame, Garbled) as error:
            self.lost = f"its agent refused the connection: {error}"
            return None, self._patience

    def _resume(self, candidate: "Candidate") -> "Iterator[Frame]":
        """Prove the driver's identity, check the agent's, and send missing frames.

        Raises RenewalFailed, OSError, BadFrame, Garbled, and StopIteration.
        """
        channel = candidate.channel
        # A hanging connection would block the host's thread for ever: closing makes the handshake raise OSError.
        watch = threading.Timer(_HANDSHAKE_PATIENCE, candidate.connection.close)
        watch.daemon = True
        watch.start()
        try:
            arrived, acked = self._shake_hands(candidate)
            with self._writing:
                with self._counting:
                    repeated = self._session.again(arrived)
                for frame in repeated:
                    channel.send(frame)
                self._next = acked + 1
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
        """Return the count of driver frames at the agent, and the number of the last acked agent frame.

        Raises as _resume().
        """
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
            raise RenewalFailed(header["cause"])
        if header["type"] != "resumed":
            raise BadFrame(f"a frame of type {header['type']}, where resumed should be")
        arrived: list[int] = header["have"]
        if not same(
            header["proof"].encode(), session_proof(key, "agent", candidate.nonce, nonce, *arrived).encode()
        ):
            raise BadFrame("a wrong proof")
        return arrived, have[LASTING]


_FIRST_LIMIT, _LONGEST_LIMIT = 3.0, 24.0
"""Seconds for an attempt. The limit doubles: a slow host needs longer, a lost packet only a quick next attempt."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0


class Ears:
    """Listener of a candidate; ignores the candidate until the session has taken it and set `listener`."""

    listener: Listener | None = None

    def heard_agent(self) -> None:
        if self.listener is not None:
            self.listener.heard_agent()

    def heard_noise(self, data: bytes) -> None:
        if self.listener is not None:
            self.listener.heard_noise(data)


class Candidate(NamedTuple):
    """A new connection, over which the agent has sent its challenge."""

    connection: AgentConnection
    channel: AgentChannel
    frames: "Iterator[Frame]"
    nonce: str
    ears: Ears


class RenewalFailed(Exception):
    """The renewal has no candidate."""


class Renewal:
    """Reconnects after the loss of a connection.

    `connect` makes a connection within the given seconds; `patience` is how long a host may refuse. A host without any
    answer is tried until stop().
    """

    def __init__(
        self,
        host: str,
        connect: "Callable[[Ears, float], tuple[AgentConnection, AgentChannel]]",
        patience: float,
        on_end: Callable[[], None],
        *,
        random: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_end` is called, in a thread, with a candidate ready or the renewal failed."""
        self._host = host
        self._connect = connect
        self._patience = patience
        self._on_end = on_end
        # Loaded here: few connections are lost, and the module takes milliseconds.
        from random import random as any_random  # noqa: PLC0415 (see above)

        self._random = random or any_random
        self._clock = clock
        self._stopped = threading.Event()
        self._over = threading.Event()
        self._candidate: Candidate | None = None
        self._cause = ""
        threading.Thread(target=self._run, name=f"to {host} again", daemon=True).start()

    def stop(self) -> None:
        """Stop reconnecting. May be repeated."""
        self._stopped.set()
        self._over.set()

    def wait(self) -> Candidate:
        """Wait for the candidate, for the caller to own. Raises RenewalFailed with the cause, empty after stop()."""
        self._over.wait()
        candidate, self._candidate = self._candidate, None
        if candidate is None:
            raise RenewalFailed(self._cause)
        return candidate

    def _run(self) -> None:
        began = self._clock()
        limit, pause = _FIRST_LIMIT, _FIRST_PAUSE
        while not self._stopped.is_set():
            try:
                self._candidate = self._attempt(limit)
                break
            except HostLost as error:
                self._cause = error.cause
                break
            except HvlaunchError as error:
                self._cause = error.cause
                if not _is_silent(error) and self._clock() >= began + self._patience:
                    break
            # A random pause, so that the hosts of a job do not all connect in the same moment.
            self._stopped.wait(pause * (1 + self._random()) / 2)
            limit, pause = min(2 * limit, _LONGEST_LIMIT), min(2 * pause, _LONGEST_PAUSE)
        self._over.set()
        # Stopped while the last attempt succeeded: wait() has no caller who would close the candidate.
        if self._stopped.is_set() and self._candidate is not None:
            self._candidate.connection.close()
        self._on_end()

    def _attempt(self, limit: float) -> Candidate:
        """Connect once. Raises HostLost if the agent is gone, other HvlaunchErrors if the agent may still run."""
        ears = Ears()
        connection, channel = self._connect(ears, limit)
        late = threading.Event()

        def end() -> None:
            late.set()
            connection.close()

        # Closing the connection is the only way to end a read that hangs.
        watch = threading.Timer(limit, end)
        watch.daemon = True
        watch.start()
        try:
            frames = channel.frames()
            return Candidate(connection, channel, frames, _challenge(frames), ears)
        except StopIteration:
            from hvlaunch.agent.wire.carrier import EXIT_NO_AGENT  # noqa: PLC0415 (few connections are lost)

            status = channel.exit_status(_EXIT_STATUS_WAIT)
            last = channel.stderr().decode("utf-8", "replace").strip().rpartition("\n")[2]
            connection.close()
            if status == EXIT_NO_AGENT:
                raise HostLost("its agent is gone", host=self._host) from None
            # Too late is not a refusal: the machine is probably busy.
            if late.is_set():
                raise StartTimeout(f"its agent did not answer within {limit:g} s", host=self._host) from None
            raise HostError(
                f"its agent can't be reached: {last or f'status {status}'}", host=self._host
            ) from None
        except (OSError, BadFrame, Garbled) as error:
            connection.close()
            kind = StartTimeout if late.is_set() else HostError
            raise kind(f"its agent can't be reached: {error}", host=self._host) from None
        finally:
            watch.cancel()


def _challenge(frames: "Iterator[Frame]") -> str:
    """Return the nonce of the first frame. Raises BadFrame for any other frame."""
    header, _ = next(frames)
    if header["type"] != "challenge":
        raise BadFrame(f"a first frame of type {header['type']}")
    nonce: str = header["nonce"]
    return nonce


def _is_silent(error: HvlaunchError) -> bool:
    """True if the host gave no answer: its agent then perhaps has not noticed the loss either."""
    if isinstance(error, ConnectFailed):
        return "refused" not in error.cause
    return isinstance(error, StartTimeout)
