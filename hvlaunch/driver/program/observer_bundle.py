"""The observer as it travels to a host, where its agent starts it."""

import zlib
from functools import cache
from pathlib import Path

from hvlaunch import agent
from hvlaunch.driver.program.agent_program import without_words

__all__ = ["observer_bundle"]

_OF_AGENT = ("__init__", "quick", "wire/__init__", "wire/frames", "wire/shapes")
"""What it has in common with the agent."""
_BOOT = "import io,zlib;exec(zlib.decompress(io.BufferedReader(io.FileIO(0,closefd=False),1).read({size})))"


@cache
def observer_bundle() -> tuple[str, bytes]:
    """The code for `python -c`, and what that reads from its stdin before the first question."""
    root = Path(agent.__file__).parent
    texts = {"hvlaunch.__init__": ""}
    texts |= {f"hvlaunch.agent.{path.replace('/', '.')}": _text(root / f"{path}.py") for path in _OF_AGENT}
    texts |= {
        f"hvlaunch.agent.observer.{file.stem}": _text(file) for file in sorted(root.glob("observer/*.py"))
    }
    begin = f"sys.meta_path.insert(0, _Finder({texts!r}))\nfrom hvlaunch.agent.observer.main import main\nmain()\n"
    program = zlib.compress(f"{_text(root / 'boot.py')}\n{begin}".encode())
    return _BOOT.format(size=len(program)), program


def _text(file: Path) -> str:
    return without_words(file.read_text(encoding="ascii"))
