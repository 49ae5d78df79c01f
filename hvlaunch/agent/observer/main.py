"""The observer's loop: questions in from stdin, answers out to stdout, each a line of JSON.

Each kind of question has a thread of its own while it is answered, since any may get stuck.
"""

from __future__ import annotations

import _thread
import os
import select
import sys
import zlib
from binascii import b2a_base64

from hvlaunch.agent.observer.questions import ANSWERS
from hvlaunch.agent.quick import dumps, loads, prctl, signal
from hvlaunch.agent.wire.frames import LONGEST_ANSWER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO, Dict, NoReturn, Optional

__all__ = ["main"]

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # prctl(2)
_IDLE = 60.0
"""Seconds without a question after which it ends: the next one starts another."""
_PLAIN = 1 << 12
"""A longer answer is compressed."""


def main() -> NoReturn:
    """Answer until stdin ends, nobody asks any more, or the agent has ended."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(_PR_SET_NAME, b"hvl-observer")
    _go_first()
    Observer(0, 1).run()
    os._exit(0)


def _go_first() -> None:
    """Where memory ends, it is not the job that has to go."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass


class Observer:
    """Reads questions, and answers each by what ANSWERS has for its kind."""

    def __init__(self, stdin: int, stdout: int) -> None:
        self._stdin = stdin
        self._stdout = stdout
        self._writing = _thread.allocate_lock()
        self._kinds: Dict[str, _thread.LockType] = {}
        """Locked while a question of that kind is answered."""

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._stdin, select.POLLIN)
        with open(self._stdin, "rb", buffering=0, closefd=False) as pipe:
            while poll.poll(_IDLE * 1000):
                question = self._read(pipe)
                if question is None:
                    return
                self._take(question)

    def _read(self, pipe: BinaryIO) -> Optional[Dict[str, Any]]:
        """The next question, with what was sent with it as `data`; None at the end."""
        line = b""
        while not line.endswith(b"\n"):
            more = pipe.readline()
            if not more:
                return None
            line += more
        question: Dict[str, Any] = loads(line.decode("ascii").rstrip())
        data = b""
        while len(data) < question["size"]:
            more = pipe.read(question["size"] - len(data))
            if not more:
                return None
            data += more
        question["data"] = data
        return question

    def _take(self, question: Dict[str, Any]) -> None:
        self._kinds.setdefault(question["kind"], _thread.allocate_lock())
        try:
            _thread.start_new_thread(self._answer, (question,))
        except RuntimeError as error:
            self._say({"id": question["id"], "problem": "it can't start a thread: %s" % error})

    def _answer(self, question: Dict[str, Any]) -> None:
        """One that may take some time waits as long for the one before it."""
        kind = question["kind"]
        if not self._kinds[kind].acquire(True, question.get("seconds", 0)):
            self._say({"id": question["id"], "problem": "it is still at the question before"})
            return
        try:
            said = {"id": question["id"], "answer": ANSWERS[kind](question)}
        except Exception as error:  # noqa: BLE001 (whatever it is, the driver must hear of it)
            said = {"id": question["id"], "problem": "%s: %s" % (type(error).__name__, error)}
        self._kinds[kind].release()
        self._say(said)

    def _say(self, said: Dict[str, Any]) -> None:
        line = dumps(said).encode("ascii")
        if len(line) > _PLAIN:
            line = b2a_base64(zlib.compress(line, 1), newline=False)
        if len(line) > LONGEST_ANSWER:
            line = dumps({"id": said["id"], "problem": "an answer of %d bytes" % len(line)}).encode("ascii")
        with self._writing:
            try:
                sys.stdout.buffer.write(line + b"\n")
                sys.stdout.buffer.flush()
            except OSError:
                os._exit(1)  # the agent has ended
