"""The tool's own tests run where the tool has changed since they last passed: they take a minute of two processors.

`make testhosts-tests` runs them and, when they pass, records the tool's checksum in `tested.sha256`.
"""

import hashlib
from pathlib import Path

import pytest

from tests.cluster.conftest import cluster, new_hosts, session_hosts
from tests.testhosts.hosts import missing

__all__ = ["cluster", "new_hosts", "session_hosts"]

HERE = Path(__file__).parent
RECORD = HERE / "tested.sha256"


def checksum() -> str:
    """Return the checksum of the tool and of its tests."""
    digest = hashlib.sha256()
    for path in sorted(HERE.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--testhosts", action="store_true", help="run the test hosts' own tests, and record success"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of this folder. Leave them out if the tool is as it was when they last passed."""
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    why = missing() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.cluster)
        if why:
            item.add_marker(pytest.mark.skip(reason=why))
    if RECORD.read_text().strip() == checksum() and not config.getoption("--testhosts", default=False):
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if item not in ours]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Record success. Only a run of this whole folder proves anything, so an option must ask for it."""
    asked = session.config.getoption("--testhosts", default=False)
    # With xdist each worker ends with a status of its own; the controller alone knows of all tests.
    is_controller = not hasattr(session.config, "workerinput")
    if asked and is_controller and exitstatus == pytest.ExitCode.OK and not missing():
        RECORD.write_text(f"{checksum()}\n")
