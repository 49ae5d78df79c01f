"""What workers import on hosts: hvlaunch's modules as a zip file, and sources of editable installs; and the forms of --env."""

import os
import re
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from hvlaunch import __version__
from hvlaunch.cli.options.general import ENVIRONMENT
from hvlaunch.sync import forms
from hvlaunch.sync.forms import BadForm, form_of, parse_form
from hvlaunch.sync.library import library, sources_of
from tests.unit.docs.blocks import ROOT

TREE = "/home/me/.cache/hvlaunch/trees/p-0123/0/tree"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "library.zip"
    path.write_bytes(library()[1])
    return path


def run(archive: Path, program: str, **env: str) -> str:
    """Run it with the file at the end of PYTHONPATH, and without this checkout."""
    words = [sys.executable, "-S", "-c", program]
    # Without site-packages; torch's own directory is there, if it has to be.
    environ = {"PYTHONPATH": str(archive), "PATH": os.environ["PATH"], **env}
    done = subprocess.run(words, capture_output=True, text=True, env=environ, cwd=archive.parent, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_file_is_the_same_each_time(archive: Path) -> None:
    name, data = library()
    library.cache_clear()
    assert library() == (name, data)
    # Once for each host and version, in about two frames of a network.
    assert len(data) < 200_000
    assert not [name for name in zipfile.ZipFile(BytesIO(data)).namelist() if "serving" in name]


def test_torchrun_finds_its_backend_in_it(archive: Path) -> None:
    program = """
from importlib.metadata import entry_points, version
(found,) = entry_points(group="torchrun.handlers", name="hvlaunch")
print(version("hvlaunch"), found.load().__module__)
"""
    assert run(archive, program).split() == [__version__, "hvlaunch.torchrun"]
    entries = (
        (ROOT / "pyproject.toml").read_text().partition('[project.entry-points."torchrun.handlers"]\n')[2]
    )
    assert entries.splitlines()[0] == 'hvlaunch = "hvlaunch.torchrun:handler"'


def test_clients_are_imported_from_it(archive: Path) -> None:
    program = "from hvlaunch.rendezvous.client import Client; import hvlaunch; print(hvlaunch.__file__)"
    assert run(archive, program).startswith(str(archive))


def test_the_torch_library_is_imported_from_it(archive: Path) -> None:
    torch = pytest.importorskip("torch")
    packages = str(Path(torch.__file__).parents[1])
    program = f"""
import sys
sys.path.append({packages!r})
import importlib, zipfile
for name in zipfile.ZipFile({str(archive)!r}).namelist():
    if name.endswith(".py"):
        importlib.import_module(name[:-3].replace("/", ".").removesuffix(".__init__"))
hvlaunch = importlib.import_module("hvlaunch")
hvlaunch.torch.init()
print(hvlaunch.torch.size(), hvlaunch.torch.elastic.__file__)
"""
    size, file = run(archive, program).split()
    assert (size, file.startswith(str(archive))) == ("1", True)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("/home/me/p", TREE),
        ("/home/me/p/src", f"{TREE}/src"),
        ("/home/me/other", None),
        ("/home/me/pp", None),
        # Built in another copy of the project, or in this one.
        ("/root/.cache/hvlaunch/trees/p-0123/1/tree/src", f"{TREE}/src"),
        ("/root/.cache/hvlaunch/trees/q-0123/1/tree/src", None),
        (f"{TREE}/src", None),
    ],
)
def test_sources_of_editable_installs_are_the_copys(path: str, source: str | None) -> None:
    assert sources_of((path,), "/home/me/p", TREE) == (() if source is None else (source,))


def test_a_root_behind_a_link_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "real/src").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    sources = sources_of((f"{tmp_path}/link/src",), str(tmp_path / "real"), TREE)
    assert sources == (f"{TREE}/src",)


# Forms of --env


def test_each_form_is_a_choice_and_each_choice_a_form() -> None:
    (option,) = (option for option in ENVIRONMENT.options if option.name == "env")
    assert option.value is not None
    files = {path.stem for path in Path(forms.__file__).parent.glob("*.toml")}
    assert {*option.value.choices} - {"all"} == files
    for name in files:
        form = form_of(name)
        assert form.keys
        assert "$VIRTUAL_ENV" in form.command or "uv sync" in form.command
        subprocess.run(["sh", "-n", "-c", form.command], check=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("command = 'x'\nkeys = [", r"x\.toml: Invalid value \(at "),
        ("keys = ['a']", r"x\.toml: command: must be a text"),
        ("command = ' '\nkeys = ['a']", r"x\.toml: command: must be a text"),
        ("command = 1\nkeys = ['a']", r"x\.toml: command: must be a text"),
        ("command = 'x'", r"x\.toml: keys: must be a list of texts"),
        ("command = 'x'\nkeys = 'a'", r"x\.toml: keys: must be a list of texts"),
        ("command = 'x'\nkeys = [1]", r"x\.toml: keys: must be a list of texts"),
        ("command = 'x'\nkeys = ['a']\nmore = 1", r"x\.toml: more: unknown; a form has command, keys"),
    ],
)
def test_errors_of_a_form_name_file_and_key(text: str, words: str) -> None:
    with pytest.raises(BadForm) as error:
        parse_form("x.toml", text)
    assert re.fullmatch(words + ".*", str(error.value), re.DOTALL)
