"""The quick halves of json, signal and socket do what the whole ones do."""

import json
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlaunch.agent import quick

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(VALUES)
def test_json_is_what_the_whole_module_makes_and_reads(value: object) -> None:
    text = quick.dumps(value)
    assert text == json.dumps(value, separators=(",", ":"))
    assert quick.loads(text) == value
    assert quick.loads(json.dumps(value)) == value


@pytest.mark.parametrize(
    "text", ["", " ", "nul", "{", '{"a":}', "[1", '"a', "1 2", "NaN", "-Infinity", "{}x", '{"a" 1}', "\x00"]
)
def test_what_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        quick.loads(text)


def test_what_json_has_no_words_for_is_refused() -> None:
    with pytest.raises(TypeError, match="no JSON for"):
        quick.dumps({"a": b"bytes"})


def test_what_is_nested_without_end_is_a_recursion_error() -> None:
    with pytest.raises(RecursionError):
        quick.loads("[" * 1_000_000)


@pytest.mark.parametrize(
    "json_below",
    ["None", "type(sys)('_json')", "type('_json', (), dict.fromkeys(JSON_HAS, staticmethod(lambda: None)))"],
    ids=["missing", "without what we need", "other arguments"],
)
def test_another_python_has_the_whole_modules(json_below: str) -> None:
    program = (
        "import sys\n"
        "JSON_HAS = ['make_encoder', 'make_scanner', 'encode_basestring_ascii']\n"
        "sys.modules['_socket'] = sys.modules['_signal'] = None\n"
        "sys.modules['signal'] = sys.modules['socket'] = sys\n"  # they are made of those two
        f"import json; sys.modules['_json'] = {json_below}\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[3])!r})\n"
        "from hvlaunch.agent import quick\n"
        "assert quick.signal is quick.socket is sys and quick.json is json\n"
        "assert quick.loads(quick.dumps({'a': [1, None]})) == {'a': [1, None]}\n"
        "assert quick.dumps([1, 2]) == '[1,2]'\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_accepted_connection_is_a_socket() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        closing(quick.accept(listener)) as connection,
    ):
        client.sendall(b"hello")
        assert connection.recv(5) == b"hello"


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (15, "SIGTERM"), (200, "signal 200")])
def test_signals_have_names(number: int, name: str) -> None:
    assert quick.signal_name(number) == name
