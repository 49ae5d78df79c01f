"""Getting to know each other: the host's facts, and which addresses lead where."""

import os
import selectors
import threading
from functools import partial
from typing import Any, Callable, Dict, List, Optional

from hvlaunch.agent import facts, probe
from hvlaunch.agent.channel import Channel
from hvlaunch.agent.frames import PROTOCOL

__all__ = ["Greeting"]

_PROBE_TIMEOUT = 5.0
_SETTLE = 0.2
_GPU_QUERY = ["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]


class Greeting:
    """Answers `hello` and `probe`. Probing happens in threads, whose findings come back through the loop."""

    def __init__(
        self,
        channel: Channel,
        selector: selectors.BaseSelector,
        call_soon: Callable[[Callable[[], None]], None],
        scratch: str,
    ) -> None:
        self._channel = channel
        self._selector = selector
        self._call_soon = call_soon
        self._scratch = scratch
        self._beacon: Optional[probe.Beacon] = None
        self._master = facts.free_port()

    def greet(self, hello: Dict[str, Any], trouble: Optional[str]) -> None:
        """Tell the facts (after counting GPUs, if asked to), then whether the rendezvous can be reached."""
        self._beacon = probe.Beacon(facts.free_port(), hello["nonce"])
        self._selector.register(self._beacon.listener, selectors.EVENT_READ, self._beacon.answer)
        answer = {
            "type": "hello",
            "protocol": PROTOCOL,
            "facts": facts.host_facts(),
            "scratch": self._scratch,
            "beacon_port": self._beacon.port,
            "master_port": self._master.getsockname()[1],
            "cwd_error": _cannot_enter(hello["cwd"]),
            "trouble": trouble,
        }
        if hello["gpus"]:
            self._in_thread(lambda: self._tell_with_gpus(answer))
        else:
            self._channel.send(answer)
        if hello["rendezvous"]:
            self._in_thread(lambda: self._reach_rendezvous(hello["rendezvous"]))

    def release_ports(self) -> None:
        """The workers start now: the port that was kept for rank 0 is theirs."""
        self._master.close()

    def probe(self, header: Dict[str, Any]) -> None:
        """Try the addresses of another host's beacon; a `probed` frame for each good one, then a last one."""
        self._in_thread(lambda: self._reach_host(header))

    def _in_thread(self, work: Callable[[], None]) -> None:
        """Do it beside the loop; what it raises is raised in the loop, where the driver is told."""

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 (see above)
                self._call_soon(partial(_raise, error))

        threading.Thread(target=run, daemon=True).start()

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

        request = probe.http_request(rendezvous["token"])
        probe.reach(targets, request, rendezvous["nonce"], _PROBE_TIMEOUT, found, _SETTLE)
        address = targets[min(good)][0] if good else None
        self._send_soon({"type": "reached", "address": address, "tried": [target[0] for target in targets]})

    def _reach_host(self, header: Dict[str, Any]) -> None:
        targets = [(str(address), int(header["port"])) for address in header["addresses"]]
        about = {"type": "probed", "target": header["target"]}

        def found(index: int) -> bool:
            self._send_soon({**about, "address": targets[index][0]})
            return False

        probe.reach(targets, lambda _: b"", header["nonce"], _PROBE_TIMEOUT, found)
        self._send_soon({**about, "address": None})


def _raise(error: Exception) -> None:
    raise error


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
    return [[word.strip() for word in line.split(",")] for line in lines if line[:1].isdigit()]
