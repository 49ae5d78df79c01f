"""TLS between clients and server: the pinned certificate, and what is not said without it."""

import base64
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from hvlaunch.rendezvous import BadCertificate, NoRendezvous, RendezvousUnreachable
from hvlaunch.rendezvous.client import Client, read_pin
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.rendezvous.serving.certificate import Certificate, tls_context
from tests.unit.rendezvous.wire import TOKEN

CERTIFICATE = Certificate()
ANOTHER = Certificate()


@pytest.fixture(scope="module")
def server() -> Iterator[RendezvousServer]:
    with RendezvousServer(TOKEN, certificate=CERTIFICATE) as one:
        yield one


@pytest.fixture
def client(server: RendezvousServer) -> Iterator[Client]:
    url = f"https://127.0.0.1:{server.port}"
    with Client(url, TOKEN, certificate=CERTIFICATE.fingerprint) as one:
        yield one


def test_requests_work_as_without_tls(client: Client) -> None:
    client.put("s", "k", b"v")
    assert client.get("s", "k") == b"v"
    large = bytes(range(256)) * 40_000
    client.put("s", "large", large)
    assert client.get("s", "large") == large
    assert client.wait("s", "k", 10) == b"v"
    assert client.add("s", "number", 3) == 3


def test_key_and_certificate_are_what_a_library_would_write() -> None:
    key = serialization.load_pem_private_key(CERTIFICATE.key, None)
    assert base64.b64decode(b"".join(CERTIFICATE.key.splitlines()[1:-1])) == key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    certificate = x509.load_pem_x509_certificate(CERTIFICATE.pem)
    assert certificate.public_key() == key.public_key()
    certificate.verify_directly_issued_by(certificate)


def test_many_at_once(server: RendezvousServer) -> None:
    def work(number: int) -> None:
        url = f"https://127.0.0.1:{server.port}"
        with Client(url, TOKEN, certificate=CERTIFICATE.fingerprint) as client:
            for turn in range(20):
                client.put("many", f"{number}.{turn}", b"%d" % number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.keys("many")) == 320


def test_a_wait_is_answered_when_the_value_comes(server: RendezvousServer, client: Client) -> None:
    threading.Timer(0.1, lambda: server.put("s", "late", b"v")).start()
    assert client.wait("s", "late", 20) == b"v"


def test_another_certificate_gets_no_request() -> None:
    with RendezvousServer(TOKEN, certificate=ANOTHER) as stranger:
        client = Client(f"https://127.0.0.1:{stranger.port}", TOKEN, certificate=CERTIFICATE.fingerprint)
        with pytest.raises(RendezvousUnreachable, match="its certificate is not the expected one"):
            client.put("s", "k", b"v")
        assert stranger.stats().requests == 0


def test_a_server_without_tls_gets_no_request() -> None:
    with RendezvousServer(TOKEN) as plain:
        client = Client(f"https://127.0.0.1:{plain.port}", TOKEN, certificate=CERTIFICATE.fingerprint)
        with pytest.raises(RendezvousUnreachable, match="TLS failed"):
            client.put("s", "k", b"v")


def test_a_url_without_a_pin_is_refused() -> None:
    with pytest.raises(NoRendezvous, match="fingerprint of its certificate is not known"):
        Client("https://127.0.0.1:1", TOKEN)


@pytest.mark.parametrize("host", ["10.0.0.1", "a", "[fd00::1]", "127.0.0.1.example"])
def test_a_token_is_never_sent_in_the_clear_to_another_machine(host: str) -> None:
    for pin in (None, CERTIFICATE.fingerprint):
        with pytest.raises(NoRendezvous, match="readable on the network"):
            Client(f"http://{host}:1", TOKEN, certificate=pin)


def test_nothing_older_than_tls_1_3(server: RendezvousServer) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", server.port), 20) as connection,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(connection)


