"""The agent: starts, watches and stops this host's workers as the driver's frames say.

One thread, one loop. The agent ends its workers and itself when the driver says so, when the
channel closes and no driver connects again in time, when the driver is silent for the lease, and when the guardian
above it is gone.
"""

from __future__ import annotations

import os
import sys
import time

from hvlaunch.agent import reaper, scratch
from hvlaunch.agent.greeting import Greeting
from hvlaunch.agent.quick import READ, WRITE, Selector, deque, signal, signal_name
from hvlaunch.agent.wire.channel import DriverChannel
from hvlaunch.agent.wire.frames import LONGEST_TEXT, LONGEST_TRACEBACK, BadFrame
from hvlaunch.agent.wire.shapes import plain
from hvlaunch.agent.workers import HostWorkers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Deque, Dict, NoReturn, Optional, Sequence

    from hvlaunch.agent.errand_processes import ErrandProcesses
    from hvlaunch.agent.local_ranks import Meeting
    from hvlaunch.agent.relay import RelayListener
    from hvlaunch.agent.wire.caller import Sealed
    from hvlaunch.agent.wire.frames import Frame
    from hvlaunch.agent.wire.rejoin import Visitors
    from hvlaunch.agent.workers import Step

__all__ = ["Agent", "main"]

_SIGNALS_TO_END = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_KILL_PATIENCE = 7.0  # see guardian.py
_LEASE_SHARE = 3
_MOST_PIDS = 16
_LAST_WORDS = 1.0
_LAST_MOMENT = 0.2


def main(
    config: Dict[str, Any],
    directory: str,
    guardian_fd: int,
    sealed: Optional[Sealed] = None,
    meeting: Optional[Meeting] = None,
) -> NoReturn:
    """Run the agent over fds 0 and 1 and exit. `guardian_fd` reads end-of-file when the guardian dies."""
    channel = DriverChannel(0, 1, sealed)
    trouble = reaper.adopt_descendants()  # fork does not hand it on, and the guardian may be killed
    try:
        code = Agent(channel, config, directory, guardian_fd, trouble, meeting).run()
    except BaseException as error:  # noqa: BLE001 (whatever it is, the driver must hear of it)
        import traceback  # noqa: PLC0415 (2 ms, and never needed where all is well)

        cause = plain(" ".join(("%s: %s" % (type(error).__name__, error)).split()), LONGEST_TEXT)
        story = traceback.format_exc().encode("ascii", "replace")[-LONGEST_TRACEBACK:]
        channel.send({"type": "fault", "cause": cause}, story)
        channel.flush_all(5.0)
        code = 1
    os._exit(code)


