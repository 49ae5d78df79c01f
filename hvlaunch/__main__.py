"""The program, and `python -m hvlaunch`. Ctrl-C ends it quietly from the first line."""

# Both are part of Python's own program: a module from a file would take a millisecond in which Ctrl-C shows a traceback.
import gc
import os

TYPE_CHECKING = False  # importing typing takes 4 ms
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["script"]

_INTERRUPTED = 130  # 128 + SIGINT
_STDERR = 2
_OBJECTS_PER_COLLECTION = 100_000
"""More than the start of a job makes. Nearly all of these objects stay, so a collection would waste 15 ms."""


def script() -> "NoReturn":
    """Run hvlaunch; its import takes a tenth of a second."""
    try:
        gc.set_threshold(_OBJECTS_PER_COLLECTION)
        # If the parent closed stdin, stdout or stderr, open them on /dev/null: another file must not get their numbers.
        while (spare := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
            pass
        os.close(spare)
        from hvlaunch.cli.main import script as run  # noqa: PLC0415 (see above)

        run()
    except KeyboardInterrupt:
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    script()
