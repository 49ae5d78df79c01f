"""torchrun's rendezvous handler."""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import cast

from torch.distributed import DistError, DistStoreError, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.client_errors import RendezvousError as ClientError
from hvlaunch.rendezvous.client_errors import RendezvousUnreachable, WaitTimeout
from hvlaunch.torch.torchrun.barrier import (
    Barrier,
    Ended,
    FormRound,
    JoinWaiting,
    Late,
    NodePlace,
    WaitForChange,
)
from hvlaunch.torch.torchrun.keeper import Backend, StateKeeper
from hvlaunch.torch.torchrun.settings import TorchrunSettings
from hvlaunch.torch.torchrun.state import JobState, Outcome, ended, formed, joined, left

__all__ = ["Handler", "RoundOver", "RoundStore"]


_LOOK = 1.0  # seconds between looks at whether the round is over
_RANKS = "torchelastic/assigned_ranks/"
_ROLE = "torchelastic/role_info/"


class RoundOver(DistStoreError):
    """With torchrun: the round has lost a node, and the awaited value will not come.

    Try: wait: torchrun starts the workers again.
    """


class RoundStore(Store):
    """One round's values, on the rendezvous server: they survive the death of any node.

    over: returns True if the round has lost a node. A waiting node then gets RoundOver, except during the exchange of ranks just after
    a round was formed: an agent would mistake an error there for its own end. It gets an answer that lets it start its workers, and
    its first look at them calls it to the next round.
    """

    def __init__(self, client: Client, scope: str, place: NodePlace, over: Callable[[], bool]) -> None:
        super().__init__()
        self._client = client
        self._scope = scope
        self._place = place
        self._over = over
        self._role = b""

    def set(self, key: str, value: bytes | str) -> None:
        data = _data(value)
        if key.startswith(_ROLE):
            self._role = data
        self._client.put(self._scope, key, data)

    def get(self, key: str) -> bytes:
        try:
            return self._awaited(key, self._deadline(None))
        except RoundOver:
            if not key.startswith(_RANKS):
                raise
            rank, size = self._place.rank, self._place.size
            return json.dumps([rank, size, rank, size]).encode()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        deadline = self._deadline(None)
        values = []
        for key in keys:
            try:
                values.append(self._awaited(key, deadline))
            except RoundOver:  # noqa: PERF203 (each key may be the missing one)
                if not key.startswith(_ROLE):
                    raise
                values.append(self._role)
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        self._client.put_many(
            self._scope, {key: _data(value) for key, value in zip(keys, values, strict=True)}
        )

    def add(self, key: str, amount: int) -> int:
        return self._client.add(self._scope, key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._client.check(self._scope, keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        deadline = self._deadline(timeout)
        for key in keys:
            self._awaited(key, deadline)

    def _deadline(self, timeout: timedelta | None) -> float:
        default = cast("timedelta", self.timeout)  # type: ignore[attr-defined]
        return time.monotonic() + (timeout or default).total_seconds()

    def _awaited(self, key: str, deadline: float) -> bytes:
        while True:
            try:
                # A round that is over still gets one request: the value may be set already.
                left = 0.0 if self._over() else max(deadline - time.monotonic(), 0.0)
                return self._client.wait(self._scope, key, timeout=min(left, _LOOK))
            except (WaitTimeout, RendezvousUnreachable) as error:  # noqa: PERF203 (a look at each)
                if self._over():
                    raise RoundOver(f"the round is over, and no worker will set {key}") from None
                if time.monotonic() >= deadline:
                    raise DistStoreError(str(error)) from error
                if isinstance(error, RendezvousUnreachable):
                    # An unreachable server may fail at once: without a pause this loop would take a
                    # whole processor.
                    time.sleep(min(_LOOK, max(deadline - time.monotonic(), 0.0)))


def _data(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


_LOG = logging.getLogger(__name__)
_STORE = "store"
_LONGEST_WAIT = 60.0  # seconds; a waiting thread looks up now and then


class Handler(RendezvousHandler):
    """One node's part in one job. docs/reference/torchrun.md explains how it differs from torch's own backends."""

    def __init__(self, settings: TorchrunSettings) -> None:
        self._settings = settings
        self._node = f"{settings.address}/{os.getpid()}/{secrets.token_hex(4)}"
        self._scope = f"torchrun.{settings.run_id}"
        self._client = Client(settings.url, settings.token, certificate=settings.certificate)
        self._keeper = StateKeeper(
            self._client,
            Backend(self._client, self._scope),
            self._node,
            interval=settings.interval,
            lease=settings.lease,
            read_timeout=settings.read_timeout,
        )
        self._place: NodePlace | None = None
        self._called_back = False
        self._is_closed = False
        self._store: RoundStore | None = None
        self._workers_store: TCPStore | None = None

    def get_backend(self) -> str:
        """Return `hvlaunch`."""
        return "hvlaunch"

    def get_run_id(self) -> str:
        """Return the value of `--rdzv-id`."""
        return self._settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """True: rank 0's agent serves the round's TCPStore, so no port can be taken in between."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a place in the next round.

        Raises RendezvousClosedError if the job has ended, but SystemExit(0) in a node without which the job ended well: torchrun would
        fail on RendezvousGracefulExitError (pytorch issue 194710). Also raises RendezvousTimeoutError and RendezvousConnectionError.
        """
        if self._is_closed and self._keeper.state is None:
            raise RendezvousClosedError(f"the job {self.get_run_id()} was closed before it began")
        failed_here = self._place is not None and not self._called_back
        self._called_back = False
        self._store = self._workers_store = None
        if self._place is None:
            atexit.register(self._leave_quietly)
        while True:
            place = self._arrive(failed_here=failed_here)
            self._place = place
            try:
                return self._enter(place)
            except RoundOver as error:
                _LOG.info("round %d: %s", place.round, error)
            except DistStoreError as error:
                raise RendezvousTimeoutError(f"rank 0 has not opened its store: {error}") from error

    def is_closed(self) -> bool:
        """Return True if the job has ended, as far as this node knows."""
        state = self._keeper.state
        return self._is_closed if state is None else bool(state.outcome)

    def set_closed(self) -> None:
        """End the job: no node gets a place any more. Before any node came, the end applies to this handler only."""
        self._is_closed = True
        self._keeper.change(lambda state: state and ended(state, "done", self._node))

    def num_nodes_waiting(self) -> int:
        """Return more than 0 if this node should join the next round. Costs no request: the keeper knows."""
        if self._place is None:
            return 0
        state = self._keeper.state
        waiting = 1 if state is None else state.calls_back(self._node, self._settings.limits.max_nodes)
        self._called_back = waiting > 0
        return waiting

    def shutdown(self) -> bool:
        """Leave. A node of the newest round thereby ends the job, with or without success. Returns False if the rendezvous is unreachable."""
        # Torchrun calls this in a `finally`, whether its workers failed or not.
        error = sys.exc_info()[1]
        outcome: Outcome = "failed" if isinstance(error, Exception) else "done"
        atexit.unregister(self._leave_quietly)
        try:
            self._leave(outcome)
        except (RendezvousError, ClientError) as problem:
            _LOG.warning("this node could not tell the rendezvous that it leaves: %s", problem)
            return False
        return True

    def _arrive(self, *, failed_here: bool) -> NodePlace:
        """Wait for a place in a round newer than the last one."""
        keeper = self._keeper
        barrier = Barrier(self._node, self._settings.limits, self._place)
        keeper.start()
        while True:
            state, now = keeper.state, time.monotonic()
            step = barrier.next(state, now, alive=keeper.sees_life)
            if isinstance(step, NodePlace):
                return step
            if isinstance(step, JoinWaiting):
                keeper.change(partial(joined, node=self._node, epoch=secrets.token_hex(4)))
            elif isinstance(step, FormRound):
                keeper.change(lambda state: state and formed(state, self._settings.limits))
            elif isinstance(step, WaitForChange):
                until = _LONGEST_WAIT if step.until is None else step.until - now
                keeper.wait(state, min(until, self._settings.interval if state and state.outcome else until))
            else:
                raise self._refusal(step, failed_here=failed_here)

    def _refusal(self, step: Ended | Late, *, failed_here: bool) -> BaseException:
        limits = self._settings.limits
        if isinstance(step, Late):
            came = ", ".join(node.partition("/")[0] for node in step.came)
            return RendezvousTimeoutError(
                f"job {self.get_run_id()} did not start within {limits.join:g} s: "
                f"it needs {limits.min_nodes} nodes, and only these came: {came}"
            )
        if step.outcome == "done" and not failed_here:
            return SystemExit(0)
        how = "a worker failed for good" if step.outcome == "failed" else "its workers are done"
        return RendezvousClosedError(f"the job {self.get_run_id()} has ended: {how} on {step.cause}")

    def _enter(self, place: NodePlace) -> RendezvousInfo:
        """Return a round's stores. Raises RoundOver if a node is lost before they exist."""
        scope = self._scope_of(place.epoch, place.round)
        store = RoundStore(self._client, scope, place, lambda: self._is_over(place))
        try:
            if place.rank == 0:
                self._publish(scope)
                # Otherwise the values of every round would stay until the job's end.
                self._client.delete_scope(self._scope_of(place.epoch, place.round - 1))
            address, port = json.loads(store.get(_STORE))
        except ClientError as error:
            raise RendezvousConnectionError(str(error)) from error
        # C++ must not hold the last reference.
        self._store = store
        _LOG.info("round %d: rank %d of %d, store %s:%d", place.round, place.rank, place.size, address, port)
        return RendezvousInfo(store, place.rank, place.size, RendezvousStoreInfo(address, port))

    def _publish(self, scope: str) -> None:
        address = self._settings.address
        try:
            self._workers_store = TCPStore(
                address,
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._settings.read_timeout),
            )
        except (DistError, ValueError) as error:
            raise RendezvousConnectionError(
                f"a TCPStore can't be opened at this node's address {address}: {error}; try: --local-addr"
            ) from error
        self._client.put(scope, _STORE, json.dumps([address, self._workers_store.port]).encode())

    def _scope_of(self, epoch: str, round_: int) -> str:
        return f"{self._scope}/{epoch}/{round_}"

    def _is_over(self, place: NodePlace) -> bool:
        state = self._keeper.state
        if state is None or (state.epoch, state.round) != (place.epoch, place.round):
            return True
        return state.outcome == "failed" if state.outcome else not state.running

    def _leave(self, outcome: Outcome) -> None:
        """Leave the job; the outcome "" does not end the job."""

        def leave(state: JobState | None) -> JobState | None:
            if state is None:
                return None
            if outcome and self._node in state.placed:
                state = ended(state, outcome, self._node)
            return left(state, [self._node])

        state = self._keeper.change(leave, once=True)
        self._keeper.stop()
        if state is not None and not state.nodes:
            self._client.delete_scope(self._scope_of(state.epoch, state.round))
            self._client.delete(self._scope, "state")
        self._store = self._workers_store = None

    def _leave_quietly(self) -> None:
        """End on a signal: torchrun tells the rendezvous nothing in this case, and peers should know at once."""
        try:
            self._leave("")
        except (RendezvousError, ClientError) as error:
            _LOG.info("%s", error)
