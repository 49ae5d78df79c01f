"""The host's part of `hvlaunch sbatch`: runs the batch script, with programs `srun`, `scontrol` and `hostname` first on its PATH.

`srun` and `scontrol` ask this errand over a socket in a private directory, and the errand asks the driver, which starts the
step as a job of its own and sends the step's output back. Every host of the allocation has the directory, at the same path,
since programs that `srun` starts call `scontrol` too; the first host alone gets the script.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading

from hvlaunch.agent.errands import write_line
from hvlaunch.agent.wire.frames import record, several, text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional

    from hvlaunch.agent.errands import ErrandStream

__all__ = ["ANSWER", "ARGUMENTS", "LONGEST_REQUEST", "READY", "RESULT", "run"]

ARGUMENTS = record({"directory": text(256), "names": several(text(256), 4096), "address": text(64)})
RESULT = record({"code": whole(0, 255)})
LONGEST_REQUEST = 600_000
"""Bytes of a request of `srun`: its words, its input, and the variables that the script has set."""

_WORDS = several(text(LONGEST_REQUEST, raw=True), 65536)
READY = record({"unknown": several(text(256), 4096)})
"""The first line of the stream: the names that this host can't resolve."""
_OUTPUT = record({"out": text(1 << 20), "stream": whole(1, 2)})
_REQUEST = record(
    {
        "ask": whole(0, 1 << 53),
        "program": text(20),
        "words": _WORDS,
        "cwd": text(4096, raw=True),
        "set": several(several(text(LONGEST_REQUEST, raw=True), 2), 65536),
        "unset": several(text(LONGEST_REQUEST, raw=True), 65536),
        "stdin": text(LONGEST_REQUEST),
    }
)
_GONE = record({"gone": whole(0, 1 << 53)})


def ANSWER(value: Any) -> bool:  # noqa: N802 (a shape like the others)
    """Return True for a later line of the stream: output of the script, a request, or its asker's end."""
    return _OUTPUT(value) or _REQUEST(value) or _GONE(value)


_CHUNK = 1 << 16
_RESOLVING = 4.0
"""Seconds for the addresses of the hosts' names."""
_LAST_OUTPUT = 2.0
"""Seconds for output of programs that the script has left running."""
_SHELLS = ("PWD", "OLDPWD", "SHLVL", "_")
"""Variables that every shell sets for itself."""

_CLIENT = r"""
import base64, json, os, socket, stat, sys
folder, program = os.path.dirname(os.path.abspath(__file__)), sys.argv[1]
words = [os.fsencode(word).decode("utf-8", "replace") for word in sys.argv[2:]]
data = b""
if program == "srun" and not stat.S_ISCHR(os.fstat(0).st_mode):
    data = sys.stdin.buffer.read(LIMIT)
connection = socket.socket(socket.AF_UNIX)
try:
    connection.connect(os.path.join(folder, "socket"))
    request = {"program": program, "words": words, "cwd": os.getcwd(), "stdin": base64.b64encode(data).decode()}
    request["env"] = dict((name, value) for name, value in os.environ.items() if "\n" not in name)
    connection.sendall(json.dumps(request).encode() + b"\n")
    outputs = [None, 1, 2]
    for line in connection.makefile("rb"):
        answer = json.loads(line.decode())
        if "code" in answer:
            sys.exit(answer["code"])
        if "files" in answer:
            out, err = [name and os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666) for name in answer["files"]]
            outputs = [None, out or 1, err or out or 2]
        else:
            os.write(outputs[answer["stream"]], base64.b64decode(answer["out"]))
except OSError as error:
    sys.exit("%s: %s" % (program, error.strerror))
except KeyboardInterrupt:
    sys.exit(130)
sys.exit("%s: the batch job has ended" % program)
"""
_ASKS = """#!/bin/sh
exec '%s' -I '%s' %s "$@"
"""
_HOSTNAME = """#!/bin/sh
case "$*" in
-i|--ip-address) echo '%s' ;;
*) exec '%s' "$@" ;;
esac
"""


