"""What can't be written down in pyproject.toml: the version, README.md as an index shows it, and the manual page."""

import re
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def value_of(name: str, file: str) -> str:
    """The text that is assigned to the name in the file."""
    found = re.search(rf'^{name} = "([^"]+)"', (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, f"no {name} in {file}"
    return found[1]


def with_absolute_links(markdown: str, repository: str, tag: str) -> str:
    """The text with links and pictures that lead into the repository, as it was at the tag: an index has no files."""

    def absolute(link: re.Match[str]) -> str:
        where = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({repository}/{where}/{tag}/{link['path']})"

    return re.sub(r"(?P<picture>!?)\[(?P<text>[^]]*)]\((?![a-z]+:|#)(?P<path>[^)]+)\)", absolute, markdown)


def manual_page() -> str:
    """Where it is, from here: made of the table of options, which needs nothing but Python."""
    sys.path.insert(0, str(ROOT))
    from hvlaunch.cli.options.table import GROUPS  # noqa: PLC0415 (as above)
    from hvlaunch.cli.pages.help import man_page  # noqa: PLC0415 (which is not installed)

    path = ROOT / "build" / "hvlaunch.1"
    path.parent.mkdir(exist_ok=True)
    path.write_text(man_page(GROUPS), encoding="utf-8")
    return str(path.relative_to(ROOT))


VERSION = value_of("__version__", "hvlaunch/__init__.py")

setup(
    version=VERSION,
    long_description=with_absolute_links(
        (ROOT / "README.md").read_text(encoding="utf-8"),
        repository=value_of("Repository", "pyproject.toml"),
        tag=f"v{VERSION}",
    ),
    long_description_content_type="text/markdown",
    data_files=[("share/man/man1", [manual_page()])],
)
