"""The agent that a job's hosts get, made when the first of them needs it."""

from collections.abc import Mapping
from threading import Lock
from typing import Any

from hvlaunch.gloo.driver.bundle import agent_command, bundle, local_agent_command, python_candidates
from hvlaunch.job import Host

__all__ = ["AgentProgram"]


class AgentProgram:
    """The agent with one `config` (see bundle()), for all hosts. `python` is for those that name none. Thread-safe."""

    def __init__(self, config: Mapping[str, Any], python: str | None) -> None:
        self._config = config
        self._python = python
        self._making = Lock()
        self._packed: dict[bool, bytes] = {}

    def packed(self, *, is_near: bool) -> bytes:
        """The program itself, one zlib stream."""
        with self._making:
            if is_near not in self._packed:
                self._packed[is_near] = bundle(self._config, is_near=is_near)
            return self._packed[is_near]

    def command(self, host: Host, *, is_here: bool, is_near: bool) -> tuple[str, bytes]:
        """What a login shell of the host is to run, and the program, where it is to be sent.

        On this machine (`is_here`) there is nothing to send, unless another Python is to run it. Raises BadUsage.
        """
        python = host.python or self._python
        if is_here and python is None:
            return local_agent_command(self._config), b""
        program = self.packed(is_near=is_near)
        return agent_command(python_candidates(python), len(program)), program
