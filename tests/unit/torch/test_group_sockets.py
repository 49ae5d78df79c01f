"""GroupSockets: real Gloo groups in threads; a collective that waits for a silent peer ends when told to."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

from hvlaunch.torch.backends import GroupSockets

LONG = 60.0


def in_threads(*calls) -> list[Any]:
    """Run the calls at the same time; what each gave or raised."""
    results: list[Any] = [None] * len(calls)

    def run(index, call):
        try:
            results[index] = call()
        except RuntimeError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    return results


def groups(name: str, store: dist.HashStore, size: int) -> list[dist.ProcessGroupGloo]:
    def make(rank):
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timedelta(seconds=LONG * 10))

    made = in_threads(*(lambda rank=rank: make(rank) for rank in range(size)))
    assert all(isinstance(one, dist.ProcessGroupGloo) for one in made)
    return made


def all_reduce(group) -> torch.Tensor:
    tensor = torch.ones(1000)
    group.allreduce(tensor).wait()
    return tensor


@pytest.fixture
def other():
    """A connection of this process that has nothing to do with any group."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        with near, far:
            yield near, far


def test_survivors_leave_a_collective_whose_peer_is_silent_and_the_next_group_works(other):
    store = dist.HashStore()
    sockets = GroupSockets()
    with sockets.watch():
        first = groups("first", store, 3)
    later = groups("later", store, 3)  # as a script's new_group, after the round began
    near, far = other

    def break_it():
        began.wait(LONG)
        return sockets.shut_down()

    began = threading.Barrier(5)

    def reduce(group):
        began.wait(LONG)
        return all_reduce(group)

    ended = in_threads(*(lambda one=one: reduce(one) for one in (*first[:2], *later[:2])), break_it)
    assert all(isinstance(error, RuntimeError) for error in ended[:4]), ended
    assert ended[4] > 0
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    again = groups("again", store, 2)
    assert all((one == 2).all() for one in in_threads(*(lambda one=one: all_reduce(one) for one in again)))


def test_a_shutdown_while_groups_form_spares_older_sockets(other):
    near, far = other
    sockets = GroupSockets()
    with closing(socket.create_server(("127.0.0.1", 0))) as listener, closing(socket.socket()) as own:
        with sockets.watch():
            own.connect(listener.getsockname())
            sockets.shut_down()
        own.settimeout(LONG)
        assert own.recv(1) == b""
    near.sendall(b"x")
    assert far.recv(1) == b"x"


def test_shut_down_sockets_can_send_until_release():
    """Gloo forgets whoever waits for a message that can't be sent: a peer may still answer what we sent it before."""
    sockets = GroupSockets()
    with closing(socket.create_server(("127.0.0.1", 0))) as listener, sockets.watch():
        own = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
        sockets.shut_down()
    own.sendall(b"x")
    own.close()
    with peer:
        peer.sendall(b"x")
        peer.sendall(b"x")
        assert sockets.shut_down() == 0
        sockets.release()
        with pytest.raises(ConnectionError):
            while True:
                peer.sendall(b"x")


def test_shutdown_without_sockets():
    sockets = GroupSockets()
    with sockets.watch():
        pass
    assert sockets.shut_down() == 0


FORGETS = """
import os, socket, sys
from datetime import timedelta
from torch import distributed as dist
from hvlaunch.torch.backends import tcp_sockets

group = dist.ProcessGroupGloo(dist.FileStore(sys.argv[1], 2), 1, 2, timedelta(seconds=120))
sys.stdin.read()
for fd, _ in tcp_sockets():
    socket.socket(fileno=fd).setsockopt(socket.IPPROTO_TCP, 19, 1)  # TCP_REPAIR
os._exit(0)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may forget a connection (TCP_REPAIR)")
def test_a_collective_ends_if_the_peer_lost_the_connection(tmp_path):
    """A firewall has reset it at the peer's end, which waits for others meanwhile, and they for us."""
    sockets = GroupSockets()
    command = [sys.executable, "-c", FORGETS, str(tmp_path / "store")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as peer:
        with sockets.watch():
            store = dist.FileStore(str(tmp_path / "store"), 2)
            group = dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=120))
        work = group.recv([torch.ones(1)], 1, 0)  # type: ignore[attr-defined]
        time.sleep(0.5)  # what tells the peer that we receive must have been acknowledged
        peer.communicate()
    with pytest.raises(RuntimeError, match="reset by peer"):
        work.wait()
