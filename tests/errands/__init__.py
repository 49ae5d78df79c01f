"""Errands of tests: importing this package makes them errands like hvlaunch's own."""

from pathlib import Path

from hvlaunch.agent import errands

__all__: list[str] = []

_HERE = str(Path(__file__).parent)
if _HERE not in errands.__path__:
    errands.__path__.append(_HERE)
