"""The agent that a job's hosts get, made when the first of them needs it."""

from collections.abc import Container, Mapping
from threading import Lock
from typing import Any

from hvlaunch.driver.program.bundle import (
    agent_command,
    bundle,
    carrier,
    local_agent_command,
    python_candidates,
    rare_modules,
)
from hvlaunch.errors import HostError
from hvlaunch.job import Host

__all__ = ["AgentProgram"]


class AgentProgram:
    """The agent with one `config` (grace, lease, reconnect in seconds; window, spill in bytes), for all hosts. `python` is for those that name none. Thread-safe.

    `own_pythons` are those that the user named before the job: no other runs on this machine.
    """

    def __init__(
        self, config: Mapping[str, Any], python: str | None, own_pythons: Container[str] = frozenset()
    ) -> None:
        self.config = config
        self._python = python
        self._own_pythons = own_pythons
        self._making = Lock()
        self._packed: dict[tuple[bool, bool], bytes] = {}
        self._rare = b""

    def packed(self, *, is_near: bool, with_ranks: bool = False) -> bytes:
        """The program itself, one zlib stream; see bundle()."""
        kind = is_near, with_ranks
        with self._making:
            if kind not in self._packed:
                self._packed[kind] = bundle(self.config, is_near=is_near, with_ranks=with_ranks)
            return self._packed[kind]

    def command(self, host: Host, *, is_here: bool, is_near: bool) -> tuple[str, bytes]:
        """What a login shell of the host is to run, and the program, where it is to be sent.

        On this machine (`is_here`) there is nothing to send, unless another Python is to run it. Raises BadUsage,
        and HostError for a Python that was found while the job runs, and would run here.
        """
        if is_here and host.python is not None and host.python not in self._own_pythons:
            raise HostError(
                f"this machine runs no python={host.python} that is found while the job runs",
                host=host.name,
                hint="--remote-python, or python= in the hostfile before the job",
            )
        if self._has_files(host, is_here):
            return local_agent_command(self.config), b""
        program = self.packed(is_near=is_near)
        candidates = python_candidates(host.python or self._python)
        return agent_command(candidates, len(program), self.config["lease"]), program

    def _has_files(self, host: Host, is_here: bool) -> bool:
        """Whether it runs from the files of this installation."""
        return is_here and host.python is None and self._python is None

    def rare(self, host: Host, *, is_here: bool) -> bytes:
        """What few jobs need of it, and what comes behind its hello; empty where it has it already."""
        if self._has_files(host, is_here):
            return b""
        with self._making:
            self._rare = self._rare or rare_modules()
            return self._rare

    def carrier(self, host: Host, scratch: str, limit: float) -> tuple[str, bytes]:
        """What a login shell of the host is to run so that we reach its agent again, in `limit` seconds, and the program for it."""
        program = carrier(scratch)
        return agent_command(python_candidates(host.python or self._python), len(program), limit), program
