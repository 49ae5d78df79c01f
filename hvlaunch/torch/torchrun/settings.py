"""torchrun's settings for this backend: endpoint, `--rdzv-conf`, token."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from hvlaunch.rendezvous.client import is_loopback, read_pin
from hvlaunch.rendezvous.client_errors import BadCertificate
from hvlaunch.rendezvous.token_file import BadTokenFile, certificate_beside, read_token_file
from hvlaunch.torch.torchrun.state import NodeLimits

__all__ = ["Parameters", "TorchrunSettings"]

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
        host, port = _place(endpoint)
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


def _place(endpoint: str) -> tuple[str, int]:
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
