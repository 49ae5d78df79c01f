"""Tests on a real GPU and on test hosts, which share it: NCCL takes them for several machines, as their names and boot ids say."""

from collections.abc import Iterator

import pytest

from tests.cluster.conftest import cluster, session_hosts
from tests.testhosts.hosts import missing

__all__ = ["cluster", "session_hosts"]


def _why_not() -> str | None:
    import torch

    return missing() if torch.cuda.is_available() else "needs a GPU, and a torch that was built for it"


@pytest.fixture(scope="session", autouse=True)
def _there_is_a_gpu() -> Iterator[None]:
    if why := _why_not():
        pytest.skip(why)
    yield
