"""A real agent with the driver's end of its errands, in the test's own thread."""

from collections.abc import Callable, Mapping
from typing import Any

import tests.errands  # noqa: F401 (makes the example an errand)
from hvlaunch.agent.wire.frames import encode
from hvlaunch.driver.links.errands import Errand, ErrandFailed, HostErrands
from tests.testhosts.places import wait_until
from tests.unit.agent.harness import AgentProcess

__all__ = ["ErrandRig"]


class ErrandRig:
    """Errands on a greeted `agent`. `sent` has the headers of frames to the agent."""

    def __init__(self, agent: AgentProcess) -> None:
        self.agent = agent
        self.sent: list[Mapping[str, Any]] = []
        self.errands = HostErrands("a", self._send)

    def _send(self, header: Mapping[str, Any], body: bytes) -> None:
        self.sent.append(header)
        self.agent.write(encode(dict(header), body))

    def pump(self) -> None:
        """Take in what comes, and hand the errands their frames."""
        self.agent.receive(0.02)
        frames, self.agent.seen = self.agent.seen, []
        for header, body in frames:
            if header["type"] == "errand":
                self.errands.obey(header, body)
            else:
                self.agent.seen.append((header, body))

    def until(self, condition: Callable[[], Any], purpose: str) -> Any:
        def check() -> Any:
            self.pump()
            return condition()

        return wait_until(check, purpose)

    def result(self, errand: Errand) -> Any:
        """Raises ErrandFailed."""
        self.until(lambda: errand.has_ended, f"the end of errand {errand.name}")
        return errand.result()

    def failure(self, errand: Errand) -> tuple[str, str]:
        """The reason and the cause."""
        try:
            result = self.result(errand)
        except ErrandFailed as error:
            return error.reason, error.detail
        raise AssertionError(f"a result: {result}")

    def read(self, errand: Errand, size: int) -> bytes:
        """Read this many bytes of its stream."""
        data = b""
        while len(data) < size:
            self.pump()
            more = errand.read(0.0)
            assert more != b"", f"the stream ended after {len(data)} bytes"
            data += more or b""
        return data
