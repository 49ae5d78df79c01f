"""Agents that call the driver once more, since their connection is lost: each is let in by a word of its own."""

import contextlib
import hmac
import os
import threading
from collections import deque
from collections.abc import Callable

from hvlaunch.agent.wire.caller import WORD_SIZE, Sealed

__all__ = ["ReturnCalls"]

_MOST = 2
"""Calls of one agent that wait: where there are more, the oldest is hung up on."""


class _Agent:
    def __init__(self, called: Callable[[], None]) -> None:
        self.called = called
        self.calls: deque[Sealed] = deque()


class ReturnCalls:
    """Who may call again, and the calls that nobody has taken yet. Thread-safe.

    A word comes over the agent's first connection, which is sealed; so only that agent has it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._agents: dict[bytes, _Agent] = {}

    def expect(self, called: Callable[[], None]) -> bytes:
        """The word for an agent; `called` is told of each of its calls, in a thread."""
        word = os.urandom(WORD_SIZE // 2).hex().encode("ascii")
        with self._changed:
            self._agents[word] = _Agent(called)
        return word

    def knows(self, word: bytes) -> bool:
        """Whether it is an agent's."""
        with self._changed:
            words = [*self._agents]
        return any(hmac.compare_digest(word, each) for each in words)

    def add(self, word: bytes, call: Sealed) -> None:
        """The agent with this word has called."""
        with self._changed:
            agent = self._agents.get(word)
            if agent is None:
                _hang_up(call)
                return
            agent.calls.append(call)
            if len(agent.calls) > _MOST:
                _hang_up(agent.calls.popleft())
            self._changed.notify_all()
        agent.called()

    def next(self, word: bytes, timeout: float) -> Sealed | None:
        """The newest call of the agent with this word, waited for so many seconds; older ones are hung up on."""
        with self._changed:
            calls = self._agents[word].calls if word in self._agents else None
            if calls is None or not self._changed.wait_for(lambda: calls, timeout):
                return None
            newest = calls.pop()
            while calls:
                _hang_up(calls.pop())
            return newest

    def close(self) -> None:
        """Hang up on all that wait."""
        with self._changed:
            for agent in self._agents.values():
                while agent.calls:
                    _hang_up(agent.calls.pop())
            self._agents.clear()


def _hang_up(call: Sealed) -> None:
    with contextlib.suppress(OSError):
        call.socket.close()
