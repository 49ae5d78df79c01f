"""The paramiko client of a job, and its shared connections to jump hosts."""

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from hvlaunch.errors import ConnectFailed, HostError, StartTimeout
from hvlaunch.job import Host, SSHOptions
from hvlaunch.ssh.config import OPENSSH, AskSSH, Hop, Hops, LoginTarget, Questions, behind, by_hand, resolve
from hvlaunch.ssh.streams import (
    ConnectLimit,
    Dialed,
    EarlyStarts,
    ProxySocket,
    Stream,
    dial,
    dial_early,
    start_proxy,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

    from hvlaunch.ssh.by_paramiko.connection import ParamikoConnection
    from hvlaunch.ssh.by_paramiko.login import Login
    from hvlaunch.ssh.keyring import Keyring

__all__ = ["Jumps", "ParamikoClient"]


_LOADING = threading.Lock()


class ParamikoClient:
    """Connects to the hosts of a job, within `timeout` seconds each. Thread-safe.

    The hosts share the keys, which `keyring` returns on first use, the connect limit and the connections to
    jump hosts. `close` ends these connections and every ProxyCommand.
    """

    def __init__(
        self,
        options: SSHOptions,
        *,
        timeout: float,
        keyring: "Callable[[], Keyring]",
        connect_limit: ConnectLimit,
    ) -> None:
        self._options = options
        self._asker = AskSSH()
        self._ask = Questions(self._asker)
        self._early = EarlyStarts(
            partial(resolve, options=options, timeout=timeout, ask=self._ask),
            self._ask.is_same_for_all,
            dial_early,
        )
        self._hops = Hops(options, timeout=timeout, ask=self._asker)
        self._timeout = timeout
        self._keyring = keyring
        self._connect_limit = connect_limit
        self._jumps: Jumps[ParamikoConnection] = Jumps()
        self._lock = threading.Lock()
        # Weak, so that ended connections do not accumulate.
        self._proxies: weakref.WeakSet[ProxySocket] = weakref.WeakSet()
        self._closed = False

    def prepare(self, hosts: Sequence[Host]) -> None:
        """Ask ssh about the hosts and begin to dial them, in another thread."""
        self._early.begin(hosts)

    def connect(self, host: Host, timeout: float | None = None) -> "ParamikoConnection":
        """Connect to `host`, check its key and authenticate with a key. Blocks.

        `timeout` replaces the common timeout. Raises a HostError: UnknownHost, ConnectFailed, SentAway,
        StartTimeout, HostKeyUnknown, HostKeyChanged, HostKeyRevoked, PermissionDenied, or HostError itself for
        unusable settings.
        """
        limit = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        early = self._early.hand_over(host)
        settings = (
            resolve(host, self._options, timeout=limit, ask=self._ask) if early is None else early.settings
        )
        dialed = None if early is None else early.dialed
        target = LoginTarget(host.name, settings, by_hand(host, self._options, settings))
        # Each jump host is reached over the one before it, and then the host over the last.
        via: ParamikoConnection | None = None
        for hop in self._hops.before(host.name, settings.proxy_jump):
            make = partial(self._jump, hop, via, limit, deadline)
            try:
                via = self._jumps.get(hop.key, make, host=host.name, timeout=deadline - time.monotonic())
            except HostError as error:
                raise behind(host.name, hop.key[-1], error) from None
        try:
            return self._open(target, via, limit, deadline, dialed)
        except StartTimeout:
            # The jump host may be dead: the next host gets a new connection to it.
            if via is not None and (via.silence() or 0.0) > limit / 2:
                self._jumps.doubt(via)
            raise

    def close(self) -> None:
        """End questions, connections to jump hosts and every ProxyCommand; may be repeated."""
        self._asker.close()
        self._early.close()
        self._jumps.close()
        with self._lock:
            self._closed = True
            proxies = [*self._proxies]
        for proxy in proxies:
            proxy.close()

    def _jump(
        self, hop: Hop, via: "ParamikoConnection | None", limit: float, deadline: float
    ) -> "ParamikoConnection":
        settings = self._hops.settings(hop.host, hop.jump)
        hint = by_hand(hop.host, self._hops.options, settings)
        return self._open(LoginTarget(hop.host.name, settings, hint), via, limit, deadline)

    def _open(
        self,
        target: LoginTarget,
        via: "ParamikoConnection | None",
        limit: float,
        deadline: float,
        dialed: Dialed | None = None,
    ) -> "ParamikoConnection":
        # For the first attempt alone.
        unused = [] if dialed is None else [dialed]

        def attempt() -> "ParamikoConnection":
            stream = self._stream(target, via, deadline, unused.pop() if unused else None)
            try:
                login = _load_login()(
                    target, self._options.host_keys, self._keyring(), timeout=limit, deadline=deadline
                )
            except BaseException:
                stream.close()
                raise
            return login.over(stream)

        address = f"{target.settings.hostname} port {target.settings.port}"
        try:
            return self._connect_limit.run(address, attempt, host=target.name, deadline=deadline)
        finally:
            for connection in unused:
                connection.sock.close()

    def _stream(
        self,
        target: LoginTarget,
        via: "ParamikoConnection | None",
        deadline: float,
        dialed: Dialed | None,
    ) -> Stream:
        settings = target.settings
        if via is not None:
            to = (settings.hostname, settings.port)
            return via.open_jump(to, host=target.name, timeout=max(0.0, deadline - time.monotonic()))
        if settings.proxy_command is None:
            return dial(target.name, settings, deadline, dialed)
        if any(setting.startswith("ProxyUseFdpass") for setting in settings.beyond):
            raise HostError("paramiko can't do ProxyUseFdpass", host=target.name, hint=OPENSSH)
        with self._lock:
            if self._closed:
                raise ConnectFailed(
                    "hvlaunch stopped connecting, because the job is ending", host=target.name
                )
            proxy = start_proxy(target.name, settings.proxy_command)
            self._proxies.add(proxy)
        return proxy


def _load_login() -> "type[Login]":
    """Import paramiko late: the import takes 60 ms, while the hosts' sshd start their work.

    invoke is left out, which would take 30 ms more: paramiko works without it, and needs it only for `Match exec` in
    its own parser of ssh_config, which is not used if there is an ssh binary. So is importlib.metadata, with the email
    package 12 ms: paramiko asks it for its own version.
    """
    import shutil  # noqa: PLC0415 (it can wait as well)

    # One thread at a time may change sys.modules.
    with _LOADING:
        # Only if no other code has imported them: a None in sys.modules would break its import.
        stand_ins: dict[str, Any] = {}
        if "paramiko" not in sys.modules:
            if "invoke" not in sys.modules and shutil.which("ssh") is not None:
                stand_ins["invoke"] = None
            if "importlib.metadata" not in sys.modules:
                stand_ins["importlib.metadata"] = _Metadata
        sys.modules.update(stand_ins)
        try:
            from hvlaunch.ssh.by_paramiko.login import Login  # noqa: PLC0415 (see above)
        finally:
            for name in stand_ins:
                del sys.modules[name]
    return Login


class _Metadata:
    """In place of importlib.metadata while paramiko is imported."""

    @staticmethod
    def version(name: str) -> str:
        """Return the version in the name of the directory `NAME-VERSION.dist-info`; "0" if there is none."""
        from pathlib import Path  # noqa: PLC0415 (as above)

        places = (info for place in sys.path for info in Path(place or ".").glob(f"{name}-*.dist-info"))
        return next((info.stem.removeprefix(f"{name}-") for info in places), "0")


class _Closable(Protocol):
    def is_open(self) -> bool: ...

    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


class Jumps(Generic[C]):
    """The connections to jump hosts, by their keys. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[str, ...], Future[C]] = {}
        self._doubted: list[C] = []

    def get(self, key: tuple[str, ...], make: Callable[[], C], *, host: str, timeout: float) -> C:
        """Return the connection for `key`: one caller makes it, and others wait; a closed connection is replaced.

        `host` is for messages. Raises the errors of `make` for all waiting callers, and StartTimeout.
        """
        from concurrent.futures import Future  # noqa: PLC0415 (5 ms, before any connection; few hosts are behind others)
        from concurrent.futures import TimeoutError as TooLate  # noqa: PLC0415

        with self._lock:
            future = self._made.get(key)
            # The first caller makes the connection outside the lock; the others wait for its Future.
            is_mine = future is None or (future.done() and not future.result().is_open())
            if future is None or is_mine:
                future = self._made[key] = Future()
        if is_mine:
            try:
                future.set_result(make())
            except BaseException as error:  # noqa: BLE001  (those who wait get it too)
                with self._lock:
                    del self._made[key]
                future.set_exception(error)
        try:
            return future.result(timeout)
        except TooLate:
            cause = f"no connection to its jump host {key[-1]} within {timeout:.0f} s"
            raise StartTimeout(cause, host=host) from None

    def doubt(self, connection: C) -> None:
        """Make a new connection for later callers, because this one does not answer. Its users may continue."""
        with self._lock:
            for key, future in [*self._made.items()]:
                if future.done() and not future.exception() and future.result() is connection:
                    self._doubted.append(connection)
                    del self._made[key]

    def close(self) -> None:
        """Close the connections, the farthest first. May be repeated."""
        with self._lock:
            made = [*self._made.values()]
            doubted = [*self._doubted]
            self._made.clear()
            self._doubted.clear()
        for connection in doubted:
            connection.close()
        for future in reversed(made):
            if future.done():
                future.result().close()
