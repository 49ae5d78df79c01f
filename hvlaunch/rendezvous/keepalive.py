"""Connections that are no more at the other end: the kernel asks now and then, and who waits learns of it."""

import socket

__all__ = ["keep_alive"]

_EVERY = 3


def keep_alive(sock: socket.socket, *, times: int = 100) -> None:
    """Ask the other end's kernel every 3 s whether it still has the connection; reads and writes fail where it has not.

    Somebody on the way, a firewall above all, may have reset it at the other end alone: who only waits would never know. That nobody
    answers `times` times in a row is a reason too.
    """
    if not hasattr(socket, "TCP_KEEPIDLE"):  # Linux has it
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _EVERY),
        (socket.TCP_KEEPINTVL, _EVERY),
        (socket.TCP_KEEPCNT, times),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
