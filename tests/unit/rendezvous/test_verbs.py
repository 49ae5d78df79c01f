"""hvlaunch's own verbs as HTTP has them: what each takes, what it answers, and what it refuses."""

import json

import pytest

from hvlaunch.rendezvous.serving.http import Answer, Head, Later
from hvlaunch.rendezvous.serving.routes import MAX_WAIT, Routes
from hvlaunch.rendezvous.store import Store, StoreLimits
from tests.unit.rendezvous.wire import TOKEN

FIRST = 1000
VERBS = {
    "GET": ["health", "get/s/k", "read/s/k", "keys/s", "count/s", "watch/s", "watch/s/k"],
    "POST": ["check/s", "get-many/s", "put-many/s", "add/s/k", "append/s/k", "compare/s/k", "delete/s/k"],
    "DELETE": ["scope/s"],
}
EACH = [(method, path) for method, paths in VERBS.items() for path in paths]


@pytest.fixture
def store():
    return Store(StoreLimits(value=10, keys=3, deletions=2, waiting=2), version=FIRST)


@pytest.fixture
def ask(store):
    """ask(method, path behind /-/, body): the answer of routes over `store`."""
    routes = Routes(
        store,
        token=TOKEN,
        about={"health": lambda: Answer(200, b"well")},
    )

    def ask_routes(method, path, body=b"", *, token=TOKEN):
        outcome = routes(Head(method, f"/-/{path}".encode(), f"Bearer {token}".encode()))
        return outcome if isinstance(outcome, Answer) else outcome(body)

    return ask_routes


def etag(version):
    return b'ETag: "%d"\r\n' % version


@pytest.mark.parametrize(("method", "path"), EACH)
def test_each_has_one_method(ask, store, method, path):
    for other in {"GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH"} - {method}:
        answer = ask(other, path)
        assert answer.status == 405
        assert answer.headers == f"Allow: {method}\r\n".encode()
    assert store.version == FIRST


@pytest.mark.parametrize(("method", "path"), EACH)
def test_each_needs_the_token(ask, store, method, path):
    assert ask(method, path, token="wrong").status == 401
    assert store.version == FIRST


@pytest.mark.parametrize(("method", "path"), EACH)
def test_each_has_its_path_and_options(ask, store, method, path):
    names = path.split("/")[1:]
    about_keys = 400 if names else 404
    assert ask(method, f"{path}/more/and/more").status == about_keys
    assert ask(method, f"{path}?x=1").status == 400
    assert ask(method, f"{path}?").status in (200, 400, 404)
    if names:
        assert ask(method, path.split("/")[0]).status == 400
        assert ask(method, path.replace("/s", "/-")).status == 400
    assert store.version in (FIRST, FIRST + 1)  # an append of nothing sets the key


def test_the_server_tells_about_itself(ask):
    assert ask("GET", "health") == Answer(200, b"well")


def test_read(ask, store):
    assert ask("GET", "read/s/k") == Answer(404, b"", etag(0))
    store.put("s", "k", b"v")
    assert ask("GET", "read/s/k") == Answer(200, b"v", etag(FIRST + 1))


def test_compare(ask, store):
    assert ask("POST", "compare/s/k?version=0", b"1") == Answer(200, b"", etag(FIRST + 1))
    assert ask("POST", "compare/s/k?version=0", b"2") == Answer(412, b"1", etag(FIRST + 1))
    assert ask("POST", f"compare/s/k?version={FIRST + 1}", b"2") == Answer(200, b"", etag(FIRST + 2))
    store.delete("s", "k")
    assert ask("POST", f"compare/s/k?version={FIRST + 2}", b"3") == Answer(412, b"", etag(0))
    assert ask("POST", "compare/s/k", b"3").status == 400
    assert ask("POST", "compare/s/k?version=0", b"x" * 11).status == 413


@pytest.mark.parametrize("body", [b"", b"x", b"1.0", b"1 ", b"--1", b"1" * 20, "١".encode()])
def test_an_amount_is_a_decimal_number(ask, store, body):
    assert ask("POST", "add/s/k", body).status == 400
    assert store.keys == 0


def test_add(ask, store):
    assert ask("POST", "add/s/k", b"+5") == Answer(200, b"5")
    assert ask("POST", "add/s/k", b"-07") == Answer(200, b"-2")
    assert store.get("s", "k") == b"-2"
    store.put("s", "k", b"five")
    assert ask("POST", "add/s/k", b"1") == Answer(409, b"s/k: the value is not a number\n")
    assert ask("POST", "add/s/huge", b"9" * 19).status == 409


def test_append(ask, store):
    assert ask("POST", "append/s/k", b"12345") == Answer(200)
    assert ask("POST", "append/s/k", b"67890") == Answer(200)
    assert ask("POST", "append/s/k", b"1").status == 413
    assert store.get("s", "k") == b"1234567890"


