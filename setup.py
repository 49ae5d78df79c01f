"""What can't be written down in pyproject.toml: the version, and README.md as an index shows it."""

import re
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


VERSION = value_of("__version__", "hvlaunch/__init__.py")

setup(
    version=VERSION,
    long_description=with_absolute_links(
        (ROOT / "README.md").read_text(encoding="utf-8"),
        repository=value_of("Repository", "pyproject.toml"),
        tag=f"v{VERSION}",
    ),
    long_description_content_type="text/markdown",
)
