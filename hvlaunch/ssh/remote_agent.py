"""A program in place of ssh: `PROGRAM HOST COMMAND`, as MPIs call it, such as the MPI operator's kubexec.sh."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

from hvlaunch.errors import ConnectFailed
from hvlaunch.job import Host
from hvlaunch.ssh.connection import Channel
from hvlaunch.ssh.local import LocalChannel

__all__ = ["RemoteAgentConnection", "agent_words", "connect_by_agent"]

_EXEC_WITHOUT_STDIN = re.compile(r"(kubectl[^\n]*? exec )(?![^\n]*(?:-i\b|--stdin\b))")


def connect_by_agent(agent: str, host: Host) -> "RemoteAgentConnection":
    """The connection to `host` by way of `agent`, a program and perhaps words of its own.

    Raises ConnectFailed where there is no such program.
    """
    return RemoteAgentConnection(agent_words(agent, host.name), host.name)


def agent_words(agent: str, host: str) -> list[str]:
    """The words before the host's name.

    kubexec.sh calls `kubectl exec` without stdin, which MPIs do not need: it is run with -i added.
    Raises ConnectFailed.
    """
    program, *words = shlex.split(agent)
    found = shutil.which(program)
    if found is None:
        raise ConnectFailed(f"{program}, which the scheduler names in place of ssh, is not there", host=host)
    if Path(found).suffix != ".sh":
        return [found, *words]
    text = Path(found).read_text(errors="replace")
    changed = _EXEC_WITHOUT_STDIN.sub(r"\1-i ", text)
    return [found, *words] if changed == text else ["/bin/sh", "-c", changed, found, *words]


class RemoteAgentConnection:
    """hvlaunch.ssh.connection.Connection: each command is a process of the program's. Addresses are not known."""

    def __init__(self, words: list[str], host: str) -> None:
        self._words = words
        self._host = host
        self.local_address: str | None = ""
        self.remote_address: str | None = ""
        self._channels: list[LocalChannel] = []

    def run(self, command: str) -> Channel:
        try:
            process = subprocess.Popen(
                [*self._words, self._host, command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            cause = f"{self._words[0]} can't be started: {(error.strerror or str(error)).lower()}"
            raise ConnectFailed(cause, host=self._host) from None
        channel = LocalChannel(process)
        self._channels.append(channel)
        return channel

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
