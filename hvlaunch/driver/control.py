"""The requests of a job's control socket: state, events, report, samples, and orders. docs/interfaces/control.md describes them."""

import asyncio
import json
import re
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from hvlaunch.driver.history import History
from hvlaunch.driver.observing import CollectWanted, Inquiry, MoveRequest, Observe, StacksWanted
from hvlaunch.engine import events as on
from hvlaunch.job import CollectOptions
from hvlaunch.outside.control import REQUESTS
from hvlaunch.rendezvous.serving.http import Answer, CallOff, Give, Head, Later, Route

if TYPE_CHECKING:
    from hvlaunch.driver.observing.observation import Observation

__all__ = ["ControlDoor", "Reports"]

T = TypeVar("T")

_MOST_WAIT = 60.0
_PATIENCE = 15.0
"""Seconds for the driver's loop to answer."""
_FRESH_WITHIN = 2.0
_SAMPLED_ON = 10.0
"""Seconds for which hosts are sampled after a request."""
_STACKS_PATIENCE = 40.0
_COLLECT_PATIENCE = 86400.0
_MOST_GLOBS = 1000
_SIGNALS = {number.name: number for number in signal.Signals}
_QUERY = re.compile(rb"(?:since=(?P<since>[0-9]{1,12}))?&?(?:wait=(?P<wait>[0-9]{1,3}))?")


class Reports(Protocol):
    """The job's failure report, as JSON."""

    @property
    def final(self) -> Mapping[str, Any] | None:
        """The final report; None until the job has ended."""

    def now(self) -> Mapping[str, Any]:
        """Return the report so far. For the loop's thread."""

    def when_ended(self, call: Callable[[Mapping[str, Any]], None]) -> Callable[[], None]:
        """Call `call` once with the final report, from any thread. Return a function that cancels this."""


