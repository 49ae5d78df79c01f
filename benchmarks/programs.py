"""Programs of others under hvlaunch: each is installed in a place of its own, run with two workers, and taken away again.

    python benchmarks/programs.py                      # all, as a table
    python benchmarks/programs.py --only Ray Hydra     # some
    python benchmarks/programs.py --write              # the table of docs/reference/programs.md anew
    python benchmarks/programs.py --only Horovod --python venv/bin/python    # one that was built before

torch is this environment's own; whatever else a program needs comes from the package index, without changing torch.
What can't be installed is said not to have run, and why. One at a time; gigabytes of downloads, and an hour.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser
from benchmarks.measure import table

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "foreign"
PAGE = HERE.parent / "docs" / "reference" / "programs.md"
MARK = "<!-- made by benchmarks/programs.py -->"
PIP = [sys.executable, "-m", "pip"]
SIZE = 2
MPI_TESTS = "attributes cco_obj errhandler exceptions group info msgspec objmodel p2p_obj request status test_comm test_op"
"""Parts of mpi4py's suite. The others do not end soon with two ranks on two busy processors, under mpirun alone, either."""


class Program(NamedTuple):
    """What is installed, what is run, and what users of it must know."""

    name: str
    packages: Sequence[str] = ()
    script: str = ""
    needs: str = "nothing"
    flags: Sequence[str] = ()
    env: Mapping[str, str] = {}
    words: Sequence[str] = ()
    """Behind the script."""
    mpirun: str = ""
    """Runs tests of mpi4py's own with it instead."""
    standards: Sequence[str] = ()
    """Files of its source that ask for C++14, where torch's headers need C++20: it is built from source, for long."""


NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
PROGRAMS = (
    Program(
        "transformers, Trainer",
        ("transformers", "accelerate"),
        "trainer.py",
        "`use_cpu=True` where there is no GPU",
    ),
    Program(
        "accelerate",
        ("accelerate",),
        "accelerated.py",
        "no `accelerate launch`: it is the launcher that hvlaunch replaces",
    ),
    Program(
        "Lightning", ("lightning",), "lightning_trainer.py", "`devices` and `num_nodes` as hvlaunch has them"
    ),
    Program(
        "DeepSpeed",
        ("deepspeed",),
        "deepspeed_zero.py",
        "no `deepspeed` launcher; `DS_ACCELERATOR=cpu` where there is no GPU",
        env={"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"},
    ),
    Program("torch, FSDP2 and DCP", (), "fsdp2_dcp.py"),
    Program("torch, RPC", (), "rpc.py"),
    Program(
        "Hydra",
        ("hydra-core",),
        "hydra_app.py",
        words=(
            "+backend=gloo",
            "+steps=3",
            "hydra.run.dir=.",
            "hydra.output_subdir=null",
            "hydra/job_logging=none",
            "hydra/hydra_logging=none",
        ),
    ),
    Program(
        "JAX",
        ("jax",),
        "jax_processes.py",
        "`jax.distributed.initialize(address, size, rank)` with MASTER_ADDR:MASTER_PORT, WORLD_SIZE and RANK",
    ),
    Program(
        "TensorFlow", ("tensorflow-cpu",), "tensorflow_workers.py", "TF_CONFIG, made from HVLAUNCH_HOSTS"
    ),
    Program(
        "Ray",
        ("ray",),
        "ray_cluster.py",
        "`--end-with-rank 0`: rank 0 is the head, the others are nodes",
        ("--end-with-rank", "0"),
    ),
    Program("Dask", ("distributed",), "dask_cluster.py", "rank 0 is the scheduler, the others are workers"),
    Program("mpi4py's own tests, Open MPI", ("mpi4py",), needs="`--mpi`", mpirun="mpirun.openmpi"),
    Program("mpi4py's own tests, MPICH", ("mpi4py",), needs="`--mpi`", mpirun="mpirun.mpich"),
    Program(
        "Horovod",
        ("horovod",),
        "horovod_training.py",
        "`--horovod`; [how to build it](../internals/torch-library.md#building-horovod)",
        ("--horovod",),
        env={
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITHOUT_MPI": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "MAKEFLAGS": "-j2",
        },
        standards=("CMakeLists.txt", "horovod/torch/CMakeLists.txt"),
    ),
)


class Outcome(NamedTuple):
    """How it went; `version` is that of the first package."""

    version: str
    how: str


def outcome(program: Program, limit: float, has_it: str | None) -> Outcome:
    """Install, run, take away. `has_it` is an interpreter that needs nothing to be installed."""
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        python, trouble = (has_it, "") if has_it else installed(program, Path(folder))
        if trouble:
            return Outcome("", f"not run: {trouble}")
        asked = [
            python,
            "-c",
            f"from importlib.metadata import version; print(version({(*program.packages, 'torch')[0]!r}))",
        ]
        number = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        return Outcome(number, ran(program, python, Path(folder), limit) or "works")


