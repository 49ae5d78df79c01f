"""One in the middle, who reads and changes: `middle.py PORT HOW MARK FIRST SPARED`.

Takes connections that the kernel has turned aside to PORT, and passes them on to where they wanted to go, with sockets
that have MARK. HOW: `change` turns one bit of what the client sends after its first SPARED bytes, `answer` one of what the server does,
`change and answer` both, `repeat` sends twice what the client sends. Only connections on which the client's first bytes are FIRST are
changed.
"""

import os
import socket
import struct
import sys
import threading

ORIGINAL = 80  # SO_ORIGINAL_DST
_BEHIND_HEAD = 40  # bytes: the head of a message, and its length with it, stays


class Connection:
    """What is known of one; nothing is changed before the client has spoken."""

    def __init__(self, how: str, first: bytes, spared: int) -> None:
        self.how = how
        self.first = first
        self.spared = spared
        self.is_chosen = False

    def changed(self, data: bytearray, side: str, passed: int) -> bytearray:
        """What goes on of what has come from a side, behind so many bytes."""
        if not self.is_chosen or passed + len(data) <= self.spared:
            return data
        if self.how == "repeat" and side == "change":
            return data + data
        if side in self.how:
            # A changed byte further behind lets whole messages pass, and over several connections a whole job.
            data[min(max(0, self.spared - passed) + _BEHIND_HEAD, len(data) - 1)] ^= 1
        return data


def pump(source: socket.socket, target: socket.socket, side: str, connection: Connection) -> None:
    passed = 0
    try:
        while data := bytearray(source.recv(1 << 16)):
            if side == "change" and not passed and data.startswith(connection.first):
                connection.is_chosen = True
                print("met", flush=True)  # noqa: T201 (for who started it)
            target.sendall(connection.changed(data, side, passed))
            passed += len(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()
        target.close()


def meet(client: socket.socket, mark: int, connection: Connection) -> None:
    _, port, packed = struct.unpack("!HH4s8x", client.getsockopt(socket.SOL_IP, ORIGINAL, 16))
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
    server.connect((socket.inet_ntoa(packed), port))
    threading.Thread(target=pump, args=(client, server, "change", connection), daemon=True).start()
    pump(server, client, "answer", connection)


def end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


def main(port: int, how: str, mark: int, first: bytes, spared: int) -> None:
    threading.Thread(target=end_with_stdin, daemon=True).start()
    with socket.create_server(("", port)) as listener:
        print("listening", flush=True)  # noqa: T201 (as above)
        while True:
            client, _ = listener.accept()
            connection = Connection(how, first, spared)
            threading.Thread(target=meet, args=(client, mark, connection), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4].encode("latin-1"), int(sys.argv[5]))
