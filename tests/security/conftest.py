"""What the tests of attacks share: users other than this one, and real sshds."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.agent.conftest import launch
from tests.unit.ssh.conftest import make_sshd, serve, sshd_folder

__all__ = ["given_to_bob", "launch", "make_sshd", "serve", "sshd_folder"]

BOB = 4242
"""A uid that nobody has here."""


@pytest.fixture
def given_to_bob() -> Callable[[Path], Path]:
    """Gives a file to another user, which takes root."""
    if os.getuid() != 0:
        pytest.skip("only root can give files to another user")

    def give(path: Path) -> Path:
        os.chown(path, BOB, BOB, follow_symlinks=False)
        return path

    return give
