"""The manual page: what man(1) makes of it."""

import re
import shutil
import subprocess
import sys

import pytest

from hvlaunch import __version__
from hvlaunch.cli.options import Option, OptionGroup, Value
from hvlaunch.cli.options.parser import EXAMPLES, sentences
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.pages.help import man_page


def shown(page):
    """What groff makes of it, without bold and underlined letters; it must have nothing to complain of."""
    if shutil.which("groff") is None:
        pytest.skip("no groff here")
    done = subprocess.run(
        ["groff", "-man", "-Tascii", "-ww", "-P-cbou", "-rLL=78n"],
        input=page,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout


def test_the_module_prints_it():
    done = subprocess.run(
        [sys.executable, "-m", "hvlaunch.cli.pages.help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == man_page(GROUPS)


def test_every_option_is_in_it_with_all_that_help_says():
    text = shown(man_page(GROUPS))
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for option in (option for group in GROUPS for option in group.options):
        said = sentences(option).replace("`", "")
        assert f" {', '.join(option.flags)} " in words
        assert " ".join((said[0].upper() + said[1:]).split()) in words, option.flag
    for _, line in EXAMPLES:
        assert " ".join(line.split()) in words
    assert words.startswith("HVLAUNCH(1) User Commands HVLAUNCH(1) NAME hvlaunch - start ")
    assert f"hvlaunch {__version__}" in words
    titles = re.findall(r"^[A-Z][A-Z ]+$", text, re.MULTILINE)
    assert titles == [
        "NAME",
        "SYNOPSIS",
        "DESCRIPTION",
        "OPTIONS",
        "OTHER COMMANDS",
        "EXIT STATUS",
        "ENVIRONMENT",
        "FILES",
        "EXAMPLES",
        "SEE ALSO",
    ]


def test_text_that_looks_like_roff_is_escaped():
    odd = Option("odd", ("--odd",), "first", Value(("X",)), more="`a\\\\b` -x 'y'.", default="'z'")
    option = odd._replace(help=".TH is no request")
    text = " ".join(shown(man_page([OptionGroup("group", (option,), about="'tis ...")])).split())
    assert "'tis ..." in text
    assert "--odd X .TH is no request. a\\\\b -x 'y'. Default: 'z'." in text
