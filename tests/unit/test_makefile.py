"""Which build of torch `make demo` takes, with stand-ins for Python and its pip; releases of torch; the report after `make unit-tests`."""

import os
import re
import subprocess
import sys
from importlib.metadata import distributions, metadata, requires
from pathlib import Path
from zipfile import ZipFile

import pytest
from coverage import CoverageData
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TORCH = next(
    line.split()[-1] for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("TORCH :=")
)
# Fails where it is asked for torch's version, and for an index that can't be reached.
PYTHON = """\
#!/bin/sh
echo "$*" >> "$0.log"
case "$*" in
    -c*version*) [ -n "$HAS_TORCH" ];;
    *--index-url\\ http://nowhere*) echo 'no route to host'; exit 1;;
esac
"""


@pytest.fixture
def make(tmp_path):
    bin_ = tmp_path / "venv" / "bin"
    bin_.mkdir(parents=True)
    (bin_.parent / ".made").touch()
    (bin_.parent / ".setuptools").touch()
    tools = tmp_path / "tools"
    tools.mkdir()

    def program(path, text):
        path.write_text(text)
        path.chmod(0o755)

    program(bin_ / "python", PYTHON)

    def run(*words, system="Linux", has_gpu=False, **env):
        program(tools / "uname", f"#!/bin/sh\necho {system}\n")
        if has_gpu:
            program(tools / "nvidia-smi", "#!/bin/sh\n")
        target = f"{tmp_path}/venv/.torch"
        line = ["make", "-s", "-C", ROOT, f"VENV={tmp_path}/venv", *words, target]
        if not has_gpu:
            line.append("HAS_GPU=false")
        env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "MAKEFLAGS": "", **env}
        done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        asked = (bin_ / "python.log").read_text().splitlines()
        return done.stdout.splitlines(), [line for line in asked if " install " in line]

    return run


def test_without_a_gpu_it_is_the_build_for_processors_and_the_size_is_said_first(make):
    said, (asked,) = make()
    assert f"--index-url https://download.pytorch.org/whl/cpu torch=={TORCH}" in asked
    assert said == [
        f"make: there is no NVIDIA GPU here: torch {TORCH} for processors, about 0.3 GB to download with all else, 1.5 GB on disk"
    ]


def test_where_that_can_not_be_had_it_is_the_default_and_its_size_is_said(make):
    said, (_, asked) = make("CPU_TORCH=http://nowhere")
    assert "--index-url" not in asked
    assert asked.endswith(f"torch=={TORCH}")
    assert "it can't be had from http://nowhere" in said[1]
    assert "about 3 GB to download" in said[2]


@pytest.mark.parametrize("where", [{"has_gpu": True}, {"system": "Darwin"}])
def test_with_a_gpu_or_elsewhere_it_is_the_default(make, where):
    said, (asked,) = make(**where)
    assert "--index-url" not in asked
    assert "about 3 GB to download" in said[0]


def test_what_is_there_stays(make):
    said, asked = make(HAS_TORCH="1")
    assert (said, asked) == ([], [])


def test_make_test_runs_each_folder_of_tests_once():
    line = ["make", "-n", "-j", "-C", str(ROOT), "VENV=/no/venv", "lint", "unit-tests", "host-tests"]
    env = {"PATH": os.environ["PATH"]}
    plan = subprocess.run(line, env=env, capture_output=True, text=True, check=True).stdout
    runs = [line for line in plan.splitlines() if re.search(r"/pytest .* -n \d", line)]
    parts = set(re.findall(r"--ignore=(\S+)", " ".join(runs)))
    folders = sorted(re.findall(r" (tests/\S+)", " ".join(runs)))
    # Parts of a folder may run with other folders.
    assert parts <= {*folders}
    folders = [folder for folder in folders if folder not in parts]
    # Those with GPUs have a target of their own.
    having = {
        f"tests/{path.relative_to(ROOT / 'tests').parts[0]}" for path in ROOT.glob("tests/*/**/test_*.py")
    }
    assert folders == sorted(having - {"tests/gpu"})
    assert len(runs) == 2


