"""The connection to an agent that a launcher has started: frames over the agent's own call to the driver."""

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

from hvlaunch.agent.wire.caller import Sealed
from hvlaunch.agent.wire.frames import encode
from hvlaunch.driver.links.agent_channel import (
    AgentChannel,
    AgentConnection,
    Listener,
    PieceReader,
    report_decoder,
)
from hvlaunch.driver.program import AgentProgram
from hvlaunch.errors import EXIT_HOSTS, AgentFailed, HostError, HostLost, HvlaunchError, StartTimeout
from hvlaunch.job import Host
from hvlaunch.mpi.calls import ReturnCalls
from hvlaunch.ssh.streams import is_near, silence, was_reset

if TYPE_CHECKING:
    from hvlaunch.agent.wire.frames import Frame

__all__ = ["EndedByLauncher", "LaunchedAgent", "LauncherEnd"]

_READ_SIZE = 1 << 16
_POLL = 0.5  # seconds between two checks that the launcher still runs
_PATIENCE = 15.0  # seconds for a launcher that ends its processes to end as well
_BY_THE_LAUNCHER = ("got SIG", "its guardian was killed", "the launcher's process")
_ENDING = (signal.SIGTERM, signal.SIGKILL)


class EndedByLauncher(HostError):
    """The launcher ended its processes on the host: a lost connection, the scheduler, or a user. `status` is its own exit status, None while
    it runs.

    Try: the launcher's own messages.
    """

    def __init__(self, cause: str, *, host: str, status: int | None) -> None:
        super().__init__(cause, host=host)
        self.status = status
        self.exit_code = status or EXIT_HOSTS
        """The launcher's exit status; 69 if there is none."""


class LauncherEnd:
    """Derives from an agent's frames whether the launcher has ended the host's processes: then no worker has failed."""

    def __init__(self, processes: int) -> None:
        self._waiting = processes
        """Number of workers without a reported end."""
        self.has_begun = False
        """The launcher is ending the processes; a worker that fails on its own meanwhile may be the reason."""
        self.is_over = False
        """The launcher has ended a worker, or all processes before their workers started."""
        self.was_told = False
        """The agent has sent its last frame: no process of the job is left on its host."""

    def concerns_driver(self, header: Mapping[str, Any]) -> bool:
        """True for a frame that the driver has to get."""
        kind = header["type"]
        # A worker that dies by the launcher's signal would look like a failed worker, and be blamed in the report.
        if kind == "parting" and header["cause"].startswith(_BY_THE_LAUNCHER):
            self.has_begun = True
            return False
        if kind == "not_started" and self.has_begun:
            self.is_over = True
            return False
        if kind == "exited":
            if self.has_begun and header["signal"] in _ENDING:
                self.is_over = True
                return False
            self._waiting -= 1
        elif kind == "bye":
            self.was_told = True
            self.connection_ended()
        return True

    def connection_ended(self) -> None:
        """Record the end of the connection: no more frames."""
        self.is_over = self.is_over or (self.has_begun and self._waiting > 0)


