"""The end of a stream of which nobody keeps the rest."""

import threading

__all__ = ["Tail"]


class Tail:
    """Keeps the last `size` bytes. Thread-safe."""

    def __init__(self, size: int = 16 * 1024) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._kept = b""

    def add(self, data: bytes) -> None:
        with self._lock:
            self._kept = (self._kept + data)[-self._size :]

    def get(self) -> bytes:
        return self._kept
