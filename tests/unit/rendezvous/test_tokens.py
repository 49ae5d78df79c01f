"""Who has not the job's token gets 401, at every place and by every method that there is, and it is counted."""

import re
from collections.abc import Iterator
from contextlib import closing

import pytest

from hvlaunch.rendezvous import Unauthorized
from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.serving import RendezvousServer
from tests.unit.rendezvous.wire import TOKEN

METHODS = [
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "DELETE",
    "OPTIONS",
    "PATCH",
    "TRACE",
    "PROPFIND",
    "MKCOL",
    "COPY",
    "PURGE",
    "LINK",
]
NOT_PLACES = [
    "/",
    "//",
    "/s",
    "/s/",
    "/s/k/more",
    "/s/%zz",
    "/s/%ff",
    "/s/k#f",
    "/-",
    "/-/",
    "/-/unknown",
    "/-/-/k",
    "*",
]
STRANGERS = {
    "nothing": b"",
    "another token": b"Authorization: Bearer another-token!\r\n",
    "an empty token": b"Authorization: Bearer \r\n",
    "less than the token": f"Authorization: Bearer {TOKEN[:-1]}\r\n".encode(),
    "more than the token": f"Authorization: Bearer {TOKEN}x\r\n".encode(),
    "the token in capitals": f"Authorization: Bearer {TOKEN.upper()}\r\n".encode(),
    "the token, bare": f"Authorization: {TOKEN}\r\n".encode(),
    "the token of Basic": f"Authorization: Basic {TOKEN}\r\n".encode(),
    "the token elsewhere": f"Cookie: {TOKEN}\r\nX-Token: {TOKEN}\r\nProxy-Authorization: Bearer {TOKEN}\r\n".encode(),
}


def places(server: RendezvousServer) -> Iterator[str]:
    """Of every route, as the server itself has them: a new one can't be missing here."""
    yield from ("/s/k", "/global/0", "/s/none")
    for name, verb in server._routes()._verbs._verbs.items():
        options = [b"", *(b"?%b=1" % option for option in verb.options), f"?token={TOKEN}".encode()]
        for names in {0, 1, 2, *verb.names}:
            yield from (f"/-/{name}" + "/s" * names + option.decode() for option in options)


def test_every_path_of_the_server_is_covered(server, monkeypatch):
    found = set(places(server))
    assert {"/-/get/s/s?wait=1", "/-/watch/s", "/-/compare/s/s?version=1", "/-/metrics", "/-/health"} <= found
    routes = server._routes()
    routes._verbs._verbs["new"] = routes._verbs._verbs["get"]
    monkeypatch.setattr(server, "_routes", lambda: routes)
    assert "/-/new/s/s" in set(places(server)) - found


@pytest.mark.parametrize("stranger", STRANGERS)
def test_without_token_every_path_is_401_and_unchanged(server, connect, stranger):
    server.put("s", "k", b"secret")
    server.put("s", "s", b"secret")
    asked = 0
    for number, place in enumerate([*places(server), *NOT_PLACES]):
        # Who shows nothing asks in each way for all; the others, each way in turn.
        for method in METHODS if stranger == "nothing" else (METHODS[number % len(METHODS)], "GET", "PUT"):
            with closing(connect(server)) as foreign:
                answer = foreign.ask(method, place, b"1", headers=STRANGERS[stranger])
            assert answer.status == 401, (method, place)
            assert b"secret" not in answer.body
            asked += 1
    assert server.stats().unauthorized == server.stats().requests == asked
    assert (server.keys("s"), server.get("s", "k"), server.get("s", "s")) == (
        ["k", "s"],
        b"secret",
        b"secret",
    )
    assert server.stats().waiting == 0
    # A connection that was there from the start would be closed by now: a stranger's time ends after 10 s.
    told = connect(server).ask("GET", "/-/metrics").body.decode()
    assert re.search(rf'^hvlaunch_rendezvous_requests_total{{status="401"}} {asked}\.0$', told, re.MULTILINE)


def test_a_value_of_one_job_is_not_read_with_the_token_of_another():
    with (
        RendezvousServer("token-of-one", host="127.0.0.1") as one,
        RendezvousServer("token-of-other", host="127.0.0.1") as other,
    ):
        tokens = {one: "token-of-one", other: "token-of-other"}
        for server, token in tokens.items():
            Client(f"http://127.0.0.1:{server.port}", token).put("s", "k", token.encode())
        for server, stranger in ((one, tokens[other]), (other, tokens[one])):
            client = Client(f"http://127.0.0.1:{server.port}", stranger)
            for call in (
                lambda c=client: c.get("s", "k"),
                lambda c=client: c.put("s", "k", b"mine"),
                lambda c=client: c.wait("s", "k", 60),
                lambda c=client: c.watch("s", timeout=60),
                lambda c=client: c.get_many("s", ["k"]),
                lambda c=client: c.delete_scope("s"),
            ):
                with pytest.raises(Unauthorized) as raised:
                    call()
                assert stranger not in str(raised.value)
            assert server.get("s", "k") == tokens[server].encode()
            assert server.stats().unauthorized == 6
