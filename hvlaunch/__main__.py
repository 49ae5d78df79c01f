"""The program, and `python -m hvlaunch`: Ctrl-C ends it quietly from its first line on."""

from __future__ import annotations

import gc
import os

TYPE_CHECKING = False  # importing typing takes 4 ms
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["script"]

_INTERRUPTED = 130  # 128 + SIGINT
_STDERR = 2
_OBJECTS_PER_COLLECTION = 100_000
"""More than the start of a job makes. Nearly all of them stay, and looking through them takes 15 ms."""


def script() -> NoReturn:
    """Run hvlaunch, whose import takes a tenth of a second."""
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    # What was closed by who started us is empty instead, so that nothing else gets its number.
    while (spare := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(spare)
    try:
        from hvlaunch.cli.main import script as run  # noqa: PLC0415 (see above)

        run()
    except KeyboardInterrupt:
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    script()
