"""Content from host to host: right parts for peers with the secret, and nothing for others."""

import hashlib
import os
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from hvlaunch.agent.errands.sync import peers as module
from hvlaunch.agent.errands.sync.content import part_numbers
from hvlaunch.agent.errands.sync.peers import PartServer, fetch
from hvlaunch.agent.wire import peers as connections
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
        """The parts that came; a sign that a part is on its way is b""."""
        taken: list[bytes] = []

        def take(data: bytes) -> bool:
            taken.append(data)
            return len(taken) < most

        addresses = [("127.0.0.1", 1), ("127.0.0.1", self.offer.port)]
        fetch(
            addresses,
            secret,
            fingerprint or self.certificate.fingerprint,
            ranges,
            take,
            lambda data: taken.append(b"") if not data else None,
        )
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


def fetching(host: Serving, pieces: "queue.Queue[int]") -> "Future[list[bytes]]":
    """Fetch the last part in a thread; its size so far goes to the queue."""
    got: list[bytes] = []

    def take(data: bytes) -> bool:
        got.append(data)
        return False

    def fetch_it() -> list[bytes]:
        address = ("127.0.0.1", host.offer.port)
        more: Callable[[bytearray], None] = lambda data: pieces.put(len(data))  # noqa: E731
        fetch([address], SECRET, host.certificate.fingerprint, "2-2", take, more)
        return got

    pool = ThreadPoolExecutor(1)
    future = pool.submit(fetch_it)
    pool.shutdown(wait=False)
    return future


def test_a_part_is_passed_on_while_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 4)
    monkeypatch.setattr(module, "_COMING", 30.0)
    host, pieces = Serving(tmp_path, parts=2), queue.Queue[int]()
    coming = bytearray()
    future = fetching(host, pieces)
    for size in (4, 8):
        coming += host.content[2][size - 4 : size]
        host.offer.comes(2, coming)
        assert pieces.get(timeout=30) == size
    host.file.write_bytes(b"".join(host.content))
    host.offer.has_more()
    assert future.result(30) == host.content[2:]
    assert pieces.get(timeout=30) == len(host.content[2])


@pytest.mark.parametrize("comes_again", [False, True])
def test_damage_on_the_way_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_again: bool
) -> None:
    """The next host keeps its source, which is innocent: each host would else ask the driver for the damage of one."""
    monkeypatch.setattr(module, "PIECE", 4)
    monkeypatch.setattr(module, "_COMING", 30.0)
    host, pieces = Serving(tmp_path, parts=2), queue.Queue[int]()
    future = fetching(host, pieces)
    host.offer.comes(2, bytearray(b"?" * 10))
    while pieces.get(timeout=30) != 8:
        pass
    if comes_again:
        host.offer.comes(2, bytearray(host.content[2][:5]))
        assert [pieces.get(timeout=30) for _ in range(2)] == [0, 4]
    host.file.write_bytes(b"".join(host.content))
    host.offer.has_more()
    assert future.result(30) == host.content[2:]


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
    monkeypatch.setattr(connections, "_GREETING", 0.3)
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


def test_a_source_on_a_slow_link_tells_its_peer_that_the_part_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part takes longer than the silence after which the driver would send all of it a second time."""
    monkeypatch.setattr(module, "_SIGN", 0.1)
    monkeypatch.setattr(connections, "_SILENCE", 0.4)
    monkeypatch.setattr(module, "_COMING", 30.0)
    host = Serving(tmp_path, parts=2)
    timer = threading.Timer(1.0, lambda: host.file.write_bytes(b"".join(host.content)))
    timer.start()
    taken = host.fetch("0-2", most=3 + 3)
    timer.join()
    assert taken[:2] == host.content[:2]
    assert b"" in taken
    assert host.content[2] in taken


class Hostile:
    """A peer with the job's certificate that sends what it likes."""

    def __init__(self, folder: Path, answers: Callable[[ssl.SSLSocket], None]) -> None:
        self.certificate = Certificate()
        pem = folder / "pem"
        pem.write_bytes(self.certificate.key + self.certificate.pem)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem)
        self._listener = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            plain, _ = self._listener.accept()
            with suppress(OSError), self._listener, context.wrap_socket(plain, server_side=True) as peer:
                answers(peer)

        threading.Thread(target=serve, daemon=True).start()

    def fetch(self) -> list[bytes]:
        taken: list[bytes] = []
        address = self._listener.getsockname()[:2]

        def take(data: bytes) -> bool:
            taken.append(data)
            return True

        fetch([address], SECRET, self.certificate.fingerprint, "0-2", take, lambda _data: None)
        return taken


def trickle(peer: ssl.SSLSocket) -> None:
    peer.sendall((1000).to_bytes(4, "big"))
    while True:
        peer.sendall(b"x")
        time.sleep(0.01)  # the pace of a trickle


def pretend(peer: ssl.SSLSocket) -> None:
    while True:
        peer.sendall(bytes(4))
        time.sleep(0.01)  # a sign now and then


def take_back(peer: ssl.SSLSocket) -> None:
    while True:
        peer.sendall((3).to_bytes(4, "big") + b"abc" + module._AGAIN.to_bytes(4, "big"))
        time.sleep(0.01)  # each piece is damaged


def claim(peer: ssl.SSLSocket) -> None:
    peer.sendall(b"\x7f" + b"\xff" * 3)
    peer.recv(1)  # the connection stays until the other end closes it


@pytest.mark.timeout(20)
@pytest.mark.parametrize("attack", [trickle, pretend, take_back, claim])
def test_a_hostile_peer_holds_a_host_up_no_longer_than_one_part_may_take(
    tmp_path: Path, attack: Callable[[ssl.SSLSocket], None]
) -> None:
    assert Hostile(tmp_path, attack).fetch() == []


def test_ranges_of_parts() -> None:
    assert part_numbers("3-5", 6) == [3, 4, 5]
    assert part_numbers("0-1,5-5", 6) == [0, 1, 5]
    for words in ("3-6", "-1-2", "5-3", "", "a-b", "1", "0-5,0-0", f"0-{10**15}"):
        with pytest.raises(ValueError):
            part_numbers(words, 6)
