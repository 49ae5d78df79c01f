"""The training of `hvlaunch practise`: with torch by DistributedDataParallel, without torch a toy by the rendezvous.

`python -m hvlaunch.practise_training`, as a worker of an elastic job. SLOW makes this rank slow, END ends the training on
all ranks. Rank 0 writes a line for each step to the pipe that REPORTS names.
"""

import json
import os
import random
import signal
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from hvlaunch.rendezvous import WaitTimeout
from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.worker import Dismissed, Membership, progress

__all__ = ["END", "REPORTS", "SLOW", "SLOW_STEP", "SLOW_TIME", "UserOrders", "main"]

REPORTS = "PRACTISE_REPORTS"
"""The variable with the path of the pipe for steps."""
SLOW, END = signal.SIGUSR1, signal.SIGUSR2
SLOW_TIME, SLOW_STEP = 5.0, 0.5
"""Duration of the slowness, and the delay of each step, in seconds."""
_STEP = 0.1
"""Seconds of a step: a user is to see steps go by."""
_PRINTED = 2.0
"""Seconds between two lines of rank 0."""
_LOOK = 0.1
"""Seconds between checks for a broken round."""


class UserOrders:
    """The user's orders to this worker, and its reports of steps."""

    def __init__(self) -> None:
        self.is_over = False
        self._slow_until = 0.0
        self._last: float | None = None
        self._printed = 0.0
        self._steps = 0
        self._pipe = -1
        signal.signal(SLOW, lambda *_: setattr(self, "_slow_until", time.monotonic() + SLOW_TIME))
        signal.signal(END, lambda *_: setattr(self, "is_over", True))
        with suppress(OSError):
            # Without a reader this fails: hvlaunch was killed.
            self._pipe = os.open(os.environ.get(REPORTS, ""), os.O_WRONLY | os.O_NONBLOCK)

    def work(self) -> None:
        """Take the time of a step."""
        time.sleep(_STEP + (SLOW_STEP if time.monotonic() < self._slow_until else 0.0))

    def report(self, step: int, loss: float, rank: int, size: int) -> None:
        """Report a finished step."""
        progress(step, loss=loss)
        if rank != 0:
            return
        now = time.monotonic()
        if self._last is None:
            self._last, self._printed = now - _STEP, now
        record = {"type": "step", "step": step, "seconds": now - self._last}
        self._last, self._steps = now, self._steps + 1
        with suppress(OSError):
            # A reader that is slow or gone must not stop the training.
            os.write(self._pipe, json.dumps(record).encode() + b"\n")
        if now >= self._printed + _PRINTED:
            rate = self._steps / (now - self._printed)
            print(f"step {step}: loss {loss:.4f}, {size} workers, {rate:.1f} steps/s", flush=True)  # noqa: T201 (a worker's output)
            self._printed, self._steps = now, 0


def main() -> None:
    """Train until the user's order."""
    orders = UserOrders()
    if find_spec("torch") is not None:
        _train_with_torch(orders)
    else:
        with suppress(Dismissed):
            _train_toy(orders)


def _train_with_torch(orders: UserOrders) -> None:
    import torch  # noqa: PLC0415 (it may not be installed)
    from torch import distributed, nn  # noqa: PLC0415 (as above)
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415 (as above)

    from hvlaunch import torch as hvt  # noqa: PLC0415 (as above)

    @hvt.elastic.run
    def train(state: Any) -> None:
        model = DistributedDataParallel(state.model)
        while not state.is_over:
            inputs = torch.rand(64, 8)
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            state.optimizer.zero_grad()
            loss.backward()
            state.optimizer.step()
            orders.work()
            # The signal comes to each rank at another step.
            is_over = torch.tensor(int(orders.is_over))
            distributed.all_reduce(is_over, distributed.ReduceOp.MAX)
            state.is_over = bool(is_over)
            state.step += 1
            state.commit()
            orders.report(state.step, loss.item(), hvt.rank(), hvt.size())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(hvt.elastic.TorchState(model=model, optimizer=optimizer, step=0, is_over=False))


def _train_toy(orders: UserOrders) -> None:
    """Find a number by gradient descent; each step is a commit. Raises Dismissed."""
    client = Client.from_environment()
    member = Membership(client, os.environ["HVLAUNCH_WORKER"], beat=1.0)
    member.start()
    # The step, which is also the number of commits, and the weight.
    state = [-1, 0.0]
    is_over = False
    while not is_over:
        member.ask(int(state[0]), None)
        grant = member.grant()
        exchange = _Exchange(client, f"practise.{grant.round}", grant.rank, grant.size)
        member.enter(grant.round, exchange.is_broken.set)
        with suppress(_RoundBroken):
            state = max(exchange.all_values(state))
            state[0] = max(state[0], 0)
            member.met()
            is_changing = False
            while not is_over and not is_changing:
                orders.work()
                gradient = state[1] - random.gauss(1.0, 0.1)
                values = exchange.all_values([gradient, orders.is_over, member.is_changing])
                gradients, ends, changes = zip(*values, strict=True)
                state = [state[0] + 1, state[1] - 0.05 * sum(gradients) / grant.size]
                is_over, is_changing = any(ends), any(changes)
                member.committed(int(state[0]))
                orders.report(int(state[0]), (state[1] - 1.0) ** 2, grant.rank, grant.size)
        member.leave()
    member.finish(is_done=True)


class _RoundBroken(Exception):
    """Another worker has failed."""


class _Exchange:
    """The collective of a round's workers, by the rendezvous."""

    def __init__(self, client: Client, scope: str, rank: int, size: int) -> None:
        self.is_broken = threading.Event()
        self._client = client
        self._scope = scope
        self._rank = rank
        self._size = size
        self._count = 0

    def all_values(self, value: list[Any]) -> list[list[Any]]:
        """Return the values of all ranks. Raises _RoundBroken."""
        self._count += 1
        keys = [f"{self._count}/{rank}" for rank in range(self._size)]
        self._client.put(self._scope, keys[self._rank], json.dumps(value).encode())
        # All ranks have read the values before the last ones.
        self._client.delete(self._scope, f"{self._count - 2}/{self._rank}")
        while not self.is_broken.is_set():
            with suppress(WaitTimeout):
                self._client.wait_all(self._scope, keys, _LOOK)
                values = self._client.get_many(self._scope, keys)
                return [json.loads(text or b"null") for text in values]
        raise _RoundBroken


if __name__ == "__main__":
    main()
