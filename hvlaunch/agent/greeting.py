"""Getting to know each other: the host's facts, and which addresses lead where."""

from __future__ import annotations

import _thread
import os

from hvlaunch.agent import facts, probe
from hvlaunch.agent.quick import socket
from hvlaunch.agent.wire.channel import DriverChannel
from hvlaunch.agent.wire.frames import LONGEST_TEXT, MOST_GPUS, PROTOCOL
from hvlaunch.agent.wire.proof import Prover
from hvlaunch.agent.wire.shapes import plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Tuple

    from hvlaunch.agent.quick import Selector

__all__ = ["Greeting"]

_PROBE_TIMEOUT = 5.0
_CONNECT_TIMEOUT = 2.0  # for the rendezvous, where there is a relay: one lost packet is sent again meanwhile
_SETTLE = 0.2
_GPU_QUERY = ["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]


class Greeting:
    """Answers `hello` and `probe`. Probing happens in threads, whose findings come back through the loop."""

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
        self._master: Optional[socket.socket] = None
        self._lent: Optional[socket.socket] = None
        self._hello: Dict[str, Any] = {}
        self._is_greeted = self._has_modules = False

    def greet(self, hello: Dict[str, Any]) -> None:
        """Tell the facts (after counting GPUs, if asked to)."""
        self._hello = hello
        beacon_port, master_port = self._take_ports(hello)
        answer = {
            "type": "hello",
            "protocol": PROTOCOL,
            "facts": facts.host_facts(),
            "scratch": self._scratch,
            "beacon_port": beacon_port,
            "master_port": master_port,
            "cwd_error": _cannot_enter(hello["cwd"]),
            "trouble": self._trouble and plain(self._trouble, LONGEST_TEXT),
        }
        if hello["gpus"]:
            self._in_thread(lambda: self._tell_with_gpus(answer))
        else:
            self._channel.send(answer)
        self._is_greeted = True
        self._look_for_rendezvous()

    def go_on(self) -> None:
        """All modules are there, that of the relay too: see whether the rendezvous can be reached, once greeted."""
        self._has_modules = True
        self._look_for_rendezvous()

    def _look_for_rendezvous(self) -> None:
        rendezvous = self._hello.get("rendezvous")
        if not (rendezvous and self._is_greeted and self._has_modules):
            return
        if rendezvous["relay"] == "always":
            self._tell_reached(None, [], relay=True)
        else:
            self._in_thread(lambda: self._reach_rendezvous(rendezvous))

    def lend_ports(self) -> None:
        """The workers start now: the port that was kept for rank 0 is theirs.

        It stays bound here. Whoever listens on it with SO_REUSEADDR, as torch does, may, since we don't listen; for
        others, and for the kernel that chooses ports, it is taken. All hosts of a static job know by now how they
        reach this one; to an elastic job others may come.
        """
        if self._lent is not None:
            self._lent.close()
        self._lent, self._master = self._master, None
        if self._lent is not None:
            self._lent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self._beacon is not None and self._hello["elastic"] is None:
            self._beacon.close()

    def renew_port(self) -> None:
        """Keep another port for rank 0 of an elastic job's next round, and tell the driver."""
        if self._hello["elastic"] is None:
            return
        try:
            self._master = facts.free_port(self._hello["ports"])
        except OSError:
            return  # the one before may be free again by then
        self._channel.send({"type": "master_port", "port": self._master.getsockname()[1]})

    def _take_ports(self, hello: Dict[str, Any]) -> Tuple[Optional[int], Optional[int]]:
        """The ports of our beacon and of rank 0, from now on ours; None where there are none in the job's range."""
        within = hello["ports"]
        try:
            self._master = facts.free_port(within)
            prover = Prover(hello["key"], "host " + hello["name"])
            self._beacon = probe.Beacon(facts.free_port(within), self._selector, prover, hello["known_as"])
        except OSError:
            if within is None:
                raise
            return None, None
        return self._beacon.port, self._master.getsockname()[1]

    def probe(self, header: Dict[str, Any]) -> None:
        """Try the addresses of another host's beacon; a `probed` frame for each good one, then a last one."""
        self._in_thread(lambda: self._reach_host(header))

    def _in_thread(self, work: Callable[[], None]) -> None:
        """Do it beside the loop; what it raises is raised in the loop, where the driver is told."""

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 (see above)
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

        def found(index: int) -> bool:
            good.append(index)
            return index == 0

        relay = rendezvous["relay"] == "auto"
        patience = _CONNECT_TIMEOUT if relay else None
        probe.reach(targets, rendezvous["key"], "rendezvous", _PROBE_TIMEOUT, found, _SETTLE, patience)
        address = targets[min(good)][0] if good else None
        tried = [target[0] for target in targets]
        self._call_soon(lambda: self._tell_reached(address, tried, relay=relay))

    def _tell_reached(self, address: Optional[str], tried: List[str], *, relay: bool) -> None:
        """Where the rendezvous is for this host's workers; where it is nowhere, we relay if we may and can."""
        port = None
        if address is None and relay:
            try:
                port = self._listen_as_relay()
            except OSError:
                pass  # a host without a loopback
            else:
                address = "127.0.0.1"
        self._channel.send({"type": "reached", "address": address, "tried": tried, "relay_port": port})

    def _reach_host(self, header: Dict[str, Any]) -> None:
        targets = [(str(address), int(header["port"])) for address in header["addresses"]]
        about = {"type": "probed", "target": header["target"], "agent": header["agent"]}

        def found(index: int) -> bool:
            self._send_soon({**about, "address": targets[index][0]})
            return False

        probe.reach(targets, header["key"], "host " + header["target"], _PROBE_TIMEOUT, found)
        self._send_soon({**about, "address": None})


def _raiser(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def _cannot_enter(path: str) -> Optional[str]:
    """Why the directory can't be entered; None where it can. The agent then stays in it."""
    try:
        os.chdir(path)
    except OSError as error:
        return os.strerror(error.errno or 0)
    os.environ["PWD"] = path
    return None


def _gpus() -> List[List[str]]:
    """Index, name and MiB of each GPU, as nvidia-smi tells; none where there is no nvidia-smi."""
    import subprocess  # noqa: PLC0415 (15 ms, only where GPUs are to be counted)

    try:
        listing = subprocess.check_output(
            _GPU_QUERY, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return []
    lines = listing.decode("utf-8", "replace").splitlines()
    gpus = [
        [plain(word.strip(), 256) for word in line.split(",")[:8]] for line in lines if line[:1].isdigit()
    ]
    return gpus[:MOST_GPUS]
