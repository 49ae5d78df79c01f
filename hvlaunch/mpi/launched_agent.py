"""The way to an agent that a launcher has started: frames over the connection by which it called."""

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

from hvlaunch.agent.wire.caller import Sealed
from hvlaunch.agent.wire.frames import encode
from hvlaunch.driver.links.agent_channel import AgentChannel, AgentConnection, Listener
from hvlaunch.driver.links.piece_reader import PieceReader
from hvlaunch.driver.links.reports import report_decoder
from hvlaunch.driver.program.agent_program import AgentProgram
from hvlaunch.errors import AgentFailed, HostError, HostLost, HvlaunchError, StartTimeout
from hvlaunch.job import Host
from hvlaunch.mpi.launcher_errors import EndedByLauncher
from hvlaunch.mpi.return_calls import ReturnCalls
from hvlaunch.ssh.tcp import is_near, silence, was_reset

if TYPE_CHECKING:
    from hvlaunch.agent.wire.frames import Frame

__all__ = ["LaunchedAgent", "LauncherEnd"]

_READ_SIZE = 1 << 16
_LOOK = 0.5  # seconds between two looks whether the launcher is still there
_PATIENCE = 15.0  # seconds for a launcher that ends its processes to end as well
_BY_THE_LAUNCHER = ("got SIG", "its guardian was killed", "the launcher's process")
_ENDING = (signal.SIGTERM, signal.SIGKILL)


class LauncherEnd:
    """Tells from an agent's frames whether the launcher has ended the host's processes: then no worker has failed."""

    def __init__(self, processes: int) -> None:
        self._waiting = processes
        """How many workers' ends were not told."""
        self.has_begun = False
        """It ends them. A worker that ends now for a cause of its own may be why."""
        self.is_over = False
        """It has ended a worker, or all before they were started."""
        self.was_told = False
        """The agent has said its last word: nothing of the job is left on its host."""

    def concerns_driver(self, header: Mapping[str, Any]) -> bool:
        """Whether the driver is to be told of the frame."""
        kind = header["type"]
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
        """Nothing will come any more."""
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
        """`launcher_end` waits for the launcher's end, some seconds: its exit status, None where it runs on.

        `trouble` is why we have hung up on all agents, if we have; by `returns` the agent calls again.
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
        """Whether the host's processes have ended, as far as anybody here knows: so the launcher can know it too."""
        return self._end.was_told or self._end.is_over

    def _called(self) -> None:
        self.on_call()

    def _begin(self, connection: Sealed) -> None:
        self._sealed = connection
        self._is_closed = False
        self.can_rejoin = True
        self.has_modules = False
        self.local_address: str | None = plain(connection.socket.getsockname()[0])
        self.remote_address: str | None = plain(connection.socket.getpeername()[0])

    def start_agent(
        self,
        program: AgentProgram,
        host: Host,  # noqa: ARG002 (the launcher has started an interpreter there)
        listener: Listener,
    ) -> AgentChannel:
        data = program.packed(is_near=is_near(self._sealed.socket), with_ranks=self.processes > 1)
        with contextlib.suppress(OSError):  # who reads sees the end too
            self._sealed.sendall(self._word + len(data).to_bytes(4, "big") + data)  # in records of its own
        return self._channel(listener)

    def _channel(self, listener: Listener) -> AgentChannel:
        return _Channel(self._sealed, listener, self._end, self._cause, self._ended)

    def _ended(self) -> None:
        """The connection is at its end: by the other side's, since no cut looks so, or by ours. Raises OSError for ours."""
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
        while (call := self._returns.next(self._word, _LOOK)) is None:
            self.close()  # it may hear us, and then it calls
            if self._launcher_end(0.0) is not None:
                raise HostLost("its launcher has ended", host=host.name)
            if time.monotonic() >= deadline:
                raise StartTimeout(f"its agent has not called within {timeout:g} s", host=host.name)
        again = copy(self)
        again._begin(call)  # noqa: SLF001 (one of us)
        return again, again._channel(listener)  # noqa: SLF001 (as above)

    def _cause(self, is_launchers: bool) -> HostError | None:
        """Of the connection's end, where it is not the agent's own: we have hung up, or it `is_launchers`."""
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
    """hvlaunch.driver.links.agent_channel.AgentChannel, to an agent whose program is on its way."""

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
        """To the end. Raises EndedByLauncher, AgentFailed, and what AgentChannel.frames() raises."""
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
        """Empty at the end. Raises OSError where the connection broke, and not by the launcher's end."""
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

    def exit_status(self, timeout: float) -> int | None:  # noqa: ARG002 (it is the launcher that is told)
        return None


def plain(address: str) -> str:
    """An IPv4 address that a socket for both families shows as ::ffff:1.2.3.4."""
    return address.removeprefix("::ffff:") if "." in address else address