class LaunchedAgent:
    """hvlaunch.driver.links.agent_channel.AgentConnection over the connection of a host's first process."""

    def __init__(
        self,
        host: str,
        connection: Sealed,
        processes: int,
        launcher_end: Callable[[float], int | None],
        trouble: Callable[[], HvlaunchError | None],
        returns: ReturnCalls,
    ) -> None:
        """`launcher_end` waits the given seconds for the launcher's exit status; None while it runs.

        `trouble` returns the error that disconnected the agents, if any. The agent calls again by `returns`.
        """
        self._host = host
        self._trouble = trouble
        self._launcher_end = launcher_end
        self._returns = returns
        self._end = LauncherEnd(processes)
        self.is_launched = True
        self.processes = processes
        self.on_call: Callable[[], None] = lambda: None
        self._word = returns.expect(self._called)
        self._begin(connection)

    @property
    def has_ended(self) -> bool:
        """True if the host's processes have ended, as far as the driver knows; then the launcher can notice it too."""
        return self._end.was_told or self._end.is_over

    def _called(self) -> None:
        self.on_call()

    def _begin(self, connection: Sealed) -> None:
        self._sealed = connection
        self._is_closed = False
        self.can_rejoin = True
        self.has_modules = False
        self.is_near = is_near(connection.socket)
        self.local_address: str | None = plain(connection.socket.getsockname()[0])
        self.remote_address: str | None = plain(connection.socket.getpeername()[0])

    def start_agent(
        self,
        program: AgentProgram,
        host: Host,  # noqa: ARG002 (the launcher has started an interpreter there)
        listener: Listener,
    ) -> AgentChannel:
        data = program.packed(is_near=self.is_near, with_ranks=self.processes > 1)
        # The reader of this connection sees its end too.
        with contextlib.suppress(OSError):
            # In TLS records of its own: the caller must not read frames that belong to the program.
            self._sealed.sendall(self._word + len(data).to_bytes(4, "big") + data)
        return self._channel(listener)

    def _channel(self, listener: Listener) -> AgentChannel:
        return _Channel(self._sealed, listener, self._end, self._cause, self._ended)

    def _ended(self) -> None:
        """Note the end of the connection. Raises OSError after a loss, or after the driver closed a silent connection."""
        # A cut never looks like an orderly end: after that, the agent itself has ended.
        self.can_rejoin = self._is_closed or was_reset(self._sealed.socket)
        if self.can_rejoin:
            raise ConnectionAbortedError("it was silent" if self._is_closed else "it was reset")

    def rejoin(
        self,
        program: AgentProgram,  # noqa: ARG002 (as AgentConnection has it)
        host: Host,
        scratch: str,  # noqa: ARG002
        listener: Listener,
        timeout: float,
    ) -> tuple[AgentConnection, AgentChannel]:
        deadline = time.monotonic() + timeout
        while (call := self._returns.next(self._word, _POLL)) is None:
            self.close()  # an agent that still hears this connection calls once it ends
            if self._launcher_end(0.0) is not None:
                raise HostLost("its launcher has ended", host=host.name)
            if time.monotonic() >= deadline:
                raise StartTimeout(f"its agent has not called within {timeout:g} s", host=host.name)
        again = copy(self)
        again._begin(call)  # noqa: SLF001 (the same class)
        return again, again._channel(listener)  # noqa: SLF001 (as above)

    def _cause(self, is_launchers: bool) -> HostError | None:
        """Return the error that ended the connection from outside: the driver's own, or the launcher's if `is_launchers`."""
        if (trouble := self._trouble()) is not None:
            return AgentFailed(trouble.cause, host=self._host, hint=trouble.hint)
        return self._ended_by_launcher() if is_launchers else None

    def _ended_by_launcher(self) -> EndedByLauncher:
        status = self._launcher_end(_PATIENCE)
        how = "" if status is None else f", and then ended with exit code {status}"
        return EndedByLauncher(f"the launcher ended its processes{how}", host=self._host, status=status)

    def silence(self) -> float | None:
        return silence(self._sealed.socket)

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._sealed.socket.shutdown(socket.SHUT_RDWR)


class _Channel:
    """hvlaunch.driver.links.agent_channel.AgentChannel to an agent that has been sent its program."""

    def __init__(
        self,
        sealed: Sealed,
        listener: Listener,
        end: LauncherEnd,
        cause: Callable[[bool], HostError | None],
        ended: Callable[[], None],
    ) -> None:
        self._ended = ended
        self._sealed = sealed
        self._listener = listener
        self._end = end
        self._cause = cause

    def frames(self) -> "Iterator[Frame]":
        """Yield frames until the end. Raises EndedByLauncher, AgentFailed, and the errors of AgentChannel.frames()."""
        reader = PieceReader(self._listener.heard_noise)
        decoder = report_decoder()
        while not self._end.is_over and (data := self._read()):
            for header, body in decoder.feed(reader.feed(self._sealed.open(data))):
                self._listener.heard_agent()
                if self._end.concerns_driver(header):
                    yield header, body
        if (cause := self._cause(self._end.is_over)) is not None:
            raise cause
        self._ended()

    def _read(self) -> bytes:
        """Read some bytes; none at the end. Raises OSError if the connection broke while the launcher ran."""
        try:
            data = self._sealed.socket.recv(_READ_SIZE)
        except OSError:
            self._end.connection_ended()
            if not self._end.is_over:
                raise
            return b""
        if not data:
            self._end.connection_ended()
        return data

    def send(self, *frames: "Frame") -> None:
        self._sealed.sendall(b"".join(encode(*frame) for frame in frames))

    def stderr(self) -> bytes:
        return b""

    def exit_status(self, timeout: float) -> int | None:  # noqa: ARG002 (only the launcher gets the status)
        return None


def plain(address: str) -> str:
    """Return the IPv4 address of ::ffff:1.2.3.4, as a socket for both families shows it; other addresses unchanged."""
    return address.removeprefix("::ffff:") if "." in address else address
