"""Notices: word of a job's failure, hang, recovery or end, for a command, a web address or a mailbox of the user.

A notice is a file, named by job and event: it is made once, by whichever driver of the job comes first. A process of its own
delivers it and outlives the driver. The file of a delivered notice stays, empty, so no successor makes another. A target
whose answer is lost, or whose process is killed before the answer, may get a notice twice, with the same `id`.
"""

import base64
import fcntl
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from email.message import EmailMessage
from functools import cache
from http.client import HTTPException
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from hvlaunch.outside import start_process
from hvlaunch.owners import make_own_directory, part_of, reason

__all__ = [
    "EVENTS",
    "NotDelivered",
    "Notices",
    "deliver",
    "deliver_file",
    "run_delivery",
    "shown",
    "target_error",
]

EVENTS = ("failed", "hung", "recovered", "done")
_FORMS = Path(__file__).with_name("notices.json")
_WEB = ("http", "https")
_KEPT = 7 * 86400.0
"""Seconds for which the file of a delivered notice stays: longer than a successor may come."""
_ABANDONED = 3600.0
"""Seconds after which an open notice has no process: a delivery takes minutes."""
_ORDER = 10.0
"""Seconds for the delivery of the job's earlier notices: another target may be down."""
_LOOK = 0.05
_PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Seconds before each further try at a server that can't be reached or is busy."""
_ANSWER, _EXCHANGE, _COMMAND = 10.0, 20.0, 60.0
"""Seconds for a server's next byte, for a whole exchange, and for a command."""
_TOO_MANY, _SERVERS = 429, 500
_LONGEST = 300
_AGENT = {"User-Agent": "hvlaunch"}
_SAFE = "%/:=&?~+!$,;'@()*[]"
"""Signs of an address that need no escape."""


class NotDelivered(Exception):
    """A target did not take a notice. `is_final`: another try would not help."""

    def __init__(self, cause: str, *, is_final: bool) -> None:
        super().__init__(cause)
        self.is_final = is_final


class Notices:
    """The notices of a job, in a directory of the user's. `warn` gets a message about a notice that can't be made."""

    def __init__(
        self, directory: Path, job_id: str, targets: Sequence[str], warn: Callable[[str], object]
    ) -> None:
        self._directory = directory
        self._job_id = job_id
        self._targets = targets
        self._warn = warn

    def begin(self) -> None:
        """Make the directory, remove old files, and go on with notices that a killed process has left."""
        with self._warning():
            make_own_directory(str(self._directory))
            for file in self._directory.iterdir():
                status = file.stat()
                is_abandoned = status.st_mtime < time.time() - _ABANDONED
                # A killed driver may have left a part; its successor made the whole file.
                is_part = file.suffix == ".part"
                if status.st_mtime < time.time() - _KEPT or (is_part and is_abandoned):
                    file.unlink()
                elif status.st_size:
                    self._tell_failures(file)
                    is_ours = file.name.startswith(f"{self._job_id}.")
                    if (is_ours or is_abandoned) and not is_part and _is_open(file):
                        start_process("hvlaunch.outside.notices", "run_delivery", file)

    def post(self, key: str, make: Callable[[], Mapping[str, Any]]) -> None:
        """Make and deliver the notice `key` of the job, unless it was made before."""
        path = self._directory / f"{self._job_id}.{key}"
        with self._warning():
            if path.exists():
                return
            notice = {"id": path.name, **make()}
            earlier = [str(file) for file in self._directory.glob(f"{self._job_id}.*") if _is_open(file)]
            body = json.dumps({"targets": self._targets, "after": earlier, "notice": notice}).encode()
            part, descriptor = part_of(path)
            with os.fdopen(descriptor, "wb") as file:
                file.write(body)
                file.flush()
                os.fsync(descriptor)
            # A link, and no rename: of two drivers one alone makes the file.
            with suppress(FileExistsError):
                path.hardlink_to(part)
            part.unlink()
            start_process("hvlaunch.outside.notices", "run_delivery", path)

    @contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._warn(f"--notify: {reason(error)}; a notice is not sent")

    def _tell_failures(self, file: Path) -> None:
        """Warn of a notice that was given up, once."""
        with suppress(ValueError, LookupError, TypeError):
            for target, cause in json.loads(file.read_bytes())["failures"]:
                job = file.name.partition(".")[0]
                self._warn(f"a notice of job {job} did not reach {target}: {cause}")
            os.truncate(file, 0)


