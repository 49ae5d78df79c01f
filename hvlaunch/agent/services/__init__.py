"""A preset's services on this host, such as Ray's, and the user's command beside them; the command may have files as well.

The whole file is a worker's command, `python3 -c TEXT PLAN COMMAND...`: it runs without hvlaunch, on any Python >= 3.8.
The plan is JSON: `first`, `others` and `all` are services of rank 0, of the others and of each; rank 0 runs `until`, which
ends when all have joined, and then the command. Without services every rank runs the command. With a `tunnel`
(wire/peers.py and tunnel.py, whose texts come before this one's) the command gets a port of rank 0's host for each other host's service.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, NoReturn, Sequence, Tuple

    from hvlaunch.agent.services.tunnel import Entrance, Exit  # noqa: TC004 (as above)

__all__ = ["Services", "main"]

_PAUSE = 0.2
_PATIENCE = 5.0
_LONG = 20.0
"""Seconds after which a service without an answer is reported."""


class Services:
    """The children of this process: services, `until`, and the command."""

    def __init__(self, plan: Dict[str, Any], command: Sequence[str]) -> None:
        self._plan = plan
        self._command = command
        self._is_first = plan["rank"] == "0"
        # Neither services nor the command need the keys.
        self._keys = os.environ.pop("HVLAUNCH_TUNNEL_KEY", "")
        self._running: Dict[int, Tuple[str, List[str]]] = {}
        self._is_stopping = False
        # A handler and not SIG_IGN, which the children would inherit. They get the signals too, as programs of this group.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note_stop)

    def _note_stop(self, number: int, frame: object) -> None:  # noqa: ARG002 (the form of a handler)
        self._is_stopping = True

    def run(self) -> int:
        """Run until the command has ended, or a service; return the wait status."""
        if self._plan["address"] and not self._is_first:
            self._wait_for(self._plan["address"])
        for words in (self._plan["first" if self._is_first else "others"], self._plan["all"]):
            if not self._is_stopping:
                self._start("service", words)
        if self._plan["tunnel"] and not self._is_stopping:
            self._open_tunnel(**self._plan["tunnel"])
        if self._is_first and not self._is_stopping:
            self._start("until", self._plan["until"]) or self._start("command", self._command)
        while self._running:
            pid, status = os.wait()
            kind, words = self._running.pop(pid, ("", []))
            if kind == "command":
                return status
            if kind == "until" and status == 0 and not self._is_stopping:
                self._start("command", self._command)
            elif kind and not (self._is_stopping and self._has("command")):
                if not self._is_stopping:
                    _complain("%s has ended before the command" % _name(words))
                return status or 1 << 8
        # Stopped before anything ran.
        return signal.SIGTERM if self._is_stopping else 1 << 8

    def _has(self, kind: str) -> bool:
        return any(other == kind for other, _ in self._running.values())

    def _start(self, kind: str, words: Sequence[str]) -> bool:
        if not words:
            return False
        # What services print is not the command's output.
        streams = {} if kind == "command" else {"stdin": subprocess.DEVNULL, "stdout": 2}
        try:
            process = subprocess.Popen(words, **streams)  # type: ignore[call-overload]
        except OSError as error:
            _end_without(words[0], error)
        # wait() below reaps it, and not Popen's own, which would miss the other children.
        process.returncode = 0
        self._running[process.pid] = kind, list(words)
        if self._is_stopping:
            # The signal may have come too early for this child.
            os.kill(process.pid, signal.SIGTERM)
        return True

    def _wait_for(self, address: str) -> None:
        """Wait until a server listens: the first host's service may start later than this host's."""
        host, _, port = address.rpartition(":")
        while not self._is_stopping and not _listens(host.strip("[]"), int(port)):
            time.sleep(_PAUSE)

    def _open_tunnel(self, option: str, service: str, exits: str) -> None:
        """Open this host's end. Rank 0 waits for all services, and gives the command its ports by `option`."""
        keys = json.loads(self._keys)
        addresses = exits.split(",")
        if not self._is_first:
            port = int(addresses[int(self._plan["rank"])].rpartition(":")[2])
            Exit(keys, port, int(service), os.environ["HVLAUNCH_SCRATCH"])
            return
        ports: List[str] = []
        for address in addresses[1:]:
            entrance = Entrance(keys, address)
            begin = time.monotonic()
            while not self._is_stopping and not entrance.is_open():
                if time.monotonic() - begin > _LONG:
                    _complain("no answer from the service at %s; is the port open between hosts?" % address)
                    begin = float("inf")
                time.sleep(_PAUSE)
            ports.append("127.0.0.1:%d" % entrance.port)
        if ports and option not in self._command:
            self._command = [*self._command, option, ",".join(ports)]


def _complain(text: str) -> None:
    sys.stderr.write("hvlaunch: %s\n" % text)


def _end_without(program: str, error: OSError) -> NoReturn:
    """End with a shell's exit code for a missing program."""
    _complain("%s: %s" % (program, error.strerror))
    sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def _name(words: Sequence[str]) -> str:
    """Return the beginning of a service's command; a shell's text is too long, and the word behind it is the program."""
    return " ".join((words[3:] if words[:2] == ["sh", "-c"] else words)[:3])


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _PATIENCE).close()
    except OSError:
        return False
    return True


def _write_files(files: Dict[str, str]) -> None:
    """Write the files, and set the variable of that name to each path."""
    for name, text in files.items():
        # Slot and start: two roles may have the same rank on one host.
        worker = os.environ["HVLAUNCH_WORKER"].partition("/")[2].replace("/", ".")
        path = os.path.join(os.environ["HVLAUNCH_SCRATCH"], name + "." + worker)
        with open(path, "w") as file:
            file.write(text)
        os.environ[name] = path


def main() -> None:
    plan, command = json.loads(sys.argv[1]), sys.argv[2:]
    _write_files(plan["files"])
    if not any(plan[name] for name in ("first", "others", "all")):
        try:
            os.execvp(command[0], command)
        except OSError as error:
            _end_without(command[0], error)
    status = Services(plan, command).run()
    if os.WIFSIGNALED(status):
        # The report names the signal that ended the command.
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))
