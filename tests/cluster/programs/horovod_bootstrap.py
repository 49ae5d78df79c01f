"""A worker that meets the others as Horovod 0.28's C++ client does, request by request, with its environment alone.

In each scope: PUT rank_<r>, GET rank_<i> of those before (absent is fine), PUT <r> with the addresses for the others,
poll every other <i> each 10 ms and get it once more, connect to all, a barrier, DELETE <r>. A connection for each
request; no header but Host and Content-Length; IPv4 only; anything but 200 and 404 is tried three times.
"""

import fcntl
import os
import socket
import struct
import sys
import time

SIOCGIFADDR = 0x8915
ENV = os.environ
SERVER = ENV["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(ENV["HOROVOD_GLOO_RENDEZVOUS_PORT"])
TIMEOUT = float(ENV.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "30"))
PAIR = 136  # bytes of one pair's address
sent: "list[str]" = []


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("256s", ENV["HOROVOD_GLOO_IFACE"].encode())
        return socket.inet_ntoa(fcntl.ioctl(any_socket, SIOCGIFADDR, asked)[20:24])


def request(method: str, scope: str, key: str, body: bytes = b"") -> "bytes | None":
    """The value; None for 404."""
    said = ""
    for _ in range(3):
        sent.append(method)
        where = socket.getaddrinfo(*SERVER, socket.AF_INET, socket.SOCK_STREAM)[0][4]
        with socket.create_connection((str(where[0]), int(where[1]))) as connection:
            head = f"{method} /{scope}/{key} HTTP/1.1\r\nHost: {SERVER[0]}\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            status, value = answer(connection)
        if status in (200, 404):
            return value if status == 200 else None
        said = f"{method} /{scope}/{key}: {status}"
        time.sleep(0.5)  # as long as Horovod's own client waits between two tries
    sys.exit(f"HTTP request failed. {said}")


def answer(connection: socket.socket) -> "tuple[int, bytes]":
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(4096) or sys.exit("the answer ends early")
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    length = next(int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:"))
    while len(body) < length:
        body += connection.recv(4096) or sys.exit("the answer ends early")
    return int(lines[0].split()[1]), body


def mesh(scope: str, rank: int, size: int) -> None:
    """Connect to everyone in the scope, wait for all, and say that we have finished."""
    request("PUT", scope, f"rank_{rank}", socket.gethostname().encode())
    for other in range(rank):
        request("GET", scope, f"rank_{other}")
    with socket.create_server((own_address(), 0)) as listener:
        listener.listen(size)
        mine = f"{listener.getsockname()[0]}:{listener.getsockname()[1]}".encode().ljust(PAIR)
        request("PUT", scope, str(rank), mine * (size - 1))
        others = [other for other in range(size) if other != rank]
        addresses = {other: wait(scope, str(other), PAIR * (size - 1)) for other in others}
        pairs = [connect(addresses[other]) for other in others if other < rank]
        pairs += [listener.accept()[0] for other in others if other > rank]
    for pair in pairs:
        pair.sendall(b"!")
    for pair in pairs:
        assert pair.recv(1) == b"!", "the barrier is broken"
        pair.close()
    request("DELETE", scope, str(rank))


def wait(scope: str, key: str, size: int) -> bytes:
    deadline = time.monotonic() + TIMEOUT
    while request("GET", scope, key) is None:
        if time.monotonic() > deadline:
            sys.exit(f"Wait timeout after {TIMEOUT:g} seconds for key(s): {key}")
        time.sleep(0.01)
    value = request("GET", scope, key)
    assert value is not None
    assert len(value) == size
    return value


def connect(addresses: bytes) -> socket.socket:
    host, _, port = addresses[:PAIR].decode().strip().partition(":")
    return socket.create_connection((host, int(port)))


assert ENV["HOROVOD_CONTROLLER"] == ENV["HOROVOD_CPU_OPERATIONS"] == "gloo"
began = time.monotonic()
kinds = {
    "global": ("RANK", "SIZE"),
    f"local_{ENV['HOROVOD_HOSTNAME']}": ("LOCAL_RANK", "LOCAL_SIZE"),
    f"cross_{ENV['HOROVOD_LOCAL_RANK']}": ("CROSS_RANK", "CROSS_SIZE"),
}
for variant in ("", "_process_set_hash_0"):
    for name, (rank_name, size_name) in kinds.items():
        mesh(name + variant, int(ENV[f"HOROVOD_{rank_name}"]), int(ENV[f"HOROVOD_{size_name}"]))
for variant in ("", "_process_set_hash_0"):
    for name in kinds:
        while request("GET", name + variant, "0") or request("GET", name + variant, "rank_0"):
            time.sleep(0.01)  # until all have said that they have finished
took = time.monotonic() - began
print(f"met by {SERVER[0]}:{SERVER[1]} with {len(sent)} requests in {took:.2f} s", flush=True)
while request("GET", "global", "release") is None:
    time.sleep(0.05)
