"""--show-config: each option with where it comes from."""

import re
from pathlib import Path

import pytest

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.main import main
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.pages.show_config import show_config
from hvlaunch.errors import BadUsage


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "hvlaunch.toml").write_text(
        "# the project's\nnp = 2\nx = {A = '1'}\n[profiles.big]\nnp = 8\n"
    )
    (tmp_path / "job.yaml").write_text(
        "command: python train.py\nhosts: [a:4, b:4]\nautotune:\n  enabled: true\n"
    )


def shown(capfd, line):
    assert main(line.split()) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    return captured.out


def test_each_value_has_its_place(capfd, monkeypatch):
    monkeypatch.setenv("HVLAUNCH_GRACE", "5")
    text = shown(capfd, "--show-config --config-file job.yaml --profile big --merge -x B=2")
    assert [line.split("  #")[0].strip() + "  #" + line.partition("  #")[2] for line in text.splitlines() if "  #" in line] == [
        'command = ["python", "train.py"]  # job.yaml',
        'hosts = "a:4,b:4"  # job.yaml',
        "num-proc = 8  # hvlaunch.toml [profiles.big]",
        'x = ["A=1", "B=2"]  # hvlaunch.toml, command line',
        "merge = true  # command line",
        "grace = 5  # HVLAUNCH_GRACE",
        "autotune = true  # job.yaml [autotune]",
        'profile = "big"  # command line',
    ]  # fmt: skip


def test_verbose_has_the_others_as_comments(capfd):
    text = shown(capfd, "--show-config --verbose --isolated")
    assert "\n# grace: 10 s\n" in text
    assert "\n# merge: false\n" in text
    assert "num-proc =" not in text
    assert "config-file" not in text


def test_nothing_is_set(capfd):
    assert shown(capfd, "--show-config --isolated") == "# no option is set\n"


def test_a_conflict_with_a_file_hints_at_show_config(capfd):
    assert main(["--end-with-rank", "5", "true"]) == 2
    assert capfd.readouterr().err.splitlines() == [
        "hvlaunch: options of hvlaunch.toml: np, x",
        "hvlaunch: some options do not come from the command line: hvlaunch --show-config says which",
        "hvlaunch: --end-with-rank 5: the job has only ranks 0-1",
    ]


def test_a_value_that_is_not_utf8_is_shown_as_a_comment(capfd):
    words = ["--show-config", "--isolated", "--cwd", "a\udcff", "--merge", "python", "\udc80"]
    assert main(words) == 0
    text = capfd.readouterr().out
    assert [re.sub(" +", " ", line) for line in text.splitlines() if "=" in line] == [
        '# command = ["python", "\\x80"] # command line; not UTF-8, so no file can set it',
        '# cwd = "a\\xff" # command line; not UTF-8, so no file can set it',
        "merge = true # command line",
    ]
    with open("shown.toml", "w") as file:  # noqa: PTH123
        file.write(text)
    assert main(["--isolated", "--config-file", "shown.toml", "--show-config"]) == 0


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
