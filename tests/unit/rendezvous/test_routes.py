"""Who may ask for what, and what the paths mean."""

import pytest

from hvlaunch.rendezvous.serving.http import Answer, Head, Later
from hvlaunch.rendezvous.serving.routes import MAX_WAIT, Routes
from hvlaunch.rendezvous.store import Store, StoreLimits
from tests.unit.rendezvous.wire import TOKEN

PLACES = [
    "/", "/s", "/s/k", "/s/k/", "/s/k/more", "//", "/s//k", "*", "/%", "/s/k?wait=1", "/s/k#f",
    "/-", "/-/", "/-/health", "/-/health/", "/-/health?x", "/-/get", "/-/get/s/k", "/-/get/s/k?wait=1", "/-/unknown", "/%2D/health",
]  # fmt: skip
HEALTH = Answer(200, b"well")
METHODS = ["GET", "PUT", "DELETE", "HEAD", "POST", "OPTIONS", "PATCH", "TRACE"]


@pytest.fixture
def store():
    return Store(StoreLimits(value=10, keys=2))


@pytest.fixture
def ask(store):
    """ask(method, target, body, token=…): the answer of routes over `store`."""
    routes = Routes(store, token=TOKEN, about={"health": lambda: HEALTH})

    def ask_routes(method, target, body=b"", *, token=TOKEN, authorization=None, is_private=True):
        if authorization is None:
            authorization = f"Bearer {token}".encode()
        target = target.encode() if isinstance(target, str) else target
        outcome = routes(Head(method, target, authorization, is_private=is_private))
        return outcome if isinstance(outcome, Answer) else outcome(body)

    return ask_routes


@pytest.mark.parametrize(
    "authorization",
    [
        b"", b"Bearer", b"Bearer ", b"Bearer wrong", f"Bearer {TOKEN}x".encode(), f"Bearer {TOKEN[:-1]}".encode(),
        f"Basic {TOKEN}".encode(), TOKEN.encode(), f"Bearer {TOKEN}, Bearer {TOKEN}".encode(), b"Bearer \xff\xfe",
    ],
)  # fmt: skip
def test_without_the_token_every_place_and_method_is_401(ask, store, authorization):
    store.put("s", "k", b"secret")
    for method in METHODS:
        for place in PLACES:
            answer = ask(method, place, b"new", authorization=authorization)
            assert answer.status == 401, (method, place)
            assert len(answer.body) < 50
            assert b"WWW-Authenticate: Bearer\r\n" in answer.headers
    assert store.get("s", "k") == b"secret"
    assert store.keys == 1


def test_a_token_that_others_can_read_opens_nothing(ask, store):
    store.put("s", "k", b"secret")
    for place in PLACES:
        for method in METHODS:
            answer = ask(method, place, b"new", is_private=False)
            assert answer.status == 401, (method, place)
            assert b"https" in answer.body
    assert store.get("s", "k") == b"secret"


def test_the_token_may_not_be_empty(store):
    with pytest.raises(ValueError, match="let everyone in"):
        Routes(store, token="")


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER   "])
def test_the_scheme_has_no_case(ask, scheme):
    assert ask("GET", "/-/health", authorization=(scheme + TOKEN).encode()).status == 200


def test_put_get_delete(ask):
    assert ask("GET", "/s/k") == Answer(404)
    assert ask("PUT", "/s/k", b"\0\xff") == Answer(200)
    assert ask("GET", "/s/k") == Answer(200, b"\0\xff")
    assert ask("PUT", "/s/k", b"") == Answer(200)
    assert ask("GET", "/s/k") == Answer(200, b"")
    assert ask("DELETE", "/s/k") == Answer(200)
    assert ask("DELETE", "/s/k") == Answer(200)
    assert ask("GET", "/s/k") == Answer(404)


@pytest.mark.parametrize("method", ["HEAD", "POST", "OPTIONS", "PATCH", "TRACE"])
def test_other_methods_are_405_and_nothing_else(ask, store, method):
    store.put("s", "k", b"secret")
    answer = ask(method, "/s/k", b"new")
    assert answer.status == 405
    assert answer.headers == b"Allow: GET, PUT, DELETE\r\n"
    assert store.get("s", "k") == b"secret"


@pytest.mark.parametrize("method", ["PUT", "DELETE", "HEAD", "POST"])
def test_our_verbs_are_only_for_get(ask, method):
    for place in ("/-/health", "/-/get/s/k"):
        assert ask(method, place).status == 405
        assert ask(method, place).headers == b"Allow: GET\r\n"


