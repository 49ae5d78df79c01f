"""A server whose answers are written down beforehand."""

import socket
import threading

__all__ = ["Scripted", "ok"]


class Scripted:
    """A server that gives each connection its list of answers, b"" for hanging up unasked, and keeps what it was sent."""

    def __init__(self, *connections: list[bytes]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.requests: list[list[bytes]] = []
        self._scripts = connections
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for script in self._scripts:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            seen: list[bytes] = []
            self.requests.append(seen)
            with connection:
                connection.settimeout(20)
                for answer in script:
                    request = b""
                    while answer and b"\r\n\r\n" not in request:
                        more = connection.recv(65536)
                        if not more:
                            break
                        request += more
                    if request:
                        seen.append(request)
                    connection.sendall(answer)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self._thread.join(20)


def ok(body=b"", status=b"200 OK"):
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)
