"""An elastic training without torch: steps are sums over all workers, by way of the rendezvous.

elastic_sums.py DIR [--restarts]: with the membership of hvlaunch.torch.elastic, or started anew for each round
and resuming from DIR/checkpoint. It ends when the test says so, with a line of JSON, `done {…}`, by rank 0.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orders import Orders

from hvlaunch.rendezvous import RendezvousUnreachable, WaitTimeout
from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.worker import Dismissed, Membership

COMMIT_EVERY = 4
STEP = float(os.environ.get("STEP", "0.03"))
LOOK = 0.3


class Broken(Exception):
    """The round is broken: go back to the last commit."""


class Changing(Exception):
    """The round ends here, at a commit."""


class Group:
    """The workers of one round."""

    def __init__(self, client: Client, number: int, rank: int, size: int) -> None:
        self.number, self.rank, self.size = number, rank, size
        self.broken = threading.Event()
        self._client = client
        self._scope = f"sums.{number}"
        self._count = 0

    def exchange(self, value: Any) -> list[Any]:
        """Every worker's value, by rank. Raises Broken."""
        self._count += 1
        keys = [f"{self._count}/{rank}" for rank in range(self.size)]
        while True:
            if self.broken.is_set():
                raise Broken
            try:
                self._client.put(self._scope, keys[self.rank], json.dumps(value).encode())
                self._client.wait_all(self._scope, keys, LOOK)
                return [json.loads(one or b"null") for one in self._client.get_many(self._scope, keys)]
            except WaitTimeout:
                pass
            except RendezvousUnreachable:
                time.sleep(LOOK)  # a cut, which may heal


class Training:
    """`now` is the state; `saved` what was committed last, with how many commits (-1: nothing)."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.now: dict[str, Any] = {"step": 0, "weight": 0, "rounds": []}
        self.saved = json.dumps(self.now)
        self.commits = -1

    def save(self) -> None:
        self.saved = json.dumps(self.now)
        self.commits += 1

    def restore(self) -> None:
        self.now = json.loads(self.saved)

    def sync(self, group: Group) -> None:
        """Take the newest state that anybody has."""
        everyone = group.exchange(self.commits)
        newest = max(everyone)
        root = everyone.index(newest)
        sent = group.exchange(self.saved if group.rank == root else None)[root]
        if self.commits < newest:
            self.saved = sent
            self.restore()
        self.commits = max(newest, 0)

    def run(self, group: Group, committed: Callable[[], bool]) -> None:
        """Until the end. `committed` is called after each commit, and says whether the round is to end."""
        self.orders.obey("join")
        self.sync(group)
        self.now["rounds"].append([group.number, self.now["step"], group.size])
        if group.rank == 0:
            print(f"round {group.number} has {group.size} at step {self.now['step']}", flush=True)
        is_over = False
        while not is_over:
            self.orders.obey("step")
            time.sleep(STEP)
            told = group.exchange([1, self.orders.is_over, self.orders.dooms(group.number)])
            if any(doomed for _, _, doomed in told):
                raise RuntimeError("the test wants all workers to fail")
            self.now["weight"] += sum(one for one, _, _ in told)
            self.now["step"] += 1
            if self.now["step"] % COMMIT_EVERY == 0:
                self.save()
                if group.rank == 0:
                    print(f"commit at step {self.now['step']}", flush=True)
                if any(group.exchange(committed())):
                    raise Changing
                is_over = any(over for _, over, _ in told)
        if group.rank == 0:
            print("done " + json.dumps(self.now), flush=True)


def in_process(client: Client, training: Training) -> None:
    """As hvlaunch.torch.elastic does it."""
    beat = min(5.0, float(os.environ["HVLAUNCH_WORKER_TIMEOUT"]) / 10)
    member = Membership(client, os.environ["HVLAUNCH_WORKER"], beat=beat)
    member.start()
    cause = None
    while True:
        member.ask(training.commits, cause)
        try:
            grant = member.grant()
        except Dismissed:
            return
        group = Group(client, grant.round, grant.rank, grant.size)
        member.enter(grant.round, group.broken.set)

        def committed() -> bool:
            member.met()
            member.committed(training.commits)
            return bool(member.is_changing)

        try:
            training.run(group, committed)
        except Changing:
            cause = None
        except Broken as broken:
            cause = repr(broken)
            training.restore()
        else:
            member.finish()
            return
        member.leave()


def by_restarts(client: Client, training: Training, checkpoint: Path) -> None:
    """As a script does it that knows nothing of rounds; told to end, it ends well."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if checkpoint.exists():
        training.saved = checkpoint.read_text()
        training.restore()

    def committed() -> bool:
        if rank == 0:
            new = checkpoint.with_suffix(".new")
            new.write_text(training.saved)
            new.replace(checkpoint)
        return False

    training.run(Group(client, int(os.environ["HVLAUNCH_ROUND"]), rank, size), committed)


def main() -> None:
    directory = Path(sys.argv[1])
    orders = Orders(directory)
    orders.obey("start")
    with Client.from_environment() as client:
        if "--restarts" in sys.argv:
            by_restarts(client, Training(orders), directory / "checkpoint")
        else:
            in_process(client, Training(orders))
    orders.obey("end")


if __name__ == "__main__":
    main()