def target_error(target: str) -> str | None:
    """Return the fault of a target; None for a command, an address of the web, or `mail:` with a mailbox."""
    if target.startswith("mail:"):
        name, at, domain = target[len("mail:") :].partition("@")
        is_mailbox = (
            at and name and domain and not any(sign.isspace() or not sign.isprintable() for sign in target)
        )
        return None if is_mailbox else "no address of a mailbox stands behind mail:"
    scheme, separator, _ = target.partition("://")
    if not separator or any(sign.isspace() for sign in scheme) or "/" in scheme:
        return None if target.strip() else "it is empty"
    form, _, plain = scheme.rpartition("+")
    if plain not in _WEB or (form and form not in _forms()):
        return f"{scheme}:// is none of http://, https://" + "".join(
            f", {name}+https://" for name in _forms()
        )
    try:
        parts = urlsplit(target)
        # A wrong port raises ValueError.
        is_server = bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        return str(error)
    return None if is_server else "it names no server"


def shown(target: str) -> str:
    """Return a target for messages: the path of an address is often a secret."""
    scheme, separator, address = target.partition("://")
    if not separator or target_error(target) is not None:
        return target
    return f"{scheme}://{urlsplit('//' + address).hostname}/..."


def deliver(target: str, notice: Mapping[str, Any]) -> None:
    """Give a notice to a target, once. Raises NotDelivered."""
    if target.startswith("mail:"):
        message = EmailMessage()
        message["To"], message["Subject"] = target[len("mail:") :], _line(notice["title"])
        message.set_content(notice["text"] or notice["title"])
        program = shutil.which("sendmail", path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/usr/lib")
        if program is None:
            raise NotDelivered("no sendmail program is installed here", is_final=True)
        _run([program, "-i", "-t"], message.as_bytes())
    elif target_error(target) is None and "://" in target.partition(" ")[0]:
        _send(_request(target, notice))
    else:
        _run(["sh", "-c", target], json.dumps(notice).encode())


def _run(words: Sequence[str], data: bytes) -> None:
    try:
        done = subprocess.run(words, input=data, capture_output=True, timeout=_COMMAND, check=False)
    except subprocess.TimeoutExpired:
        raise NotDelivered(f"{words[0]} did not end within {_COMMAND:g} s", is_final=True) from None
    except OSError as error:
        raise NotDelivered(f"{words[0]}: {reason(error)}", is_final=True) from None
    if done.returncode:
        last = _line(done.stderr.decode(errors="replace").strip().rpartition("\n")[2])
        raise NotDelivered(f"exit code {done.returncode}" + (f": {last}" if last else ""), is_final=True)


@cache
def _forms() -> dict[str, Any]:
    return dict(json.loads(_FORMS.read_bytes()))


def _request(target: str, notice: Mapping[str, Any]) -> Request:
    scheme, _, address = target.partition("://")
    name, _, plain = scheme.rpartition("+")
    parts = urlsplit(f"{plain}://{address}")
    user, _, server = parts.netloc.rpartition("@")
    url = urlunsplit((plain, server, quote(parts.path, _SAFE), quote(parts.query, _SAFE), ""))
    common = dict(_AGENT)
    if user:
        common["Authorization"] = f"Basic {base64.b64encode(unquote(user).encode()).decode()}"
    host = parts.hostname or ""
    form = _forms().get(name) or next((form for form in _forms().values() if host in form["hosts"]), None)
    if form is None:
        return Request(url, json.dumps(notice).encode(), {"Content-Type": "application/json"} | common)  # noqa: S310 (target_error)
    texts = {"title": notice["title"], "text": notice["text"], "event": notice["event"]}
    headers = {
        key: _line(_filled(value, texts)).encode("ascii", "replace").decode()
        for key, value in form["headers"].items()
    }
    body = form["body"]
    data = (
        _filled(body, texts)
        if isinstance(body, str)
        else json.dumps({key: _filled(value, texts) for key, value in body.items()})
    )
    return Request(url, data.encode(), headers | common)  # noqa: S310 (as above)


def _filled(pattern: str, texts: Mapping[str, str]) -> str:
    # One pass: a text may have braces of its own.
    return re.sub(r"\{(title|text|event)\}", lambda match: texts[match[1]], pattern)


def _line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST]


