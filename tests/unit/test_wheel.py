"""What the wheel holds, and that the tests run against it: `make test` installs it, and names it with --wheel."""

import re
import subprocess
import sys
import sysconfig
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import hvlaunch
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.pages.help import man_page

ROOT = Path(__file__).parents[2]
UPLOT = "licenses/hvlaunch/view/page/uplot.LICENSE.txt"
ABOUT_IT = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", UPLOT, "top_level.txt"}


@pytest.fixture(scope="module")
def wheel(request: pytest.FixtureRequest) -> dict[str, bytes]:
    """The wheel's files."""
    path = request.config.getoption("--wheel")
    if path is None:
        pytest.skip("no --wheel: the working tree is tested")
    with zipfile.ZipFile(ROOT / path) as file:
        return {name: file.read(name) for name in file.namelist()}


def about(wheel: dict[str, bytes], name: str) -> bytes:
    return wheel[f"hvlaunch-{hvlaunch.__version__}.dist-info/{name}"]


@pytest.fixture(scope="module")
def metadata(wheel: dict[str, bytes]) -> Message:
    return Parser().parsestr(about(wheel, "METADATA").decode())


def test_it_is_what_the_tests_import(wheel: dict[str, bytes]) -> None:
    installed = Path(sysconfig.get_path("purelib"))
    why = "not the installed one: start `pytest`, since `python -m pytest` looks into the working directory first"
    assert Path(hvlaunch.__file__) == installed / "hvlaunch/__init__.py", why
    for name, data in wheel.items():
        if name.startswith("hvlaunch/"):
            assert (installed / name).read_bytes() == data, f"{name} is another wheel's"


@pytest.mark.usefixtures("wheel")
def test_it_is_what_other_processes_import() -> None:
    script = "import hvlaunch; print(hvlaunch.__file__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{hvlaunch.__file__}\n"


def test_it_holds_the_working_trees_package_and_nothing_else(wheel: dict[str, bytes]) -> None:
    page = (path for path in (ROOT / "hvlaunch/view/page").iterdir() if path.is_file())
    sources = {
        *(ROOT / "hvlaunch").rglob("*.py[i]"),
        *(ROOT / "hvlaunch").rglob("*.py"),
        ROOT / "hvlaunch/py.typed",
        ROOT / "hvlaunch/SKILL.md",
        ROOT / "hvlaunch/cli/foreign.json",
        ROOT / "hvlaunch/outside/notices.json",
        *(ROOT / "hvlaunch/cli/presets").glob("*.toml"),
        *(ROOT / "hvlaunch/sync/forms").glob("*.toml"),
        *page,
    }
    package = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in sources}
    described = {f"hvlaunch-{hvlaunch.__version__}.dist-info/{name}" for name in ABOUT_IT}
    manual = f"hvlaunch-{hvlaunch.__version__}.data/data/share/man/man1/hvlaunch.1"
    assert wheel.keys() == package.keys() | described | {manual}
    assert wheel[manual].decode() == man_page(GROUPS)
    assert {name: wheel[name] for name in package} == package


def test_its_version_is_the_packages_and_has_an_entry_in_the_changelog(metadata: Message) -> None:
    assert metadata["Version"] == hvlaunch.__version__
    assert f"\n## [{hvlaunch.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_it_is_small_and_needs_no_torch(request: pytest.FixtureRequest, metadata: Message) -> None:
    # A release's is 3 % smaller: .ci/release-check compresses it anew, and has a limit of its own.
    assert (ROOT / request.config.getoption("--wheel")).stat().st_size < 1_430_000
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert "torch" not in {re.split(r"[^\w-]", line)[0] for line in needed}
    assert needed


def test_a_releases_wheel_is_compressed_anew_and_has_the_same_files(tmp_path: Path) -> None:
    pytest.importorskip("zopfli", reason="the extra dev brings it")
    source = (ROOT / "tests/unit/test_wheel.py").read_bytes()
    contents = {"a/module.py": (source, 0o644), "a/b/script": (b"#!/bin/sh", 0o755), "a/\u00fc": (b"", 0o600)}
    made = []
    for year in (1999, 2026):
        path = tmp_path / f"{year}.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for name, (data, mode) in contents.items():
                info = zipfile.ZipInfo(name, (year, 1, 2, 3, 4, 6))
                info.external_attr, info.compress_type = mode << 16, zipfile.ZIP_DEFLATED
                file.writestr(info, data)
        before = path.stat().st_size
        subprocess.run([sys.executable, ROOT / ".ci/smaller.py", path], capture_output=True, check=True)
        assert path.stat().st_size < before
        made.append(path.read_bytes())
        with zipfile.ZipFile(path) as file:
            assert file.testzip() is None
            found = {info.filename: (file.read(info), info.external_attr >> 16) for info in file.infolist()}
        assert found == contents
    assert made[0] == made[1], "the same files are the same wheel, whenever it was built"


def test_a_release_has_its_part_of_the_changelog_as_notes() -> None:
    command = str(ROOT / ".ci/release-notes")
    notes = subprocess.run([command, "0.1.0"], capture_output=True, text=True, check=True).stdout
    assert notes.startswith("The first version.\n") and "## [" not in notes
    assert notes.rstrip().endswith("unless `--host-keys off` is given.")
    missing = subprocess.run([command, "9.9.9"], capture_output=True, text=True, check=False)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr == "release-notes: CHANGELOG.md has no section [9.9.9]\n"


def test_a_citation_names_this_version_and_its_day() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    version, day = re.findall(r"^(?:version|date-released): (.+)$", citation, re.MULTILINE)
    assert f"\n## [{version}] - {day}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert version == hvlaunch.__version__


def test_its_commands_and_torchruns_way_to_it(wheel: dict[str, bytes]) -> None:
    assert about(wheel, "entry_points.txt").decode().split() == [
        *["[console_scripts]"],
        *["hvlaunch", "=", "hvlaunch.__main__:script"],
        *["hvlaunch-rendezvous", "=", "hvlaunch.cli.rendezvous:script"],
        *["[torchrun.handlers]"],
        *["hvlaunch", "=", "hvlaunch.torchrun:handler"],
    ]


def test_an_index_shows_readme_with_links_that_lead_into_the_repository_at_this_version(
    metadata: Message,
) -> None:
    readme = (ROOT / "README.md").read_text()
    shown = metadata.get_payload()
    assert isinstance(shown, str)
    links = dict(zip(re.findall(r"]\((.+?)\)", readme), re.findall(r"]\((.+?)\)", shown), strict=True))
    repository = next(url for url in metadata.get_all("Project-URL", []) if url.startswith("Repository, "))
    base = repository.removeprefix("Repository, ")
    at = f"v{hvlaunch.__version__}"
    assert links["docs/pictures/kill.svg"] == f"{base}/raw/{at}/docs/pictures/kill.svg"
    assert links["docs/guides/lost-host.md"] == f"{base}/blob/{at}/docs/guides/lost-host.md"
    assert [link for link in links.values() if not link.startswith("https://")] == []
    assert re.sub(r"]\(.+?\)", "", shown) == re.sub(r"]\(.+?\)", "", readme)


def test_the_metadata_name_all_licences_of_the_content(wheel: dict[str, bytes], metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT"
    assert set(metadata.get_all("License-File", ())) == {"LICENSE", UPLOT.removeprefix("licenses/")}
    assert b"Leon Sorokin" in about(wheel, UPLOT)
