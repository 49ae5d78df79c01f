"""The start of a session: the host's facts, its ports, and the addresses that lead to other hosts and the rendezvous."""

from __future__ import annotations

import _thread
import os
import sys

from hvlaunch.agent import facts
from hvlaunch.agent.quick import socket
from hvlaunch.agent.wire import probe
from hvlaunch.agent.wire.channel import DriverChannel
from hvlaunch.agent.wire.frames import LONGEST_TEXT, PROTOCOL, plain
from hvlaunch.agent.wire.proof import Prover
from hvlaunch.agent.workers import CannotStart, enter, find

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Tuple

    from hvlaunch.agent.quick import Selector

__all__ = ["Greeting"]

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
