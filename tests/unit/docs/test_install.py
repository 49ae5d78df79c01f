"""The page of installation: its extras and versions are those of the package, and the texts for assistants are whole."""

import re
import sys
from pathlib import Path

import pytest

from tests.unit.docs.blocks import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def page() -> str:
    return next((ROOT / "docs").rglob("install.md")).read_text()


def rows(title: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    section = page().split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_of_extras_is_complete() -> None:
    extras: dict[str, list[str]] = PROJECT["optional-dependencies"]
    table = {name: cells[1] for cells in rows("Extras") for name in re.findall(r"`(\w+)`", cells[0])}
    assert table.keys() == extras.keys()
    for name in ("top", "stacks", "uvloop", "yaml", "torch"):
        assert table[name] == re.split(r"[^\w-]", extras[name][0])[0]


def test_the_supported_versions_match_the_package_and_the_tests() -> None:
    table = {cells[0]: cells[1:] for cells in rows("What is supported")}
    named = re.findall(r"Python :: 3\.(\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
    assert table["Python here"][0] == f"3.{named[0]} to 3.{named[-1]}"
    assert PROJECT["requires-python"] == f">=3.{named[0]}"
    tried = re.search(r'"version", (\[.*\])', (ROOT / "tests/unit/agent/test_bundle.py").read_text())
    assert tried is not None
    hosts = re.findall(r"3\.\d+", tried[1])
    assert table["Python on the hosts"][0] == f"{hosts[0]} to {hosts[-1]}"
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert table["torch"][0].startswith(f"{pinned[1]} (")
    assert (
        f"{PROJECT['optional-dependencies']['torch'][0].removeprefix('torch>=')} and newer" in table["torch"]
    )


@pytest.mark.timeout(600)
def test_assistants_get_every_page_for_users(site: Path) -> None:
    listed = (site / "llms.txt").read_text()
    whole = (site / "llms-full.txt").read_text()
    links = re.findall(r"^- \[.+]\(https://docs\.example\.org/hvlaunch/(.*)\): \S", listed, re.MULTILINE)
    pages = {path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")}
    left_out = {".", "changelog", "contributing"}
    assert {link.rstrip("/") for link in links} == {
        page for page in pages - left_out if not page.startswith(("api/", "internals/"))
    }
    assert len(links) == len(set(links))
    assert (
        len(
            re.findall(
                r"^# ", re.sub(r"^```.*?^```", "", whole, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
            )
        )
        == len(links) + 1
    )
    assert "a:4,b:4" in whole