def test_a_usual_client_accepts_the_certificate(server: RendezvousServer) -> None:
    context = ssl.create_default_context(cadata=CERTIFICATE.pem.decode())
    context.check_hostname = False
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        tls = context.wrap_socket(connection)
        assert tls.version() == "TLSv1.3"
        tls.sendall(b"GET /-/count/s HTTP/1.1\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n\r\n")
        assert tls.recv(4096).startswith(b"HTTP/1.1 200 OK")
        tls.close()


def test_the_answer_before_a_goodbye_is_whole(server: RendezvousServer) -> None:
    context = ssl.create_default_context(cadata=CERTIFICATE.pem.decode())
    context.check_hostname = False
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        tls = context.wrap_socket(connection, suppress_ragged_eofs=False)
        head = b"GET /-/count/none HTTP/1.1\r\nConnection: close\r\nAuthorization: Bearer "
        tls.sendall(head + TOKEN.encode() + b"\r\n\r\n")
        said = b""
        while data := tls.recv(4096):
            said += data
        assert said.endswith(b"\r\n\r\n0")
        tls.close()


@pytest.mark.parametrize(
    "noise", [b"\x16", b"\x16\x03\x01" + b"x" * 200, b"\x16\x03\x01\xff\xff" + b"\0" * 70000]
)
def test_a_broken_handshake_ends_its_connection_only(
    server: RendezvousServer, client: Client, noise: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        try:
            connection.sendall(noise)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
        except ConnectionResetError:
            pass
    assert server.stats().faults == 0
    client.put("s", "after", b"v")


def test_one_changed_byte_ends_the_connection(server: RendezvousServer) -> None:
    """One in the middle changes a request on its way: it is not done."""
    context = ssl.create_default_context(cadata=CERTIFICATE.pem.decode())
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing)
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                incoming.write(connection.recv(65536))
        connection.sendall(outgoing.read())
        head = b"PUT /s/changed HTTP/1.1\r\nContent-Length: 1\r\nAuthorization: Bearer "
        tls.write(head + TOKEN.encode() + b"\r\n\r\nx")
        record = bytearray(outgoing.read())
        record[40] ^= 1
        connection.sendall(record)
        while connection.recv(65536):
            pass
    assert server.get("s", "changed") is None
    assert server.stats().faults == 0


class TestCertificates:
    def test_each_is_its_own(self) -> None:
        assert CERTIFICATE.fingerprint != ANOTHER.fingerprint
        assert CERTIFICATE.key != ANOTHER.key

    def test_other_tools_read_it(self) -> None:
        from cryptography import x509

        read = x509.load_pem_x509_certificate(CERTIFICATE.pem)
        read.verify_directly_issued_by(read)
        assert read.subject.rfc4514_string() == "CN=hvlaunch"
        assert (read.not_valid_before_utc.year, read.not_valid_after_utc.year) == (2000, 9999)
        assert "PRIVATE" not in repr(CERTIFICATE)

    def test_it_is_read_again_from_its_pem(self) -> None:
        again = Certificate(CERTIFICATE.key + CERTIFICATE.pem)
        assert (again.fingerprint, again.key, again.pem) == (
            CERTIFICATE.fingerprint,
            CERTIFICATE.key,
            CERTIFICATE.pem,
        )
        tls_context(again)

    def test_a_pin_is_a_fingerprint_or_a_file(self, tmp_path) -> None:
        file = tmp_path / "crt"
        file.write_bytes(CERTIFICATE.pem)
        assert read_pin(str(file)) == CERTIFICATE.fingerprint
        assert read_pin(CERTIFICATE.fingerprint.upper().replace("SHA", "sha")) == CERTIFICATE.fingerprint

    @pytest.mark.parametrize(
        "text", ["sha256:", "sha256:" + "0" * 63, "md5:" + "0" * 32, "/no/such/file", "x\0y"]
    )
    def test_a_malformed_pin(self, text: str) -> None:
        with pytest.raises(BadCertificate):
            read_pin(text)

    def test_a_file_without_a_certificate(self, tmp_path) -> None:
        file = tmp_path / "crt"
        file.write_bytes(CERTIFICATE.key)
        with pytest.raises(BadCertificate, match="not a certificate in PEM"):
            read_pin(str(file))