def test_delete_and_delete_scope(ask, store):
    store.put("s", "a", b"")
    store.put("s", "b", b"")
    store.put("t", "a", b"")
    assert ask("POST", "delete/s/a") == Answer(200)
    assert ask("POST", "delete/s/a") == Answer(404)
    assert ask("DELETE", "scope/s") == Answer(200)
    assert ask("DELETE", "scope/s") == Answer(200)
    assert (store.keys, store.scopes()) == (1, ["t"])


def test_keys_and_count(ask, store):
    assert ask("GET", "keys/s") == Answer(200, b"[]\n")
    store.put("s", "ä", b"")
    store.put("s", "b", b"")
    assert json.loads(ask("GET", "keys/s").body) == ["b", "ä"]
    assert ask("GET", "count/s") == Answer(200, b"2")


def test_many(ask, store):
    assert ask("POST", "put-many/s", b'[["a",2],["\\u00e4",0]]\n\n\0') == Answer(200)
    assert store.get("s", "a") == b"\n\0"
    assert ask("POST", "get-many/s", '["ä", "x", "a"]'.encode()) == Answer(200, b"[0,null,2]\n\n\0")
    assert ask("POST", "put-many/s", b"[]\n") == Answer(200)
    assert ask("POST", "put-many/s", b'[["b",1],["c",1]]\nbc').status == 507
    assert ask("POST", "put-many/s", b'[["b",11]]\n12345678901').status == 413
    assert store.keys_of("s") == ["a", "ä"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\n", b"[]", b"x\n", b"{}x\n", b"1\n", b"null\n", b"[1]\n", b'["ab"]\n', b'[["a"]]\n', b'[["a",1,1]]\n1', b'[["a",1]]\n',
        b'[["a",1]]\n12', b'[["a",-1]]\n', b'[["a",null]]\n', b'[["a",true]]\n1', b'[["a",1.0]]\n1', b'[["a","1"]]\n1', b"[[1,1]]\n1",
        b'[["",1]]\n1', b'[["\\ud800",1]]\n1', b"[" * 100_000 + b"\n", b"\xff\n", b'[["a",99999999999999999999]]\n1', b"9" * 5000 + b"\n",
    ],
)  # fmt: skip
def test_what_is_no_batch_is_400(ask, store, body):
    assert ask("POST", "put-many/s", body).status == 400
    assert store.keys == 0


@pytest.mark.parametrize(
    "body", [b"", b"x", b"{}", b'"a"', b"1", b"null", b"[1]", b'[""]', b'["a",null]', b'["\\ud800"]', b"[" * 100_000, b"\xff"]
)  # fmt: skip
def test_what_is_no_list_of_keys_is_400(ask, body):
    assert ask("POST", "get-many/s", body).status == 400
    assert ask("POST", "check/s?wait=1", body).status == 400


def test_one_answer_has_a_bound(ask, store):
    store.limits = StoreLimits()
    store.put("s", "k", b"x" * (16 << 20))
    assert ask("POST", "get-many/s", b'["k","k","k","k"]').status == 200
    assert ask("POST", "get-many/s", b'["k","k","k","k","k"]').status == 413
    keys = json.dumps(["k" * 1000] * 1100).encode()
    assert ask("POST", "get-many/s", keys).status == 413
    assert ask("POST", "check/s", keys).status == 413
    head = json.dumps([["k" * 1000, 0]] * 1100).encode()
    assert ask("POST", "put-many/s", head + b"\n").status == 413
    assert ask("POST", "put-many/s", b'[["k",2000000]]\n' + b"\0" * 2_000_000).status == 200


def test_check(ask, store):
    store.put("s", "a", b"")
    assert ask("POST", "check/s", b"[]") == Answer(200)
    assert ask("POST", "check/s", b'["a"]') == Answer(200)
    assert ask("POST", "check/s", b'["a","b"]') == Answer(404)


def test_check_waits_for_all(ask, store):
    given: list[Answer] = []
    later = ask("POST", "check/s?wait=2", b'["a","b"]')
    assert isinstance(later, Later)
    assert (later.timeout, later.late) == (2.0, Answer(404))
    later.begin(given.append)
    for key in ("b", "other"):
        store.put("s", key, b"")
    assert (given, store.waiting) == ([], 1)
    store.delete("s", "b")
    store.put("s", "a", b"")
    assert (given, store.waiting) == ([], 1)
    store.put("s", "b", b"")
    assert (given, store.waiting) == ([Answer(200)], 0)


def test_check_that_is_called_off_leaves_nothing(ask, store):
    call_off = ask("POST", "check/s?wait=2", b'["a","b"]').begin(pytest.fail)
    store.put("s", "a", b"")
    call_off()
    assert store.waiting == 0
    store.put("s", "b", b"")


def batch(answer):
    head, _, data = answer.body.partition(b"\n")
    return json.loads(head), data


def test_watch_from_nothing(ask, store):
    assert ask("GET", "watch/s") == Answer(404, b"", etag(FIRST))
    store.put("s", "a", b"1")
    store.put("s", "b", b"")
    head = {"version": FIRST + 2, "complete": True, "keys": [["a", 1], ["b", 0]]}
    assert batch(ask("GET", "watch/s")) == (head, b"1")
    assert batch(ask("GET", "watch/s?since=0")) == (head, b"1")


