"""One in the middle, who reads and changes: `middle.py PORT HOW MARK`.

Takes connections that the kernel has turned aside to PORT, and passes them on to where they wanted to go, with sockets
that have MARK. HOW: `change` turns one bit of what the client sends after its handshake, `answer` one of what the server does.
"""

import socket
import struct
import sys
import threading

ORIGINAL = 80  # SO_ORIGINAL_DST
SPARED = 2000  # bytes: a handshake is shorter


def pump(source: socket.socket, target: socket.socket, bad: bool) -> None:
    passed = 0
    try:
        while data := bytearray(source.recv(1 << 16)):
            if bad and passed + len(data) > SPARED:
                data[-1] ^= 1
            passed += len(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()
        target.close()


def meet(client: socket.socket, how: str, mark: int) -> None:
    _, port, packed = struct.unpack("!HH4s8x", client.getsockopt(socket.SOL_IP, ORIGINAL, 16))
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
    server.connect((socket.inet_ntoa(packed), port))
    print("met", flush=True)  # noqa: T201 (for who started it)
    threading.Thread(target=pump, args=(client, server, how == "change"), daemon=True).start()
    pump(server, client, how == "answer")


def main(port: int, how: str, mark: int) -> None:
    with socket.create_server(("", port)) as listener:
        print("listening", flush=True)  # noqa: T201 (as above)
        while True:
            client, _ = listener.accept()
            threading.Thread(target=meet, args=(client, how, mark), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
