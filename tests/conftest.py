"""What holds for all tests."""

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent

# `tests` and `benchmarks` are found here, and hvlaunch is not: the one that is installed comes first.
sys.path.append(str(HERE.parent))

# A test run in the background of a shell script begins with SIGINT ignored, one by nohup with SIGHUP, and would hand
# that on to all that it starts; hvlaunch respects it, so that Ctrl-C and a closed terminal could not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Some set it for their shell; hvlaunch would hand it on, instead of what it finds out itself, or heed it.
for name in ("OMP_NUM_THREADS", "NO_COLOR"):
    os.environ.pop(name, None)

# torch's store looks up the name of each of its connections, also on this machine. If the answer is lost, the C library
# waits 5 seconds and asks again: tests of a second have taken a minute.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"

# The same examples each time, however long they take on a busy machine. To look for others: --hypothesis-profile=default.
settings.register_profile(
    "same everywhere", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same everywhere")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--wheel", type=Path, default=None, help="the wheel that is installed: it is looked into"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """In a worker of xdist pytest-cov starts two tracers, and stops but one of them for `no_cover`: the first ends here."""
    measuring = session.config.pluginmanager.get_plugin("_cov")
    if measuring is not None and hasattr(session.config, "workerinput"):
        measuring.cov_controller.cov.stop()


# Modules and thousands of tests stay until the end: looking for garbage among them is half of the time in which they are loaded.


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _jobs_and_options_of_tests_are_not_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name)))
        yield


@pytest.fixture(autouse=True)
def _hosts_are_not_remembered_from_test_to_test() -> None:
    shutil.rmtree(Path(os.environ["XDG_STATE_HOME"], "hvlaunch", "ledger"), ignore_errors=True)


def pytest_report_header() -> str:
    import hvlaunch

    return f"hvlaunch: {Path(hvlaunch.__file__).parent}"


@pytest.fixture(scope="session", autouse=True)
def _away_from_the_working_tree() -> Iterator[None]:
    """Python looks for modules where it is started, and `python -m hvlaunch` in a test is to start the installed one."""
    before = os.getcwd()  # noqa: PTH109 (chdir takes it as it is)
    os.chdir(HERE)
    yield
    os.chdir(before)