class ControlDoor:
    """Answers requests, in the server's thread. The driver's loop answers most of them, through `post`."""

    def __init__(
        self,
        about: Mapping[str, Any],
        history: History,
        post: Callable[[on.Event | CollectWanted | Inquiry | MoveRequest | Observe | StacksWanted], None],
        keep_output: Callable[[], None],
        reports: Reports,
    ) -> None:
        """`about` has the facts of the job's start; `keep_output` begins to keep the job's output in its directory."""
        self._about = about
        self._keep_output = keep_output
        self._history = history
        self._reports = reports
        self._post = post

    def __call__(self, head: Head) -> Answer | Route:
        """Return the answer, or the function that takes the request's body: see RequestReader."""
        path, _, query = head.target.partition(b"?")
        # Strict on purpose: an unknown word in the query is an error of the client.
        options = _QUERY.fullmatch(query)
        if options is None:
            return Answer(400, b"the query is not understood\n")
        since, wait = int(options["since"] or 0), min(float(options["wait"] or 0), _MOST_WAIT)
        routes: dict[str, Route] = {
            "/job": lambda _body: self._job(),
            "/events": lambda _body: self._events(since, wait),
            "/report": lambda _body: self._report(wait),
            "/samples": lambda _body: self._samples(),
            "/totals": lambda _body: Answer(200, _json(self._history.totals())),
            "/signal": self._signal,
            "/stop": self._stop,
            "/output": self._output,
            "/stacks": self._stacks,
            "/ready": lambda _body: self._ready(),
            "/collect": self._collect,
            "/move": self._move,
        }
        request = REQUESTS.get(path.decode("latin-1"))
        if request is None:
            return Answer(404, b"there is no such path\n")
        if head.method != request.method:
            return Answer(405, b"", b"Allow: %s\r\n" % request.method.encode())
        return routes[path.decode()]

    def _job(self) -> Later:
        """Answer with the state in the driver's loop."""

        def begin(give: Give) -> CallOff:
            giver = _Giver(give)
            # The state belongs to the driver's thread, so its loop is asked.
            self._post(Inquiry(lambda state: giver(Answer(200, _json({**self._about, **state})))))
            return giver.call_off

        return Later(begin, _PATIENCE, Answer(503, b"the driver is busy\n"))

    def _events(self, number: int, wait: float) -> Answer | Later:
        """Answer with the records from this number on; without any, with those that come within `wait` seconds."""

        def page() -> Answer:
            records = self._history.since(number)
            # Put together by hand: the records are JSON already.
            body = b'{"next": %d, "missed": %d, "events": [%s]}\n'
            return Answer(200, body % (records.next, records.missed, b", ".join(records.records)))

        def begin(give: Give) -> CallOff:
            giver = _Giver(give)
            forget = self._history.when_longer(number, lambda: giver(page()))

            def call_off() -> None:
                giver.call_off()
                forget()

            return call_off

        return Later(begin, wait, page()) if wait else page()

    def _report(self, wait: float) -> Answer | Later:
        """Answer with the final report if it comes within `wait` seconds; without `wait`, with the report so far."""
        # After the end the driver's loop does not answer any more.
        if (form := self._reports.final) is not None:
            return Answer(200, _json(form))

        def begin(give: Give) -> CallOff:
            giver = _Giver(give)
            if wait:
                return self._reports.when_ended(lambda form: giver(Answer(200, _json(form))))
            self._post(Inquiry(lambda _state: giver(Answer(200, _json(self._reports.now())))))
            return giver.call_off

        return Later(begin, wait or _PATIENCE, Answer(503, b"the driver is busy\n"))

    def _samples(self) -> Later:
        """Answer with the newest samples; wait shortly for fresh ones. Sampling continues for the next request."""

        def begin(give: Give) -> CallOff:
            giver = _Giver(give)

            def ask(observation: "Observation") -> None:
                # A client asks about once per second: sampling must not stop in between.
                observation.keep_on(_SAMPLED_ON)
                observation.when_fresh(
                    _FRESH_WITHIN, lambda: giver(Answer(200, _json(observation.as_json())))
                )

            self._post(Observe(ask))
            return giver.call_off

        return Later(begin, _PATIENCE, Answer(503, b"the driver is busy\n"))

    def _signal(self, body: bytes) -> Answer:
        name = _field(body, "signal", str)
        number = None if name is None else _SIGNALS.get(name.upper()) or _SIGNALS.get(f"SIG{name.upper()}")
        if number is None:
            return _bad(b'the body must name a signal, as {"signal": "USR1"} does\n')
        self._post(on.UserSignal(number))
        return _done()

    def _output(self, _body: bytes) -> Answer:
        self._keep_output()
        return _done()

    def _stacks(self, body: bytes) -> Answer | Later:
        """Answer with the stacks of workers, when their hosts have sent them."""
        request = _stacks_request(body)
        if request is None:
            return _bad(b'the body is not {"ranks": "0-3,8", "native": false}; null is all ranks\n')
        ranks, native = request

        def begin(give: Give) -> CallOff:
            from hvlaunch.telemetry.stack import as_json  # noqa: PLC0415 (when somebody asks)

            giver = _Giver(give)
            self._post(
                StacksWanted(lambda stacks: giver(Answer(200, _json(as_json(stacks)))), ranks, native=native)
            )
            return giver.call_off

        return Later(begin, _STACKS_PATIENCE, Answer(503, b"the driver is busy\n"))

    def _ready(self) -> Answer | Later:
        """Answer whether the job's service is ready now."""
        port, url = (self._about.get(name) for name in ("ready_port", "ready_url"))
        if port is None and url is None:
            return Answer(404, b"the job has no --ready-port or --ready-url\n")

        def begin(give: Give) -> CallOff:
            giver = _Giver(give)
            self._post(
                Observe(
                    lambda observation: observation.ask_ready(
                        port, url, lambda state: giver(Answer(200, _json(state)))
                    )
                )
            )
            return giver.call_off

        return Later(begin, _PATIENCE, Answer(503, b"the driver is busy\n"))

    def _collect(self, body: bytes) -> Answer | Later:
        """Answer with what was collected, when all hosts have sent their files."""
        options = _collect_request(body)
        if options is None:
            return _bad(
                b'the body is not {"options": [["GLOB", "/DIR"]]}; no options are those of --collect\n'
            )

        def begin(give: Give) -> CallOff:
            giver = _Giver(give)
            self._post(CollectWanted(lambda results: giver(Answer(200, _json(results))), options))
            return giver.call_off

        return Later(begin, _COLLECT_PATIENCE, Answer(503, b"the driver is busy\n"))

    def _move(self, body: bytes) -> Answer | Later:
        """Answer when the move begins, or why it does not."""
        event = _move_request(body)
        if event is None:
            return _bad(b'the body is not {"host": "a", "to": "b"}; null is any host with free slots\n')

        def begin(give: Give) -> CallOff:
            giver = _Giver(give)

            def answer(reason: str | None) -> None:
                refused = f"host {event.host} is not moved: {reason}\n".encode()
                done = Answer(200, _json({"next": self._history.next}))
                giver(done if reason is None else _bad(refused))

            self._post(MoveRequest(event, answer))
            return giver.call_off

        return Later(begin, _PATIENCE, Answer(503, b"the driver is busy\n"))

    def _stop(self, body: bytes) -> Answer:
        is_kill = _field(body, "kill", bool)
        if is_kill is None:
            return _bad(b'the body is not {"kill": false}, or true\n')
        for _ in range(1 + is_kill):
            # A second Ctrl-C kills.
            self._post(on.Interrupted(signal.SIGTERM))
        return _done()