@pytest.mark.parametrize(
    "target",
    [
        "/", "/s", "/s/", "//k", "/s/k/", "/s/k/more", "*", "s/k", "/s/k?wait=1", "/s/k?x", "/s/k#f",
        "/s/%", "/s/%4", "/s/%zz", "/s/%ff", b"/s/\xff", "/-/get", "/-/get/s", "/-/get/s/k/more", "/-/get/-/k", "/-/health?x",
    ],
)  # fmt: skip
def test_what_is_no_place_is_400(ask, store, target):
    assert ask("GET", target).status == 400
    if "/-/" not in str(target):
        assert ask("PUT", target, b"x").status == 400
    assert store.keys == 0


def test_an_unknown_verb_is_404_and_no_scope_is_ours(ask, store):
    for target in ("/-/unknown", "/-/unknown/more/and/more", "/-/health/more", "/-", "/%2d/k"):
        assert ask("GET", target) == Answer(404)
    assert ask("PUT", "/-/k", b"x") == Answer(404)
    assert store.keys == 0


@pytest.mark.parametrize(
    ("encoded", "scope", "key"),
    [
        ("/a%20b/c%2Fd", "a b", "c/d"),
        ("/r%C3%B6/%e2%82%ac", "rö", "€"),
        ("/%2E%2E/%2e", "..", "."),
        ("/a+b/c%2Bd", "a+b", "c+d"),
        ("/%2561/%25", "%61", "%"),
        ("/--/-", "--", "-"),
        ("/local_10.0.0.1/rank_0", "local_10.0.0.1", "rank_0"),
        ("/%00/%0d%0a", "\0", "\r\n"),
    ],
)
def test_components_are_decoded_once_after_they_are_split(ask, store, encoded, scope, key):
    assert ask("PUT", encoded, b"v") == Answer(200)
    assert store.get(scope, key) == b"v"


def test_what_the_store_refuses_has_a_status_and_says_why(ask):
    assert ask("PUT", "/s/k", b"12345678901").status == 413
    ask("PUT", "/s/1", b"")
    ask("PUT", "/s/2", b"")
    answer = ask("PUT", "/s/3", b"")
    assert answer.status == 507
    assert answer.body == b"s/3: the rendezvous is full: it has 2 keys\n"


@pytest.mark.parametrize("query", ["", "?wait=0", "?wait=5", "?wait=0.25"])
def test_a_long_poll_for_a_key_that_is_set_answers_at_once(ask, store, query):
    store.put("s", "k", b"v")
    assert ask("GET", f"/-/get/s/k{query}") == Answer(200, b"v")
    assert store.waiting == 0


@pytest.mark.parametrize("query", ["", "?wait=0", "?wait=0.000"])
def test_without_a_wait_it_is_a_get(ask, query):
    assert ask("GET", f"/-/get/s/k{query}") == Answer(404)


def test_a_long_poll_answers_what_is_put(ask, store):
    later = ask("GET", "/-/get/s/k?wait=2.5")
    assert isinstance(later, Later)
    assert (later.timeout, later.late) == (2.5, Answer(404))
    given: list[Answer] = []
    later.begin(given.append)
    ask("PUT", "/s/other", b"no")
    assert given == []
    ask("PUT", "/s/k", b"yes")
    assert given == [Answer(200, b"yes")]
    assert store.waiting == 0


def test_a_long_poll_that_is_called_off_leaves_nothing(ask, store):
    call_off = ask("GET", "/-/get/s/k?wait=2").begin(pytest.fail)
    assert store.waiting == 1
    call_off()
    assert store.waiting == 0
    ask("PUT", "/s/k", b"v")


def test_a_wait_has_an_upper_bound(ask):
    assert ask("GET", "/-/get/s/k?wait=999999999").timeout == MAX_WAIT


@pytest.mark.parametrize(
    "query",
    ["wait", "wait=", "wait=-1", "wait=nan", "wait=inf", "wait=1e3", "wait=1_0", "wait=1.", "wait=.5", "wait=1&wait=2", "x=1",
     "wait=1&x=2", "wait=9999999999", "wait=%31", "wait= 1", "WAIT=1"],
)  # fmt: skip
def test_a_query_that_is_not_understood_is_400(ask, query):
    assert ask("GET", f"/-/get/s/k?{query}").status == 400
