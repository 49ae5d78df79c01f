"""Client of a job's driver: HTTP over the control socket in the job's directory (docs/interfaces/control.md)."""

import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import Any, Literal

from hvlaunch.errors import EXIT_HOSTS, EXIT_USAGE, BadUsage, HvlaunchError
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.outside import CONTROL, KnownJob, await_driver, has_driver, has_ended, reachable
from hvlaunch.owners import peer_is_own

__all__ = [
    "REQUESTS",
    "ControlClient",
    "ControlRefused",
    "ControlRequest",
    "DriverGone",
    "await_ready",
    "state_of",
]

_PATIENCE = 20.0
_LOOK = 0.05
_READY_LOOK = 0.5
"""Seconds between two looks at a service."""


class ControlRequest(NamedTuple):
    """A request of the control socket. `fields` are those of its body, or of its query: name, kind, default, meaning."""

    method: Literal["GET", "POST"]
    about: str
    fields: tuple[tuple[str, str, Any, str], ...] = ()
    is_action: bool = False
    """True if it changes the job."""
    wait: float = 0.0
    """Seconds longer than usual that the driver may take."""


_WAIT = ("wait", "integer", 0, "seconds to wait, at most 60")
REQUESTS: Mapping[str, ControlRequest] = {
    "/job": ControlRequest(
        "GET",
        "the job now: phase, round, workers with their host, state and progress, hosts, and whether it hangs",
    ),
    "/events": ControlRequest(
        "GET",
        "events of the job, the oldest first: up to 1,000 from number `since` on; `next` is the number of the next request",
        (("since", "integer", 0, "number of the first event"), _WAIT),
    ),
    "/report": ControlRequest(
        "GET",
        "the failure report: the rank and host that failed first, and why; of a running job, the report so far",
        (_WAIT,),
    ),
    "/samples": ControlRequest(
        "GET",
        "the load, memory, network, disk, GPUs and workers of each host, measured within the last two seconds",
    ),
    "/totals": ControlRequest(
        "GET", "seconds since the start, useful seconds, rounds, restarts, lost hosts and recovery times"
    ),
    "/stacks": ControlRequest(
        "POST",
        "what the workers do at this moment, as stacks of Python",
        (
            ("ranks", "string", None, "ranks such as 0-3,8; all without it"),
            ("native", "boolean", False, "with frames of C and C++"),
        ),
        wait=40.0,
    ),
    "/ready": ControlRequest("GET", "whether the job's service answers (--ready-port, --ready-url)"),
    "/signal": ControlRequest(
        "POST",
        "send a signal to all workers",
        (("signal", "string", None, "its name, such as USR1"),),
        is_action=True,
    ),
    "/collect": ControlRequest(
        "POST",
        "bring files back from the workers' directory on each host",
        (
            (
                "options",
                "array",
                [],
                "pairs of a pattern and an absolute directory here; those of --collect without any",
            ),
        ),
        is_action=True,
        wait=86400.0,
    ),
    "/move": ControlRequest(
        "POST",
        "move the workers of a host to another one, for maintenance; the job must be elastic and have a spare",
        (
            ("host", "string", None, "the host to be free of workers"),
            ("to", "string", None, "the host that takes them over; any with free slots without it"),
        ),
        is_action=True,
    ),
    "/output": ControlRequest("POST", "store the job's output in its directory from now on", is_action=True),
    "/stop": ControlRequest(
        "POST",
        "stop the job, as Ctrl-C does",
        (("kill", "boolean", False, "kill the workers at once"),),
        is_action=True,
    ),
}
"""All requests of the control socket by path; docs/interfaces/control.md describes the answers."""


class DriverGone(HvlaunchError):
    """No driver answers for the job: it has ended, was killed, or is stopped.

    Try: `hvlaunch jobs`, then `hvlaunch attach JOB`.
    """

    exit_code = EXIT_HOSTS


