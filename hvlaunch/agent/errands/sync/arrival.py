"""The arrival of content on this host: room for it, its list, and its parts, from the driver or from other hosts.

What has come is offered to other hosts meanwhile.
"""

from __future__ import annotations

import os
import time
import zlib

from hvlaunch.agent.errands.sync.content import LARGE, PART, PIECE, Manifest, ranges_of
from hvlaunch.agent.quick import loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterable, Iterator, Optional, Sequence, Tuple

    from hvlaunch.agent.errands import ErrandStream
    from hvlaunch.agent.errands.sync.content import PartWriter, TreeFile

__all__ = ["check_room", "has_room", "receive_all", "receive_manifest"]

_LARGEST_MANIFEST = 1 << 30
_PROGRESS = 1.0  # seconds between signs of progress, which the driver can't see for itself


def receive_manifest(stream: ErrandStream, tree_hash: str) -> Manifest:
    """Ask the driver for the list of files. Raises ValueError for a list with another hash."""
    stream.write(b"manifest\n")
    data = stream.read_exactly(int.from_bytes(stream.read_exactly(4), "big"))
    return Manifest(zlib.decompressobj().decompress(data, _LARGEST_MANIFEST), tree_hash)


def has_room(folder: str, lacking: Iterable[TreeFile]) -> bool:
    """True if the folder's file system has room for these files."""
    size, free = _room(folder, lacking)
    return size <= free


def check_room(folder: str, lacking: Iterable[TreeFile], place: str) -> None:
    """Raises OSError if the folder's file system has no room for these files. `place` is the directory for the user."""
    size, free = _room(folder, lacking)
    if size > free:
        raise OSError("%s has %d MB free, and the files need %d MB" % (place, free >> 20, size >> 20))


def _room(folder: str, lacking: Iterable[TreeFile]) -> Tuple[int, int]:
    """Return the bytes that the files still need, and the free bytes."""
    files = list(lacking)
    # Content of an earlier try is counted by its blocks, because the files have holes.
    begun = {file.content + ".part" for file in files}
    entries = (entry for entry in os.scandir(folder) if entry.name in begun)
    size = sum(file.size for file in files) - sum(entry.stat().st_blocks * 512 for entry in entries)
    status = os.statvfs(folder)
    return size, status.f_bavail * status.f_frsize


def receive_all(
    stream: ErrandStream,
    peer: Optional[Dict[str, Any]],
    writer: PartWriter,
    size: int,
    folder: str,
    hashes: Sequence[str],
    places_of: Callable[[int], Iterator[Tuple[str, int]]],
) -> None:
    """Receive the needed parts, of files with `size` bytes. If these are many, offer all parts to other hosts.

    `hashes` are those of all parts, and `places_of` yields possible places of a part. `folder` is this user's own.
    """
    if peer is not None and size >= LARGE:
        from hvlaunch.agent.errands.sync.peers import PartServer  # noqa: PLC0415 (few copies are large)

        server = PartServer(peer["secret"], peer["pem"], folder, hashes, PART, places_of)
        writer.on_part, writer.on_bytes = server.has_more, server.comes
        stream.write(b"offer %d\n" % server.port)
    while writer.needed:
        _receive_parts(stream, peer, writer)


def _receive_parts(stream: ErrandStream, peer: Optional[Dict[str, Any]], writer: PartWriter) -> None:
    """Ask for the needed parts, and take them from the driver, or from a host that the driver names."""
    ranges = ",".join("%d-%d" % pair for pair in ranges_of(sorted(writer.needed)))
    stream.write(b"parts " + ranges.encode("ascii") + b"\n")
    answer = loads(stream.read_line().decode("ascii").strip())
    if answer["from"] and peer is not None:
        from hvlaunch.agent.errands.sync.peers import fetch  # noqa: PLC0415 (few copies are large)

        addresses = [(host, port) for host, port in answer["from"]]
        shown = time.monotonic()

        def tell(data: bytearray) -> None:
            nonlocal shown
            writer.show_next(data)
            if time.monotonic() >= shown + _PROGRESS:
                shown = time.monotonic()
                stream.write(b"progress %d\n" % writer.received)

        fetch(addresses, peer["secret"], peer["fingerprint"], ranges, writer.write_next, tell)
        return
    while writer.needed:
        size = int.from_bytes(stream.read_exactly(4), "big")
        data = bytearray()
        while len(data) < size:
            data += stream.read_exactly(min(size - len(data), PIECE))
            writer.show_next(data)
        if not writer.write_next(bytes(data)) and writer.needed:
            raise ValueError("a part of a file was damaged on its way")
