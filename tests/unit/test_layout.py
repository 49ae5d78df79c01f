"""What CONTRIBUTING.md says of every module, and what the documents say of files."""

import ast
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.house import MOST_LINES, parsed

pytestmark = (
    pytest.mark.no_cover
)  # a tracer doubles the time of reading files, and hvlaunch itself does not run

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "hvlaunch").rglob("*.py"))
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        ROOT / "hvlaunch/SKILL.md",
    ]
)
FOLDERS = ("hvlaunch", "tests", "benchmarks", "examples", "docs")
WITHOUT_ALL = {"__init__.py", "__main__.py"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


# One test for all files: a test for each of them costs more than all the reading.


def test_a_module_is_short_and_says_what_it_is():
    long = [name_of(path) for path in MODULES if path.read_text().count("\n") > MOST_LINES]
    assert long == [], "a module this long is two nouns"
    assert [name_of(path) for path in MODULES if not ast.get_docstring(parsed(path))] == []


def test_a_module_names_what_it_offers():
    def names(path: Path) -> set[str]:
        return {
            target.id
            for statement in parsed(path).body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }

    modules = [path for path in MODULES if path.name not in WITHOUT_ALL]
    assert [name_of(path) for path in modules if "__all__" not in names(path)] == []


WITHOUT_LINUX = """
import importlib, os, select, signal, socket, sys
for module in (os, select, signal, socket):
    for name in dir(module):
        if name.startswith(("EPOLL", "epoll", "TCP_QUICKACK", "TCP_INFO", "AF_NETLINK", "memfd", "sched_getaff", "posix_spawn")):
            delattr(module, name)
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_a_driver_on_another_system_can_import_what_it_needs():
    """The driver may run on macOS; what only Linux has may be used on hosts alone."""
    packages = ("cli", "console", "gloo", "hosts", "mpi", "rendezvous", "ssh")
    driver = [path for path in MODULES if path.parent.name in packages]
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in driver
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LINUX, *names], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_readme_has_command_lines():
    section = (ROOT / "README.md").read_text().split("\n## Command lines\n")[1].split("\n## ")[0]
    assert len(re.findall(r"^hvlaunch ", section, re.MULTILINE)) >= 5


def test_a_make_command_of_the_workflows_has_a_target():
    lines = [
        line
        for path in (ROOT / ".github/workflows").glob("*.yml")
        for line in re.findall(r"^ +- run: (?:sudo )?make (.+)$", path.read_text(), re.MULTILINE)
    ]
    named = {word for line in lines for word in shlex.split(line) if "=" not in word}
    assert {"host-tests", "release-check", "unit-tests"} <= named <= make_targets()


@cache
def files() -> list[str]:
    return [f"/{name_of(file)}" for top in FOLDERS for file in (ROOT / top).rglob("*.py")]


def test_a_module_that_a_document_names_is_there():
    missing = []
    for path in DOCUMENTS:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text)) - {"train.py", "setup.py"}
        missing += [
            (name_of(path), name)
            for name in sorted(named)
            if not any(file.endswith(f"/{name}") for file in files())
        ]
    assert missing == []


def test_links_between_documents_lead_to_files():
    wrong = [
        (name_of(path), target)
        for path in DOCUMENTS
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert wrong == []


@cache
def anchors(path: Path) -> set[str]:
    """The names of a page's headings as GitHub makes them, and those that it sets itself."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    headings = [line.lstrip("# ").lower() for line in text.splitlines() if line.startswith("#")]
    names = {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}
    return names | set(re.findall(r'<a id="([^"]+)">', text))


def test_links_to_a_part_of_a_page_lead_to_a_heading():
    wrong = [
        (name_of(path), target, part)
        for path in DOCUMENTS
        for target, part in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text())
        if part not in anchors(path.parent / target if target else path)
    ]
    assert wrong == []


def test_the_actions_of_the_workflows_are_pinned_by_commit():
    """A tag can be moved to other code, which would run with the right to publish."""
    uses = [
        line.strip()
        for path in (ROOT / ".github/workflows").glob("*.yml")
        for line in path.read_text().splitlines()
        if "uses:" in line and "uses: ./" not in line
    ]
    assert uses
    for line in uses:
        assert re.search(r"uses: [\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+$", line), line