def run(arguments: Dict[str, Any], stream: ErrandStream) -> Dict[str, Any]:
    folder = arguments["directory"]
    os.mkdir(folder, 0o700)  # a name that another user has taken is an error
    try:
        return _Host(folder, stream).run(arguments["names"], arguments["address"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Host:
    """A host of the allocation."""

    def __init__(self, folder: str, stream: ErrandStream) -> None:
        self._folder = folder
        self._stream = stream
        self._lock = threading.Lock()
        self._askers: Dict[int, socket.socket] = {}
        self._last = 0
        self._environ: Dict[str, str] = {}
        self._body: Optional[subprocess.Popen[bytes]] = None
        self._readers: List[threading.Thread] = []
        self._is_over = threading.Event()

    def run(self, names: List[str], address: str) -> Dict[str, Any]:
        """Serve until the script, or the driver's input, has ended."""
        self._write_programs(address)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.path.join(self._folder, "socket"))
        listener.listen(64)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        self._tell({"unknown": _unknown(names)})
        threading.Thread(target=self._obey, daemon=True).start()
        self._is_over.wait()
        for reader in self._readers:
            reader.join(_LAST_OUTPUT)
        code = 0 if self._body is None else self._body.wait()
        return {"code": code if code >= 0 else 128 - code}

    def _write_programs(self, address: str) -> None:
        client = os.path.join(self._folder, "client.py")
        programs = os.path.join(self._folder, "bin")
        _write(client, _CLIENT.replace("LIMIT", str(LONGEST_REQUEST // 2)), 0o600)
        os.mkdir(programs, 0o700)
        for name in ("srun", "scontrol"):
            _write(os.path.join(programs, name), _ASKS % (sys.executable, client, name), 0o700)
        real = shutil.which("hostname")
        if real is not None:
            # By Debian's /etc/hosts a host's own name is 127.0.1.1, of no use to other hosts.
            _write(os.path.join(programs, "hostname"), _HOSTNAME % (address, real), 0o700)

    def _tell(self, value: Dict[str, Any]) -> None:
        try:
            write_line(self._stream, value)
        except OSError:
            os._exit(1)  # the agent has ended

    def _obey(self) -> None:
        """Carry out the driver's lines: begin, signal, and answers to requests."""
        while True:
            try:
                order = json.loads(self._stream.read_line().decode("ascii"))
            except EOFError:
                self._is_over.set()
                return
            if "begin" in order:
                self._begin(order["begin"])
            elif "signal" in order:
                _signal(self._body, order["signal"])
            else:
                self._answer(order.pop("ask"), order)

    def _begin(self, body: Dict[str, Any]) -> None:
        script = os.path.join(self._folder, "script")
        _write(script, body["script"], 0o700)
        programs = os.path.join(self._folder, "bin")
        env = dict(os.environ, **body["env"])
        env["PATH"] = programs + ":" + env.get("PATH", os.defpath)
        # A login shell sets its PATH anew, and then reads this file.
        profile = os.path.join(self._folder, "profile")
        before = env.get("BASH_ENV", "")
        begin = 'case ":$PATH:" in *":%s:"*) ;; *) PATH="%s:$PATH" ;; esac\n' % (programs, programs)
        _write(profile, begin + ('[ ! -r "%s" ] || . "%s"\n' % (before, before) if before else ""), 0o600)
        env["BASH_ENV"] = profile
        self._environ = env
        # Unlike the errand, the script is not the kernel's first choice when memory runs out.
        start = (
            'echo 0 2> /dev/null > /proc/self/oom_score_adj; cd "$0" 2> /dev/null || '
            '{ cd && echo "hvlaunch: no directory $0 on this host: the script runs in $PWD" >&2; }; exec "$@"'
        )
        self._body = subprocess.Popen(
            ["/bin/sh", "-c", start, body["cwd"], *body["interpreter"], script, *body["words"]],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for number, pipe in ((1, self._body.stdout), (2, self._body.stderr)):
            reader = threading.Thread(target=self._read, args=(number, pipe), daemon=True)
            self._readers.append(reader)
            reader.start()
        threading.Thread(target=self._await, args=(self._body,), daemon=True).start()

    def _await(self, body: subprocess.Popen[bytes]) -> None:
        body.wait()
        self._is_over.set()

    def _read(self, number: int, pipe: Any) -> None:
        while True:
            data = os.read(pipe.fileno(), _CHUNK)
            if not data:
                return
            self._tell({"out": base64.b64encode(data).decode("ascii"), "stream": number})

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Pass a request on, and wait for the end of its asker."""
        with connection:
            line = connection.makefile("rb").readline(2 * LONGEST_REQUEST)
            try:
                request = json.loads(line.decode("utf-8"))
                environ = request.pop("env")
                before = self._environ or os.environ
                names = [name for name in environ if name not in _SHELLS]
                # PATH has the programs above, which tasks call too.
                request["set"] = [
                    [name, environ[name]]
                    for name in names
                    if name == "PATH" or before.get(name) != environ[name]
                ]
                request["unset"] = [name for name in self._environ if name not in environ]
            except (ValueError, KeyError, AttributeError):
                return
            with self._lock:
                self._last += 1
                number = request["ask"] = self._last
                self._askers[number] = connection
            if len(json.dumps(request)) > LONGEST_REQUEST or not _REQUEST(request):
                self._answer(number, {"out": _encoded("srun: the request is too long\n"), "stream": 2})
                self._answer(number, {"code": 1})
                return
            self._tell(request)
            try:
                connection.recv(1)  # nothing more comes before its end
            except OSError:
                pass
            with self._lock:
                is_open = self._askers.pop(number, None) is not None
        if is_open:
            self._tell({"gone": number})

    def _answer(self, number: int, answer: Dict[str, Any]) -> None:
        with self._lock:
            connection = self._askers.pop(number, None) if "code" in answer else self._askers.get(number)
        if connection is None:
            return
        try:
            connection.sendall(json.dumps(answer).encode("ascii") + b"\n")
        except OSError:
            pass  # its asker has ended


def _encoded(message: str) -> str:
    return base64.b64encode(message.encode()).decode("ascii")


def _signal(body: Optional[subprocess.Popen[bytes]], number: int) -> None:
    if body is None:
        return
    try:
        os.killpg(body.pid, number)
        # A stopped process takes the signal only when it continues.
        if number != signal.SIGKILL:
            os.killpg(body.pid, signal.SIGCONT)
    except OSError:
        pass  # it has ended


def _write(path: str, content: str, mode: int) -> None:
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", errors="surrogateescape"
    ) as file:
        file.write(content)


def _unknown(names: List[str]) -> List[str]:
    """Return the names that lead to no address here, or to this host though another host has the name."""
    leads: Dict[str, bool] = {}

    def look_up(name: str) -> None:
        try:
            addresses = {entry[4][0] for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
        except OSError:
            return
        is_loop = all(str(address).startswith(("127.", "::1")) for address in addresses)
        leads[name] = not is_loop or name.split(".", maxsplit=1)[0] == socket.gethostname().split(".")[0]

    threads = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_RESOLVING)
    return [name for name in names if not leads.get(name)]
