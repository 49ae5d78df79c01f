"""How collectives are ended. GroupSockets: real Gloo groups in threads; how NCCL groups are aborted; that their collectives end by that is shown on a GPU (tests/gpu)."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.torch_version import TorchVersion

from hvlaunch.torch.backends import Aborts, GroupSockets, abort_groups, has_timed_out
from hvlaunch.torch.elastic.training import settle_nccl
from tests.unit.torch.ranks import in_worlds

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


class Abortable:
    def __init__(self, end):
        self.aborted = 0
        self._end = end

    def abort(self):
        self.aborted += 1
        self._end()


def test_groups_are_aborted_concurrently():
    both = threading.Barrier(2)
    groups = [Abortable(lambda: both.wait(LONG)), Abortable(lambda: both.wait(LONG))]
    Aborts(LONG).abort(groups)
    assert not both.broken
    assert [group.aborted for group in groups] == [1, 1]


def test_each_group_is_aborted_once_and_new_groups_too():
    hold = threading.Event()
    stuck, later = Abortable(lambda: hold.wait(LONG)), Abortable(lambda: None)
    aborts = Aborts(0.01)
    began = time.monotonic()
    aborts.abort([stuck])
    aborts.abort([stuck, later])
    assert time.monotonic() - began < LONG / 2
    assert (stuck.aborted, later.aborted) == (1, 1)
    hold.set()


def test_gloo_groups_are_not_aborted():
    def work(rank):
        import torch
        from torch import distributed as dist

        abort_groups()
        one = torch.ones(1)
        dist.all_reduce(one)
        return one.item()

    assert in_worlds(2, work) == [2.0, 2.0]


class OldNccl:
    """A backend as torch 2.6 makes it: the error is not told."""

    def __init__(self, name="nccl"):
        self.aborted = 0
        self._name = name

    def name(self):
        return self._name

    def abort(self):
        self.aborted += 1


class NewNccl(OldNccl):
    """As ProcessGroupNCCL2 and ProcessGroupNCCLLazy, which are no kind of ProcessGroupNCCL."""

    def __init__(self, name="nccl2", error="SUCCESS"):
        super().__init__(name)
        self.error = error

    def get_error(self):
        return SimpleNamespace(name=self.error)


class Mute(NewNccl):
    """As a backend that has only what the base class of all backends has."""

    def get_error(self):
        raise RuntimeError("Backend xccl does not support getError")


class Group:
    """As torch 2.6 makes it, without abort(): its backends have that."""

    def __init__(self, backends):
        self._backends = backends
        self._device_types = [torch.device(kind) for kind in backends]

    def _get_backend(self, device):
        if device.type not in self._backends:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self._backends[device.type]


@pytest.fixture
def in_groups(monkeypatch):
    """Returns a function that makes one group for each argument; an argument has a group's backends by device type."""

    def make(*groups):
        world = SimpleNamespace(pg_map={Group(backends): None for backends in groups})
        monkeypatch.setattr(dist.distributed_c10d, "_world", world)

    return make


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("cuda", OldNccl("nccl")),
        ("cuda", OldNccl("nccl-legacy")),
        ("cuda", NewNccl("nccl")),
        ("cuda", NewNccl("nccl2")),
        ("cuda", NewNccl("nccl-lazy")),
        ("xpu", Mute("xccl")),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{type(value).__name__}-{value.name()}",
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_backend_for_gpus_is_known_by_what_it_can_do(in_groups, kind, backend, is_wrapped):
    backend.aborted = 0
    shown = SimpleNamespace(wrapped_pg=backend, name=backend.name) if is_wrapped else backend
    gloo = NewNccl("gloo")
    in_groups({"cpu": gloo, kind: shown}, {"cpu": gloo, "cuda": gloo})
    assert not has_timed_out()
    abort_groups()
    assert (backend.aborted, gloo.aborted) == (1, 0)


@pytest.mark.parametrize("name", ["nccl", "nccl2", "nccl-lazy"])
def test_a_timeout_is_noticed_in_any_class(in_groups, name):
    backend = NewNccl(name)
    in_groups(
        {"cuda": OldNccl()}, {"xpu": Mute("xccl")}, {"cpu": NewNccl("gloo", "TIMEOUT")}, {"cuda": backend}
    )
    assert not has_timed_out()
    backend.error = "TIMEOUT"
    assert has_timed_out()


@pytest.mark.parametrize(
    ("version", "users", "kept", "is_told"),
    [
        ("2.13.0+cpu", None, "0", False),
        ("2.14.1+cu130", None, "0", False),
        ("2.15.0+cu132", None, "0", True),
        ("3.0.0", None, "0", True),
        ("2.15.0+cu132", "1", "1", False),
        ("2.15.0+cu132", "0", "0", False),
    ],
)
def test_elastic_jobs_keep_the_groups_that_were_tried(version, users, kept, is_told):
    environ = {} if users is None else {"TORCH_DIST_USE_NCCL2": users}
    assert settle_nccl(environ, TorchVersion(version)) is is_told
    assert environ["TORCH_DIST_USE_NCCL2"] == kept
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert not settle_nccl(environ, TorchVersion(version)), "it is said once"
