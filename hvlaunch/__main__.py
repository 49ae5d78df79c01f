"""The program, and `python -m hvlaunch`: Ctrl-C ends it quietly from its first line on."""

import os
from typing import NoReturn

__all__ = ["script"]

_INTERRUPTED = 130  # 128 + SIGINT


def script() -> NoReturn:
    """Run hvlaunch, whose import takes a tenth of a second."""
    try:
        from hvlaunch.cli.main import script as run  # noqa: PLC0415 (see above)

        run()
    except KeyboardInterrupt:
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    script()
