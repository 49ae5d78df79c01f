"""Nodes of torchrun jobs for tests: hvlaunch's and torch's own rendezvous handlers, in threads of this process."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from torch.distributed.elastic.rendezvous import RendezvousInfo

from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.torch.torchrun import Handler, TorchrunSettings
from hvlaunch.torch.torchrun.state import NodeLimits

__all__ = ["PATIENCE", "TOKEN", "Nodes", "serve"]

TOKEN = "the-token-of-the-job"
PATIENCE = 30.0


@contextlib.contextmanager
def serve(port: int = 0) -> Iterator[RendezvousServer]:
    with RendezvousServer(TOKEN, host="127.0.0.1", port=port) as server:
        yield server


class Nodes:
    """Makes handlers of one job, and lets several of them wait for a round at the same time."""

    def __init__(self, port: int) -> None:
        self.settings = TorchrunSettings(
            url=f"http://127.0.0.1:{port}",
            token=TOKEN,
            certificate=None,
            run_id="job",
            limits=NodeLimits(min_nodes=1, max_nodes=2),
            address="127.0.0.1",
            interval=0.05,
            lease=2.0,
            read_timeout=PATIENCE,
        )
        self._made: list[Handler] = []
        self._threads = ThreadPoolExecutor(8)

    def make(self, address: str = "127.0.0.1", least: int = 1, most: int = 2, **others) -> Handler:
        times = {"join": others.pop("join", PATIENCE), "last_call": others.pop("last_call", PATIENCE)}
        limits = NodeLimits(min_nodes=least, max_nodes=most, **times)
        handler = Handler(replace(self.settings, address=address, limits=limits, **others))
        self._made.append(handler)
        return handler

    def begin(self, node) -> "Future[RendezvousInfo]":
        return self._threads.submit(node.next_rendezvous)

    def round(self, *nodes) -> list[RendezvousInfo]:
        """The result of each node, after all have reached the same round."""
        return [future.result(PATIENCE) for future in [self.begin(node) for node in nodes]]

    def close(self) -> None:
        for handler in self._made:
            handler.shutdown()
        self._threads.shutdown()