class ControlRefused(HvlaunchError):
    """The driver has refused a request: the job is ending, or the request is unknown. `cause` is its answer.

    Try: the version of hvlaunch that started the job.
    """

    exit_code = EXIT_USAGE


class ControlClient:
    """Sends requests to the driver of one job, each over a connection of its own."""

    def __init__(self, job: KnownJob, patience: float = _PATIENCE) -> None:
        """`patience` is the limit in seconds for an answer that the driver can give at once."""
        self._job = job
        self._patience = patience

    def get(self, path: str, wait: float = 0.0) -> Any:
        """Return the answer to GET as data, or None for 404. Raises DriverGone, ControlRefused.

        `wait` is how many seconds longer the driver may take.
        """
        return self._ask("GET", path, None, wait)

    def post(self, path: str, body: Mapping[str, Any], wait: float = 0.0) -> Any:
        """Return the answer to POST as data. Raises as get()."""
        return self._ask("POST", path, json.dumps(body).encode(), wait)

    def _ask(self, method: str, path: str, body: bytes | None, wait: float) -> Any:
        connection = _UnixConnection(self._job, timeout=self._patience + wait)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, HTTPException):
            raise self._gone() from None
        finally:
            connection.close()
        # The server's last answer to all its clients: the driver is ending.
        if answer.status == 503:  # noqa: PLR2004 (Service Unavailable)
            raise self._gone()
        if answer.status == 404:  # noqa: PLR2004 (Not Found)
            return None
        if answer.status != 200:  # noqa: PLR2004 (OK)
            raise ControlRefused(f"job {self._job.id}: {data.decode(errors='replace').strip()}")
        return json.loads(data) if data else None

    def _gone(self) -> DriverGone:
        hint = f"hvlaunch jobs, or the log of the driver (process {self._job.about.get('pid')})"
        return DriverGone(f"job {self._job.id}: its driver does not answer", hint=hint)


def state_of(job: KnownJob, patience: float) -> Mapping[str, Any] | None:
    """Return the answer to GET /job; None if the driver gives no answer within `patience` seconds."""
    try:
        state: Mapping[str, Any] | None = ControlClient(job, patience).get("/job")
    except (DriverGone, ControlRefused):
        return None
    return state


def await_ready(job: KnownJob, timeout: float | None = None) -> bool:
    """Wait until the job's service is ready; False if the job ends before.

    Raises BadUsage for a job without --ready-port and --ready-url, and TimeoutError after `timeout` seconds.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    problem = "its driver has not answered"
    while not has_ended(job):
        try:
            state = ControlClient(job).get("/ready")
        except DriverGone:
            # A successor may have taken the job over.
            if not await_driver(job):
                return False
            state = {"is_ready": False, "problem": problem}
        if state is None:
            raise BadUsage(
                f"job {job.id} has no --ready-port or --ready-url", hint="--ready-port with the next job"
            )
        if state["is_ready"]:
            return True
        problem = state["problem"]
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"job {job.id} is not ready within {timeout:g} s: {problem}")
        time.sleep(_READY_LOOK)
    return False


class _UnixConnection(HTTPConnection):
    def __init__(self, job: KnownJob, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._directory = job.directory

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        deadline = time.monotonic() + (self.timeout or 0.0)
        # Between two drivers the socket is missing for a moment.
        while not self._try_to_connect():
            if not has_driver(self._directory) or time.monotonic() > deadline:
                raise ConnectionRefusedError
            time.sleep(_LOOK)

    def _try_to_connect(self) -> bool:
        """Connect; False if no driver listens. Raises OSError, DriverGone. The successor of a killed driver begins to listen after it has the lock."""
        with suppress(FileNotFoundError, ConnectionRefusedError), reachable(self._directory) as path:
            self.sock.connect(f"{path}/{CONTROL}")
            # The kernel tells whose program listens, whatever became of the directory since it was checked.
            if not peer_is_own(self.sock):
                raise DriverGone(f"{self._directory}: another user's program answers in place of the driver")
            return True
        return False
