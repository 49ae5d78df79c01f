"""Which jump hosts are on the way, and one connection for all who need it."""

import threading
from functools import partial

import pytest

from hvlaunch.errors import ConnectFailed, HostError, HostKeyUnknown, StartTimeout
from hvlaunch.job import Host, SSHOptions
from hvlaunch.ssh.by_paramiko import Jumps
from hvlaunch.ssh.config import Hops, behind, parse_hop
from tests.testhosts.places import wait_until

from .conftest import in_thread


@pytest.mark.parametrize(
    ("word", "host"),
    [
        ("gate", Host("gate")),
        ("ada@gate", Host("gate", user="ada")),
        ("gate:2222", Host("gate", port=2222)),
        ("ada@gate:2222", Host("gate", user="ada", port=2222)),
        ("ssh://ada@gate:2222", Host("gate", user="ada", port=2222)),
        ("ssh://gate/", Host("gate")),
        ("[fe80::1]", Host("fe80::1")),
        ("ada@[fe80::1]:22", Host("fe80::1", user="ada", port=22)),
        (" gate ", Host("gate")),
    ],
)
def test_one_word_of_a_proxy_jump(word, host):
    assert parse_hop(word, host="x") == host


@pytest.mark.parametrize("word", ["", "@gate", "gate:", "gate:x", "a/b", "gate:22:22", "fe80::1"])
def test_no_word_of_a_proxy_jump(word):
    with pytest.raises(HostError, match="which is not a host") as caught:
        parse_hop(word, host="x")
    assert caught.value.host == "x"


@pytest.fixture
def hops(tmp_path):
    def make(*lines: str) -> Hops:
        path = tmp_path / "config"
        path.write_text("".join(line + "\n" for line in lines))
        return Hops(SSHOptions(config=path, user="me", port=1, host_keys="off"), timeout=10.0)

    return make


def way(hops: Hops, jump: str | None) -> list[tuple[str, str | None]]:
    return [(" ".join(hop.key), hop.jump) for hop in hops.before("x", jump)]


def test_the_way_to_a_host(hops):
    found = hops("Host inner", "  ProxyJump gate", "Host far", "  ProxyJump inner,other")
    assert way(found, None) == []
    assert way(found, "gate") == [("gate", None)]
    assert way(found, "a,b,c") == [("a", None), ("a b", "a"), ("a b c", "a,b")]
    assert way(found, "inner") == [("gate", None), ("gate inner", None)]
    assert way(found, "far") == [
        ("gate", None),
        ("gate inner", None),
        ("gate inner other", "inner"),
        ("gate inner other far", None),
    ]
    assert way(found, "gate,inner") == [("gate", None), ("gate inner", "gate")]


def test_a_jump_host_has_nothing_of_the_hosts_own_words(hops):
    found = hops("Host gate", "  User ada", "  Port 2200")
    settings = found.settings(parse_hop("gate", host="x"))
    assert (settings.user, settings.port) == ("ada", 2200)
    settings = found.settings(parse_hop("eve@gate:22", host="x"), "first")
    assert (settings.user, settings.port, settings.proxy_jump) == ("eve", 22, "first")
    assert found.options.host_keys == "off"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("Host a", "  ProxyJump b", "Host b", "  ProxyJump a"), "its jump hosts form a loop: a → b → a"),
        (
            ("Host a", "  ProxyJump a"),
            "its jump host a: the ssh configuration can't be used: jumphost loop via a",
        ),
    ],
)
def test_circles(hops, lines, said):
    with pytest.raises(HostError) as caught:
        hops(*lines).before("x", "a")
    assert said in str(caught.value)
    assert caught.value.host == "x"


class Line:
    """A connection that counts how often it is closed."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name
        self.open = True

    def is_open(self) -> bool:
        return self.open

    def close(self) -> None:
        self._log.append(self._name)


def test_many_share_one_connection():
    jumps: Jumps[Line] = Jumps()
    made, got, go = [], [], threading.Event()

    def make() -> Line:
        made.append(Line([], "gate"))
        go.wait(10.0)
        return made[-1]

    threads = [
        in_thread(lambda: got.append(jumps.get(("gate",), make, host="x", timeout=10.0)))[0] for _ in range(8)
    ]
    wait_until(lambda: made, "one to connect")
    go.set()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert got == made * 8


def test_a_doubted_connection_stays_with_its_users():
    jumps: Jumps[Line] = Jumps()
    log: list[str] = []
    first = jumps.get(("gate",), lambda: Line(log, "first"), host="x", timeout=1.0)
    jumps.doubt(first)
    assert log == []
    second = jumps.get(("gate",), lambda: Line(log, "second"), host="x", timeout=1.0)
    jumps.doubt(first)  # by another who had it
    assert jumps.get(("gate",), lambda: Line(log, "third"), host="x", timeout=1.0) is second
    jumps.close()
    assert sorted(log) == ["first", "second"]


def test_a_failure_reaches_all_waiting_callers_and_the_next_retries():
    jumps: Jumps[Line] = Jumps()
    error = ConnectFailed("refused", host="gate")
    begun, go = threading.Event(), threading.Event()
    attempts: list[None] = []

    def fail() -> Line:
        attempts.append(None)
        begun.set()
        go.wait(10.0)
        raise error

    first, ended = in_thread(lambda: jumps.get(("gate",), fail, host="x", timeout=10.0))
    begun.wait(10.0)
    second, also = in_thread(lambda: jumps.get(("gate",), fail, host="y", timeout=10.0))
    with pytest.raises(StartTimeout, match="no connection to its jump host gate within 0 s"):
        jumps.get(("gate",), fail, host="z", timeout=0.01)
    go.set()
    first.join()
    second.join()
    assert ended == [error]
    assert also == [error]
    line = Line([], "gate")
    assert jumps.get(("gate",), lambda: line, host="x", timeout=10.0) is line


def test_a_connection_that_is_gone_is_made_anew():
    jumps: Jumps[Line] = Jumps()
    first, second = Line([], "first"), Line([], "second")
    assert jumps.get(("gate",), lambda: first, host="x", timeout=1.0) is first
    first.open = False
    assert jumps.get(("gate",), lambda: second, host="x", timeout=1.0) is second


def test_the_farthest_is_closed_first():
    jumps: Jumps[Line] = Jumps()
    log: list[str] = []
    for name in ("gate", "inner"):
        jumps.get((name,), partial(Line, log, name), host="x", timeout=1.0)
    jumps.close()
    jumps.close()
    assert log == ["inner", "gate"]


def test_a_jump_hosts_error_becomes_the_hosts_behind_it():
    error = HostKeyUnknown("its key is not known", host="gate", hint="h", key_type="t", fingerprint="f")
    about = behind("x", "ada@gate", error)
    assert isinstance(about, HostKeyUnknown)
    assert str(about) == "host x: its jump host ada@gate: its key is not known; try: h"
    assert (about.key_type, about.fingerprint, about.exit_code) == ("t", "f", 69)
    assert str(error).startswith("host gate: ")
