"""What the test tells the workers of an elastic job: files in a directory that all hosts see."""

import os
import sys
import time
from pathlib import Path

__all__ = ["Orders"]


class Orders:
    """An order is a file named `HOST`, `HOST.SLOT` or `all`, with a point of the program's and a verb.

    The points are `start`, `join`, `step` and, after training, `end`. The verbs: `raise` and `exit` do so, once; `fail` raises
    each time; `hold` waits there until the order is withdrawn.
    """

    def __init__(self, directory: Path) -> None:
        host, slot, *_ = os.environ["HVLAUNCH_WORKER"].split("/")
        self._orders = directory / "orders"
        self._names = ("all", host, f"{host}.{slot}")
        self._end = directory / "end"
        self._doom = directory / "doom"

    @property
    def is_over(self) -> bool:
        """Whether the test wants the training to end."""
        return self._end.exists()

    def dooms(self, number: int) -> bool:
        """Whether all workers of this round are to fail; they have to agree on when."""
        return self._doom.exists() and self._doom.read_text() == str(number)

    def obey(self, point: str) -> None:
        """Do what is ordered for this point, if anything is."""
        for name in self._names:
            file = self._orders / name
            verb = _verb(file, point)
            if verb == "hold":
                print(f"held {'.'.join(self._names[2:])}", flush=True)
                while _verb(file, point) == verb:
                    time.sleep(0.02)
            elif verb is not None:
                if verb != "fail" and name != "all":
                    file.unlink()
                if verb == "exit":
                    sys.exit(0)
                raise RuntimeError(f"the test wants worker {self._names[2]} to fail")


def _verb(file: Path, point: str) -> str | None:
    try:
        when, verb = file.read_text().split()
    except FileNotFoundError:
        return None
    return verb if when == point else None
