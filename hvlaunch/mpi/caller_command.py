"""What the launcher starts in place of the user's command: agent/caller.py, packed for its command line."""

import ast
import sys
import zlib
from binascii import b2a_base64
from pathlib import Path

from hvlaunch.agent import caller
from hvlaunch.gloo.driver.bundle import NEW_ENOUGH

__all__ = ["caller_command"]

# Of the program, which is $0, a launcher and its shells see letters, digits, + / and = alone. They hand the other
# words on as they are, the interpreters to try, too.
_UNPACK = "import sys,zlib,binascii;exec(zlib.decompress(binascii.a2b_base64(sys.argv[1])))"
_NAME = "hvlaunch-agent"
"""For those who read the list of processes."""
_SHELL = (
    f'for p; do case "$("$p" -V </dev/null 2>/dev/null)" in {NEW_ENOUGH}) '
    f'exec "$p" -I -S -X utf8 -c "{_UNPACK}" "$0" {_NAME};; esac; done; '
    'echo "hvlaunch: host $(uname -n): no Python >= 3.8 among $*" >&2; exit 127'
)


def caller_command(names: frozenset[str], python: str | None = None) -> tuple[str, ...]:
    """The words for the launcher. `names` are the variables that the caller tells the driver of.

    `python` is the interpreter; None tries this one's path, python3 and python.
    """
    text = _without_words(Path(caller.__file__).read_text(encoding="ascii"))
    program = zlib.compress(f"{text}\nmain({sorted(names)!r})\n".encode("ascii"), 9)
    candidates = [sys.executable, "python3", "python"] if python is None else [python]
    return ("/bin/sh", "-c", _SHELL, b2a_base64(program, newline=False).decode("ascii"), *candidates)


def _without_words(text: str) -> str:
    """The program less its docstrings and comments, which are a third of what is sent."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            rest = [statement for statement in node.body if not _is_docstring(statement)]
            node.body = rest or [ast.Pass()]
    return ast.unparse(tree)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
