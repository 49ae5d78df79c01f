"""Reconnecting to a running agent: at once, then after growing pauses, as long as the agent may still be reached."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import random as any_random
from typing import TYPE_CHECKING

from hvlaunch.agent.wire.carrier import EXIT_NO_AGENT
from hvlaunch.agent.wire.frames import BadFrame
from hvlaunch.driver.links.agent_channel import AgentChannel, AgentConnection, Garbled, Listener
from hvlaunch.errors import ConnectFailed, HostError, HostLost, HvlaunchError, StartTimeout

if TYPE_CHECKING:
    from hvlaunch.agent.wire.frames import Frame

__all__ = ["Candidate", "Renewal", "RenewalFailed"]

_FIRST_LIMIT, _LONGEST_LIMIT = 3.0, 24.0
"""Seconds for an attempt. The limit doubles: a slow host needs longer, a lost packet only a quick next attempt."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_STATUS_WAIT = 2.0


class Ears:
    """Listener of a candidate; ignores the candidate until the session has taken it and set `listener`."""

    listener: Listener | None = None

    def heard_agent(self) -> None:
        if self.listener is not None:
            self.listener.heard_agent()

    def heard_noise(self, data: bytes) -> None:
        if self.listener is not None:
            self.listener.heard_noise(data)


@dataclass
class Candidate:
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
        random: Callable[[], float] = any_random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_end` is called, in a thread, with a candidate ready or the renewal failed."""
        self._host = host
        self._connect = connect
        self._patience = patience
        self._on_end = on_end
        self._random = random
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
            status = channel.exit_status(_STATUS_WAIT)
            last = channel.stderr().decode("utf-8", "replace").strip().rpartition("\n")[2]
            connection.close()
            if status == EXIT_NO_AGENT:
                raise HostLost("its agent is gone", host=self._host) from None
            # Too late is not a refusal: the machine is probably busy.
            if late.is_set():
                raise StartTimeout(f"its agent did not answer within {limit:g} s", host=self._host) from None
            raise HostError(f"no way to its agent: {last or f'status {status}'}", host=self._host) from None
        except (OSError, BadFrame, Garbled) as error:
            connection.close()
            kind = StartTimeout if late.is_set() else HostError
            raise kind(f"no way to its agent: {error}", host=self._host) from None
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
