"""Bytes to requests: however they are cut, whatever is wrong with them, and how much of them there is."""

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvlaunch.rendezvous.serving.http import Answer, Head, RequestReader, render_head
from hvlaunch.rendezvous.serving.traffic import HttpLimits

LIMITS = HttpLimits(head=400, body=100)
PUT = b"PUT /s/k HTTP/1.1\r\nContent-Length: 3\r\nAuthorization: Bearer t\r\n\r\nabc"


def reader(limits=LIMITS, heads=None):
    """Every route answers with its body; POST is refused at its head."""

    def admit(head: Head):
        if heads is not None:
            heads.append(head)
        return Answer(405) if head.method in ("POST", "HEAD") else lambda body: Answer(200, body)

    return RequestReader(admit, limits)


def answers(reader):
    given = [(exchange.answer(), exchange.keep_alive) for exchange in reader.ready]
    return [(answer.status, answer.body, keep_alive) for answer, keep_alive in given]


PIPELINE = (
    b"PUT /s/k HTTP/1.1\r\nContent-Length: 3\r\nAuthorization: Bearer t\r\n\r\nabc"
    b"\r\n"
    b"GET /s/k?wait=1 HTTP/1.1\r\nHost: x\r\n\r\n"
    b"PUT /s/k HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nde\r\n1;ext=1\r\nf\r\n0\r\nAuthorization: Bearer u\r\n\r\n"
    b"POST /x HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello"
    b"DELETE /s/k HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    b"GET /last HTTP/1.0\r\n\r\n"
)
PIPELINE_ANSWERS = [
    (200, b"abc", True),
    (200, b"", True),
    (200, b"def", True),
    (405, b"", True),
    (200, b"", True),
    (200, b"", False),
]
PIPELINE_HEADS = [
    Head("PUT", b"/s/k", b"Bearer t"),
    Head("GET", b"/s/k?wait=1", b""),
    Head("PUT", b"/s/k", b""),
    Head("POST", b"/x", b""),
    Head("DELETE", b"/s/k", b""),
    Head("GET", b"/last", b""),
]


@given(st.lists(st.integers(0, len(PIPELINE)), max_size=30))
@settings(deadline=None)
def test_requests_are_the_same_however_the_bytes_are_cut(cuts):
    heads: list[Head] = []
    subject = reader(heads=heads)
    edges = [0, *sorted(cuts), len(PIPELINE)]
    for begin, end in pairwise(edges):
        subject.feed(PIPELINE[begin:end])
    assert answers(subject) == PIPELINE_ANSWERS
    assert heads == PIPELINE_HEADS


def test_byte_by_byte():
    subject = reader()
    for index in range(len(PIPELINE)):
        subject.feed(PIPELINE[index : index + 1])
    assert answers(subject) == PIPELINE_ANSWERS


def test_nothing_after_the_last_request_is_looked_at():
    subject = reader()
    subject.feed(b"GET /a HTTP/1.1\r\nConnection: close\r\n\r\nGET /b HTTP/1.1\r\n\r\n\0\0garbage")
    subject.feed(b"GET /c HTTP/1.1\r\n\r\n")
    assert answers(subject) == [(200, b"", False)]
    assert subject.ended


