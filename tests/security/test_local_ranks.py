"""Where a launcher's processes meet their host's agent (`--mpi`, `--srun`): another user of the host is not met."""

import os
import socket
import subprocess
import sys
from contextlib import closing
from zlib import crc32

import pytest

from hvlaunch.agent.quick import Selector
from hvlaunch.agent.wire.caller import ADDRESSES, CERTIFICATE, ENTRY
from hvlaunch.agent.workers.local_ranks import LocalRanks
from hvlaunch.mpi import Kind, names_of
from hvlaunch.mpi.request import caller_command

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")

NOBODY = 65534
LISTEN = "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.bind('\\0' + sys.argv[1]); s.listen(); print(flush=True); c, _ = s.accept(); print(repr(c.recv(100)))"
CONNECT = "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[1]); s.sendall(b'%8d%8d0000' % (1, 1)); print(repr(s.recv(100)))"


def test_another_user_in_the_agents_place_gets_nothing_from_a_rank():
    fingerprint = f"sha256:{os.urandom(8).hex()}"
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN, f"hvlaunch {fingerprint} {crc32(b'w'):08x} 4"],
        stdout=subprocess.PIPE,
        text=True,
    ) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "\n"
        ranks = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
        env = {**os.environ, ENTRY: "w", CERTIFICATE: fingerprint, ADDRESSES: "127.0.0.1 1", **ranks}
        words = caller_command(names_of(Kind.OPEN_MPI), sys.executable)
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert "user 65534 listens in place of its first process" in done.stderr
        assert stranger.stdout.readline() == "b''\n"


def test_another_user_is_no_rank():
    name = f"hvlaunch test {os.urandom(8).hex()}"
    with closing(socket.socket(socket.AF_UNIX)) as listener, closing(Selector()) as selector:
        listener.bind(f"\0{name}")
        listener.listen()
        ranks = LocalRanks((listener, {}), selector, lambda *_: None, lambda _: None)
        ranks.meet(1, lambda: None)
        with subprocess.Popen(
            [sys.executable, "-c", CONNECT, name], stdout=subprocess.PIPE, text=True
        ) as stranger:
            ((accept, _),) = selector.select(60)
            accept()
            assert stranger.communicate(timeout=60)[0] in ("b''\n", "")
        assert 1 not in ranks