class Agent:
    """The loop, and what the driver's frames mean."""

    def __init__(
        self,
        channel: DriverChannel,
        config: Dict[str, Any],
        directory: str,
        guardian_fd: int,
        trouble: Optional[str],
        meeting: Optional[Meeting] = None,
    ) -> None:
        self._channel = channel
        self._lease = float(config["lease"])
        self._grace = float(config["grace"])
        self._scratch = directory
        self._guardian_fd = guardian_fd
        self._trouble = trouble
        self._patience = min(_KILL_PATIENCE, self._lease / _LEASE_SHARE)
        self._ending = False
        self._end_by = float("inf")
        """When workers that still live can't be killed."""
        self._alone = False
        self._stays = False
        """Whether to wait, once all has ended, until the driver needs none of what was said again."""
        self._greeted = False
        self._last_heard = time.monotonic()
        self._lost_at: Optional[float] = None
        """When the connection was lost; None while there is one."""
        self._reconnect = min(float(config["reconnect"]), self._lease)
        self._key: str = ""
        self._visitors: Optional[Visitors] = None
        self._calls: Deque[Callable[[], None]] = deque()
        self._selector = Selector()
        self._workers = HostWorkers(
            channel, self._selector, int(config["window"]), directory, int(config["spill"])
        )
        self._meeting = meeting
        self._relay: Optional[RelayListener] = None
        self._errands: Optional[ErrandProcesses] = None
        self._greeting = Greeting(channel, self._selector, self._call_soon, directory, self._listen)
        self._wake_read, self._wake_write = os.pipe()
        self._watch_signals()
        self._selector.register(channel.read_fd, READ, self._receive)
        self._selector.register(guardian_fd, READ, self._orphaned)
        self._writing = False

    def _watch_signals(self) -> None:
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        for number in (signal.SIGCHLD, *_SIGNALS_TO_END):
            signal.signal(number, lambda *_: None)
        self._selector.register(self._wake_read, READ, self._woken)

    def _call_soon(self, call: Callable[[], None]) -> None:
        """Run `call` in the loop; for other threads."""
        self._calls.append(call)
        os.write(self._wake_write, b"\0")

    def _listen(self) -> int:
        """Relay for the workers from now on; the port. Raises OSError, BadFrame."""
        try:
            from hvlaunch.agent.relay import RelayListener  # noqa: PLC0415 (see above)
        except ImportError as error:
            raise BadFrame("modules, but none for a relay: %s" % error) from None
        self._relay = RelayListener(self._channel, self._selector)
        return self._relay.listen()

    def run(self) -> int:
        """Work until there is nothing left to do and nobody left to do it for; the exit code."""
        while not (self._ending and (self._workers.all_ended or time.monotonic() >= self._end_by)):
            self._turn()
        pids = reaper.kill_descendants(self._patience)
        left = len(pids)
        if self._workers.ranks is not None:
            left += self._workers.ranks.finish()
        self._workers.read_the_rest()
        self._channel.send({"type": "bye", "left": left, "pids": pids[:_MOST_PIDS]})
        self._end_by = float("inf")
        while self._stays and not self._channel.is_heard:
            self._turn()
        self._channel.flush_all(_LAST_WORDS if self._alone else self._lease)
        if self._guardian_fd >= 0:
            try:
                os.kill(os.getppid(), signal.SIGCONT)  # whoever has stopped it: it ends with us
            except OSError:
                pass
        scratch.remove(self._scratch)  # the guardian may have been killed since we last looked
        if self._meeting is not None and time.monotonic() >= self._last_heard + self._lease:
            from hvlaunch.agent.family import end_daemon  # noqa: PLC0415 (few agents lose their launcher too)

            end_daemon(os.getppid())
        return int(self._guardian_fd < 0)

    def _turn(self) -> None:
        """Whatever has come, or is due."""
        self._watch_writing()
        for call, _ in self._selector.select(self._timeout()):
            call()
        if self._relay is not None:
            self._relay.read_on()
        now = time.monotonic()
        self._workers.take_due_steps(now)
        if self._errands is not None:
            self._errands.end_overdue(now)
        if self._lost_at is not None and now >= self._lost_at + self._reconnect:
            self._give_up("the driver is gone")
        elif now >= self._last_heard + self._lease:
            self._give_up("heard nothing from the driver for %g seconds" % self._lease)
        elif self._is_lost():
            self._call_driver()

    def _timeout(self) -> float:
        deadlines = [self._end_by, *self._workers.deadlines()]
        if self._errands is not None:
            deadlines.append(self._errands.deadline())
        if self._needs_driver:
            end = self._last_heard + self._lease
            deadlines.append(end if self._is_lost() else end - self._lease / 2)
            if self._lost_at is not None:
                deadlines.append(self._lost_at + self._reconnect)
        return max(0.0, min(deadlines) - time.monotonic())

    def _watch_writing(self) -> None:
        if self._channel.blocked == self._writing:
            return
        if self._writing:
            self._selector.unregister(self._channel.write_fd)
        else:
            self._selector.register(self._channel.write_fd, WRITE, self._channel.flush)
        self._writing = not self._writing

    def _receive(self) -> None:
        try:
            frames = self._channel.receive()
            if frames is not None:
                self._last_heard = time.monotonic()
                for frame in frames:
                    self._obey(frame)
                    self._channel.received(frame)
                return
        except BadFrame as error:
            self._channel.send({"type": "fault", "cause": plain("the driver sent %s" % error, LONGEST_TEXT)})
            self._selector.unregister(self._channel.read_fd)
            self._give_up("the driver is gone")
            return
        self._selector.unregister(self._channel.read_fd)
        if not self._channel.can_rejoin:
            self._give_up("the driver is gone")
            return
        self._channel.lose()
        self._lost_at = time.monotonic()
        self._workers.lose_driver()
        self._call_driver()

    def _receive_visitors(self) -> Visitors:
        if self._visitors is None:
            from hvlaunch.agent.wire.rejoin import Visitors  # noqa: PLC0415 (few connections are lost)

            self._visitors = Visitors(self._channel, self._selector, self._key, self._hang_up, self._go_on)
        return self._visitors

    def _call_driver(self) -> None:
        """By ssh it finds the way to us; else we called it, and call it again."""
        sealed = self._channel.sealed
        if sealed is not None and sealed.again is not None and self._channel.can_rejoin:
            self._receive_visitors().call(sealed.again, self._is_lost, self._call_soon)

    @property
    def _needs_driver(self) -> bool:
        return self._stays or not self._ending

    def _is_lost(self) -> bool:
        """Whether another connection is needed, as far as we know."""
        half = self._last_heard + self._lease / 2
        return self._needs_driver and (self._lost_at is not None or time.monotonic() >= half)

    def _hang_up(self) -> None:
        """Wait for nothing more of this connection."""
        if self._lost_at is None:
            self._selector.unregister(self._channel.read_fd)
        if self._writing:
            self._selector.unregister(self._channel.write_fd)
            self._writing = False

    def _go_on(self, is_new: bool) -> None:
        """There is another connection, to the driver as before or to one that takes its place."""
        self._lost_at = None
        self._last_heard = time.monotonic()
        self._selector.register(self._channel.read_fd, READ, self._receive)
        if is_new and self._relay is not None:
            self._relay.begin_epoch()
        if is_new and self._errands is not None:
            self._errands.end_all()
        self._workers.find_driver(is_new=is_new)

    def _obey(self, frame: Frame) -> None:
        """Raises BadFrame for what may not come now."""
        header, body = frame
        kind = header["type"]
        if not self._greeted and kind not in ("hello", "ping", "leave", "bye"):
            raise BadFrame("a frame of type %s before hello" % kind)
        if kind == "ping":
            self._channel.send({"type": "pong", "at": time.monotonic()})
            self._show_life()
        elif kind == "have":
            self._channel.session.taken(header["frames"])
        elif kind == "patience":
            self._reconnect = min(header["seconds"], self._lease)
        elif kind == "leave":
            self._give_up("the driver has left")
        elif kind == "hello":
            self._greeted = True
            self._workers.suspension = header["elastic"]
            self._greet(header)
        elif kind == "modules":
            try:
                if body:
                    sys.meta_path[0].add(body)  # type: ignore[attr-defined]
            except Exception as error:  # noqa: BLE001 (zlib's and marshal's are of many kinds)
                raise BadFrame("modules: %s" % error) from None
            self._greeting.go_on()
            self._open_door()
        elif kind == "call":
            scratch.keep_call(self._scratch, body)
        elif kind == "probe":
            self._greeting.probe(header)
        elif kind == "start":
            if self._ending:
                return  # sent before the driver knew
            self._greeting.lend_ports()
            self._workers.start(header, body)
            self._greeting.renew_port()
        elif kind == "relay" and self._relay is not None:
            self._relay.obey(header, body)
        elif kind == "errand":
            if self._errands is None:
                from hvlaunch.agent.errand_processes import ErrandProcesses  # noqa: PLC0415 (few jobs have any)

                self._errands = ErrandProcesses(self._channel, self._selector)
                self._workers.reaped_other = self._errands.reaped
            self._errands.obey(header, body)
        elif kind == "bye":
            self._stays = not self._ending
            self._end_workers([(signal.SIGKILL, 0.0)])
        else:
            self._workers.obey(header, body)

    def _open_door(self) -> None:
        """From now on another connection may take the place of this one, where whoever brings it has the key."""
        if not self._key:
            return
        if self._channel.sealed is None:
            try:
                listener = scratch.listen(self._scratch)
            except OSError:
                return  # then the session ends with its connection
            self._selector.register(listener, READ, lambda: self._receive_visitors().let_in(listener))
        self._channel.can_rejoin = True

    def _show_life(self) -> None:
        """To the guardian, which sees our first connection alone."""
        try:
            os.write(self._guardian_fd, b"\0")
        except OSError:
            pass  # it is gone, or has seen enough

    def _greet(self, hello: Dict[str, Any]) -> None:
        """Answer, once all processes of a launcher's are there."""
        self._key = hello["session"] or ""
        others = hello["processes"] - 1
        if self._meeting is None or not others:
            self._greeting.greet(hello, self._trouble)
            return
        from hvlaunch.agent.local_ranks import LocalRanks  # noqa: PLC0415 (few agents are started by a launcher)

        self._workers.ranks = LocalRanks(self._meeting, self._selector, self._workers.end_of, self._part)
        self._workers.ranks.meet(others, lambda: self._greeting.greet(hello, self._trouble))

    def _part(self, cause: str) -> None:
        """The launcher ends processes of this host."""
        self._give_up(cause, alone=False)

    def _woken(self) -> None:
        for number in os.read(self._wake_read, 512):
            if number in _SIGNALS_TO_END:
                self._give_up("got %s" % signal_name(number), alone=False)
        while self._calls:
            self._calls.popleft()()
        self._workers.reap()

    def _orphaned(self) -> None:
        """The guardian was killed. Nothing watches over the agent now, so it ends all, and itself.

        Perhaps a worker made somebody kill us all (MPI_Abort), and is about to end with a code of its own.
        """
        self._channel.send({"type": "parting", "cause": "its guardian was killed"})
        self._selector.unregister(self._guardian_fd)
        self._guardian_fd = -1
        self._alone = True
        self._stays = False
        self._end_workers([(signal.SIGKILL, _LAST_MOMENT)])

    def _end_workers(self, steps: Sequence[Step]) -> None:
        """And then ourselves, whether they can be ended or not."""
        self._ending = True
        self._end_by = time.monotonic() + steps[-1][1] + self._patience
        self._show_life()
        self._workers.stop(None, steps)

    def _give_up(self, cause: str, *, alone: bool = True) -> None:
        """End the workers and then ourselves; `alone` is when nobody is there to report to."""
        self._stays = False
        if self._ending:
            return
        self._channel.send({"type": "parting", "cause": cause})
        self._alone = alone
        if alone:
            if self._relay is not None:
                self._relay.close()
            self._workers.discard_output()
        self._end_workers([(signal.SIGTERM, 0.0), (signal.SIGKILL, self._grace)])
