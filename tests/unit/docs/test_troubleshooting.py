"""The pages of errors: each error has its row, and what troubleshooting.md quotes is what is printed."""

import ast
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from docs.errors_page import page
from tests.unit.docs.blocks import ROOT

SYMPTOMS = (ROOT / "docs/guides/troubleshooting.md").read_text()
ERRORS = "".join((ROOT / f"docs/reference/{name}.md").read_text() for name in ("errors", "errors-python"))
ROWS: dict[str, str] = dict(re.findall(r'^\| <a id="(\w+)"></a>`\1` \| (.+) \|$', ERRORS, re.MULTILINE))
PACKAGE = ROOT / "hvlaunch"
ROOTS = {"HvlaunchError"}
FOR_PYTHON = ("api/", "rendezvous/worker.py", "torch/")
"""What programs import: whatever is raised there is seen by users, of whatever kind it is."""
VARYING = {"EndedByLauncher", "GaveUp", "HostsFailed", "JobFailed", "JobStopped", "WorkerFailed"}
NEVER_AT_THE_END = {
    *("CollectiveFailed", "Dismissed", "RoundOver", "WorkersChanged"),
    *("ResultNotPickled", "WrongPython"),
}
"""Errors without an exit code: elastic.run catches them, or WorkerFailed has them."""
PLACEHOLDER = re.compile(r"\b[A-Z]+(?:[:][A-Z]+)*\b|…")
"""Of a quoted message: NAME, FILE:LINE."""


@dataclass
class Written:
    """What all modules of the package have that these tests look for."""

    classes: list[tuple[Path, str, set[str]]]
    """Each class: its file, its name, and the last words of its bases' names."""
    texts: list[str]
    """All texts; what differs in them is `…`."""


@cache
def written() -> Written:
    """Read the package once: its syntax takes a second, and several tests look for parts of it."""
    whole = Written([], [])
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                whole.classes.append((path, node.name, bases))
            elif isinstance(node, ast.JoinedStr):
                whole.texts.append(
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                whole.texts.append(node.value)
    return whole


def errors() -> set[str]:
    """Names of the errors that users may see: those of the tree, and all others of what programs import."""
    found: set[str] = set()
    known = set(ROOTS)
    every = written().classes
    while more := {name for _, name, bases in every if bases & known} - found:
        found |= more
        known |= more
    for path, name, bases in every:
        is_imported = path.relative_to(PACKAGE).as_posix().startswith(FOR_PYTHON)
        if is_imported and any(base.endswith(("Error", "Exception")) for base in bases):
            found.add(name)
    return {name for name in found if not name.startswith("_")}


def test_each_error_has_a_row_and_each_row_an_error():
    found = errors()
    assert len(found) > 70
    assert (sorted(found - ROWS.keys()), sorted(ROWS.keys() - found)) == ([], [])
    assert ERRORS.count('<a id="') == len(ROWS)


def test_a_row_has_a_cause_and_a_next_step():
    cells = {name: text.split(" | ") for name, text in ROWS.items()}
    assert [name for name, row in cells.items() if len(row) != 3 or not (row[1] and row[2])] == []
    assert [name for name, text in ROWS.items() if len(text.split()) < 10] == []


def test_a_row_has_the_exit_code_of_its_class():
    codes = {name: text.partition(" | ")[0] for name, text in ROWS.items()}
    checked = {}
    for path, name, bases in written().classes:
        # Importing torch would take seconds, and all errors there have the code of their base.
        if codes.get(name, "").isdigit() and "NamedTuple" not in bases and "torch" not in path.parts:
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            checked[name] = str(getattr(import_module(module), name).exit_code)
    assert len(checked) > 60
    assert checked == {name: codes[name] for name in checked}
    assert {name for name, code in codes.items() if not code.isdigit()} == VARYING | NEVER_AT_THE_END
    assert codes["GaveUp"].startswith("1: ")
    assert "; 77 if " in codes["GaveUp"]


@pytest.mark.parametrize("name", ["errors.md", "errors-python.md"])
def test_the_pages_of_errors_are_current(name):
    assert (ROOT / "docs/reference" / name).read_text() == page(name), "make options-page"


def test_what_is_quoted_as_hvlaunchs_is_what_it_prints():
    rows = re.findall(r"^\| (.+?) \| .+ \| .+ \|$", SYMPTOMS, re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    pieces = [piece.strip(" :,") for text in quoted for piece in PLACEHOLDER.split(text)]
    long = [piece for piece in pieces if len(piece) >= 6]
    assert len(long) > 40
    missing = [piece for piece in long if not any(piece in text for text in written().texts)]
    assert not missing, missing
