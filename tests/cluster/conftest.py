"""Fixtures of tests on real hosts: `cluster` (hosts a, b, c, d), `whole_site` (a site of SSH) and `new_hosts` (others)."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.ssh_sites import Site, make_site
from tests.testhosts.hosts import TestHosts, missing, wait_until

SETTLE = 60.0  # seconds for what a test stopped to be gone
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test below this directory, and skip it where hosts can't be made."""
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    why = missing() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.cluster)
        if why:
            item.add_marker(pytest.mark.skip(reason=why))


def running(hosts: TestHosts) -> list[str]:
    """What runs on the hosts and in the driver place, as lines of text."""
    found = [("driver", process) for process in hosts.driver.processes()]
    found += [(host.name, process) for host in hosts for process in host.user_processes()]
    return [f"{place}: {process}" for place, process in found]


def clear(hosts: TestHosts) -> None:
    for process in hosts.driver.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    for host in hosts:
        if host.user_processes():
            host.kill()


@pytest.fixture(scope="session")
def session_hosts() -> Iterator[TestHosts]:
    with TestHosts(["a", "b", "c", "d"]) as hosts:
        yield hosts


@pytest.fixture
def cluster(session_hosts: TestHosts) -> Iterator[TestHosts]:
    """Hosts a, b, c and d, as they were made. A test that leaves a process on one, or in the driver place, fails."""
    yield session_hosts
    left: list[str] = []
    try:
        wait_until(lambda: not running(session_hosts), "nothing runs", SETTLE)
    except TimeoutError:
        left = running(session_hosts)
        clear(session_hosts)
    session_hosts.repair()
    if left:
        pytest.fail("the test left running:\n" + "\n".join(left))


@pytest.fixture(scope="module")
def whole_site() -> Iterator[Site]:
    """A site of SSH, as it was made. Who uses it makes that true again."""
    with make_site() as site:
        yield site


@pytest.fixture
def new_hosts() -> Iterator[Callable[..., TestHosts]]:
    """Makes hosts of this test's own; takes the arguments of TestHosts."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(TestHosts(*args, **options))
