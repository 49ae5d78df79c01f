"""The agent: starts, watches and stops this host's workers as the driver's frames say.

A single thread runs a single loop. The agent ends its workers and itself by order of the driver, after a lost connection
without another in time, after a lease of silence, and after the death of its guardian. A session starts with its greeting: the
host's facts, its ports, and the addresses that lead to other hosts and the rendezvous.
"""

from __future__ import annotations

import _thread
import os
import sys
import time

from hvlaunch.agent import facts, reaper, scratch
from hvlaunch.agent.quick import READ, WRITE, Selector, deque, has_own_proc, signal, signal_name, socket
from hvlaunch.agent.wire import probe
from hvlaunch.agent.wire.channel import DriverChannel
from hvlaunch.agent.wire.frames import LONGEST_TEXT, LONGEST_TRACEBACK, PROTOCOL, BadFrame, plain
from hvlaunch.agent.wire.probe import Prover
from hvlaunch.agent.workers import CannotStart, enter, find
from hvlaunch.agent.workers.host_workers import HostWorkers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Deque, Dict, List, NoReturn, Optional, Sequence, Tuple

    from hvlaunch.agent.errand_processes import ErrandProcesses
    from hvlaunch.agent.wire.caller import Sealed
    from hvlaunch.agent.wire.frames import Frame
    from hvlaunch.agent.wire.rejoin import Visitors
    from hvlaunch.agent.wire.relay import RelayListener
    from hvlaunch.agent.workers.host_workers import Step
    from hvlaunch.agent.workers.local_ranks import Meeting

__all__ = ["Agent", "Greeting", "main"]

_SIGNALS_TO_END = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_KILL_PATIENCE = 7.0  # seconds; guardian.py waits for this time twice
_LEASE_SHARE = 3  # a short lease shortens the patience too: the driver waits no longer than its own lease
_MOST_PIDS = 16
_LAST_WORDS = 1.0
_FOREIGN_PROC = (
    "/proc shows another PID namespace (unshare --mount-proc mounts its own): workers can't be observed"
)
_LAST_MOMENT = 0.2


def main(
    config: Dict[str, Any],
    directory: str,
    guardian_fd: int,
    sealed: Optional[Sealed] = None,
    meeting: Optional[Meeting] = None,
) -> NoReturn:
    """Run the agent over fds 0 and 1 and exit. `guardian_fd` reads end-of-file after the guardian's death."""
    channel = DriverChannel(0, 1, sealed)
    # The guardian is a subreaper already, but fork does not hand that on, and the guardian may be killed.
    trouble = reaper.adopt_descendants() or (None if has_own_proc() else _FOREIGN_PROC)
    try:
        code = Agent(channel, config, directory, guardian_fd, trouble, meeting).run()
    except BaseException as error:  # noqa: BLE001 (the driver must get every error)
        import traceback  # noqa: PLC0415 (2 ms, and needed after a defect only)

        cause = plain(" ".join(("%s: %s" % (type(error).__name__, error)).split()), LONGEST_TEXT)
        story = traceback.format_exc().encode("ascii", "replace")[-LONGEST_TRACEBACK:]
        channel.send({"type": "fault", "cause": cause}, story)
        channel.flush_all(5.0)
        code = 1
    os._exit(code)


class _Lifeline:
    """The lease of the driver, and the state of the connection to it."""

    def __init__(self, lease: float, reconnect: float) -> None:
        """`reconnect`: seconds to wait for another connection after a loss."""
        self.lease = lease
        self.reconnect = min(reconnect, lease)
        self.kill_patience = min(_KILL_PATIENCE, lease / _LEASE_SHARE)
        self.last_heard = time.monotonic()
        self.lost_at: Optional[float] = None
        """Time of the connection's loss; None while connected."""

    def renew(self) -> None:
        """Begin the lease anew, after data from the driver."""
        self.last_heard = time.monotonic()

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.last_heard + self.lease

    @property
    def is_lost(self) -> bool:
        """True after the connection's loss, or a silence of half the lease."""
        # A cut in the network is no end of the connection, so half a lease of silence counts as one.
        return self.lost_at is not None or time.monotonic() >= self.last_heard + self.lease / 2

    def cause_of_end(self) -> Optional[str]:
        """Return why the agent has to end now; None while waiting for the driver is permitted."""
        if self.lost_at is not None and time.monotonic() >= self.lost_at + self.reconnect:
            return "the driver is gone"
        return "received nothing from the driver for %g seconds" % self.lease if self.is_over else None

    def deadlines(self) -> List[float]:
        """Return the next times of a change of is_lost or cause_of_end()."""
        end = self.last_heard + self.lease
        times = [end if self.is_lost else end - self.lease / 2]
        if self.lost_at is not None:
            times.append(self.lost_at + self.reconnect)
        return times


