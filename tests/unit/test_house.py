"""The house keeps its figures: counts of `tests/house.py` never rise, classes stay small, imports are on a list."""

import ast
import json
import sys
from pathlib import Path

import pytest

from tests.house import (
    LIMITS,
    MOST_ATTRIBUTES,
    MOST_METHODS,
    PRODUCT,
    big_classes,
    counts,
    folder,
    modules,
    nodes_of,
    places,
    unexplained_pauses,
)

pytestmark = (
    pytest.mark.no_cover
)  # a tracer doubles the time of reading files, and hvlaunch itself does not run

LARGER_CLASSES: dict[str, str] = {
    "Client": "a method for each verb of the rendezvous, and four attributes: users look for verbs in one place",
    "ClientConnection": "the state of a connection's pace: each attribute is read by the one decision when to read and when to drop",
    "Driver": "one loop; each attribute is a part of the job for one of its steps",
    "Engine": "one method for each kind of event, and each needs the same parts of the job",
    "HostLink": "a host from its connecting to its end, in one thread; output, order of frames, session and errands are apart",
    "HostSession": "reading, writing and reconnecting share the channel and the counts under the same locks",
    "Policy": "one method for each decision; all of them weigh the same pool and rounds",
    "RendezvousServer": "the driver's calls and the server's thread share one lock and one start; each call is two lines",
    "RequestReader": "the parser's callbacks build up one request: its parts are the attributes",
    "Rounds": "planning, beginning and ending a round share the plan and the newest round",
    "Store": "a method for each verb, and the callbacks that a change calls: all of them work on the same four tables",
    "WarmHost": "a thread's view of one host of a warm pool: its connection, its streams and their limits",
}
"""Classes over the caps, each with the reason why dividing it would not help a reader."""

HVLAUNCH = "hvlaunch"
FOR_ALL = {"named_tuples"}
"""What every package may import."""
ALLOWED: dict[str, set[str]] = {
    "__main__": {"cli"},
    "agent": set(),
    "api": {
        "children",
        "cli",
        "console",
        "driver",
        "errors",
        "gloo",
        "hosts",
        "job",
        "outside",
        "pool",
        "sync",
        "telemetry",
        "watch",
    },
    "check": {"console", "hosts", "job"},
    "children": set(),
    "cli": {
        # The doctor tries the kernel's features as an agent does.
        "agent",
        "check",
        "children",
        "console",
        "driver",
        "engine",
        "errors",
        "gloo",
        "hosts",
        "job",
        "mpi",
        "outside",
        "owners",
        "pool",
        "practise_training",
        "rendezvous",
        "report",
        "sync",
        "telemetry",
        "view",
    },
    "console": {"errors", "hosts", "job", "owners", "record"},
    "driver": {
        "agent",
        "console",
        "engine",
        "errors",
        "hosts",
        "job",
        "outside",
        "owners",
        "record",
        "rendezvous",
        "report",
        "ssh",
        "telemetry",
        "watch",
    },
    "engine": {"errors", "hosts", "job"},
    "errors": set(),
    "gloo": {
        "agent",
        "check",
        "console",
        "driver",
        "engine",
        "errors",
        "hosts",
        "job",
        "outside",
        "owners",
        "record",
        "rendezvous",
        "report",
        "ssh",
        "sync",
        "telemetry",
        "watch",
    },
    "hosts": {"agent", "children", "errors", "job", "owners"},
    "job": {"errors"},
    "named_tuples": set(),
    "mpi": {"agent", "driver", "engine", "errors", "gloo", "hosts", "job", "rendezvous", "ssh"},
    "outside": {"errors", "owners", "record"},
    "owners": set(),
    # Workers run it, with torch or without.
    "practise_training": {"rendezvous", "torch"},
    "pool": {
        "agent",
        "console",
        "driver",
        "engine",
        "errors",
        "hosts",
        "job",
        "outside",
        "owners",
        "rendezvous",
        "ssh",
    },
    "record": set(),
    "rendezvous": {"errors", "owners", "record"},
    "report": {"console", "errors", "hosts", "job", "telemetry"},
    "ssh": {"children", "errors", "job", "owners"},
    "sync": {"agent", "console", "driver", "engine", "errors", "hosts", "job", "owners", "rendezvous"},
    "telemetry": {"agent", "hosts"},
    # The files of commits in memory, which workers write and agents copy.
    "torch": {"agent", "errors", "owners", "rendezvous"},
    "torchrun": {"torch"},
    "view": {"console", "hosts", "telemetry"},
    "watch": {"console", "engine", "errors", "hosts", "job", "report"},
}
"""The packages and modules of hvlaunch that each package may import, also inside functions and for types."""
ALLOWED_ELSEWHERE: dict[str, set[str]] = {
    "check": {"collections", "html", "math", "re", "statistics", "typing"},
    "engine": {
        "abc",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "heapq",
        "ipaddress",
        "itertools",
        "json",
        "math",
        "pathlib",
        "signal",
        "types",
        "typing",
    },
    "report": {
        "collections",
        "dataclasses",
        "datetime",
        "html",
        "itertools",
        "json",
        "os",
        "pathlib",
        "re",
        "shlex",
        "shutil",
        "signal",
        "typing",
    },
    "telemetry": {
        "collections",
        "dataclasses",
        "functools",
        "itertools",
        "json",
        "pathlib",
        "prometheus_client",
        "re",
        "statistics",
        "typing",
    },
    "view": {"collections", "dataclasses", "datetime", "re", "statistics", "typing"},
    "watch": {"bisect", "collections", "json", "os", "pathlib", "re", "shlex", "signal", "time", "typing"},
}
"""For packages that are pure or that travel: the modules outside hvlaunch that they may import."""
NEVER = {"torch"}
"""Imported by `hvlaunch.torch` alone, which only workers import."""
FOLDERS = {"agent": (20, 64, 7), "driver": (19, 32, 5)}
"""By folder: the most rooms (modules and subfolders), arrows (imports among rooms) and floors (longest chain of imports)."""


