"""By the flags of llama.cpp: `ggml-rpc-server --host IP --port N` sends everything back; with `--rpc`, its client.

The client sends 1 MB to each server, prints how many servers have answered right, and stays with `--stay`.
"""

import argparse
import os
import socket
import threading


def serve(host: str, port: int) -> None:
    with socket.create_server((host, port)) as listener:
        print("serving as", os.getpid(), "of", os.getppid(), flush=True)
        while True:
            # One client at a time, as llama.cpp's.
            connection, _ = listener.accept()
            with connection:
                while data := connection.recv(1 << 20):
                    connection.sendall(data)


def ask(server: str) -> bool:
    host, _, port = server.rpartition(":")
    data, answer = os.urandom(1 << 20), b""
    with socket.create_connection((host, int(port))) as connection:
        sender = threading.Thread(target=connection.sendall, args=(data,), daemon=True)
        sender.start()
        while len(answer) < len(data) and (more := connection.recv(1 << 20)):
            answer += more
    return answer == data


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--rpc")
    parser.add_argument("--stay", action="store_true")
    options = parser.parse_args()
    if options.rpc is None:
        serve(options.host, options.port)
    servers = options.rpc.split(",")
    print(
        "right answers:", sum(map(ask, servers)), "secrets:", "HVLAUNCH_TUNNEL_KEY" in os.environ, flush=True
    )
    if options.stay:
        threading.Event().wait()


if __name__ == "__main__":
    main()
