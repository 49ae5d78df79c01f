"""The program, and `python -m hvlaunch`: Ctrl-C ends it quietly from its first line on."""

import gc
import os
from typing import NoReturn

__all__ = ["script"]

_INTERRUPTED = 130  # 128 + SIGINT
_OBJECTS_PER_COLLECTION = 100_000
"""More than the start of a job makes. Nearly all of them stay, and looking through them takes 15 ms."""


def script() -> NoReturn:
    """Run hvlaunch, whose import takes a tenth of a second."""
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    try:
        from hvlaunch.cli.main import script as run  # noqa: PLC0415 (see above)

        run()
    except KeyboardInterrupt:
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    script()
