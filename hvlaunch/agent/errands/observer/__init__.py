"""The observer: answers questions about this host and its workers, until nobody asks any more.

A question is a line of JSON (`id`, `kind`, `size` and what the kind needs) and `size` raw bytes. An answer is a line of
JSON with the same `id` and either an `answer` or a `problem`; a long one is compressed and in base64. Each kind has a
thread of its own while it is answered, since any may hang in the kernel.
"""

from __future__ import annotations

import _thread
import os

from hvlaunch.agent.quick import dumps, loads
from hvlaunch.agent.wire.frames import record, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Mapping

    from hvlaunch.agent.errands import ErrandStream

    Question = Dict[str, Any]

__all__ = ["ARGUMENTS", "LONGEST_ANSWER", "RESULT", "run"]

ARGUMENTS = record({})
RESULT = record({"questions": whole(0, 1 << 53)})

LONGEST_ANSWER = 1 << 19
"""Bytes of an answer."""
_IDLE = 60.0
"""Seconds without a question after which the observer ends: the next question starts another."""
_PLAIN = 1 << 12
"""A longer answer is compressed."""


def run(arguments: Dict[str, Any], stream: ErrandStream) -> Dict[str, Any]:  # noqa: ARG001 (every errand has them)
    """Answer until the input ends or stays silent."""
    return {"questions": _Observer(stream).run()}


class _Samples:
    """Keeps the previous sample, which the rates need."""

    def __init__(self) -> None:
        self._samples: Any = None

    def __call__(self, question: Question) -> Any:
        if self._samples is None:
            from hvlaunch.agent.errands.observer.samples import Samples  # noqa: PLC0415 (each kind imports its own)

            self._samples = Samples()
        return self._samples.take(question["workers"], question["paths"])


def _stacks(question: Question) -> Any:
    from hvlaunch.agent.errands.observer.stacks import answer  # noqa: PLC0415 (as the samples)

    return answer(question)


def _py_spy(question: Question) -> Any:
    from hvlaunch.agent.errands.observer.stacks import take_py_spy  # noqa: PLC0415 (as the samples)

    return take_py_spy(question)


def _peers(question: Question) -> Any:
    from hvlaunch.agent.errands.observer.peers import answer  # noqa: PLC0415 (as the samples)

    return answer(question)


def _versions(question: Question) -> Any:
    from hvlaunch.agent.errands.observer.versions import answer  # noqa: PLC0415 (as the samples)

    return answer(question)


def _bindings(question: Question) -> Any:
    from hvlaunch.agent.errands.observer.bindings import answer  # noqa: PLC0415 (as the samples)

    return answer(question)


def _ready(question: Question) -> Any:
    from hvlaunch.agent.errands.observer.ready import answer  # noqa: PLC0415 (as the samples)

    return answer(question)


_ANSWERS: Mapping[str, Callable[[Question], Any]] = {
    "samples": _Samples(),
    "stacks": _stacks,
    "stacks_before_kill": _stacks,  # a kind of its own: it must not wait for stacks that a user asked for
    "py_spy": _py_spy,
    "peers": _peers,
    "versions": _versions,
    "bindings": _bindings,
    "ready": _ready,
}
"""A function for each kind of question. It returns the answer as JSON; its exception becomes the `problem`."""


class _Observer:
    """Reads questions and answers each in a thread of its own."""

    def __init__(self, stream: ErrandStream) -> None:
        self._stream = stream
        self._kinds: Dict[str, _thread.LockType] = {}
        """Locked while a question of the kind is answered."""

    def run(self) -> int:
        """The number of questions, once nobody asks any more."""
        count = 0
        while self._stream.wait(_IDLE):
            try:
                question: Question = loads(self._stream.read_line().decode("ascii").rstrip())
                question["data"] = self._stream.read_exactly(question["size"])
            except EOFError:
                break
            count += 1
            self._begin(question)
        return count

    def _begin(self, question: Question) -> None:
        self._kinds.setdefault(question["kind"], _thread.allocate_lock())
        try:
            _thread.start_new_thread(self._answer, (question,))
        except RuntimeError as error:
            self._send({"id": question["id"], "problem": "it can't start a thread: %s" % error})

    def _answer(self, question: Question) -> None:
        kind = question["kind"]
        # A question that may take a while waits as long for the one before it, and no other question waits.
        if not self._kinds[kind].acquire(True, question.get("seconds", 0)):
            self._send({"id": question["id"], "problem": "it has not answered the previous question yet"})
            return
        try:
            answer = {"id": question["id"], "answer": _ANSWERS[kind](question)}
        except Exception as error:  # noqa: BLE001 (whatever it is, the driver must hear of it)
            answer = {"id": question["id"], "problem": "%s: %s" % (type(error).__name__, error)}
        self._kinds[kind].release()
        self._send(answer)

    def _send(self, answer: Dict[str, Any]) -> None:
        line = dumps(answer).encode("ascii")
        if len(line) > _PLAIN:
            import zlib  # noqa: PLC0415 (samples are short)
            from binascii import b2a_base64  # noqa: PLC0415 (as above)

            line = b2a_base64(zlib.compress(line, 1), newline=False)
        if len(line) > LONGEST_ANSWER:
            problem = "an answer of %d bytes" % len(line)
            # The driver would take a longer line for nonsense, and replace this observer.
            line = dumps({"id": answer["id"], "problem": problem}).encode("ascii")
        try:
            self._stream.write(line + b"\n")
        except OSError:
            os._exit(1)  # the agent has ended
