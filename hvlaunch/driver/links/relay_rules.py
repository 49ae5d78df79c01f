"""What an agent may do with relayed connections: their numbers, how many, and how much may be on its way."""

from collections.abc import Mapping
from typing import Any

from hvlaunch.agent.frames import MOST_RELAYED, RELAY_WINDOW, BadFrame

__all__ = ["RelayRules"]


class _Connection:
    """Bytes of both directions. What we have passed on of the agent's, it may send again."""

    def __init__(self) -> None:
        self.arrived = 0
        self.passed_on = 0
        self.sent = 0
        self.taken = 0
        self.is_ended = False


class RelayRules:
    """For one agent. sent() may be called by another thread than heard()."""

    def __init__(self) -> None:
        self._opened = 0
        self._open: dict[int, _Connection] = {}

    def sent(self, header: Mapping[str, Any], size: int) -> None:
        """The agent is about to get this frame, with a body of `size` bytes."""
        connection = self._open.get(header["id"])
        if connection is None:
            return
        match header["what"]:
            case "credit":
                connection.passed_on += header["bytes"]
            case "data":
                connection.sent += size
            case "close":
                self._open.pop(header["id"], None)

    def heard(self, header: Mapping[str, Any], size: int) -> None:
        """The agent has sent this frame. Raises BadFrame."""
        number, what = header["id"], header["what"]
        if what == "open":
            self._opened += 1
            if number != self._opened or len(self._open) >= MOST_RELAYED:
                raise BadFrame("a relayed connection too many")
            self._open[number] = _Connection()
            return
        if number > self._opened:
            raise BadFrame("a relayed connection that was never opened")
        connection = self._open.get(number)
        if connection is None:
            return  # we have closed it, and the agent did not know yet
        match what:
            case "data" | "end":
                connection.arrived += size
                if connection.is_ended or connection.arrived - connection.passed_on > RELAY_WINDOW:
                    raise BadFrame("relayed data beyond its window")
                connection.is_ended = what == "end"
            case "credit":
                connection.taken += header["bytes"]
                if connection.taken > connection.sent:
                    raise BadFrame("credit for more than was relayed")
            case "close":
                self._open.pop(number, None)
