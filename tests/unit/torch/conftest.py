"""Rendezvous to test against: one that all share, and one for each test of torchrun's backend."""

import pytest

from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.serving import RendezvousServer
from tests.unit.torch import torchrun_nodes
from tests.unit.torch.played_job import PlayedJob

TOKEN = "of-this-job"


@pytest.fixture(scope="session")
def rendezvous_server():
    with RendezvousServer(TOKEN, host="127.0.0.1") as server:
        yield server


@pytest.fixture
def rendezvous(rendezvous_server):
    """Its url and token; nothing that other tests set is there."""
    return f"http://127.0.0.1:{rendezvous_server.port}", TOKEN


@pytest.fixture
def server():
    with torchrun_nodes.serve() as server:
        yield server


@pytest.fixture
def client(server):
    with Client(f"http://127.0.0.1:{server.port}", torchrun_nodes.TOKEN) as client:
        yield client


@pytest.fixture
def job():
    """job(train, size): that many workers, each of which calls train() when it is first seated."""
    jobs = []

    def start(train, size: int) -> PlayedJob:
        jobs.append(PlayedJob(train, size))
        return jobs[-1]

    yield start
    for one in jobs:
        one.close()


@pytest.fixture
def nodes(server):
    nodes = torchrun_nodes.Nodes(server.port)
    yield nodes
    nodes.close()
