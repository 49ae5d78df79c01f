"""A rendezvous to test against."""

import pytest

from hvlaunch.rendezvous.server import RendezvousServer

TOKEN = "of-this-job"


@pytest.fixture(scope="session")
def rendezvous_server():
    with RendezvousServer(TOKEN, "probe", "nonce", host="127.0.0.1") as server:
        yield server


@pytest.fixture
def rendezvous(rendezvous_server):
    """Its url and token; nothing that other tests set is there."""
    return f"http://127.0.0.1:{rendezvous_server.port}", TOKEN