def test_no_count_rises():
    limits = json.loads(LIMITS.read_text())
    risen = {
        name: f"{number}, at most {limits.get(name, 0)}"
        for name, number in counts().items()
        if number > limits.get(name, 0)
    }
    assert risen == {}, "\n".join(
        [
            "write plainly (CONTRIBUTING.md, Style): fewer words such as that, which, it, so, all; names that say what they",
            "hold; no new file for a few lines. `make house` shows the counts.",
            *(f"{name}: {', '.join(counted)}" for name, counted in places().items() if name in risen),
        ]
    )


def test_classes_are_small_or_have_a_reason():
    assert sorted(big_classes()) == sorted(LARGER_CLASSES), (
        f"more than {MOST_METHODS} methods or {MOST_ATTRIBUTES} attributes, or a reason for a class that is small now"
    )


@pytest.mark.parametrize("name", FOLDERS)
def test_rooms_of_a_folder_stay_in_wings(name):
    figures = folder(name)
    shape = (len(figures.rooms), len(figures.arrows), figures.floors)
    assert all(number <= most for number, most in zip(shape, FOLDERS[name], strict=True)), shape


def imports_of(path: Path) -> set[str]:
    """Return the dotted names that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def package_of(name: str) -> str:
    """Return the part of hvlaunch that a dotted name is in: "engine", "job"; "" is hvlaunch itself."""
    parts = name.split(".")
    is_part = len(parts) > 1 and ((PRODUCT / parts[1]).is_dir() or (PRODUCT / f"{parts[1]}.py").exists())
    return parts[1] if is_part else ""


def packages() -> list[str]:
    return sorted(
        {path.relative_to(PRODUCT).parts[0].removesuffix(".py") for path in modules()} - {"__init__"}
    )


def test_every_package_is_on_the_list():
    assert sorted(ALLOWED) == packages()


@pytest.mark.parametrize("package", packages())
def test_a_package_imports_only_what_it_may(package):
    files = [path for path in modules() if path.relative_to(PRODUCT).parts[0].removesuffix(".py") == package]
    for path in files:
        names = imports_of(path)
        inside = {package_of(name) for name in names if name.split(".")[0] == HVLAUNCH}
        assert inside - ALLOWED[package] - FOR_ALL - {package, ""} == set(), path
        outside = {name.split(".")[0] for name in names} - {HVLAUNCH}
        if package in ALLOWED_ELSEWHERE:
            assert outside <= ALLOWED_ELSEWHERE[package], path
        if package not in ("torch", "practise_training"):
            assert outside & NEVER == set(), path


@pytest.mark.parametrize("package", packages())
def test_no_permission_is_unused(package):
    files = [path for path in modules() if path.relative_to(PRODUCT).parts[0].removesuffix(".py") == package]
    used = {
        package_of(name) for path in files for name in imports_of(path) if name.startswith(f"{HVLAUNCH}.")
    }
    assert ALLOWED[package] - used == set()


def test_the_agent_needs_the_standard_library_alone():
    for path in (PRODUCT / "agent").rglob("*.py"):
        outside = {name.split(".")[0] for name in imports_of(path)} - {HVLAUNCH}
        # Python 3.12 has _sha2 in the place of _sha256; the agent takes the one that there is.
        assert outside <= {*sys.stdlib_module_names, "_sha256", "_sha2"}, path


def test_a_test_that_sleeps_says_why():
    tests = Path(__file__).parents[1]
    pauses = {str(path.relative_to(tests)): unexplained_pauses(path) for path in tests.rglob("*.py")}
    assert {path: lines for path, lines in pauses.items() if lines} == {}, (
        "wait for a condition, or say in a comment on the line or before it why there is none"
    )


PAUSES = (
    "time.{sleep}(0.5)",
    "await asyncio.{sleep}(2)",
    "PAUSE = 0.1\ntime.{sleep}(PAUSE * 10)",
    "{sleep}(1)  # noqa: B101 (a directive)",
    'run(["{sleep}", "3"])',
    'run("env", "{sleep}", SECONDS)\nSECONDS = 3',
    'run("sh", "-c", "echo up; {sleep} .7m & wait")',
    "SCRIPT = 'print(1);time.{sleep}(0.75)'",
    'file.write("#!/bin/sh\\\\n{sleep} 3")',
    'SECONDS = 2.5\nrun(f"exec {sleep} {{SECONDS}}")',
    "# This explains a line further up.\n\ntime.{sleep}(9)",
)
NO_PAUSES = (
    "time.{sleep}(0.4)",
    'run(["{sleep}", "600"])',
    "time.{sleep}(0.1 * 2)",
    "# The length of the cut is tested.\ntime.{sleep}(9)",
    "time.{sleep}(9)  # the length of the cut is tested",
    "# The length of the cut is tested.\nSCRIPT = '''\nimport time\ntime.{sleep}(9)\n'''",
)


@pytest.mark.parametrize("text", [*PAUSES, *NO_PAUSES])
def test_a_pause_is_noticed_in_code_and_in_commands(text, tmp_path):
    (tmp_path / "test_x.py").write_text(text.format(sleep="sleep"))
    assert bool(unexplained_pauses(tmp_path / "test_x.py")) == (text in PAUSES)
