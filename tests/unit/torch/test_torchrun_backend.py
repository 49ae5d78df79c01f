"""torch's RendezvousBackend on the server, by itself and below torch's own handler."""

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from hvlaunch.rendezvous.client import Client
from hvlaunch.torch.torchrun.keeper import Backend
from tests.unit.torch.torchrun_nodes import TOKEN, Nodes


@pytest.fixture
def backend(client):
    return Backend(client, "scope")


def test_there_is_no_state_at_first(backend):
    assert backend.get_state() is None


def test_the_first_state_is_set_without_a_token_and_once(backend):
    state, token, was_set = backend.set_state(b"\x00one")
    assert (state, was_set) == (b"\x00one", True)
    assert backend.get_state() == (state, token)
    assert backend.set_state(b"two") == (state, token, False)


def test_a_state_is_replaced_with_its_token_and_no_other(backend):
    _, first, _ = backend.set_state(b"one")
    state, second, was_set = backend.set_state(b"two", first)
    assert (state, was_set) == (b"two", True)
    assert backend.set_state(b"three", first) == (b"two", second, False)


def test_the_same_bytes_have_a_new_token(backend):
    _, first, _ = backend.set_state(b"same")
    _, second, _ = backend.set_state(b"same", first)
    assert backend.set_state(b"other", first) == (b"same", second, False)


def test_a_foreign_token_sets_nothing(backend):
    assert backend.set_state(b"x", object()) is None
    _, token, _ = backend.set_state(b"one")
    assert backend.set_state(b"x", object()) == (b"one", token, False)
    assert backend.set_state(b"x", "invalid") == (b"one", token, False)


def test_without_the_server_or_its_token_there_is_no_connection(server):
    for url, token in ((f"http://127.0.0.1:{server.port}", "wrong"), ("http://127.0.0.1:1", TOKEN)):
        backend = Backend(Client(url, token), "scope")
        with pytest.raises(RendezvousConnectionError):
            backend.get_state()
        with pytest.raises(RendezvousConnectionError):
            backend.set_state(b"x")


def test_torchs_own_handler_works_on_it(server, backend):
    shared, nodes = HashStore(), Nodes(server.port)
    handlers = [
        DynamicRendezvousHandler.from_backend("job", shared, backend, 2, 2, f"127.0.0.{number}")
        for number in (1, 2)
    ]
    assert [info.world_size for info in nodes.round(*handlers)] == [2, 2]
    for handler in handlers:
        assert handler.shutdown()
    nodes.close()
