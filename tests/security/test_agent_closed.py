"""A worker has the agent's user, and still can't speak in its name: the kernel opens neither of its guards to it."""

import os
import sys

import pytest

from tests.unit.agent.harness import AgentProcess

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="takes another user's id, so that the kernel refuses it something"
)

NOBODY = """
import os, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
os.execv("/bin/sh", ["sh", "-c", sys.argv[1]])
"""
ATTACK = """
import ctypes, os
agent = os.getppid()
guardian = int(open("/proc/%d/stat" % agent).read().rpartition(")")[2].split()[1])
for pid in (agent, guardian):
    for name in ("fd/0", "fd/1", "mem", "environ"):
        try:
            os.close(os.open("/proc/%d/%s" % (pid, name), os.O_RDWR if name == "mem" else os.O_RDONLY))
            print("opened", name)
        except OSError as error:
            print("refused", name)
    libc = ctypes.CDLL(None, use_errno=True)
    print("traced" if libc.ptrace(16, pid, None, None) == 0 else "refused", "ptrace")
print("own", os.open("/proc/self/environ", os.O_RDONLY) >= 0, libc.prctl(3, 0, 0, 0, 0))
"""


def test_a_worker_opens_neither_agent_nor_guardian() -> None:
    python = "/usr/bin/python3"
    agent = AgentProcess(shell=(sys.executable, "-I", "-S", "-c", NOBODY), candidates=[python])
    try:
        agent.hello()
        ended, out, err = agent.run([python, "-c", ATTACK])
        lines = out.decode().splitlines()
        assert (ended["code"], err) == (0, b"")
        assert lines[:-1] == [f"refused {name}" for name in ("fd/0", "fd/1", "mem", "environ", "ptrace")] * 2
        assert lines[-1] == "own True 1"  # the worker itself is as any process is
        agent.start(["/bin/sh", "-c", "sleep 1000 & setsid sleep 1000 & exit 3"], slots=[1])
        assert agent.expect("exited", slot=1)[0]["code"] == 3
        bye, status = agent.bye()
        assert (bye["left"], status) == (0, 0)  # it still finds and ends its descendants
    finally:
        agent.end()
