"""Connecting again to an agent that is still there: at once, then after growing pauses, for as long as it makes sense."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import random as any_random
from typing import TYPE_CHECKING

from hvlaunch.agent.wire.carrier import EXIT_NO_AGENT
from hvlaunch.agent.wire.frames import BadFrame
from hvlaunch.driver.links.agent_channel import AgentChannel, AgentConnection, Listener
from hvlaunch.driver.links.piece_reader import Garbled
from hvlaunch.errors import ConnectFailed, HostError, HostLost, HvlaunchError, StartTimeout

if TYPE_CHECKING:
    from hvlaunch.agent.wire.frames import Frame

__all__ = ["Candidate", "Renewal", "RenewalFailed"]

_FIRST_LIMIT, _LONGEST_LIMIT = 3.0, 24.0
"""Seconds for one attempt."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_STATUS_WAIT = 2.0


class Ears:
    """Hears a candidate, of which nothing counts before it has the session, and there is a `listener`."""

    listener: Listener | None = None

    def heard_agent(self) -> None:
        if self.listener is not None:
            self.listener.heard_agent()

    def heard_noise(self, data: bytes) -> None:
        if self.listener is not None:
            self.listener.heard_noise(data)


@dataclass
class Candidate:
    """A connection over which an agent has asked us what we are."""

    connection: AgentConnection
    channel: AgentChannel
    frames: "Iterator[Frame]"
    nonce: str
    ears: Ears


class RenewalFailed(Exception):
    """There will be no candidate."""


class Renewal:
    """One loss of a connection. `connect` makes another, within so many seconds; `patience` is how long a host may refuse us.

    A host that does not answer at all is tried for ever: until stop().
    """

    def __init__(
        self,
        host: str,
        connect: "Callable[[Ears, float], tuple[AgentConnection, AgentChannel]]",
        patience: float,
        found: Callable[[], None],
        *,
        random: Callable[[], float] = any_random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`found` is called, in a thread, when there is a candidate, or none will be."""
        self._host = host
        self._connect = connect
        self._patience = patience
        self._found = found
        self._random = random
        self._clock = clock
        self._stopped = threading.Event()
        self._over = threading.Event()
        self._candidate: Candidate | None = None
        self._cause = ""
        threading.Thread(target=self._run, name=f"to {host} again", daemon=True).start()

    def stop(self) -> None:
        """There is no need any more. May be repeated."""
        self._stopped.set()
        self._over.set()

    def wait(self) -> Candidate:
        """The candidate, which is the caller's. Raises RenewalFailed, with the cause, and without one after stop()."""
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
            self._stopped.wait(pause * (1 + self._random()) / 2)
            limit, pause = min(2 * limit, _LONGEST_LIMIT), min(2 * pause, _LONGEST_PAUSE)
        self._over.set()
        if self._stopped.is_set() and self._candidate is not None:
            self._candidate.connection.close()
        self._found()

    def _attempt(self, limit: float) -> Candidate:
        """Raises HostLost where there is no agent any more, and other HvlaunchErrors where there may be one."""
        ears = Ears()
        connection, channel = self._connect(ears, limit)
        late = threading.Event()

        def end() -> None:
            late.set()
            connection.close()

        watch = threading.Timer(limit, end)
        watch.daemon = True
        watch.start()
        try:
            frames = channel.frames()
            return Candidate(connection, channel, frames, _challenge(frames), ears)
        except StopIteration:
            status = channel.exit_status(_STATUS_WAIT)
            last = channel.stderr().decode("utf-8", "replace").strip().rpartition("\n")[2]
            connection.close()
            if status == EXIT_NO_AGENT:
                raise HostLost("its agent is gone", host=self._host) from None
            if late.is_set():  # a machine that is busy, as likely as not
                raise StartTimeout(f"its agent did not answer within {limit:g} s", host=self._host) from None
            raise HostError(f"no way to its agent: {last or f'status {status}'}", host=self._host) from None
        except (OSError, BadFrame, Garbled) as error:
            connection.close()
            kind = StartTimeout if late.is_set() else HostError
            raise kind(f"no way to its agent: {error}", host=self._host) from None
        finally:
            watch.cancel()


def _challenge(frames: "Iterator[Frame]") -> str:
    """Raises BadFrame where the first frame is none."""
    header, _ = next(frames)
    if header["type"] != "challenge":
        raise BadFrame(f"a first frame of type {header['type']}")
    nonce: str = header["nonce"]
    return nonce


def _is_silent(error: HvlaunchError) -> bool:
    """Whether nobody has answered there, so that its agent may not know that we are away either."""
    if isinstance(error, ConnectFailed):
        return "refused" not in error.cause
    return isinstance(error, StartTimeout)
