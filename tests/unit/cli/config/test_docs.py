"""docs/reference/config.md: what it shows is what is printed. (tests/unit/docs reads its files and command lines.)"""

import re
from pathlib import Path

import pytest

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.pages.show_config import show_config
from hvlaunch.errors import BadUsage

REFERENCE = Path(__file__).parents[4] / "docs/reference"
PAGE, OPTIONS = (REFERENCE / "config.md").read_text(), (REFERENCE / "options.md").read_text()
BLOCKS = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", PAGE, re.MULTILINE | re.DOTALL)
FILES = [text for language, text in BLOCKS if language in ("toml", "yaml")]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(here, text):
    name = Path(text.partition("\n")[0].removeprefix("# ")).name
    (here / name).write_text(text)
    return name


def test_show_config_prints_the_pages_example(here):
    write(here, FILES[0])
    text = next(text for _, text in BLOCKS if text.startswith("command = ["))
    assert show_config(parse(["--show-config"], environ={}), GROUPS).startswith(text)


def test_the_pages_example_of_a_mistake_is_the_message(here):
    (here / "hvlaunch.toml").write_text("\n\nnum-porc = 2\n")
    with pytest.raises(BadUsage) as caught:
        parse(["true"], environ={})
    assert f"  hvlaunch: {caught.value}\n" in PAGE


def test_the_page_names_options_that_a_found_file_may_not_set():
    assert "](options.md#not-from-a-file-that-was-found)" in PAGE
    text = OPTIONS.partition("\n## Not from a file that was found\n")[2]
    own = {option for group in GROUPS for option in group.options if option.source == "own"}
    names = set(re.findall(r"`(--[-a-z]+)`", text))
    assert all(names & set(option.flags) for option in own)
    assert len(names) == len(own)