def _stacks_request(body: bytes) -> tuple[tuple[range, ...] | None, bool] | None:
    """Read the ranks, and whether frames of C are wanted; None for a malformed body."""
    from hvlaunch.hosts.parse import ranges_of  # noqa: PLC0415 (when somebody asks)

    with suppress(ValueError):
        value = json.loads(body)
        if (
            isinstance(value, dict)
            and value.keys() == {"ranks", "native"}
            and isinstance(value["native"], bool)
        ):
            ranks = value["ranks"]
            if ranks is None or isinstance(ranks, str):
                return (None if ranks is None else ranges_of(ranks)), value["native"]
    return None


def _move_request(body: bytes) -> on.MoveWanted | None:
    """Read the two hosts; None for a malformed body."""
    with suppress(ValueError):
        value = json.loads(body)
        if isinstance(value, dict) and value.keys() == {"host", "to"}:
            host, to = value["host"], value["to"]
            if isinstance(host, str) and host and (to is None or (isinstance(to, str) and to)):
                return on.MoveWanted(host, to)
    return None


def _collect_request(body: bytes) -> tuple[CollectOptions, ...] | None:
    """Read patterns and directories; None for a malformed body."""
    listed = _field(body, "options", list)
    if listed is None or len(listed) > _MOST_GLOBS:
        return None
    for pair in listed:
        is_pair = isinstance(pair, list) and [type(text) for text in pair] == [str, str]
        if not is_pair or not pair[0] or not pair[1].startswith("/") or "\0" in pair[1]:
            return None
    return tuple(CollectOptions(glob, directory) for glob, directory in listed)


class _Giver:
    """Gives an answer once, from any thread."""

    def __init__(self, give: Give) -> None:
        self._loop = asyncio.get_running_loop()
        self._give = give
        self._is_over = False

    def __call__(self, answer: Answer) -> None:
        with suppress(RuntimeError):
            # The server's event loop is closed: the job has ended.
            self._loop.call_soon_threadsafe(self._settle, answer)

    def call_off(self) -> None:
        self._is_over = True

    def _settle(self, answer: Answer) -> None:
        if not self._is_over:
            self._is_over = True
            self._give(answer)


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _done() -> Answer:
    return Answer(200, b"{}\n")


def _bad(text: bytes) -> Answer:
    return Answer(400, text)


def _field(body: bytes, name: str, kind: type[T]) -> T | None:
    """Read the only field of an object; None for a malformed body."""
    with suppress(ValueError):
        value = json.loads(body)
        if isinstance(value, dict) and value.keys() == {name} and isinstance(value[name], kind):
            return cast("T", value[name])
    return None
