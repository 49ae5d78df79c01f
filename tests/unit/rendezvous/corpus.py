"""Broken and hostile requests, and what the server answers to each before it hangs up or the client does.

The token is right wherever one can be, so that it is not the 401 that saves the server. The fuzzer starts from
these: benchmarks/fuzz_rendezvous.py.
"""

from tests.unit.rendezvous.wire import AUTH, get, put

__all__ = ["HOSTILE", "VALID"]

GET = b"GET /s/k HTTP/1.1\r\n"
PUT = b"PUT /s/k HTTP/1.1\r\n"
NEXT = get("/s/smuggled")
CHUNKED = b"Transfer-Encoding: chunked\r\n"


def length(size: int | bytes) -> bytes:
    return b"Content-Length: %b\r\n" % (b"%d" % size if isinstance(size, int) else size)


def post(path: str, body: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\n" % path.encode() + AUTH + length(len(body)) + b"\r\n" + body


def chunked(body: bytes) -> bytes:
    return PUT + AUTH + CHUNKED + b"\r\n" + body


def with_line(line: bytes) -> bytes:
    return GET + AUTH + line + b"\r\n\r\n"


HOSTILE: dict[str, tuple[bytes, list[int]]] = {
    # Not HTTP/1
    "nothing": (b"", []),
    "NULs": (b"\0" * 100, [501]),
    "newlines": (b"\r\n" * 5000, [431]),
    "a TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)), [501]),
    "an HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x12\x04\0\0\0\0\0", [400]),
    "SSH": (b"SSH-2.0-OpenSSH_9.2\r\n", [501]),
    "a TCPStore client": (b"\x00\xce\xf7\x85<\r\x98\\\x00\x00\x06\x01\x00\x00", [501]),
    "SOCKS": (b"\x05\x01\x00", [501]),
    "HTTP/0.9": (b"GET /s/k\r\n", []),
    "HTTP/1.9": (b"GET /s/k HTTP/1.9\r\n\r\n", [400]),
    "HTTP/11.1": (b"GET /s/k HTTP/11.1\r\n\r\n", [400]),
    "an answer": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", [501]),
    "a proxy header": (b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n" + get("/s/k"), [501]),
    # Request lines
    "no method": (b" /s/k HTTP/1.1\r\n\r\n", [501]),
    "an unknown method": (b"BREW /s/k HTTP/1.1\r\n" + AUTH + b"\r\n", [501]),
    "a small method": (b"get /s/k HTTP/1.1\r\n" + AUTH + b"\r\n", [501]),
    "a long method": (b"G" * 100_000, [501]),
    "CONNECT": (b"CONNECT x:1 HTTP/1.1\r\n" + AUTH + b"\r\n", [501]),
    "TRACE": (b"TRACE /s/k HTTP/1.1\r\n" + AUTH + b"\r\n", [405]),
    "a star": (b"OPTIONS * HTTP/1.1\r\n" + AUTH + b"\r\n", [400]),
    "absolute form": (get("http://elsewhere/s/k"), [400]),
    "absolute form of something else": (get("file:///etc/passwd"), [400]),
    "authority form": (get("elsewhere:80"), [400]),
    "two spaces": (b"GET  /s/k  HTTP/1.1\r\n" + AUTH + b"\r\n", [404]),
    "a space in the path": (get("/s/k k"), [400]),
    "a tab in the path": (get("/s/\tk"), [400]),
    "a NUL in the path": (get("/s/\0k"), [400]),
    "high bytes in the path": (b"GET /s/\xff\xfe HTTP/1.1\r\n" + AUTH + b"\r\n", [400]),
    "a fragment": (get("/s/k#f"), [400]),
    "no scope": (get("//k"), [400]),
    "no key": (get("/s/"), [400]),
    "only a slash": (get("/"), [400]),
    "three components": (get("/s/k/k"), [400]),
    "upwards": (get("/s/k/../../etc/passwd"), [400]),
    "a query where none belongs": (get("/s/k?wait=1"), [400]),
    "a long path": (get("/s/" + "k" * 100_000), [431]),
    "bare percent": (get("/s/%"), [400]),
    "half percent": (get("/s/%4"), [400]),
    "percent, not hex": (get("/s/%zz"), [400]),
    "percent, no UTF-8": (get("/s/%ff"), [400]),
    "percent, a surrogate": (get("/s/%ed%a0%80"), [400]),
    "percent, overlong": (get("/s/%c0%af"), [400]),
    "percent, a slash": (get("/s/%2F"), [404]),
    "percent, CR LF": (get("/s/%0d%0aX:%20y"), [404]),
    "percent, NUL": (get("/s/%00"), [404]),
    "percent, the verbs' scope": (get("/%2d/health"), [200]),
    "only CR": (b"GET /s/k HTTP/1.1\rHost: x\r\r", [400]),
    "only LF": (b"GET /s/k HTTP/1.1\nHost: x\n\n", [400]),
    # Header fields
    "many fields": (GET + AUTH + b"X: y\r\n" * 10_000 + b"\r\n", [431]),
    "a long field": (with_line(b"X: " + b"y" * 100_000), [431]),
    "a long name": (with_line(b"X" * 100_000 + b": y"), [431]),
    "a field without an end": (GET + b"X: " + b"y" * 600_000, [431]),
    "a folded field": (with_line(b"X: y\r\n z"), [400]),
    "a space before the colon": (with_line(b"Host : x"), [400]),
    "no colon": (with_line(b"Host"), [400]),
    "no name": (with_line(b": x"), [400]),
    "a NUL in a field": (with_line(b"X: \0"), [400]),
    "a NUL in a name": (with_line(b"X\0: y"), [400]),
    "a CR in a field": (with_line(b"X: y\rz"), [400]),
    "two tokens": (with_line(AUTH.strip()), [400]),
    "no token in the field": (GET + b"Authorization: Bearer\r\n\r\n", [401]),
    "another scheme": (GET + b"Authorization: Basic dXNlcjpwYXNz\r\n\r\n", [401]),
    "high bytes in the token": (GET + b"Authorization: Bearer \xff\xfe\r\n\r\n", [401]),
    "an upgrade": (with_line(b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA=="), [501]),
    "an upgrade to HTTP/2": (
        with_line(b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk"),
        [501],
    ),
    # Lengths
    "no length": (PUT + AUTH + b"\r\nbody", [200, 501]),
    "an empty length": (PUT + AUTH + length(b"") + b"\r\n", [400]),
    "a negative length": (PUT + AUTH + length(-1) + b"\r\n", [400]),
    "a signed length": (PUT + AUTH + length(b"+1") + b"\r\nx", [400]),
    "a hexadecimal length": (PUT + AUTH + length(b"0x1") + b"\r\nx", [400]),
    "a length with an underscore": (PUT + AUTH + length(b"1_0") + b"\r\n" + b"x" * 10, [400]),
    "a length with a fraction": (PUT + AUTH + length(b"1.0") + b"\r\nx", [400]),
    "a length in other digits": (PUT + AUTH + length("٣".encode()) + b"\r\nxxx", [400]),
    "a list of lengths": (PUT + AUTH + length(b"1, 1") + b"\r\nx", [400]),
    "two lengths": (PUT + AUTH + length(1) + length(1) + b"\r\nx", [400]),
    "two lengths that differ": (PUT + AUTH + length(0) + length(len(NEXT)) + b"\r\n" + NEXT, [400]),
    "a huge length": (PUT + AUTH + length(10**18) + b"\r\n", [413]),
    "a length beyond 64 bits": (PUT + AUTH + length(2**64) + b"\r\n", [400]),
    "a length of many digits": (PUT + AUTH + length(b"9" * 5000) + b"\r\n", [400]),
    "a length and chunks": (PUT + AUTH + length(4) + CHUNKED + b"\r\n0\r\n\r\n" + NEXT, [400]),
    "chunks and a length": (PUT + AUTH + CHUNKED + length(4) + b"\r\n0\r\n\r\n" + NEXT, [400]),
    "a body too short": (PUT + AUTH + length(10) + b"\r\nx", []),
    "a continue that never goes on": (PUT + AUTH + length(10) + b"Expect: 100-continue\r\n\r\n", [100]),
    "a strange expectation": (PUT + AUTH + length(1) + b"Expect: miracles\r\n\r\nx", [200]),
    # Chunks
    "chunked, but not": (PUT + AUTH + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + NEXT, [501]),
    "chunked twice": (PUT + AUTH + CHUNKED * 2 + b"\r\n0\r\n\r\n" + NEXT, [400]),
    "chunked, then identity": (
        PUT + AUTH + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + NEXT,
        [400],
    ),
    "gzip, then chunked": (PUT + AUTH + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + NEXT, [501]),
    "chunked by a tab": (PUT + AUTH + b"Transfer-Encoding:\tchunked\r\n\r\n0\r\n\r\n", [200]),
    "chunked by HTTP/1.0": (b"PUT /s/k HTTP/1.0\r\n" + AUTH + CHUNKED + b"\r\n0\r\n\r\n" + NEXT, [200]),
    "a chunk of no size": (chunked(b"\r\nx\r\n"), [400]),
    "a chunk of a negative size": (chunked(b"-1\r\nx\r\n"), [400]),
    "a chunk of 0x": (chunked(b"0x1\r\nx\r\n0\r\n\r\n"), [400]),
    "a chunk of a huge size": (chunked(b"ffffffffffffffff\r\nx"), []),
    "a chunk beyond 64 bits": (chunked(b"1" + b"0" * 16 + b"\r\nx"), [400]),
    "a chunk longer than it says": (chunked(b"1\r\nxyz\r\n0\r\n\r\n"), [400]),
    "a chunk with a long extension": (chunked(b"1;" + b"x" * 600_000), [431]),
    "a chunk with a quoted newline": (chunked(b'1;x="\r\n0\r\n\r\n"\r\n'), [400]),
    "chunks by LF": (chunked(b"1\nx\n0\n\n"), [400]),
    "zeros without end": (chunked(b"0" * 600_000), [431]),
    "a long trailer": (chunked(b"0\r\nX: " + b"y" * 600_000), [431]),
    "many trailers": (chunked(b"0\r\n" + b"X: y\r\n" * 100_000), [431]),
    "a trailer that would be a token": (
        PUT + CHUNKED + b"\r\n1\r\nx\r\n0\r\n" + AUTH + b"\r\n",
        [401],
    ),
    "many small chunks": (chunked(b"1\r\nx\r\n" * 5000), []),
    # Pipelines
    "something after a close": (GET + AUTH + b"Connection: close\r\n\r\n" + NEXT, [404]),
    "garbage after a request": (get("/s/k") + b"\0\xff\r\n", [404, 501]),
    "a body of GET": (GET + AUTH + length(len(NEXT)) + b"\r\n" + NEXT, [404]),
    "a HEAD with a body": (b"HEAD /s/k HTTP/1.1\r\n" + AUTH + length(3) + b"\r\nabc" + NEXT, [405, 200]),
    "a body of what is refused": (
        b"POST /s/k HTTP/1.1\r\n" + AUTH + length(len(NEXT)) + b"\r\n" + NEXT,
        [405],
    ),
    "a body without a token": (PUT + length(len(NEXT)) + b"\r\n" + NEXT, [401]),
    "a pipeline behind a long poll": (get("/-/get/s/k?wait=60") + NEXT * 100, [404, *[200] * 100]),
    # Verbs
    "no verb": (get("/-/"), [400]),
    "an unknown verb": (get("/-/format"), [404]),
    "a verb's scope as a value": (put("/-/k", b"x"), [404]),
    "a wait that is no number": (get("/-/get/s/k?wait=nan"), [400]),
    "an endless wait": (get("/-/get/s/k?wait=inf"), [400]),
    "a wait of many digits": (get("/-/get/s/k?wait=" + "9" * 4000), [400]),
    "a wait twice": (get("/-/get/s/k?wait=1&wait=2"), [400]),
    "the verbs' scope as a scope": (get("/-/get/-/k"), [400]),
    "an amount that is no number": (post("/-/add/s/n", b"one"), [400]),
    "an amount of many digits": (post("/-/add/s/n", b"9" * 10_000), [400]),
    "an amount beyond 64 bits": (post("/-/add/s/n", b"9223372036854775808"), [409]),
    "a version that is none": (post("/-/compare/s/k?version=x", b""), [400]),
    "an id that is too long": (post("/-/add/s/n?id=" + "x" * 65, b"1"), [400]),
    "a batch of garbage": (post("/-/put-many/s", b"\xff\xfe\n"), [400]),
    "a batch without a head": (post("/-/put-many/s", b"[]"), [400]),
    "a batch with too little": (post("/-/put-many/s", b'[["k",5]]\nabc'), [400]),
    "a batch with too much": (post("/-/put-many/s", b'[["k",1]]\nabc'), [400]),
    "a batch of negative sizes": (post("/-/put-many/s", b'[["k",-1],["l",2]]\na'), [400]),
    "a batch of true sizes": (post("/-/put-many/s", b'[["k",true]]\na'), [400]),
    "a batch of numbers": (post("/-/put-many/s", b"[[1,1]]\na"), [400]),
    "a batch of an object": (post("/-/put-many/s", b'{"k":1}\na'), [400]),
    "a batch of nulls": (post("/-/put-many/s", b"[null]\na"), [400]),
    "a batch with a surrogate": (post("/-/put-many/s", b'[["\\ud800",1]]\na'), [400]),
    "a batch of depth": (post("/-/put-many/s", b"[" * 100_000 + b"\n"), [413]),
    "keys of depth": (post("/-/get-many/s", b"[" * 100_000), [413]),
    "keys of many digits": (post("/-/check/s", b"[" + b"9" * 100_000 + b"]"), [413]),
    "keys that are none": (post("/-/check/s", b'[1,{},null,""]'), [400]),
    "keys that are too many": (post("/-/check/s", b"[" + b'"k",' * 400_000 + b'"k"]'), [413]),
}
"""By name: the bytes of one connection, whose client then says that it has said all; the statuses of the answers."""

VALID = [
    get("/s/k"),
    put("/s/k", b"value"),
    b"DELETE /s/k HTTP/1.1\r\n" + AUTH + b"\r\n",
    chunked(b"5\r\nhello\r\n1;x=y\r\n \r\n0\r\nTrailer: x\r\n\r\n"),
    get("/-/get/s/k?wait=0.01"),
    get("/-/read/s/k"),
    get("/-/keys/s"),
    get("/-/count/s"),
    get("/-/watch/s?since=1&wait=0.01"),
    get("/-/watch/s/k?wait=0.01"),
    get("/-/health"),
    get("/-/health"),
    post("/-/check/s?wait=0.01", b'["k","l"]'),
    post("/-/get-many/s", b'["k","l"]'),
    post("/-/put-many/s", b'[["k",1],["l",2]]\nabb'),
    post("/-/add/s/n?id=one", b"7"),
    post("/-/append/s/k?id=two", b"more"),
    post("/-/compare/s/k?version=0&id=three", b"new"),
    post("/-/delete/s/k?id=four", b""),
    b"DELETE /-/scope/s HTTP/1.1\r\n" + AUTH + b"\r\n",
]
"""Requests of each kind, for the fuzzer to break."""