def test_watch_of_what_changed(ask, store):
    for key in ("a", "b", "c"):
        store.put("s", key, b"1")
    store.put("s", "a", b"2")
    store.delete("s", "b")
    assert batch(ask("GET", f"watch/s?since={FIRST + 3}")) == (
        {"version": FIRST + 5, "complete": False, "keys": [["b", None], ["a", 1]]},
        b"2",
    )
    assert ask("GET", f"watch/s?since={FIRST + 5}").status == 404
    assert batch(ask("GET", f"watch/s/b?since={FIRST + 3}"))[0]["keys"] == [["b", None]]
    assert ask("GET", f"watch/s/c?since={FIRST + 3}").status == 404
    assert ask("GET", "watch/s/b").status == 404


def test_watch_waits_for_a_change(ask, store):
    given: list[Answer] = []
    later = ask("GET", "watch/s?wait=999")
    assert (later.timeout, later.late) == (MAX_WAIT, Answer(404, b"", etag(FIRST)))
    later.begin(given.append)
    store.put("t", "k", b"")
    assert given == []
    store.put_many("s", {"a": b"1", "b": b"2"})
    assert batch(*given)[0]["keys"] == [["a", 1], ["b", 1]]
    assert store.waiting == 0


def test_who_knows_nothing_hears_of_no_deletion(ask, store):
    given: list[Answer] = []
    store.put("s", "k", b"")
    store.delete("s", "k")
    call_off = ask("GET", "watch/s/k?wait=1").begin(given.append)
    store.put("s", "other", b"")
    store.delete("s", "other")
    assert (given, store.waiting) == ([], 1)
    call_off()
    assert store.waiting == 0


def test_who_missed_forgotten_deletions_is_told_everything(ask, store):
    for number in range(3):
        store.put("s", "k", b"%d" % number)
        store.delete("s", "k")
    assert batch(ask("GET", f"watch/s?since={FIRST + 1}")) == (
        {"version": FIRST + 6, "complete": True, "keys": []},
        b"",
    )
    assert batch(ask("GET", f"watch/s/k?since={FIRST + 1}"))[0]["keys"] == [["k", None]]
    assert batch(ask("GET", f"watch/s?since={FIRST + 2}"))[0] == {
        "version": FIRST + 6, "complete": False, "keys": [["k", None]],
    }  # fmt: skip


def test_who_comes_from_another_server_is_told_everything(ask, store):
    store.put("s", "k", b"v")
    for since in (FIRST - 500, FIRST + 500):
        assert batch(ask("GET", f"watch/s?since={since}"))[0]["complete"]
        assert batch(ask("GET", f"watch/s/k?since={since}"))[1] == b"v"


def test_not_too_many_may_wait(ask, store):
    for _ in range(2):
        ask("GET", "get/s/k?wait=1").begin(lambda answer: None)
    for method, path in (("GET", "get/s/k?wait=1"), ("GET", "watch/s?wait=1")):
        assert ask(method, path).status == 507
    assert ask("POST", "check/s?wait=1", b'["k"]').status == 507
    store.put("s", "k", b"")
    assert ask("POST", "check/s?wait=1", b'["a","b","c"]').status == 507
    ask("POST", "check/s?wait=1", b'["a","b"]').begin(lambda answer: None)
    assert ask("GET", "get/s/absent?wait=1").status == 507
    store.put("s", "a", b"")
    assert ask("GET", "get/s/absent?wait=1").status == 507
    store.put("s", "b", b"")
    assert isinstance(ask("POST", "check/s?wait=1", b'["a","c"]'), Later)
    store.delete("s", "k")
    assert ask("GET", "get/s/k").status == 404


@pytest.mark.parametrize(
    "query",
    ["id=", "id=a/b", f"id={'x' * 65}", "id=1&id=1", "wait=1", "id=%31", "since=1", "id", "version=0"],
)
def test_options_are_strict(ask, query):
    assert ask("POST", f"add/s/k?{query}", b"1").status == 400


def test_a_request_with_an_id_is_done_once(ask, store):
    for _ in range(3):
        assert ask("POST", "add/s/n?id=a", b"5") == Answer(200, b"5")
        assert ask("POST", "append/s/a?id=b", b"x") == Answer(200)
    assert ask("POST", "compare/s/c?version=0&id=c", b"1") == ask("POST", "compare/s/c?id=c&version=0", b"1")
    assert ask("POST", "delete/s/c?id=d") == ask("POST", "delete/s/c?id=d") == Answer(200)
    assert (store.get("s", "n"), store.get("s", "a"), store.get("s", "c")) == (b"5", b"x", None)


def test_what_was_refused_is_tried_again(ask, store):
    store.put("s", "k", b"text")
    assert ask("POST", "add/s/k?id=a", b"1").status == 409
    assert ask("POST", "compare/s/k?version=0&id=b", b"1").status == 412
    store.delete("s", "k")
    assert ask("POST", "compare/s/k?version=0&id=b", b"1").status == 200
    assert ask("POST", "add/s/k?id=a", b"1") == Answer(200, b"2")