class Agent:
    """The agent's loop, and the effect of each of the driver's frames."""

    def __init__(
        self,
        channel: DriverChannel,
        config: Dict[str, Any],
        directory: str,
        guardian_fd: int,
        trouble: Optional[str],
        meeting: Optional[Meeting] = None,
    ) -> None:
        """`trouble`: why the agent can't adopt orphans, if so. A launcher's other processes call at `meeting`."""
        self._channel = channel
        self._lifeline = _Lifeline(float(config["lease"]), float(config["reconnect"]))
        self._grace = float(config["grace"])
        self._scratch = directory
        self._guardian_fd = guardian_fd
        self._ending = False
        self._end_by = float("inf")
        """Time from which live workers count as unkillable."""
        self._alone = False
        self._stays = False
        """True if the agent stays at its end until the driver has acknowledged its frames."""
        self._session_key: Optional[str] = None
        """None before hello; empty for a session without further connections."""
        self._visitors: Optional[Visitors] = None
        self._calls: Deque[Callable[[], None]] = deque()
        self._selector = Selector()
        self._workers = HostWorkers(
            channel, self._selector, int(config["window"]), directory, int(config["spill"])
        )
        self._meeting = meeting
        self._relay: Optional[RelayListener] = None
        self._errands: Optional[ErrandProcesses] = None
        self._greeting = Greeting(channel, self._selector, self._call_soon, directory, self._listen, trouble)
        self._wake_read, self._wake_write = os.pipe()
        self._watch_signals()
        self._selector.register(channel.read_fd, READ, self._receive)
        self._selector.register(guardian_fd, READ, self._orphaned)

    def _watch_signals(self) -> None:
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        # Python writes each signal's number into the pipe, so the loop sees signals like any other event. The handlers
        # do nothing: they are there because an ignored signal would not be written.
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
        """Relay for the workers from now on; return the port. Raises OSError, BadFrame."""
        try:
            from hvlaunch.agent.wire.relay import RelayListener  # noqa: PLC0415 (few hosts need a relay)
        except ImportError as error:
            raise BadFrame("modules, but none for a relay: %s" % error) from None
        self._relay = RelayListener(self._channel, self._selector)
        return self._relay.listen()

    def run(self) -> int:
        """Work until the job is over or the driver gone, and each process has ended; return the exit code."""
        while not (self._ending and (self._workers.all_ended or time.monotonic() >= self._end_by)):
            self._turn()
        pids = reaper.kill_descendants(self._lifeline.kill_patience)
        left = len(pids)
        if self._workers.ranks is not None:
            left += self._workers.ranks.finish()
        # Only now: a descendant could have written until it was killed.
        self._workers.output.finish_all()
        self._channel.send({"type": "bye", "left": left, "pids": pids[:_MOST_PIDS]})
        self._channel.flush()  # before the wait for frames of the driver
        self._end_by = float("inf")
        while self._stays and not self._channel.is_acknowledged:
            self._turn()
        self._channel.flush_all(_LAST_WORDS if self._alone else self._lifeline.lease)
        if self._guardian_fd >= 0:
            try:
                # A worker may have stopped the guardian, which would then never exit.
                os.kill(os.getppid(), signal.SIGCONT)
            except OSError:
                pass
        scratch.remove(self._scratch)  # the guardian may have been killed unnoticed
        if self._meeting is not None and self._lifeline.is_over:
            from hvlaunch.agent.workers.family import end_daemon  # noqa: PLC0415 (few agents lose their launcher too)

            end_daemon(os.getppid())
        return int(self._guardian_fd < 0)

    def _turn(self) -> None:
        """Handle a batch of events, and the due steps; write the frames of all together."""
        self._watch_writing()
        for call, _ in self._selector.select(self._timeout()):
            call()
        now = time.monotonic()
        self._workers.take_due_steps(now)
        if self._errands is not None:
            self._errands.end_overdue(now)
        cause = self._lifeline.cause_of_end()
        if cause is not None:
            self._give_up(cause)
        elif self._needs_connection():
            self._call_driver()
        self._channel.flush()
        # Behind flush(): nothing else wakes a connection that was held back for want of room.
        if self._relay is not None:
            self._relay.read_on()

    def _timeout(self) -> float:
        deadlines = [self._end_by, *self._workers.deadlines()]
        if self._errands is not None:
            deadlines.append(self._errands.deadline())
        if self._needs_driver:
            deadlines.extend(self._lifeline.deadlines())
        return max(0.0, min(deadlines) - time.monotonic())

    def _watch_writing(self) -> None:
        # A pipe that takes data is always ready, so it is watched only while frames wait: the loop would spin.
        is_watched = self._channel.write_fd in self._selector
        if self._channel.blocked and not is_watched:
            self._selector.register(self._channel.write_fd, WRITE, self._channel.flush)
        elif is_watched and not self._channel.blocked:
            self._selector.unregister(self._channel.write_fd)

    def _receive(self) -> None:
        try:
            frames = self._channel.receive()
            if frames is not None:
                self._lifeline.renew()
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
        self._lifeline.lost_at = time.monotonic()
        # Output may wait in a file now, so streams that were paused for want of credit are read on.
        self._workers.output.read_on()
        self._call_driver()

    def _receive_visitors(self) -> Visitors:
        if self._visitors is None:
            from hvlaunch.agent.wire.rejoin import Visitors  # noqa: PLC0415 (few connections are lost)

            self._visitors = Visitors(
                self._channel, self._selector, self._session_key or "", self._hang_up, self._go_on
            )
        return self._visitors

    def _call_driver(self) -> None:
        """Call the driver again, for a launcher's agent; by ssh the driver connects."""
        sealed = self._channel.sealed
        if sealed is not None and sealed.again is not None and self._channel.can_rejoin:
            self._receive_visitors().call(sealed.again, self._needs_connection, self._call_soon)

    @property
    def _needs_driver(self) -> bool:
        return self._stays or not self._ending

    def _needs_connection(self) -> bool:
        return self._needs_driver and self._lifeline.is_lost

    def _hang_up(self) -> None:
        """Stop watching this connection."""
        if self._lifeline.lost_at is None:
            self._selector.unregister(self._channel.read_fd)
        if self._channel.write_fd in self._selector:
            self._selector.unregister(self._channel.write_fd)

    def _go_on(self, is_new: bool) -> None:
        """Continue over another connection, to the same driver or (`is_new`) a successor."""
        self._lifeline.lost_at = None
        self._lifeline.renew()
        self._selector.register(self._channel.read_fd, READ, self._receive)
        if is_new and self._relay is not None:
            self._relay.begin_epoch()
        if is_new and self._errands is not None:
            self._errands.end_all()
        self._workers.find_driver(is_new=is_new)

    def _obey(self, frame: Frame) -> None:
        """Carry out a frame. Raises BadFrame for an unexpected frame."""
        header, body = frame
        kind = header["type"]
        if self._session_key is None and kind not in ("hello", "ping", "leave", "bye"):
            raise BadFrame("a frame of type %s before hello" % kind)
        if kind == "ping":
            self._channel.send({"type": "pong", "at": time.monotonic()})
            self._show_life()
        elif kind == "have":
            self._channel.session.taken(header["frames"])
        elif kind == "patience":
            self._lifeline.reconnect = min(header["seconds"], self._lifeline.lease)
        elif kind == "leave":
            self._give_up("the driver has left")
        elif kind == "hello":
            self._workers.suspension = header["elastic"]
            self._greet(header)
        elif kind == "modules":
            try:
                if body:
                    sys.meta_path[0].add(body)  # type: ignore[attr-defined]
            except AttributeError:
                # This agent has its modules from another place than boot.py's bundle.
                raise BadFrame("modules for an agent that needs none") from None
            self._greeting.go_on()
            self._open_door()
        elif kind == "call":
            scratch.keep_call(self._scratch, body)
        elif kind == "probe":
            self._greeting.probe(header)
        elif kind == "vouch":
            self._greeting.vouch(header)
        elif kind == "start":
            if self._ending:
                return  # the driver sent it before it got `parting`
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
        elif kind == "hold":
            from hvlaunch.agent.leases import hold  # noqa: PLC0415 (few jobs have leases)

            self._channel.send({"type": "held", **hold(header)})
        elif kind == "bye":
            self._stays = not self._ending
            self._end_workers([(signal.SIGKILL, 0.0)])
        else:
            self._workers.obey(header, body)

    def _open_door(self) -> None:
        """Permit another connection to replace the first, given the session's key."""
        # Only now, because the code for it came with the modules.
        if not self._session_key:
            return
        if self._channel.sealed is None:
            try:
                listener = scratch.listen(self._scratch)
            except OSError:
                return  # then the session ends with its connection
            self._selector.register(listener, READ, lambda: self._receive_visitors().let_in(listener))
        self._channel.can_rejoin = True

    def _show_life(self) -> None:
        """Renew the guardian's deadline; the guardian sees only the end of the first connection."""
        try:
            os.utime(self._scratch)  # for a guardian outside of a container
            os.write(self._guardian_fd, b"\0")
        except OSError:
            pass  # the guardian is gone, or its pipe is full, which is as good

    def _greet(self, hello: Dict[str, Any]) -> None:
        """Answer hello, after the calls of a launcher's other processes here."""
        self._session_key = hello["session"] or ""
        others = hello["processes"] - 1
        if self._meeting is None or not others:
            self._greeting.greet(hello)
            return
        from hvlaunch.agent.workers.local_ranks import LocalRanks  # noqa: PLC0415 (few agents are started by a launcher)

        self._workers.ranks = LocalRanks(self._meeting, self._selector, self._workers.record_exit, self._part)
        self._workers.ranks.meet(others, lambda: self._greeting.greet(hello))

    def _part(self, cause: str) -> None:
        """End the workers, because the launcher ends processes of this host."""
        self._give_up(cause, alone=False)

    def _woken(self) -> None:
        for number in os.read(self._wake_read, 512):
            if number in _SIGNALS_TO_END:
                self._give_up("got %s" % signal_name(number), alone=False)
        while self._calls:
            self._calls.popleft()()
        self._workers.reap()

    def _orphaned(self) -> None:
        """End the workers and the agent itself, after the guardian was killed."""
        # Without a guardian, the death of the agent would leave the workers running for ever.
        self._channel.send({"type": "parting", "cause": "its guardian was killed"})
        self._channel.flush()  # now: sshd, whose child the guardian was, reports its end at once
        self._selector.unregister(self._guardian_fd)
        self._guardian_fd = -1
        self._alone = True
        self._stays = False
        # A worker may have had the launcher kill every process (MPI_Abort), and be about to end with its own code: that
        # code is worth a moment.
        self._end_workers([(signal.SIGKILL, _LAST_MOMENT)])

    def _end_workers(self, steps: Sequence[Step]) -> None:
        """Send the signals of `steps`; the loop stops after the last worker's end, or once the rest is unkillable."""
        self._ending = True
        self._end_by = time.monotonic() + steps[-1][1] + self._lifeline.kill_patience
        self._show_life()
        self._workers.stop(None, steps)

    def _give_up(self, cause: str, *, alone: bool = True) -> None:
        """End the workers and the agent; `alone`: without a driver to report to."""
        self._stays = False
        if self._ending:
            return
        self._channel.send({"type": "parting", "cause": cause})
        self._alone = alone
        if alone:
            if self._relay is not None:
                self._relay.close()
            self._workers.output.discard()
        self._end_workers([(signal.SIGTERM, 0.0), (signal.SIGKILL, self._grace)])


