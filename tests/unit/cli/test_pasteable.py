"""Commands in messages, help and pages can be pasted into any shell: paths and ranges are quoted, in single quotes."""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hvlaunch
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.discovery import HostScript
from hvlaunch.hosts.hostfile import read_hostfile
from hvlaunch.rendezvous.token_file import BadTokenFile, read_token_file
from tests.unit.docs.blocks import ROOT

PACKAGE = Path(hvlaunch.__file__).parent
PAGES = [
    ROOT / "README.md",
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("hostfiles/*.md"),
    *ROOT.glob("examples/*"),
]
UNQUOTED_RANGE = re.compile(r"(?<![\w-])(?:-H|--hosts?|-w|--include|--exclude)[ =](?!['\"])\S*\w\[\d")
"""zsh takes it for a pattern, and finds no file."""
DOUBLE_QUOTES = re.compile(r"""pip install (?:-\S+ )*"|-H "[^"$]*\[""")
PATH_FOLLOWS = re.compile(r"(?:^|[`;:,] ?)(?:chmod \S+|rm|df|cat|cd|mkdir|ssh-keygen (?:-\S+ )*-f) $")


def product() -> Iterator[Path]:
    return (path for path in PACKAGE.rglob("*.py") if "torch" not in path.parts)


@cache
def texts(path: Path) -> list[ast.Constant | ast.JoinedStr]:
    """Return the texts of a module's syntax; three tests read the same modules."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr)]


def strings(path: Path) -> Iterator[str]:
    for node in texts(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def unquoted(path: Path) -> Iterator[str]:
    """Yield commands whose path stands in a message as it is."""
    for node in texts(path):
        if not isinstance(node, ast.JoinedStr):
            continue
        for text, value in zip(node.values, node.values[1:], strict=False):
            if not (isinstance(text, ast.Constant) and isinstance(value, ast.FormattedValue)):
                continue
            is_quoted = isinstance(value.value, ast.Call) and "shlex" in ast.unparse(value.value.func)
            if PATH_FOLLOWS.search(str(text.value)) and not is_quoted:
                yield f"{path.name}:{node.lineno}: {text.value!s}{{{ast.unparse(value.value)}}}"


@pytest.mark.no_cover
@pytest.mark.parametrize("wrong", [UNQUOTED_RANGE, DOUBLE_QUOTES])
def test_ranges_are_in_single_quotes(wrong: re.Pattern[str]) -> None:
    places = [(path, text) for path in product() for text in strings(path)]
    places += [(path, path.read_text()) for path in PAGES if path.is_file()]
    assert [f"{path.name}: {match[0]}" for path, text in places for match in wrong.finditer(text)] == []


@pytest.mark.no_cover
def test_paths_in_commands_are_quoted() -> None:
    assert [line for path in product() for line in unquoted(path)] == []


def test_the_sweep_sees_what_is_wrong(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        'a = f"chmod 600 {path}"\nb = f"x; rm {file}: y"\nc = f"chmod 600 {shlex.quote(path)}"\n'
    )
    assert len([*unquoted(module)]) == 2
    assert UNQUOTED_RANGE.search("hvlaunch -np 2 -H gpu[1-2]:2 true")
    assert not UNQUOTED_RANGE.search("hvlaunch -np 2 -H 'gpu[1-2]:2' true")
    assert DOUBLE_QUOTES.search('pip install "hvlaunch[top]"')


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A file that every user may change, whose name a shell takes apart."""
    path = tmp_path / "my [new] file; $HOME"
    path.write_text("a slots=1\n")
    path.chmod(0o777)
    return path


def test_the_path_of_a_hostfile_is_one_word(odd: Path) -> None:
    with pytest.raises(BadUsage) as error:
        read_hostfile(odd)
    assert shlex.split(str(error.value.hint)) == ["chmod", "o-w", str(odd)]


def test_the_path_of_a_script_is_one_word(odd: Path) -> None:
    with pytest.raises(BadUsage) as error:
        HostScript(shlex.quote(str(odd)), 1.0).read_hosts()
    assert shlex.split(str(error.value.hint)) == ["chmod", "o-w", str(odd)]


def test_the_path_of_a_token_is_one_word(odd: Path) -> None:
    with pytest.raises(BadTokenFile) as error:
        read_token_file(odd)
    assert shlex.split(str(error.value.hint)) == ["chmod", "600", str(odd)]
