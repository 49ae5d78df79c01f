"""A client of a job's rendezvous that has the token: `honest_client.py DIR`, beside a worker, with its environment.

Every 20 ms a PUT and a GET, on a connection that it keeps and on a new one in turns; for each a line in DIR/served: when it
ended, by the monotonic clock, and how long both took. It knows nothing of hvlaunch but what travels, so it serves any version.
"""

import hashlib
import os
import socket
import ssl
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

_PAUSE = 0.02
_PATIENCE = 60.0


class Connection:
    def __init__(self) -> None:
        url = urlsplit(os.environ["HVLAUNCH_RENDEZVOUS"])
        assert url.hostname is not None
        self._socket = socket.create_connection((url.hostname, url.port or 0), _PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if url.scheme == "https":
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            self._socket = secured = context.wrap_socket(self._socket)
            found = "sha256:" + hashlib.sha256(secured.getpeercert(binary_form=True) or b"").hexdigest()
            assert found == os.environ["HVLAUNCH_RENDEZVOUS_CERT"]
        self._reader = self._socket.makefile("rb")

    def ask(self, method: str, body: bytes = b"") -> None:
        """Raises OSError where there is no good answer."""
        head = f"{method} /honest/key HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {os.environ['HVLAUNCH_TOKEN']}\r\n"
        self._socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = self._reader.readline()
        size = 0
        while (line := self._reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            size = int(value) if name.lower() == b"content-length" else size
        if b" 200 " not in status or len(self._reader.read(size)) != size:
            raise OSError(f"answered {status!r}")

    def close(self) -> None:
        self._reader.close()
        self._socket.close()


def serve_once(kept: Connection | None) -> Connection | None:
    """By the kept connection or by a new one, as often as it takes; the one to be kept."""
    began = time.monotonic()
    while time.monotonic() < began + _PATIENCE:
        try:
            connection = kept or Connection()
            connection.ask("PUT", b"value")
            connection.ask("GET")
        except OSError:  # noqa: PERF203 (it waits anyway)
            kept = None
            time.sleep(_PAUSE)
        else:
            return connection
    return None


def main() -> None:
    with (Path(sys.argv[1]) / "served").open("a") as served:
        kept = None
        while True:
            for connection in (kept, None):
                began = time.monotonic()
                used = serve_once(connection)
                ended = time.monotonic()
                served.write(f"{ended:.4f} {ended - began:.4f}\n")
                served.flush()
                if connection is None and kept is not None and used is not None:
                    used.close()
                else:
                    kept = used
                time.sleep(_PAUSE)


if __name__ == "__main__":
    main()