BROKEN = {
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03": 501,  # TLS: its first byte is no method's
    b"\0" * 50: 501,
    b"SSH-2.0-OpenSSH_9.2\r\n": 501,
    b"get /a/b HTTP/1.1\r\n\r\n": 501,
    b"BREW /a/b HTTP/1.1\r\n\r\n": 501,
    b"CONNECT a:1 HTTP/1.1\r\n\r\n": 501,
    b"PUT /a/b HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: x\r\nContent-Length: 3\r\n\r\nabc": 501,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": 400,
    b"GET /a/b\r\n\r\n": 505,
    b"GET /a/b HTTP/0.9\r\n\r\n": 505,
    b"GET /a/b HTTP/2.0\r\n\r\n": 505,
    b"GET /a/b HTTP/1.7\r\n\r\n": 400,
    b"GET /a/b HTTPS/1.1\r\n\r\n": 400,
    b"GET a/b HTTP/1.1\r\n\r\n": 400,
    b"GET /a/\xff HTTP/1.1\r\n\r\n": 400,
    b"GET /a b HTTP/1.1\r\n\r\n": 400,
    b"GET /a/b HTTP/1.1\nHost: x\n\n": 400,
    b"GET /a/b HTTP/1.1\r\nHost : x\r\n\r\n": 400,
    b"GET /a/b HTTP/1.1\r\n: x\r\n\r\n": 400,
    b"GET /a/b HTTP/1.1\r\nNo colon\r\n\r\n": 400,
    b"GET /a/b HTTP/1.1\r\nX: y\r\n folded\r\n\r\n": 400,
    b"GET /a/b HTTP/1.1\r\nX: \0\r\n\r\n": 400,
    b"GET /a/b HTTP/1.1\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n": 400,
    b"PUT /a/b HTTP/1.1\r\nContent-Length: \r\n\r\n": 400,
    b"PUT /a/b HTTP/1.1\r\nContent-Length: -1\r\n\r\n": 400,
    b"PUT /a/b HTTP/1.1\r\nContent-Length: +1\r\n\r\nx": 400,
    b"PUT /a/b HTTP/1.1\r\nContent-Length: 1_0\r\n\r\n": 400,
    b"PUT /a/b HTTP/1.1\r\nContent-Length: 0x1\r\n\r\n": 400,
    b"PUT /a/b HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n": 400,
    b"PUT /a/b HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx": 400,
    b"PUT /a/b HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": 400,
    b"PUT /a/b HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\nabc": 501,
    b"PUT /a/b HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n": 501,
    b"PUT /a/b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n": 400,
    b"PUT /a/b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n": 400,
    b"PUT /a/b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\na\r\n": 400,
    b"PUT /a/b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\na": 400,
}


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "byte by byte"])
@pytest.mark.parametrize(("request_", "status"), BROKEN.items())
def test_what_is_malformed_is_refused_and_ends_the_connection(request_, status, whole):
    subject = reader()
    subject.feed(b"GET /before HTTP/1.1\r\n\r\n")
    for piece in [request_] if whole else [bytes([byte]) for byte in request_]:
        subject.feed(piece)
    assert answers(subject) == [(200, b"", True), (status, b"", False)]
    assert subject.ended
    assert not subject.partial


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_no_bytes_crash_it_and_it_never_hoards(data):
    seeds = [PIPELINE, *BROKEN]
    stream = bytearray(b"".join(data.draw(st.lists(st.sampled_from(seeds), max_size=3))))
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(stream)))
        stream[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    subject = reader()
    step = data.draw(st.integers(1, 64))
    for begin in range(0, len(stream), step):
        subject.feed(bytes(stream[begin : begin + step]))
    statuses = [status for status, _, _ in answers(subject)]
    assert set(statuses) <= {200, 400, 405, 413, 431, 501, 505}
    assert [keep_alive for _, _, keep_alive in answers(subject)].count(False) == subject.ended


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 401,
        b"GET /a/b HTTP/1.1\r\n" + b"X: 12345\r\n" * 50,
        b"GET /a/b HTTP/1.1\r\nX: " + b"y" * 1000,
        b"GET /a/b HTTP/1.1\r\n" + b"X" * 1000,
        b"PUT /a/b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 1000,
        b"PUT /a/b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nTrailer: " + b"x" * 1000,
        b"PUT /a/b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"T: x\r\n" * 200,
        b"\r\n" * 500,
    ],
)
def test_a_head_without_end_is_refused_within_its_limit(head):
    subject = reader()
    fed = 0
    while not subject.ended:
        assert fed < len(head)
        subject.feed(head[fed : fed + 10])
        fed += 10
    assert answers(subject) == [(431, b"", False)]
    assert fed < 400 + 100


def test_a_head_as_large_as_the_limit_passes():
    request = b"GET /%s HTTP/1.1\r\nX: %s\r\n\r\n" % (b"a" * 100, b"y" * 294)
    subject = reader()
    subject.feed(request)
    assert answers(subject) == [(200, b"", True)]
    subject.feed(request.replace(b"X: ", b"X: y"))
    assert answers(subject)[1:] == [(431, b"", False)]


def test_a_body_of_many_small_chunks_is_no_head():
    subject = reader(HttpLimits(head=100, body=1000))
    for piece in [
        b"PUT /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        *[b"1\r\nx\r\n"] * 1000,
        b"0\r\n\r\n",
    ]:
        for byte in piece:
            subject.feed(bytes([byte]))
    assert answers(subject) == [(200, b"x" * 1000, True)]


