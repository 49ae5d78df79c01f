"""Hostfiles: the dialects, our words, and what is wrong in which line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlaunch.errors import BadHost, BadUsage
from hvlaunch.hosts.parse import hostfile_line, parse_hostfile, read_hostfile
from hvlaunch.job import Host

EXAMPLES = Path(__file__).parents[3] / "hostfiles"

EXAMPLE_HOSTS = {
    "openmpi": [Host("node01", 4), Host("node02", 4), Host("node03", 2, user="alice"), Host("node04", 2)],
    "horovod": [Host("worker-0", 4), Host("worker-1", 4), Host("worker-2.example.com", 2)],
    "deepspeed": [Host("worker-1", 8), Host("worker-2", 8)],
    "mpich": [Host("node01", 6), Host("node02", 2), Host("node03", 4, user="alice"), Host("192.168.1.20", 1)],
    "bare": [Host("node01"), Host("node02.example.com"), Host("10.0.0.7"), Host("fe80::1%eth0")],
    "ranges": [
        *(Host(f"gpu{number}", 8) for number in ("01", "02", "03", "07")),
        *(Host(f"cpu{number}", 2) for number in (0, 4, 8)),
        *(Host(name, user="alice") for name in ("rack1n1", "rack1n2", "rack2n1", "rack2n2")),
    ],
    "hvlaunch": [
        Host("trainer", 8, port=2222, address="10.1.2.3"),
        Host("storage", address="fd00::5"),
        Host("borrowed", 4, user="alice", identity="/keys/lab cluster/id_ed25519"),
        Host("gpu1", 2, python="/opt/python3.12/bin/python3"),
        Host("gpu2", 2, python="/opt/python3.12/bin/python3"),
    ],
}


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix != ".sh"} == {*EXAMPLE_HOSTS, "README.md"}


@pytest.mark.parametrize("name", EXAMPLE_HOSTS)
def test_example(name: str) -> None:
    assert "#" in (EXAMPLES / name).read_text()
    assert read_hostfile(EXAMPLES / name) == EXAMPLE_HOSTS[name]


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("a", Host("a")),
        ("a # c", Host("a")),
        ("a# c", Host("a")),
        ("  a\t slots=4 # don't", Host("a", 4)),
        ("a slots=4\r", Host("a", 4)),
        ("a slots = 4", Host("a", 4)),
        ("a slots= 4 port =22", Host("a", 4, port=22)),
        ("a count=4", Host("a", 4)),
        ("a cpu=4", Host("a", 4)),
        ("a max_slots=4 slots=4", Host("a", 4)),
        ("a slots-max=8 slots=4", Host("a", 4)),
        ("a max-slots=8", Host("a")),
        ("a:4 slots_max=4", Host("a", 4)),
        ("bob@a slots=4", Host("a", 4, user="bob")),
        ("a user_name=bob", Host("a", user="bob")),
        ("a user=CORP\\bob", Host("a", user="CORP\\bob")),
        ("bob@[fe80::1]:4 port=65535", Host("fe80::1", 4, user="bob", port=65535)),
        ("a identity='/k/a b#c=d'", Host("a", identity="/k/a b#c=d")),
        ("a identity=/k/'x y'/id", Host("a", identity="/k/x y/id")),
        ("a identity=keys/id", Host("a", identity="keys/id")),
        ("a python=~/venv/bin/python", Host("a", python="~/venv/bin/python")),
        ("a address=fe80::1%eth0", Host("a", address="fe80::1%eth0")),
        ("a address=[::1]", Host("a", address="::1")),
        ("a address=a.example.com", Host("a", address="a.example.com")),
    ],
)
def test_line(line: str, host: Host) -> None:
    assert parse_hostfile(line, "f") == [host]


@pytest.mark.parametrize("text", ["", "\n", "# only\n\n   # comments\r\n"])
def test_a_text_may_have_no_host(text: str) -> None:
    assert parse_hostfile(text, "f") == []


def test_the_home_directory_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_hostfile("a identity='~/my keys/id'", "f") == [Host("a", identity=f"{tmp_path}/my keys/id")]


def test_a_host_in_several_lines_is_one_host() -> None:
    text = "b:1\na slots=2 port=22\nb\na slots=1 user=bob\na python=/py\na"
    assert parse_hostfile(text, "f") == [Host("b", 2), Host("a", 5, port=22, user="bob", python="/py")]


@pytest.mark.parametrize(
    ("line", "word", "cause"),
    [
        ("a 4", "4", "unknown field; after the host a line may have slots=,"),
        ("a b slots=4", "b", "unknown field"),
        ("a ifhn=eth0", "ifhn=eth0", "unknown field"),
        ("a Slots=4", "Slots=4", "unknown field"),
        ("a slots", "slots", "no value"),
        ("a slots=", "slots=", "no value; write slots=VALUE"),
        ("a identity=''", "identity=", "no value"),
        ("a slots==4", "slots", "no value"),
        ("a slots=4 =5", "=", "unknown field"),
        ("a slots=0", "slots=0", "slots must be a whole number from 1 to 65535"),
        ("a slots=-1", "slots=-1", "whole number"),
        ("a slots=four", "slots=four", "whole number"),
        ("a max_slots=x", "max_slots=x", "max_slots must be a whole number"),
        ("a slots=4 max_slots=2", "a", "slots=4 is more than max_slots=2"),
        ("a:4 max_slots=2", "a:4", "slots=4 is more than max_slots=2"),
        ("a slots=4 slots=4", "slots=4", "given twice"),
        ("a slots=4 count=4", "count=4", "slots given twice"),
        ("a max_slots=4 max-slots=4", "max-slots=4", "max_slots given twice"),
        ("a:4 slots=4", "a:4", "slots given twice"),
        ("bob@a user=bob", "bob@a", "user given twice"),
        ("a port=0", "port=0", "port must be a whole number from 1 to 65535"),
        ("a port=65536", "port=65536", "from 1 to 65535"),
        ("a port=ssh", "port=ssh", "from 1 to 65535"),
        ("a user=-l", "user=-l", "not a user name"),
        ("a address=-o", "address=-o", "not an address or a host name"),
        ("a address=a:4", "address=a:4", "not an address or a host name"),
        ("n[1-2] address=10.0.0.1", "n[1-2]", "one address can't be used for 2 hosts"),
        ("a python='/a\tb'", "python=/a\tb", "can't be printed"),
        ("a identity=/a\0b", "identity=/a\0b", "can't be printed"),
        ("a identity=~nobody-has-this-name/id", "identity=~nobody-has-this-name/id", "no home directory"),
        ("a identity='x", "a identity='x", "a quote is not closed"),
        ("slots=4", "slots", "a line must begin with a host"),
        ("= 4", "=", "not a host name"),
        ("a,b slots=4", "a,b", "not a host name"),
        ("fe80::1 slots=4", "fe80::1", "needs brackets: [fe80::1]"),
        ("gpu[1 slots=4", "gpu[1", "not a range of hosts"),
        ("first user=bob", "first", "user of host first is bob here, but alice earlier"),
        ("first port=23", "first", "port of host first is 23 here, but 22 earlier"),
        ("first identity=/b", "first", "identity of host first is /b here, but /a earlier"),
        ("first python=/b", "first", "python of host first is /b here, but /p earlier"),
        ("first address=b", "first", "address of host first is b here, but 10.0.0.1 earlier"),
    ],
)
def test_an_error_names_file_line_and_word(line: str, word: str, cause: str) -> None:
    text = f"# a comment\nfirst slots=2 user=alice port=22 identity=/a python=/p address=10.0.0.1\n\n{line}\n"
    with pytest.raises(BadHost) as caught:
        parse_hostfile(text, "my hosts")
    assert (caught.value.source, caught.value.line, caught.value.word) == ("my hosts", 4, word)
    assert str(caught.value).startswith(f"my hosts:4: {word!r}: ")
    assert cause in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfa slots=2\r\nb slots=1\r\n")
    assert read_hostfile(path) == [Host("a", 2), Host("b", 1)]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    latin, empty, comments = tmp_path / "latin", tmp_path / "empty", tmp_path / "comments"
    latin.write_bytes("a\nb # f\u00fcr\n".encode("latin-1"))
    empty.touch()
    comments.write_text("# nothing yet\n")
    for path, cause in [
        (tmp_path / "none", "no such file or directory"),
        (tmp_path, "is a directory"),
        (Path("a\0b"), "embedded null byte"),
        (latin, "line 2 is not UTF-8 text"),
        (empty, "it has no hosts"),
        (comments, "it has no hosts"),
    ]:
        with pytest.raises(BadUsage) as caught:
            read_hostfile(path)
        assert str(caught.value).startswith(f"hostfile {path}: {cause}")
        assert caught.value.exit_code == 2
        assert "\n" not in str(caught.value)


def test_a_bad_line_of_a_file_names_the_path(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb slots=two\n")
    with pytest.raises(BadHost) as caught:
        read_hostfile(path)
    assert str(caught.value).startswith(f"{path}:2: 'slots=two': slots must be a whole number")


WORDS = ["a", "b:2", "u@c", "n[1-2]", " ", "\n", "\r", "slots", "=", "==", "4", "0", "max_slots=", "port=22"]
MORE_WORDS = [
    "user=",
    "identity=",
    "~",
    "'",
    '"',
    "#",
    "\\",
    "address=",
    "::1",
    "[",
    "]",
    ",",
    "python=",
    "\0",
    "\u2028",
]


@given(st.text() | st.lists(st.sampled_from(WORDS + MORE_WORDS), max_size=16).map("".join))
def test_any_text_is_hosts_or_one_clear_line(text: str) -> None:
    try:
        hosts = parse_hostfile(text, "f")
    except BadHost as error:
        assert error.line is not None
        assert 1 <= error.line <= text.count("\n") + 1
        assert "\n" not in str(error)
        return
    assert len({host.name for host in hosts}) == len(hosts)
    assert all(host.slots is None or host.slots >= 1 for host in hosts)


@given(st.binary(max_size=60))
def test_any_bytes_are_hosts_or_bad_usage(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes"
    path.write_bytes(data)
    try:
        assert read_hostfile(path)
    except BadUsage as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    "host",
    [
        Host("a"),
        Host(
            "a",
            slots=4,
            user="me",
            port=2222,
            identity="/keys/a b",
            python="/opt/it's/python",
            address="10.0.0.1",
        ),
        Host("fe80::1", slots=1, address="fe80::2"),
        Host("b", python='/opt/a "quoted" name/python'),
    ],
)
def test_a_written_line_gives_the_same_host(host: Host) -> None:
    assert parse_hostfile(hostfile_line(host), "here") == [host]
    assert parse_hostfile(hostfile_line(host, slots=7), "here")[0].slots == 7
