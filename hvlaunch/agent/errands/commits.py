"""Copies commits of workers from host to host, serves this host's commits to others, and saves them to a directory on disk.

The driver sends orders, each a line, and gets a line for each: the commits on this host. Commits travel by TLS between hosts with
the job's secret (agent/wire/peers.py). The receiver computes the checksums again: a copy with others is no commit.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
import time

from hvlaunch.agent import commits
from hvlaunch.agent.commits import COPIES, PAGE, KeptCommit, saves
from hvlaunch.agent.errands import answer_lines, write_line
from hvlaunch.agent.errands.sync.content import PEER
from hvlaunch.agent.quick import dumps, loads
from hvlaunch.agent.wire.frames import PORT, number, plain, record, several, text, whole
from hvlaunch.agent.wire.peers import PeerServer, dial, exactly

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from typing import Any, Callable, Dict, List, Optional, Tuple

    from hvlaunch.agent.errands import ErrandStream

__all__ = ["ANSWER", "ARGUMENTS", "PORTS", "RESULT", "run"]

ARGUMENTS = record({"scratch": text(4096, raw=True), "peer": PEER, "save_to": text(4096, raw=True)})
"""`save_to` is a directory, or empty."""
RESULT = record({})
PORTS = record({"port": PORT})
_LARGE = 1 << 62


def _commits(value: Any) -> bool:
    is_field = text(200, raw=True), *[whole(0, _LARGE)] * 5
    return several(lambda item: isinstance(item, list) and len(item) == len(is_field), 4096)(value) and all(
        form(field)
        for item in value
        for form, field in zip(is_field, item)  # noqa: B905 (as checked)
    )


ANSWER = record(
    {
        "own": _commits,
        "copies": _commits,
        "problems": several(text(1000, raw=True), 4096),
        "bytes": whole(0, _LARGE),
        "seconds": number(0, 1e9),
        "is_saving": lambda value: isinstance(value, bool),
        "save_seconds": number(0, 1e9),
        "trouble": text(1000),
        "directory": text(100),
    }
)
_PIECE = 1 << 20
_LIFE = 1.0
"""Seconds between signs of life during a copy: empty answers."""
_LONGEST_REQUEST = 4096


def run(arguments: Dict[str, Any], stream: ErrandStream) -> Dict[str, Any]:
    """Serve, and carry out orders until the driver ends the input."""
    directory = commits.make_directory(arguments["scratch"])
    os.makedirs(os.path.join(directory, COPIES), mode=0o700, exist_ok=True)
    peer = arguments["peer"]
    server = PeerServer(peer["secret"], peer["pem"], directory, lambda caller: _serve(directory, caller))
    write_line(stream, {"port": server.port})
    saver = _Saver(arguments["save_to"])

    def obey(order: Dict[str, Any]) -> Dict[str, Any]:
        for fields in order.get("save", ()):
            saver.begin(directory, KeptCommit(*fields), order["generation"])
        answer = _obey(directory, order, peer, lambda: write_line(stream, {}))
        saving = {"is_saving": saver.unfinished > 0, "save_seconds": saver.seconds}
        return {**answer, **saving, "trouble": saver.trouble, "directory": saver.directory}

    answer_lines(stream, obey)
    return {}


class _Saver:
    """Writes commits to the directory in a thread of its own: a slow disk delays no answer."""

    def __init__(self, save_to: str) -> None:
        self._save_to = save_to
        self._orders: queue.SimpleQueue[Optional[Tuple[KeptCommit, int, int]]] = queue.SimpleQueue()
        self.unfinished = 0
        self.directory = ""
        """Id of the directory, if it has one."""
        self.trouble = ""
        """Cause of a failed save among the last ones; empty without one."""
        self.seconds = 0.0
        """Duration of the last save; 0 before the first."""
        self._begun = 0.0
        if save_to:
            self.unfinished = 1
            self._orders.put(None)
            threading.Thread(target=self._run, daemon=True).start()

    def begin(self, directory: str, commit: KeptCommit, generation: int) -> None:
        """Save a commit of this host soon. Its file is locked from here on: its writers use others."""
        if not self.unfinished:
            self.trouble = ""
            self._begun = time.monotonic()
        here = next((item for item in commits.held(directory) if item[:-1] == commit[:-1]), None)
        if here is None:
            self.trouble = "step %d: the workers have a newer commit by now" % commit.step
            return
        descriptor = commits.lock_shared(here)
        self.unfinished += 1
        self._orders.put((commit, generation, descriptor))

    def _run(self) -> None:
        while True:
            order = self._orders.get()
            try:
                if order is None:
                    self.directory = saves.prepare(self._save_to)
                else:
                    commit, generation, descriptor = order
                    try:
                        saves.save(self._save_to, generation, commit, descriptor)
                    finally:
                        commits.release(descriptor)
                    saves.prune(self._save_to)
            except (OSError, ValueError) as error:
                self.trouble = plain(getattr(error, "strerror", None) or str(error), 1000)
            if order is not None:
                self.seconds = time.monotonic() - self._begun
            self.unfinished -= 1


def _obey(
    directory: str, order: Dict[str, Any], peer: Dict[str, str], show_life: Callable[[], None]
) -> Dict[str, Any]:
    problems: List[str] = []
    size, begin = 0, time.monotonic()
    pinned = [(pair[0], pair[1]) for pair in order.get("pins", ())]
    if "pins" in order:
        commits.set_pins(directory, pinned, is_held=order["hold"])
    items = [(KeptCommit(*item["commit"]), item["addresses"]) for item in order.get("fetch", ())]
    names = {commit.name for commit, _ in items} | {
        commit.name for commit in commits.held(directory) if _is_copy(commit, directory)
    }
    for commit, addresses in items:
        states = [name for name in names if name.rpartition(".")[0] == commit.name.rpartition(".")[0]]
        try:
            _fetch(directory, commit, addresses, peer, pinned, show_life, len(states) if commit.size else 1)
            size += commit.length
        except commits.NoRoom as error:
            # No part of the copies: it would take memory, and help nobody.
            problems.append(str(error))
            break
        except (OSError, EOFError, ValueError) as error:
            problems.append("step %d: %s" % (commit.step, str(error) or type(error).__name__))
    seconds = time.monotonic() - begin
    if "first" in order:
        commits.forget(directory, order["first"])
    here = commits.held(directory)
    ours = [list(commit[:-1]) for commit in here if not _is_copy(commit, directory)]
    copies = [list(commit[:-1]) for commit in here if _is_copy(commit, directory)]
    return {"own": ours, "copies": copies, "problems": problems, "bytes": size, "seconds": seconds}


def _is_copy(commit: KeptCommit, directory: str) -> bool:
    return os.path.dirname(commit.path) != directory


def _serve(directory: str, caller: ssl.SSLSocket) -> None:
    """Send a commit: the checksums with their length, then the content. Nothing follows a length of 0. Raises OSError, EOFError, ValueError."""
    size = int.from_bytes(exactly(caller, 4), "big")
    if size > _LONGEST_REQUEST:
        return
    fields = loads(exactly(caller, size).decode("ascii"))
    commit = next((item for item in commits.held(directory) if list(item[:-1]) == fields), None)
    if commit is None:
        caller.sendall(bytes(4))
        return
    # Writers stay away until the end: their next version goes to another file.
    with commits.shared_lock(commit) as descriptor:
        table = commits.table_of(descriptor, commit)
        caller.sendall(len(table).to_bytes(4, "big") + table)
        mapped = mmap.mmap(descriptor, PAGE + commit.length, access=mmap.ACCESS_READ)
        with mapped, memoryview(mapped) as view:
            for begin in range(PAGE, PAGE + commit.length, _PIECE):
                with view[begin : begin + _PIECE] as piece:
                    caller.sendall(piece)


def _fetch(
    directory: str,
    commit: KeptCommit,
    addresses: List[Any],
    peer: Dict[str, str],
    pinned: List[Any],
    show_life: Callable[[], None],
    states: int,
) -> None:
    """Copy a commit from the first address with an answer. Raises OSError, EOFError, ValueError, NoRoom."""
    connection = dial(addresses, peer["secret"], peer["fingerprint"])
    if connection is None:
        raise ConnectionError(
            "its host does not answer at %s" % ", ".join(address for address, _ in addresses)
        )
    with connection:
        words = dumps(list(commit[:-1])).encode("ascii")
        connection.sendall(len(words).to_bytes(4, "big") + words)
        table = exactly(connection, int.from_bytes(exactly(connection, 4), "big"))
        if not table:
            raise ValueError("its host has a newer commit by now")
        folder = os.path.join(directory, COPIES)
        descriptor = commits.begin(folder, commit, lambda: (pinned, False), states=states)
        try:
            with mmap.mmap(descriptor, PAGE + commit.length) as mapped, memoryview(mapped) as view:
                done, last = PAGE, time.monotonic()
                while done < len(view):
                    if time.monotonic() > last + _LIFE:
                        last = time.monotonic()
                        show_life()
                    with view[done : done + _PIECE] as piece:
                        count = connection.recv_into(piece)
                    if not count:
                        raise EOFError("its host has ended the connection")
                    done += count
            commits.seal(descriptor, commit, table)
        finally:
            commits.release(descriptor)
