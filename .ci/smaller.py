# ruff: noqa: INP001 (a script, and no package)
"""Compress the files of a wheel anew with zopfli: `smaller.py WHEEL`. It saves 3 %, and takes some ten seconds.

The files stay as they are, and so does RECORD. Their times do not: the same files give the same wheel.
"""

import struct
import sys
import zlib
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

from zopfli.zlib import compress  # type: ignore[import-untyped]

ITERATIONS = 5
"""Fifteen save 0.03 % more."""
BEGINNING_OF_1980 = 1 << 5 | 1
"""The first day that a zip file can name."""
LOCAL = struct.Struct("<4s5H3L2H")
CENTRAL = struct.Struct("<4s6H3L5H2L")
END = struct.Struct("<4s4H2LH")


def deflated(data: bytes) -> tuple[int, bytes]:
    """Return the method and the bytes: stored, if nothing is saved."""
    packed = compress(data, numiterations=ITERATIONS)[2:-4]  # without the header and the checksum of zlib
    return (ZIP_DEFLATED, packed) if len(packed) < len(data) else (ZIP_STORED, data)


def common(info: ZipInfo, method: int, packed: bytes, data: bytes) -> tuple[int, ...]:
    """Return the fields that both headers of a file have, after the version that wrote it."""
    flags = 0 if info.filename.isascii() else 0x800
    name = len(info.filename.encode())
    return 20, flags, method, 0, BEGINNING_OF_1980, zlib.crc32(data), len(packed), len(data), name, 0


def smaller(wheel: Path) -> bytes:
    """Return the wheel, compressed anew: zipfile takes no bytes that are compressed already."""
    body, directory, count = bytearray(), bytearray(), 0
    with ZipFile(wheel) as archive:
        for info in archive.infolist():
            data, name = archive.read(info), info.filename.encode()
            method, packed = deflated(data)
            fields = common(info, method, packed, data)
            made_by = info.create_system << 8 | 20
            directory += CENTRAL.pack(b"PK\1\2", made_by, *fields, 0, 0, 0, info.external_attr, len(body))
            directory += name
            body += LOCAL.pack(b"PK\3\4", *fields) + name + packed
            count += 1
    return bytes(body + directory) + END.pack(b"PK\5\6", 0, 0, count, count, len(directory), len(body), 0)


def main(name: str) -> None:
    """Replace the wheel by a smaller one."""
    wheel = Path(name)
    before = wheel.stat().st_size
    wheel.write_bytes(smaller(wheel))
    print(f"{wheel.name}: {wheel.stat().st_size} bytes, {before} before")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
