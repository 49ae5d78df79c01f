"""Content from host to host: right parts for peers with the secret, and nothing for others."""

import hashlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvlaunch.agent.errands.sync import peers as module
from hvlaunch.agent.errands.sync.peers import PartServer, fetch
from hvlaunch.rendezvous.serving.certificate import Certificate

SIZE = 1000
SECRET = os.urandom(32).hex()


class Serving:
    """A host with some of three parts in a file."""

    def __init__(self, folder: Path, *, parts: int) -> None:
        self.content = [os.urandom(SIZE), os.urandom(SIZE), os.urandom(10)]
        self.file = folder / "content"
        self.file.write_bytes(b"".join(self.content[:parts]))
        self.certificate = Certificate()
        hashes = [hashlib.sha256(part).hexdigest() for part in self.content]
        pem = (self.certificate.key + self.certificate.pem).decode()
        self.offer = PartServer(SECRET, pem, str(folder), hashes, SIZE, self._places)
        assert [path.name for path in folder.iterdir()] == ["content"], "the key stays on no disk"

    def _places(self, number: int) -> Iterator[tuple[str, int]]:
        yield "/nowhere", 0
        yield str(self.file), number * SIZE

    def fetch(
        self, ranges: str, *, secret: str = SECRET, fingerprint: str = "", most: int = 3
    ) -> list[bytes]:
        taken: list[bytes] = []

        def take(data: bytes) -> bool:
            taken.append(data)
            return len(taken) < most

        addresses = [("127.0.0.1", 1), ("127.0.0.1", self.offer.port)]
        fetch(addresses, secret, fingerprint or self.certificate.fingerprint, ranges, take)
        return taken


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COMING", 0.5)


def test_parts_come_in_order_from_the_first_address_with_an_answer(tmp_path: Path) -> None:
    host = Serving(tmp_path, parts=3)
    assert host.fetch("0-2") == host.content
    assert host.fetch("1-1,2-2", most=2) == host.content[1:]


def test_a_part_is_passed_on_when_it_has_come(tmp_path: Path) -> None:
    host = Serving(tmp_path, parts=1)

    def come() -> None:
        host.file.write_bytes(b"".join(host.content))
        host.offer.has_more()

    timer = threading.Timer(0.1, come)
    timer.start()
    assert host.fetch("0-2") == host.content
    timer.join()


def test_a_part_that_does_not_come_ends_the_answer(tmp_path: Path) -> None:
    host = Serving(tmp_path, parts=2)
    assert host.fetch("0-2") == host.content[:2]


def test_damaged_content_is_not_sent(tmp_path: Path) -> None:
    host = Serving(tmp_path, parts=3)
    host.file.write_bytes(host.file.read_bytes()[: SIZE + 1] + b"?" * SIZE)
    assert host.fetch("0-2") == host.content[:1]


def test_nothing_comes_without_the_secret_or_from_another_host(tmp_path: Path) -> None:
    host = Serving(tmp_path, parts=3)
    assert host.fetch("0-2", secret="0" * 64) == []
    assert host.fetch("0-2", fingerprint=Certificate().fingerprint) == []
    assert host.fetch("0-2") == host.content


@pytest.mark.parametrize("ranges", ["0-3", "-1-0", "x", "", "0-2,0-2", "2-0"])
def test_nonsense_gets_no_answer(tmp_path: Path, ranges: str) -> None:
    host = Serving(tmp_path, parts=3)
    assert host.fetch(ranges) == []
    assert host.fetch("0-2") == host.content


def test_strangers_do_not_hold_up_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that say nothing, more than are served at once, and one that says nonsense."""
    monkeypatch.setattr(module, "_GREETING", 0.3)
    host = Serving(tmp_path, parts=3)
    strangers = [socket.create_connection(("127.0.0.1", host.offer.port)) for _ in range(6)]
    strangers[0].sendall(b"GET / HTTP/1.0\r\n\r\n")
    assert host.fetch("0-2") == host.content
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", host.offer.port)) as plain,
        context.wrap_socket(plain) as peer,
    ):
        peer.sendall(SECRET.encode() + b"\xff\xff\xff\xff")
        peer.settimeout(30.0)
        assert peer.recv(1) == b"", "a length beyond all ranges"
    for stranger in strangers:
        stranger.close()
