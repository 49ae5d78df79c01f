"""A program in place of ssh: `PROGRAM HOST COMMAND`, as MPIs call it, such as the MPI operator's kubexec.sh."""

import re
import shlex
import shutil
from pathlib import Path

from hvlaunch.errors import ConnectFailed
from hvlaunch.job import Host
from hvlaunch.ssh.pipes import PipeConnection

__all__ = ["agent_words", "connect_by_agent"]

_EXEC_WITHOUT_STDIN = re.compile(r"(kubectl[^\n]*? exec )(?![^\n]*(?:-i\b|--stdin\b))")


def connect_by_agent(agent: str, host: Host, timeout: float | None = None) -> PipeConnection:  # noqa: ARG001 (as ways to hosts have it)
    """The connection to `host` by way of `agent`, a program and perhaps words of its own. Addresses are not known.

    Raises ConnectFailed where there is no such program.
    """
    return PipeConnection([*agent_words(agent, host.name), host.name], host.name, "")


def agent_words(agent: str, host: str) -> list[str]:
    """The words before the host's name.

    kubexec.sh calls `kubectl exec` without stdin, which MPIs do not need: it is run with -i added.
    Raises ConnectFailed.
    """
    program, *words = shlex.split(agent)
    found = shutil.which(program)
    if found is None:
        raise ConnectFailed(
            f"{program}, which the scheduler names to be used instead of ssh, was not found", host=host
        )
    if Path(found).suffix != ".sh":
        return [found, *words]
    text = Path(found).read_text(errors="replace")
    changed = _EXEC_WITHOUT_STDIN.sub(r"\1-i ", text)
    return [found, *words] if changed == text else ["/bin/sh", "-c", changed, found, *words]
