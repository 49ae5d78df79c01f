"""Writes every packet of a network namespace to a file until it is killed: `sniffer.py FILE`."""

import socket
import sys

ALL = 0x0003  # ETH_P_ALL, packet(7)
RCVBUFFORCE = 33  # SO_RCVBUFFORCE, socket(7)

with (
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL)) as packets,
    open(sys.argv[1], "wb", buffering=0) as file,  # noqa: PTH123 (a program of its own)
):
    packets.setsockopt(socket.SOL_SOCKET, RCVBUFFORCE, 256 << 20)
    print("listening", flush=True)  # noqa: T201 (for who started it)
    while True:
        file.write(packets.recv(1 << 16))