_PROBE_TIMEOUT = 5.0
_VOUCH_TIMEOUT = 1.0
_CONNECT_TIMEOUT = 2.0  # for a rendezvous with a relay: enough to send a lost packet again
_SETTLE = 0.2
_NVML = """\
import ctypes
nvml, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint()
nvml.nvmlInit_v2()
nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
print(count.value)
"""
"""Counts GPUs by NVIDIA's management library, in a process of its own: a driver that hangs, or crashes, is not the agent's end."""


class Greeting:
    """Answers `hello` and `probe`. Threads probe, and send their results through the loop."""

    def __init__(
        self,
        channel: DriverChannel,
        selector: Selector,
        call_soon: Callable[[Callable[[], None]], None],
        scratch: str,
        listen: Callable[[], int],
        trouble: Optional[str],
    ) -> None:
        self._channel = channel
        self._selector = selector
        self._call_soon = call_soon
        self._scratch = scratch
        self._listen_as_relay = listen
        self._trouble = trouble
        self._beacon: Optional[probe.Beacon] = None
        # Rank 0's port first, then those for `{port:NAME}`.
        self._kept: List[socket.socket] = []
        self._lent: List[socket.socket] = []
        self._hello: Dict[str, Any] = {}
        self._is_greeted = self._has_modules = False

    def greet(self, hello: Dict[str, Any]) -> None:
        """Send the facts, after counting GPUs if the driver wants their number."""
        self._hello = hello
        beacon_port, master_port = self._take_ports(hello)
        answer: Dict[str, Any] = {
            "type": "hello",
            "protocol": PROTOCOL,
            "facts": facts.host_facts(),
            "scratch": self._scratch,
            "beacon_port": beacon_port,
            "master_port": master_port,
            "cwd_error": enter(hello["cwd"]),
            "trouble": self._trouble and plain(self._trouble, LONGEST_TEXT),
        }
        if "more_ports" in hello:
            answer["more_ports"] = self._ports()[1:]
        if "python" in hello:
            program, path = hello["python"]
            try:
                packages = facts.packages_of(
                    find(program, os.environ.get("PATH", os.defpath) if path is None else path)
                )
            except CannotStart:
                packages = None
            answer["facts"]["packages"] = packages
        if hello["gpus"]:
            # The driver of GPUs may take seconds, in which the agent must answer pings.
            self._in_thread(lambda: self._tell_with_gpus(answer))
        else:
            self._channel.send(answer)
        self._is_greeted = True
        self._look_for_rendezvous()

    def go_on(self) -> None:
        """Note the arrival of all modules; look for the rendezvous, once greeted."""
        self._has_modules = True
        self._look_for_rendezvous()

    def _look_for_rendezvous(self) -> None:
        # A relay needs the modules, so the search for the rendezvous begins with the later of the two events.
        rendezvous = self._hello.get("rendezvous")
        if not (rendezvous and self._is_greeted and self._has_modules):
            return
        if rendezvous["relay"] == "always":
            self._tell_reached(None, [], relay=True)
        else:
            self._in_thread(lambda: self._reach_rendezvous(rendezvous))

    def lend_ports(self) -> None:
        """Lend rank 0's port, and the ports for places in the command, to the workers that start now."""
        # A port stays bound here. A program with SO_REUSEADDR, such as torch, may listen on it, since the agent does
        # not; for other programs, and for the kernel's choice of ports, it is taken.
        # In a job with roles, other orders of the same round follow the first, and restarts.
        if not self._kept:
            return
        for lent in self._lent:
            lent.close()
        self._lent, self._kept = self._kept, []
        for lent in self._lent:
            lent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # The hosts of a static job have found each other by now; an elastic job may get new hosts.
        if self._beacon is not None and self._hello["elastic"] is None:
            self._beacon.close()

    def renew_port(self) -> None:
        """Keep other ports for an elastic job's next round, and tell the driver."""
        if self._hello["elastic"] is None:
            return
        try:
            self._keep_ports()
        except OSError:
            self._kept.clear()
            return  # those before may be free again by then
        port, *more = self._ports()
        self._channel.send({"type": "master_port", "port": port, **({"more": more} if more else {})})

    def _keep_ports(self) -> None:
        for _ in range(1 + self._hello.get("more_ports", 0)):
            self._kept.append(facts.free_port(self._hello["ports"]))

    def _ports(self) -> List[int]:
        return [kept.getsockname()[1] for kept in self._kept]

    def _take_ports(self, hello: Dict[str, Any]) -> Tuple[Optional[int], Optional[int]]:
        """Reserve and return the ports of the beacon and of rank 0; None if the job's range has no free port."""
        within = hello["ports"]
        try:
            self._keep_ports()
            prover = Prover(hello["key"], "host " + hello["name"])
            self._beacon = probe.Beacon(facts.free_port(within), self._selector, prover, hello["known_as"])
        except OSError:
            if within is None:
                raise
            return None, None
        return self._beacon.port, self._ports()[0]

    def probe(self, header: Dict[str, Any]) -> None:
        """Try the addresses of another host's beacon; send `probed` for each proven address, then a final `probed`."""
        self._in_thread(lambda: self._reach_host(header))

    def vouch(self, header: Dict[str, Any]) -> None:
        """Try to reach another host, silent for the driver; send `vouched` after an answer."""
        self._in_thread(lambda: self._reach_silent_host(header))

    def _in_thread(self, work: Callable[[], None]) -> None:
        """Run `work` beside the loop; an exception is raised in the loop, which reports it to the driver."""

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 (see the docstring)
                self._call_soon(_raiser(error))

        _thread.start_new_thread(run, ())

    def _send_soon(self, header: Dict[str, Any]) -> None:
        self._call_soon(lambda: self._channel.send(header))

    def _tell_with_gpus(self, answer: Dict[str, Any]) -> None:
        answer["facts"]["gpus"] = _gpus()
        self._send_soon(answer)

    def _reach_rendezvous(self, rendezvous: Dict[str, Any]) -> None:
        targets = [(str(address), int(port)) for address, port in rendezvous["candidates"]]
        good: List[int] = []

        def on_proof(index: int) -> bool:
            good.append(index)
            # The first candidate is the best: nothing is gained by waiting for others.
            return index == 0

        relay = rendezvous["relay"] == "auto"
        patience = _CONNECT_TIMEOUT if relay else None
        probe.reach(targets, rendezvous["key"], "rendezvous", _PROBE_TIMEOUT, on_proof, _SETTLE, patience)
        address = targets[min(good)][0] if good else None
        tried = [target[0] for target in targets]
        self._call_soon(lambda: self._tell_reached(address, tried, relay=relay))

    def _tell_reached(self, address: Optional[str], tried: List[str], *, relay: bool) -> None:
        """Report the rendezvous' address for this host's workers; relay if no address works and `relay` permits it."""
        port = None
        if address is None and relay:
            try:
                port = self._listen_as_relay()
            except OSError:
                pass  # the host has no loopback
            else:
                address = "127.0.0.1"
        self._channel.send({"type": "reached", "address": address, "tried": tried, "relay_port": port})

    def _reach_host(self, header: Dict[str, Any]) -> None:
        targets = [(str(address), int(header["port"])) for address in header["addresses"]]
        about = {"type": "probed", "target": header["target"], "agent": header["agent"]}

        def on_proof(index: int) -> bool:
            self._send_soon({**about, "address": targets[index][0]})
            return False

        probe.reach(targets, header["key"], "host " + header["target"], _PROBE_TIMEOUT, on_proof)
        self._send_soon({**about, "address": None})

    def _reach_silent_host(self, header: Dict[str, Any]) -> None:
        targets = [(str(address), int(header["port"])) for address in header["addresses"]]

        def on_proof(_index: int) -> bool:
            self._send_soon({"type": "vouched", "target": header["target"]})
            return True

        probe.reach(targets, header["key"], "host " + header["target"], _VOUCH_TIMEOUT, on_proof)


def _raiser(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def _gpus() -> int:
    """Return the number of GPUs; 0 if it can't be read."""
    command = [sys.executable, "-IS", "-c", _NVML]
    try:
        # The library's package has this too: a host without it is spared another start of Python.
        find("nvidia-smi", os.environ.get("PATH", os.defpath))
        import subprocess  # noqa: PLC0415 (15 ms, only where GPUs are to be counted)

        return int(
            subprocess.check_output(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=30)
        )
    except Exception:  # noqa: BLE001 (of several kinds; all mean that there is none, or none that answers)
        return 0
