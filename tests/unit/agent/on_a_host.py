"""Runs on any Python that a host may have, 3.8 included: what the agent takes of CPython's privates does its work there.

`on_a_host.py ROOT`, where ROOT has hvlaunch; stdin has JSON values, one a line. Prints a JSON object: whether
the quick ways are the ones that were taken.
"""

import json
import socket
import sys

sys.path.insert(0, sys.argv[1])

from hvlaunch.agent import quick
from hvlaunch.agent.wire.frames import END, HEAD, Decoder, PieceWriter, encode

PR_SET_CHILD_SUBREAPER = 36
BROKEN = ("", " ", "nul", "{", '{"a":}', "[1", '"a', "1 2", "NaN", "-Infinity", "{}x", '{"a" 1}', "\x00")


def refuses(error, call, *args):
    try:
        call(*args)
    except error:
        return True
    return False


def check_json(values):
    for value in values:
        text = quick.dumps(value)
        assert text == json.dumps(value, separators=(",", ":")), text
        assert quick.loads(text) == quick.loads(json.dumps(value)) == value, value
    for text in BROKEN:
        assert refuses(ValueError, quick.loads, text), text
    assert refuses(RecursionError, quick.loads, "[" * 1_000_000)
    assert refuses(TypeError, quick.dumps, {"a": b"bytes"})


def check_frames(values):
    frames = [({"type": "x", "value": value}, b"\n" * size) for size, value in enumerate(values)]
    pieces = PieceWriter().cut(b"".join(encode(*frame) for frame in frames))
    # The driver's reader of pieces needs a newer Python; test_pieces.py tests it.
    data = b"".join(piece[HEAD.size : -len(END)] for piece in pieces)
    for step in (1, 7, len(data)):
        back = frames[:0]
        decoder = Decoder()
        for start in range(0, len(data), step):
            back += decoder.feed(data[start : start + step])
        assert back == frames, step


def check_sockets():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        raw = quick.socket.socket(fileno=listener.detach())
        client = socket.create_connection(raw.getsockname())
        connection = quick.accept(raw)
        heard = []
        watch = quick.Selector()
        watch.register(connection, quick.READ, lambda: heard.append(connection.recv(5)))
        client.sendall(b"hello")
        for call, _ in watch.select(30):
            call()
        assert heard == [b"hello"], heard
        for end in (client, connection, raw):
            end.close()


def check_process():
    assert quick.signal_name(15) == "SIGTERM"
    assert quick.signal_name(200) == "signal 200"
    assert quick.prctl(PR_SET_CHILD_SUBREAPER, 1) is None
    assert quick.prctl(-1, 0) == "prctl: Invalid argument"


def check_mac():
    digest = "f7bc83f430538424b13298e6aa6fb143ef4d59a14946175997479dbc2d1a3cd8"
    assert quick.mac(b"key", b"The quick brown fox jumps over the lazy dog").hex() == digest


values = [json.loads(line) for line in sys.stdin]
check_json(values)
check_frames(values)
check_sockets()
check_process()
check_mac()
taken = {
    "json": not hasattr(quick, "json"),
    "signal": quick.signal.__name__ == "_signal",
    "sha256": "_hashlib" not in sys.modules,
    "socket": quick.socket.__name__ == "_socket",
}
sys.stdout.write(json.dumps(taken))
