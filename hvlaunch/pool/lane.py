"""A lane: what goes to and fro between one job's driver and one agent that a warm agent has forked."""

import json
import socket
import threading
from collections import deque
from contextlib import suppress

from hvlaunch.outside.pools import LANE_DATA, LANE_ENDED, LANE_HEAD

__all__ = ["Lane"]

_MOST_KEPT = 64 << 20
"""Bytes that wait for a driver that takes none: its connection is broken then, and it may make another."""


class Lane:
    """The driver's side. Nothing here waits for a driver but the thread that a slow one needs."""

    def __init__(self, link: socket.socket, job: str, begun: bytes = b"") -> None:
        self.job = job
        self.begun = begun
        """What the driver has sent already."""
        self._link = link
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._is_over = False

    def deliver(self, data: bytes) -> None:
        """To the driver. Never blocks."""
        self._put(LANE_DATA, data)

    def end(self, status: int, stderr: str) -> None:
        """The agent has ended so."""
        self._put(LANE_ENDED, json.dumps({"status": status, "stderr": stderr}).encode())

    def read(self) -> bytes:
        """What the driver sends next; empty at its end. Blocks."""
        try:
            return self._link.recv(1 << 16)
        except OSError:
            return b""

    def break_off(self) -> None:
        """The driver sees the end of its connection, and not that of its agent. May be repeated."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def _put(self, kind: int, data: bytes) -> None:
        part = LANE_HEAD.pack(kind, len(data)) + data
        with self._lock:
            if self._waiting:
                self._keep(part)
                return
            try:
                sent = self._link.send(part, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError:  # the driver is gone
                return
            if sent < len(part):
                self._keep(part[sent:])
                threading.Thread(target=self._flush, name=f"to job {self.job}", daemon=True).start()

    def _keep(self, part: bytes) -> None:
        self._waiting.append(part)
        self._size += len(part)
        if self._size > _MOST_KEPT:
            self.break_off()

    def _flush(self) -> None:
        """For a driver that takes less than comes."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                part = self._waiting[0]
            try:
                self._link.sendall(part)
            except OSError:
                self._is_over = True
            with self._lock:
                if self._is_over:
                    self._waiting.clear()
                    return
                self._waiting.popleft()
                self._size -= len(part)