def installed(program: Program, folder: Path) -> tuple[str, str]:
    """A Python that has the packages, on top of this one's; or why there is none."""
    if not program.packages:
        return sys.executable, ""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = str(folder / "venv" / "bin" / "python")
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    paths = [sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))]
    Path(own, "zz_below.pth").write_text("\n".join(dict.fromkeys(paths)) + "\n")
    constraint = folder / "constraint"
    constraint.write_text(f"torch=={version('torch')}\n")
    pip = [*PIP, "--python", python, "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    what: list[str | Path] = ["--constraint", constraint, *program.packages]
    if program.standards:
        source, trouble = source_of(program.packages[0], folder)
        if trouble:
            return python, trouble
        for file in program.standards:
            text = (source / file).read_text()
            (source / file).write_text(text.replace("CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 20"))
        what = ["--no-deps", "--no-build-isolation", source]
    done = subprocess.run(
        [*pip, *what],
        env={**os.environ, **program.env},
        capture_output=True,
        text=True,
        check=False,
    )
    return python, "" if done.returncode == 0 else "pip can't install it here: " + last_line(done.stderr)


def ran(program: Program, python: str, folder: Path, limit: float) -> str:
    """Why it did not work, if so."""
    hvlaunch = [sys.executable, "-m", "hvlaunch", "-np", str(SIZE), "-H", f"localhost:{SIZE}", *program.flags]
    words = [python, str(SCRIPTS / program.script), *program.words]
    env = {**os.environ, **NO_GPU, **program.env}
    if program.mpirun:
        if shutil.which(program.mpirun) is None:
            return f"not run: no {program.mpirun} here"
        tests, trouble = mpi_tests(folder)
        if trouble:
            return f"not run: {trouble}"
        hvlaunch += ["--mpi", "--mpirun", program.mpirun]
        words = [python, str(tests), "-q", *(word for part in MPI_TESTS.split() for word in ("-i", part))]
        env |= library(program.mpirun, folder)
    passed = ["-x", "LD_LIBRARY_PATH"] if "LD_LIBRARY_PATH" in env else []
    try:
        done = subprocess.run(
            [*hvlaunch, *passed, *words],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"does not end within {limit:g} s"
    print(done.stdout[-3000:], done.stderr[-6000:], file=sys.stderr)
    if done.returncode != 0:
        return f"exit code {done.returncode}: {last_line(done.stderr)}"
    said = (done.stdout + done.stderr).split()
    expected = ["OK"] * SIZE if program.mpirun else ["right", *map(str, range(SIZE))]
    is_told = all(said.count(word) >= expected.count(word) for word in expected)
    return "" if is_told else "ended well without a result"


def mpi_tests(folder: Path) -> tuple[Path, str]:
    """mpi4py's own tests, which are in its source."""
    source, trouble = source_of(f"mpi4py=={version('mpi4py')}", folder)
    return source / "test" / "main.py", trouble


def source_of(package: str, folder: Path) -> tuple[Path, str]:
    """Where the package's source is now; or why it can't be had."""
    name = package.partition("=")[0]
    words: list[str | Path] = ["download", "--quiet", "--no-deps", "--no-binary", name, "-d", folder]
    done = subprocess.run([*PIP, *words, package], capture_output=True, text=True, check=False)
    archives = [*folder.glob(f"{name}-*.tar.gz")]
    if done.returncode != 0 or not archives:
        return folder, "its source can't be had here: " + last_line(done.stderr)
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return archives[0].with_name(archives[0].name.removesuffix(".tar.gz")), ""


def library(mpirun: str, folder: Path) -> Mapping[str, str]:
    """What makes mpi4py's build for all MPIs find the library of this one."""
    if mpirun == "mpirun.openmpi":
        return {"MPI4PY_LIBMPI": "libmpi.so.40"}
    found = [*Path("/usr/lib").glob("*/libmpich.so.12")]
    (folder / "mpich").mkdir()
    (folder / "mpich" / "libmpi.so.12").symlink_to(found[0])
    return {"LD_LIBRARY_PATH": str(folder / "mpich")}


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:160] if lines else "it says nothing"


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="programs whose names have one of these words"
    )
    parser.add_argument(
        "--python", metavar="PATH", help="an interpreter that has these programs: nothing is installed"
    )
    parser.add_argument("--limit", type=float, default=300, help="seconds for each (default 300)")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reference/programs.md")
    options = parser.parse_args()
    rows = []
    for program in PROGRAMS:
        if options.only and not any(word.lower() in program.name.lower() for word in options.only):
            continue
        found = outcome(program, options.limit, options.python)
        rows.append([program.name, found.version, found.how, program.needs])
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    text = table(["program", "version", f"{SIZE} workers", "what it needs"], rows)
    print(text)
    if options.write:
        before, _, rest = PAGE.read_text().partition(MARK)
        _, _, after = rest.partition(MARK)
        PAGE.write_text(f"{before}{MARK}\n\n{text}\n\n{MARK}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