@pytest.fixture
def locked(tmp_path):
    """Return the lines of lock.txt for an extra of this wheel, or for a package."""
    headers = "Name: hvlaunch\n" + "\n".join(
        f"{field}: {value}"
        for field in ("Provides-Extra", "Requires-Dist")
        for value in metadata("hvlaunch").get_all(field) or ()
    )

    def lines(*words, requires=""):
        wheel = tmp_path / "hvlaunch-0-py3-none-any.whl"
        with ZipFile(wheel, "w") as archive:
            archive.writestr("hvlaunch-0.dist-info/METADATA", headers + requires)
        words = (str(wheel), *words) if words[-1] in EXTRAS else words
        command = [sys.executable, ROOT / ".ci/locked.py", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    return lines


EXTRAS = metadata("hvlaunch").get_all("Provides-Extra") or []
LOCK = (ROOT / "lock.txt").read_text()


def packages(lines):
    return {line.split("==")[0] for line in lines if line[:1].strip()}


def test_every_locked_package_has_hashes_and_constraints_agree():
    entries = re.findall(r"^(\S.*?) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", LOCK, re.MULTILINE)
    assert [entry for entry, _ in entries] == (ROOT / "constraints.txt").read_text().splitlines()
    assert len(entries) == len(re.findall("^[a-z]", LOCK, re.MULTILINE))


@pytest.mark.parametrize("extra", ["dev", "examples", "test"])
def test_what_is_taken_of_the_lock_is_whole(locked, extra):
    """As `pip check` would say it: what is taken of the lock needs nothing else but torch."""
    taken = packages(locked(extra))
    assert {"paramiko", "bcrypt", "cloudpickle", "numpy"} <= taken
    assert "torch" not in taken
    for name in taken & {distribution.metadata["Name"].lower() for distribution in distributions()}:
        for need in map(Requirement, requires(name) or ()):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                assert canonicalize_name(need.name) in taken | {"torch"}, f"{name} needs {need}"


def test_a_build_of_torch_for_processors_brings_nothing_for_gpus(locked):
    has_gpus = any("nvidia" in need for need in requires("torch") or ())
    assert any("nvidia" in name for name in packages(locked("dev"))) is has_gpus
    assert "sympy" in packages(locked("dev"))


def test_one_package_with_its_hashes(locked):
    (first, *hashes, _) = locked("setuptools")
    assert first.startswith("setuptools==")
    assert len(hashes) == len([line for line in hashes if "--hash=sha256:" in line]) == 2


def test_a_package_that_the_lock_lacks_has_no_version_and_no_hash(locked):
    """pip refuses that, as soon as other packages have hashes."""
    assert "new-thing" in locked("examples", requires="\nRequires-Dist: New_Thing>=1\n")


def test_the_demo_ends_with_the_next_step(tmp_path):
    hvlaunch = tmp_path / "bin" / "hvlaunch"
    hvlaunch.parent.mkdir()
    hvlaunch.write_text('#!/bin/sh\necho "ran $*"\n')
    hvlaunch.chmod(0o755)
    made = [word for name in (".extras-examples", ".wheel") for word in ("-o", f"{tmp_path}/{name}")]
    done = subprocess.run(
        ["make", "-s", "-C", ROOT, f"VENV={tmp_path}", *made, "demo"],
        capture_output=True,
        text=True,
        check=True,
    )
    first, *_, script, machines = done.stdout.splitlines()
    assert first == "ran -np 2 python examples/ddp_digits.py"
    assert "hvlaunch -np 2 python train.py" in script
    page = machines.split()[2].rstrip(",")
    assert (ROOT / page).is_file()


@pytest.mark.parametrize("name", ["my checkout", "hvlaunch"])
def test_the_report_of_coverage_needs_no_certain_path_of_the_checkout(name, tmp_path):
    """The package may be in a checkout of any name, and a file outside runs under the name of a module of ours."""
    checkout = tmp_path / name
    package = checkout / "hvlaunch"
    for path in (
        package / "__init__.py",
        package / "engine/engine.py",
        checkout / "tests/errands/example.py",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a = 1\nb = 2\nc = 3\nd = 4\n")
    (checkout / "build").mkdir()
    data = CoverageData(str(checkout / "build/coverage"))
    data.add_lines(
        {
            str(package / "__init__.py"): [1, 2, 3, 4],
            str(package / "engine/engine.py"): [1],
            str(checkout / "tests/errands/example.py"): [1, 2],
        }
    )
    data.write()
    (checkout / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    done = subprocess.run(
        [sys.executable, "-m", "tests.coverage_report"],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "coverage by unit tests, in pytest's own processes: 62.5% of 8 lines",
        "   25.0%  hvlaunch/engine/engine.py",
    ]


def minor(version: str) -> tuple[int, int]:
    major, number = version.split(".")[:2]
    return int(major), int(number)


def test_the_page_says_which_releases_of_torch_are_tried():
    """The bound of pyproject.toml, the Makefile, the workflow and docs/reference/torch.md speak of the same releases."""
    makefile = (ROOT / "Makefile").read_text()
    others = re.search(r"^OTHER_TORCHS \?= (.*)$", makefile, re.MULTILINE)
    matrix = re.search(r'torch: \["(.*)"\]', (ROOT / ".github/workflows/ci.yml").read_text())
    bound = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert others and matrix and bound
    assert others[1].split() == matrix[1].split('", "')
    table = (ROOT / "docs/reference/torch.md").read_text().split("## Releases of torch\n")[1]
    rows = re.findall(r"^\| (\d[\d.]*)(?: to (\d[\d.]*))? \| ([^|]+) \|", table, re.MULTILINE)
    listed: dict[tuple[int, int], str] = {}
    for first, last, how in rows:
        major, number = minor(first)
        listed |= {(major, one): how for one in range(number, minor(last or first)[1] + 1)}
    assert [*listed] == [(2, one) for one in range(minor(bound[1])[1], len(listed) + minor(bound[1])[1])]
    tried = {minor(version): "`make torch-versions`" for version in others[1].split()} | {
        minor(TORCH): "all tests"
    }
    assert listed == dict.fromkeys(listed, "expected") | tried
    assert minor(others[1].split()[0]) == minor(bound[1]), "the oldest is tried"
