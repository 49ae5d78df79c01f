"""An elastic job of forks of the test's process, whose driver the test plays."""

import multiprocessing
import os
import time
import traceback
from typing import Any

from hvlaunch.rendezvous import Client
from hvlaunch.rendezvous.messages import ASKS, PLACES, ROUNDS, Ask, Grant, Notice, decode, encode
from hvlaunch.rendezvous.serving import RendezvousServer
from tests.unit.torch.ranks import LONG, all_forked, begin_fork

__all__ = ["LONG", "PlayedJob", "mark", "me"]

TOKEN = "t0ken"


class PlayedJob:
    """Workers as forks of this process, and the driver's side of their rounds."""

    def __init__(self, train, size: int) -> None:
        self.server = RendezvousServer(TOKEN, host="127.0.0.1")
        self.server.start()
        context = multiprocessing.get_context("fork")
        self.results = context.SimpleQueue()
        self.go = [context.Event() for _ in range(size)]
        # All are forked now: later this process has threads that a fork would lose.
        self.workers = [
            context.Process(target=self._work, args=(train, number), daemon=True) for number in range(size)
        ]
        all_forked(self.workers)
        self.round = -1
        self.seated: list[int] = []

    def _work(self, train, number: int) -> None:
        begin_fork()
        os.environ.update(
            HVLAUNCH_ELASTIC="1",
            HVLAUNCH_WORKER=f"h/{number}/0",
            HVLAUNCH_WORKER_TIMEOUT="30",
            HVLAUNCH_HOST="h",
            HVLAUNCH_RENDEZVOUS=f"http://127.0.0.1:{self.server.port}",
            HVLAUNCH_TOKEN=TOKEN,
        )
        self.go[number].wait()
        code: Any = 0
        try:
            self.results.put((number, train()))
        except SystemExit as end:
            code = end.code
        except BaseException:  # noqa: BLE001 (a fork must not return into its parent)
            traceback.print_exc()
            code = 1
        os._exit(code)

    def grant(self, *numbers: int) -> list[Ask]:
        """Start a round with these workers, in this order, once all have asked for it; what they asked."""
        for number in numbers:
            self.go[number].set()
        asks = [self._ask(number) for number in numbers]
        self.round += 1
        self.seated = list(numbers)
        for rank, number in enumerate(numbers):
            grant = Grant(self.round, rank, len(numbers), rank, len(numbers), 0, 1, "127.0.0.1", "lo")
            self.server.put(PLACES, f"h/{number}/0", encode(grant))
        return asks

    def _ask(self, number: int) -> Ask:
        deadline = time.monotonic() + LONG
        while time.monotonic() < deadline:
            value = self.server.get(ASKS, f"h/{number}/0")
            after = self.round if number in self.seated else -1
            if value is not None and (ask := decode(Ask, value)).round >= after:
                return ask
            time.sleep(0.01)
        raise AssertionError(f"worker {number} has not asked")

    def tell(self, state: str) -> None:
        self.server.put(ROUNDS, str(self.round), encode(Notice(state, "the test says so")))

    def until(self, key: str) -> bytes:
        """Wait for the value that a worker puts there."""
        value = self.server.wait("test", key, LONG)
        assert value is not None
        return value

    def result(self) -> tuple[int, object]:
        number, result = self.results.get()
        return number, result

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.join()
        self.server.close()


def me() -> int:
    return int(os.environ["HVLAUNCH_WORKER"].split("/")[1])


def mark(key: str) -> None:
    """Tell the test that we have come here."""
    with Client.from_environment() as client:
        client.put("test", key, b"1")
