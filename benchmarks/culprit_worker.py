"""A worker that fails, or loses one that does: python culprit_worker.py PROGRAM KIND RANK

All workers repeat a collective until the one with that rank fails by KIND: an exception; an exception, after which it
closes its group and takes another second to end; os._exit(7); a segmentation fault. PROGRAM is torch (Gloo), jax
(Gloo), horovod, or horovod-like, which plays its workers where it is not installed: see HorovodLike.
"""

import atexit
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

ERROR = "the culprit's own error"
STEPS = 3
SECOND = 1.0


class Program(Protocol):
    """A library for collectives."""

    def step(self) -> None:
        """A collective."""

    def close(self) -> None:
        """Leave the group."""


class Torch:
    def __init__(self, rank: int, size: int) -> None:
        import torch  # noqa: PLC0415 (only this program needs it)
        import torch.distributed as dist  # noqa: PLC0415 (only this program needs it)

        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=size)
        self._value = torch.ones(1)
        self._dist = dist

    def step(self) -> None:
        self._dist.all_reduce(self._value)

    def close(self) -> None:
        self._dist.destroy_process_group()


class Jax:
    """A worker that ends waits for the others, which wait for it in a collective; after a second here, not minutes.

    Then jaxlib aborts them all. That is no way to close in a `finally`, since the traceback would never be printed.
    """

    def __init__(self, rank: int, size: int) -> None:
        import jax  # noqa: PLC0415 (only this program needs it)

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(
            where, size, rank, shutdown_timeout_seconds=1, heartbeat_timeout_seconds=10
        )
        import numpy as np  # noqa: PLC0415 (only this program needs it)
        from jax.experimental import multihost_utils  # noqa: PLC0415 (only this program needs it)

        self._gather = multihost_utils.process_allgather
        self._value = np.ones(1)

    def step(self) -> None:
        self._gather(self._value)

    def close(self) -> None:
        """Python's end does it."""


class Horovod:
    def __init__(self, _rank: int, _size: int) -> None:
        import horovod.torch as hvd  # noqa: PLC0415 (only this program needs it)
        import torch  # noqa: PLC0415 (only this program needs it)

        torch.set_num_threads(1)
        hvd.init()
        self._value = torch.ones(1)
        self._hvd = hvd

    def step(self) -> None:
        self._hvd.allreduce(self._value, name="value")

    def close(self) -> None:
        self._hvd.shutdown()


class HorovodInternalError(RuntimeError):
    __module__ = "horovod.common.exceptions"


class HorovodLike:
    """What a worker sees of Horovod 0.28.1: the errors of its collectives, and what it does when Python ends.

    Rank 0 coordinates. A worker that ends by Python's own way says so, and waits until its thread has left: at once the
    others' collectives fail, since Horovod has been shut down. Where a worker is gone without a word, those of Gloo do.
    """

    def __init__(self, rank: int, size: int) -> None:
        where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self._peers: list[socket.socket] = []
        if rank == 0:
            with socket.create_server(where, backlog=size) as server:
                self._peers = [server.accept()[0] for _ in range(size - 1)]
        else:
            self._peers = [_connected(where)]
        self._is_coordinator = rank == 0
        atexit.register(self.close)

    def step(self) -> None:
        try:
            if self._is_coordinator:
                words = [_receive(peer) for peer in self._peers]
                word = b"down" if b"down" in words else b"okay"
                for peer in self._peers:
                    peer.sendall(word)
            else:
                self._peers[0].sendall(b"okay")
                word = _receive(self._peers[0])
        except OSError as error:
            text = f"[gloo/transport/tcp/pair.cc:589] Read error [127.0.0.1]:1234: {error.strerror}"
            raise HorovodInternalError(text) from None
        if word == b"down":
            raise HorovodInternalError(
                "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to "
                "allreduce, allgather or broadcast a tensor after one of the ranks finished execution."
            )

    def close(self) -> None:
        peers, self._peers = self._peers, []
        for peer in peers:
            with suppress(OSError):
                peer.sendall(b"down")
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(4):
                    pass


def _connected(where: tuple[str, int]) -> socket.socket:
    while True:
        try:
            return socket.create_connection(where)
        except ConnectionRefusedError:  # noqa: PERF203 (rank 0 does not listen yet)
            time.sleep(0.01)


def _receive(peer: socket.socket) -> bytes:
    word = peer.recv(4, socket.MSG_WAITALL)
    if not word:
        raise ConnectionResetError(104, "Connection reset by peer")
    return word


def raise_and_close(program: Program) -> None:
    try:
        raise ValueError(ERROR)
    finally:
        program.close()
        time.sleep(SECOND)


def raise_error(_: Program) -> None:
    raise ValueError(ERROR)


def leave(_: Program) -> None:
    os._exit(7)


def crash(_: Program) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


PROGRAMS: dict[str, Callable[[int, int], Program]] = {
    "torch": Torch,
    "horovod-like": HorovodLike,
    "horovod": Horovod,
    "jax": Jax,
}
KINDS: dict[str, tuple[Callable[[Program], None], int]] = {
    "exception": (raise_error, 1),
    "exception, slow end": (raise_and_close, 1),
    "os._exit": (leave, 7),
    "segmentation fault": (crash, 139),
}
"""How to fail, and with which exit code."""


def main(name: str, kind: str, culprit: int) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    program = PROGRAMS[name](rank, size)
    fail, _ = KINDS[kind]
    for step in range(sys.maxsize):
        if step == STEPS and rank == culprit:
            fail(program)
        program.step()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
