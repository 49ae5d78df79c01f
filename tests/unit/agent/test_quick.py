"""The quick halves of json, signal and socket do what the whole ones do, on every Python that a host may have."""

import ast
import hmac
import json
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvlaunch
from hvlaunch.agent import quick
from tests.unit.agent.harness import interpreter

ROOT = Path(hvlaunch.__file__).parents[1]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(VALUES)
def test_json_equals_that_of_the_standard_module(value: object) -> None:
    text = quick.dumps(value)
    assert text == json.dumps(value, separators=(",", ":"))
    assert quick.loads(text) == value
    assert quick.loads(json.dumps(value)) == value


@pytest.mark.parametrize(
    "text", ["", " ", "nul", "{", '{"a":}', "[1", '"a', "1 2", "NaN", "-Infinity", "{}x", '{"a" 1}', "\x00"]
)
def test_broken_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        quick.loads(text)


def test_value_without_a_json_form_is_refused() -> None:
    with pytest.raises(TypeError, match="no JSON for"):
        quick.dumps({"a": b"bytes"})


def test_deep_nesting_is_a_recursion_error() -> None:
    with pytest.raises(RecursionError):
        quick.loads("[" * 1_000_000)


@pytest.mark.parametrize(
    "json_below",
    ["None", "type(sys)('_json')", "type('_json', (), dict.fromkeys(JSON_HAS, staticmethod(lambda: None)))"],
    ids=["missing", "without what we need", "other arguments"],
)
def test_python_without_private_names_uses_the_standard_modules(json_below: str) -> None:
    program = (
        "import sys\n"
        "JSON_HAS = ['make_encoder', 'make_scanner', 'encode_basestring_ascii']\n"
        "sys.modules['_socket'] = sys.modules['_signal'] = None\n"
        "sys.modules['signal'] = sys.modules['socket'] = sys\n"  # they are made of those two
        f"import json; sys.modules['_json'] = {json_below}\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from hvlaunch.agent import quick\n"
        "assert quick.signal is quick.socket is sys and quick.json is json\n"
        "assert quick.loads(quick.dumps({'a': [1, None]})) == {'a': [1, None]}\n"
        "assert quick.dumps([1, 2]) == '[1,2]'\n"
        "try: quick.loads('[NaN]')\n"
        "except ValueError: pass\n"
        "else: raise AssertionError('a NaN was read')\n"
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


@given(st.binary(max_size=200), st.binary())
def test_hmac_equals_that_of_the_standard_module(key: bytes, message: bytes) -> None:
    assert quick.mac(key, message) == hmac.digest(key, message, "sha256")


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (15, "SIGTERM"), (200, "signal 200")])
def test_signals_have_names(number: int, name: str) -> None:
    assert quick.signal_name(number) == name


def test_prctl_returns_the_error() -> None:
    assert quick.prctl(-1, 0) == "prctl: Invalid argument"


SOME_JSON = [None, True, -1, 1e300, "", "\x00\x7fé\u2028😀", [], {}, {"a": [1, {"": None}]}, [[["x"]]], 2**70]


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.15"])
def test_quick_replacements_work_on_every_supported_python(version: str) -> None:
    program = Path(__file__).with_name("on_a_host.py")
    done = subprocess.run(
        [interpreter(version), "-I", "-S", "-X", "utf8", str(program), str(ROOT)],
        input="\n".join(map(json.dumps, SOME_JSON)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"json": True, "signal": True, "sha256": True, "socket": True}


def private_names(module: Path) -> set[str]:
    """The names of others that begin with an underscore, and that it imports, or asks something else for."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            found.update([node.module or "", *names] if isinstance(node, ast.ImportFrom) else names)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") not in ("self", "cls", "os"):
            found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def test_private_names_of_cpython_are_only_in_quick() -> None:
    agent = ROOT / "hvlaunch" / "agent"
    found = {
        str(file.relative_to(agent)): private_names(file)
        for file in agent.rglob("*.py")
        if file.parent.name not in ("observer", "errands")
    }
    assert {"_json", "_socket", "_signal", "_collections", "_ctypes", "_accept"} <= found.pop("quick.py")
    assert found.pop("boot.py") == {"_frozen_importlib_external"}  # before anything can be imported
    assert found.pop("launched.py") == {"_frozen_importlib_external", "_socket"}  # as above
    assert {"_ssl", "_SSLContext", "_wrap_bio", "_hashlib", "_thread"} <= found.pop("wire/caller.py")
    assert found.pop("workers/local_ranks.py") == {"_frozen_importlib_external"}  # as boot.py
    for name in ("main.py", "wire/rejoin.py"):
        assert found.pop(name) == {"_thread"}, name  # which Python's documentation has
    assert {file: names for file, names in found.items() if names} == {}


NO_JSON = ['["\n"]', '["\\x"]', '["', '{"a', "[1,", '{"a":}', "{1:2}"]
WITHOUT_JSON = """
import sys
sys.path.append(sys.argv[1])
from hvlaunch.agent.quick import loads
assert "json" not in sys.modules
for text in sys.argv[2:]:
    try:
        loads(text)
    except ValueError:
        print("refused")
"""


def test_broken_json_is_a_value_error_without_the_standard_module() -> None:
    command = [sys.executable, "-I", "-S", "-c", WITHOUT_JSON, str(ROOT), *NO_JSON]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["refused"] * len(NO_JSON), "")