def test_a_body_is_refused_as_soon_as_its_size_is_known():
    subject = reader()
    subject.feed(b"PUT /a/b HTTP/1.1\r\nContent-Length: 101\r\n\r\n")
    assert answers(subject) == [(413, b"", False)]


def test_chunks_are_refused_at_the_byte_too_many():
    subject = reader()
    subject.feed(b"PUT /a/b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n64\r\n" + b"x" * 100 + b"\r\n1\r\n")
    assert answers(subject) == []
    subject.feed(b"x")
    assert answers(subject) == [(413, b"", False)]


def test_the_refusal_of_a_head_comes_before_that_of_its_body():
    for request in (
        b"POST /a/b HTTP/1.1\r\nContent-Length: 101\r\n\r\n",
        b"POST /a/b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n65\r\n" + b"x" * 101,
        b"POST /a/b HTTP/1.1\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n",
    ):
        subject = reader()
        subject.feed(request)
        assert answers(subject) == [(405, b"", False)]


def test_no_byte_of_a_refused_body_is_kept():
    subject = reader()
    subject.feed(b"POST /a/b HTTP/1.1\r\nContent-Length: 100\r\n\r\n" + b"x" * 99)
    assert not subject._body
    subject.feed(b"x")
    assert answers(subject) == [(405, b"", True)]


@pytest.mark.parametrize(("version", "awaited"), [("1.1", True), ("1.0", False)])
def test_expect_100_continue(version, awaited):
    subject = reader()
    subject.feed(f"PUT /a HTTP/{version}\r\nContent-Length: 2\r\nExpect: 100-Continue\r\n".encode())
    assert not subject.awaits_continue
    subject.feed(b"\r\n")
    assert subject.awaits_continue == awaited
    subject.permit_body()
    assert not subject.awaits_continue
    subject.feed(b"ab")
    assert answers(subject) == [(200, b"ab", awaited)]


def test_a_fault_of_the_application_is_not_the_clients():
    def admit(head):
        raise ZeroDivisionError

    with pytest.raises(Exception) as caught:
        RequestReader(admit, LIMITS).feed(b"GET /a HTTP/1.1\r\n\r\n")
    assert isinstance(caught.value.__context__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("request_", "connection"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", None),
        (b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n", b"close"),
        (b"GET / HTTP/1.0\r\n\r\n", b"close"),
        (b"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", b"keep-alive"),
        (b"nonsense\r\n", b"close"),
    ],
)
def test_the_answer_says_what_becomes_of_the_connection(request_, connection):
    subject = reader()
    subject.feed(request_)
    head = render_head(subject.ready[0], Answer(200, b"abc"))
    lines = [
        b"HTTP/1.1 200 OK",
        *([b"Connection: " + connection] if connection else []),
        b"Content-Length: 3",
    ]
    assert head == b"\r\n".join([*lines, b"", b""])


def test_a_head_tells_the_peer():
    heads = []

    def not_there(head):
        heads.append(head)
        return Answer(404)

    subject = RequestReader(not_there, HttpLimits(), "10.0.0.1")
    subject.feed(b"GET /s/k HTTP/1.1\r\n\r\n")
    assert heads == [Head("GET", b"/s/k", b"", "10.0.0.1")]


def test_a_body_of_tiny_chunks_costs_no_more_than_its_bytes():
    subject = reader(HttpLimits(head=400, body=1 << 20))
    subject.feed(b"PUT /s/k HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunks = b"2\r\nab\r\n" * 1000
    tracemalloc.start()
    for _ in range(200):
        subject.feed(chunks)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 2 * 400_000
    subject.feed(b"0\r\n\r\n")
    assert answers(subject) == [(200, b"ab" * 200_000, True)]


def test_what_is_asked_for_is_done_when_its_turn_comes_and_not_before():
    done = []

    def route(body):
        done.append(body)
        return Answer(200)

    requests = RequestReader(lambda _: route, LIMITS)
    requests.feed(2 * PUT)
    assert done == []
    for exchange in requests.ready:
        assert exchange.answer() == Answer(200)
    assert done == [b"abc", b"abc"]