class _NoRedirect(HTTPRedirectHandler):
    """A notice goes to no other server than the user's."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _send(request: Request) -> None:
    """Send the request, within the time of an exchange. Raises NotDelivered."""
    results: SimpleQueue[NotDelivered | None] = SimpleQueue()
    # A server may answer byte by byte, and must not keep other targets from the notice.
    threading.Thread(target=lambda: results.put(_exchange(request)), daemon=True).start()
    try:
        problem = results.get(timeout=_EXCHANGE)
    except Empty:
        problem = NotDelivered(f"no answer within {_EXCHANGE:g} s", is_final=False)
    if problem is not None:
        raise problem


def _exchange(request: Request) -> NotDelivered | None:
    try:
        # The answer's first line counts: its content may break off, or have no end.
        build_opener(_NoRedirect).open(request, timeout=_ANSWER).close()
    except HTTPError as error:
        error.close()
        is_final = error.code != _TOO_MANY and error.code < _SERVERS
        return NotDelivered(f"the server answered {error.code}", is_final=is_final)
    except (OSError, HTTPException) as error:
        return NotDelivered(_cause(error), is_final=False)
    except ValueError as error:
        return NotDelivered(str(error), is_final=True)
    return None


def _cause(error: OSError | HTTPException) -> str:
    if isinstance(error, URLError) and isinstance(error.reason, OSError):
        error = error.reason
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return f"no answer within {_ANSWER:g} s"
    if isinstance(error, ConnectionError) and error.errno is None:
        return "the server closed the connection without an answer"
    if isinstance(error, OSError):
        return reason(error) if error.errno is not None else str(error)
    return "its answer is not HTTP"


def deliver_file(path: Path, pauses: Sequence[float] = _PAUSES) -> None:
    """Deliver the notice of a file to all of its targets, unless another process does. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        content = json.loads(file.read() or b"{}")
        left: list[str] = list(content.get("targets", ()))
        failures: list[tuple[str, str]] = []
        deadline = time.monotonic() + _ORDER
        while any(_is_open(Path(name)) for name in content.get("after", ())) and time.monotonic() < deadline:
            time.sleep(_LOOK)
        for pause in (0.0, *pauses):
            if not left:
                break
            time.sleep(pause)
            late: list[tuple[str, str]] = []
            for target in list(left):
                try:
                    deliver(target, content["notice"])
                except NotDelivered as error:
                    (failures if error.is_final else late).append((shown(target), str(error)))
                    if not error.is_final:
                        continue
                left.remove(target)
                # At once: a process after a killed one must not repeat what was delivered.
                _rewrite(descriptor, {**content, "targets": left})
        # The address of a target may be a secret, and is needed no more.
        if left or failures:
            _rewrite(descriptor, {"failures": failures + (late if left else [])})
        elif content:
            os.ftruncate(descriptor, 0)


def _is_open(path: Path) -> bool:
    """Return True for a notice with targets left to reach."""
    try:
        return bool(json.loads(path.read_bytes())["targets"])
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _rewrite(descriptor: int, content: Mapping[str, Any]) -> None:
    # In place, in one write, and only then shorter: the process may be killed at any moment, and the disk be full.
    data = json.dumps(content).encode()
    os.pwrite(descriptor, data.ljust(os.fstat(descriptor).st_size), 0)
    os.ftruncate(descriptor, len(data))


def run_delivery() -> None:
    """Run the program that delivers the notice in a file, its first argument."""
    deliver_file(Path(sys.argv[1]))
