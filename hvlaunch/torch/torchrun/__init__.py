"""torchrun's rendezvous handler, and its settings: endpoint, `--rdzv-conf`, token."""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

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

from hvlaunch.rendezvous import BadCertificate, RendezvousUnreachable, WaitTimeout
from hvlaunch.rendezvous import RendezvousError as ClientError
from hvlaunch.rendezvous.client import Client, is_loopback, read_pin
from hvlaunch.rendezvous.token_file import BadTokenFile, certificate_beside, read_token_file
from hvlaunch.torch.torchrun.keeper import Backend, StateKeeper
from hvlaunch.torch.torchrun.state import (
    Barrier,
    Ended,
    FormRound,
    JobState,
    JoinWaiting,
    Late,
    NodeLimits,
    NodePlace,
    Outcome,
    WaitForChange,
    ended,
    formed,
    joined,
    left,
)

__all__ = ["Handler", "Parameters", "RoundOver", "RoundStore", "TorchrunSettings"]


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
    a round was formed: an agent would mistake an error there for its own end. The agent gets an answer, starts its
    workers, and learns of the next round at its first look at the workers.
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


# The default of torchrun and of hvlaunch-rendezvous.
_DEFAULT_PORT = 29400
_TORCHS = {"timeout", "is_host", "store_type", "close_timeout", "heartbeat_timeout"}
"""Settings of torch's own backends that are harmless and without effect here."""


class Parameters(Protocol):
    """The used part of torch's RendezvousParameters."""

    endpoint: str
    run_id: str
    min_nodes: int
    max_nodes: int
    local_addr: str | None
    config: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunSettings:
    """Address of the rendezvous, and time limits. Times are in seconds."""

    url: str
    token: str = field(repr=False)
    certificate: str | None
    """Fingerprint of the rendezvous' certificate; None on this machine."""
    run_id: str
    limits: NodeLimits
    address: str
    """This node's address, as other nodes reach it."""
    interval: float = 1.0
    """Time between two heartbeats."""
    lease: float = 6.0
    """A node that is silent for this long is lost."""
    read_timeout: float = 60.0
    """Longest time to reach the rendezvous."""

    @classmethod
    def of(cls, parameters: Parameters, environ: Mapping[str, str] = os.environ) -> TorchrunSettings:
        """Read the parameters. Raises ValueError with the setting's name for impossible values."""
        conf = _Conf(parameters.config)
        endpoint = parameters.endpoint.strip()
        host, port = _host_and_port(endpoint)
        interval = conf.seconds("keep_alive_interval", 1.0)
        token_file = conf.text("token_file") or environ.get("HVLAUNCH_TOKEN_FILE")
        certificate = _certificate(conf.text("cert"), token_file, environ)
        if certificate is None and not is_loopback(host):
            raise ValueError(
                "the certificate of a rendezvous on another machine must be known; "
                "set --rdzv-conf cert=FILE or HVLAUNCH_RENDEZVOUS_CERT"
            )
        scheme = "http" if certificate is None else "https"
        settings = cls(
            url=f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}",
            token=_token(token_file, environ),
            certificate=certificate,
            run_id=parameters.run_id,
            limits=NodeLimits(
                min_nodes=parameters.min_nodes,
                max_nodes=parameters.max_nodes,
                join=conf.seconds("join_timeout", 600.0),
                last_call=conf.seconds("last_call_timeout", 30.0, least=0),
            ),
            address=parameters.local_addr or _own_address(host, port),
            interval=interval,
            lease=interval * conf.count("keep_alive_max_attempt", 6),
            read_timeout=conf.seconds("read_timeout", 60.0),
        )
        conf.reject_rest()
        return settings


class _Conf:
    """Read `--rdzv-conf`, key by key; an unused key is an error."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._known = set(_TORCHS)

    def text(self, key: str) -> str | None:
        self._known.add(key)
        value = self._config.get(key)
        return None if value is None else str(value)

    def seconds(self, key: str, default: float, *, least: float = 0.1) -> float:
        text = self.text(key)
        try:
            value = default if text is None else float(text)
        except ValueError:
            value = float("nan")
        if not least <= value < float("inf"):
            raise ValueError(f"--rdzv-conf {key}={text} is not a number of seconds ({least:g} or more)")
        return value

    def count(self, key: str, default: int) -> int:
        text = self.text(key)
        if text is None:
            return default
        if not text.isdecimal() or not int(text):
            raise ValueError(f"--rdzv-conf {key}={text} is not a whole number (1 or more)")
        return int(text)

    def reject_rest(self) -> None:
        unknown = sorted(set(self._config) - self._known)
        if unknown:
            names = ", ".join(sorted(self._known - _TORCHS))
            raise ValueError(f"--rdzv-conf has {', '.join(unknown)}, but this backend knows only {names}")


def _host_and_port(endpoint: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{endpoint}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, 0
    port = _DEFAULT_PORT if port is None else port
    if not host or not port or parts.path or "@" in endpoint:
        raise ValueError(f"--rdzv-endpoint={endpoint!r} is not HOST:PORT of an hvlaunch rendezvous")
    return host, port


def _certificate(text: str | None, token_file: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the given file or fingerprint, else the certificate that hvlaunch-rendezvous writes beside the token file, if present."""
    text = text or environ.get("HVLAUNCH_RENDEZVOUS_CERT")
    if not text and token_file and Path(certificate_beside(token_file)).exists():
        text = certificate_beside(token_file)
    try:
        return read_pin(text) if text else None
    except BadCertificate as error:
        raise ValueError(str(error)) from error


def _token(file: str | None, environ: Mapping[str, str]) -> str:
    if file:
        try:
            return read_token_file(Path(file))
        except BadTokenFile as error:
            raise ValueError(str(error)) from error
    token = environ.get("HVLAUNCH_TOKEN", "")
    if not token:
        ways = "--rdzv-conf token_file=FILE, HVLAUNCH_TOKEN_FILE or HVLAUNCH_TOKEN"
        raise ValueError(f"the rendezvous needs the job's token; set {ways}")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("HVLAUNCH_TOKEN must be one word of printable ASCII characters")
    return token


def _own_address(host: str, port: int) -> str:
    """Return the node's own address on the way to the rendezvous: peers reach it, and it needs no DNS.

    For a rendezvous on the loopback, or with an unknown name, return the node's name, as torchrun does.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        # UDP: nothing is sent.
        with closing(socket.socket(family, kind)) as probe:
            probe.connect(address)
            address_here = str(probe.getsockname()[0])
    except OSError:
        return socket.getfqdn()
    loopback = address_here == "::1" or address_here.startswith("127.")
    return socket.getfqdn() if loopback else address_here
