"""Lists of hosts: words of -H, hostfiles in their dialects, and schedulers' variables and files, as they look in real allocations."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlaunch.errors import BadHost, BadUsage
from hvlaunch.hosts.parse import (
    MAX_SLOTS,
    allocation,
    hostfile_line,
    lsf_slots,
    parse_host,
    parse_hostfile,
    parse_hosts,
    read_hostfile,
)
from hvlaunch.job import Host


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [Host("a")]),
        ("a:4", [Host("a", 4)]),
        ("a:4,b:2", [Host("a", 4), Host("b", 2)]),
        (" a:4 , b \n", [Host("a", 4), Host("b")]),
        ("alice@a:4", [Host("a", 4, user="alice")]),
        ("alice@corp.example@a", [Host("a", user="alice@corp.example")]),
        ("CORP\\alice@a", [Host("a", user="CORP\\alice")]),
        ("localhost:1", [Host("localhost", 1)]),
        ("10.0.0.1:2", [Host("10.0.0.1", 2)]),
        ("worker-0.example.com:2", [Host("worker-0.example.com", 2)]),
        (f"a:{MAX_SLOTS}", [Host("a", MAX_SLOTS)]),
        ("z,a,m", [Host("z"), Host("a"), Host("m")]),
        ("gpu[01-03,07]:8", [Host("gpu01", 8), Host("gpu02", 8), Host("gpu03", 8), Host("gpu07", 8)]),
        ("gpu[0-8/4]", [Host("gpu0"), Host("gpu4"), Host("gpu8")]),
        ("gpu[9-11]", [Host("gpu9"), Host("gpu10"), Host("gpu11")]),
        ("[1-2].rack.example.com", [Host("1.rack.example.com"), Host("2.rack.example.com")]),
        ("r[1-2]n[1-2]", [Host("r1n1"), Host("r1n2"), Host("r2n1"), Host("r2n2")]),
        ("z,n[3,1],a", [Host("z"), Host("n1"), Host("n3"), Host("a")]),
        ("bob@n[1-2]:2", [Host("n1", 2, user="bob"), Host("n2", 2, user="bob")]),
        ("[fe80::1]:4", [Host("fe80::1", 4)]),
        ("[::1]", [Host("::1")]),
        ("[fe80::1%eth0]", [Host("fe80::1%eth0")]),
        ("bob@[fe80::1%eth0.5]:4,a", [Host("fe80::1%eth0.5", 4, user="bob"), Host("a")]),
        ("[::ffff:10.0.0.1]:2", [Host("::ffff:10.0.0.1", 2)]),
        # The same host again
        ("a:2,b:1,a:3", [Host("a", 5), Host("b", 1)]),
        ("a,a", [Host("a", 2)]),
        ("a:4,a,a", [Host("a", 6)]),
        ("n[1-2]:4,n2:1", [Host("n1", 4), Host("n2", 5)]),
        ("a:2,bob@a:2", [Host("a", 4, user="bob")]),
        ("bob@a:2,a:2", [Host("a", 4, user="bob")]),
    ],
)
def test_hosts(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "word", "cause"),
    [
        ("", "", "missing"),
        ("a,", "", "comma too many"),
        (",a", "", "comma too many"),
        ("a:1,,b:1", "", "comma too many"),
        ("a:0", "a:0", "from 1 to"),
        ("a:-1", "a:-1", "from 1 to"),
        ("b,a:", "a:", "from 1 to"),
        ("a:x", "a:x", "from 1 to"),
        ("a:1.5", "a:1.5", "from 1 to"),
        ("a:1_0", "a:1_0", "from 1 to"),
        ("a:+1", "a:+1", "from 1 to"),
        ("a:²", "a:²", "from 1 to"),
        ("a:٣", "a:٣", "from 1 to"),
        (f"a:{MAX_SLOTS + 1}", f"a:{MAX_SLOTS + 1}", "from 1 to"),
        (f"a:{'9' * 5000}", f"a:{'9' * 5000}", "from 1 to"),
        ("[fe80::1]:0", "[fe80::1]:0", "from 1 to"),
        (":4", ":4", "name is missing"),
        ("a b", "a b", "not a host name"),
        ("a\nb", "a\nb", "not a host name"),
        ("-oProxyCommand=x", "-oProxyCommand=x", "not a host name"),
        ("--", "--", "not a host name"),
        ("a/b", "a/b", "not a host name"),
        ("a;b", "a;b", "not a host name"),
        ("@a", "@a", "not a user name"),
        ("-l@a", "-l@a", "not a user name"),
        ("a b@c", "a b@c", "not a user name"),
        ("$x@c", "$x@c", "not a user name"),
        ("bob@", "bob@", "name is missing"),
        ("bob@:4", "bob@:4", "name is missing"),
        ("fe80::1", "fe80::1", "needs brackets: [fe80::1]"),
        ("bob@fe80::1:4", "bob@fe80::1:4", "needs brackets: [fe80::1:4]"),
        ("fe80::1%eth0", "fe80::1%eth0", "needs brackets: [fe80::1%eth0]"),
        ("a:1:2", "a:1:2", "more than one colon"),
        ("[fe80::x]:4", "[fe80::x]:4", "not an IPv6 address"),
        ("[fe80::1%]", "[fe80::1%]", "not an IPv6 address"),
        ("[fe80::1%e 0]", "[fe80::1%e 0]", "not an IPv6 address"),
        ("[a:4]", "[a:4]", "not an IPv6 address"),
        ("[:\0]", "[:\0]", "not an IPv6 address"),
        ("n[1-2", "n[1-2", "not a range of hosts"),
        ("n[1,2", "n[1,2", "not a range of hosts"),
        ("n1]", "n1]", "not a host name"),
        ("n[]", "n[]", "not a range of hosts"),
        ("n[a-b]", "n[a-b]", "not a range of hosts"),
        ("n[1-]", "n[1-]", "not a range of hosts"),
        ("n[-1-2]", "n[-1-2]", "not a range of hosts"),
        ("n[1-2]!n1", "n[1-2]!n1", "not a range of hosts"),
        ("-n[1-2]", "-n[1-2]", "not a range of hosts"),
        ("n[[1-2]]", "n[[1-2]]", "not a range of hosts"),
        ("n[2-1]", "n[2-1]", "bad range: invalid values in range : 2-1"),
        ("n[1-2][3-4]", "n[1-2][3-4]", "reopening bracket"),
        ("n[1-4/0]", "n[1-4/0]", "bad range"),
        ("n[0-99999999]", "n[0-99999999]", "more than 65535 hosts"),
        ("n[1-999]m[1-999]", "n[1-999]m[1-999]", "more than 65535 hosts"),
        ("ann@a,bob@a", "bob@a", "user of host a is bob here, but ann earlier"),
    ],
)
def test_malformed_hosts_are_refused(text: str, word: str, cause: str) -> None:
    with pytest.raises(BadHost) as caught:
        parse_hosts(text)
    assert (caught.value.word, caught.value.source, caught.value.line) == (word, "-H", None)
    assert caught.value.exit_code == 2
    assert cause in str(caught.value)
    assert repr(word if len(word) <= 100 else word[:100] + "…") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_item_of_a_file_names_its_line() -> None:
    with pytest.raises(BadHost, match=r"^hosts.txt:7: 'a:0': "):
        parse_host("a:0", source="hosts.txt", line=7)


def test_the_largest_range_is_quick_to_refuse_and_the_limit_itself_is_fine() -> None:
    assert len(parse_hosts(f"n[1-{MAX_SLOTS}]")) == MAX_SLOTS
    with pytest.raises(BadHost):
        parse_hosts(f"n[0-{MAX_SLOTS}]")


@pytest.mark.parametrize(("text", "loaded"), [("a:4,bob@[fe80::1]:2", False), ("n[1-2]", True)])
def test_cluster_shell_is_loaded_for_ranges_only(text: str, loaded: bool) -> None:
    code = (
        "import sys, hvlaunch.hosts.parse as parse, hvlaunch.hosts.parse, hvlaunch.hosts.local\n"
        f"parse.parse_hosts({text!r})\n"
        "print(any(name.startswith('ClusterShell') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(loaded)


NAMES = st.from_regex(r"[a-z0-9_][a-z0-9_.-]{0,12}", fullmatch=True)
V6 = st.ip_addresses(v=6).map(str)
USERS = st.from_regex(r"[a-z_][a-z0-9_.@+-]{0,8}", fullmatch=True)
SLOTS = st.integers(1, MAX_SLOTS)
HOSTS = st.builds(Host, NAMES | V6, st.none() | SLOTS, st.none() | USERS)


def written(host: Host) -> str:
    user = f"{host.user}@" if host.user else ""
    name = f"[{host.name}]" if ":" in host.name else host.name
    return f"{user}{name}" + (f":{host.slots}" if host.slots else "")


@given(st.lists(HOSTS, min_size=1, unique_by=lambda host: host.name))
def test_a_list_that_is_written_out_is_read_back(hosts: list[Host]) -> None:
    assert parse_hosts(",".join(map(written, hosts))) == hosts


@given(st.integers(0, 300), st.integers(0, 20), st.integers(1, 5), st.integers(1, 4))
def test_a_range_is_the_hosts_it_stands_for(first: int, more: int, step: int, width: int) -> None:
    last = first + more
    low, high = f"{first:0{width}}", f"{last:0{width}}"
    if len(low) != len(high) and low.startswith("0") and first:
        return  # padded to two widths: no range
    names = [host.name for host in parse_hosts(f"n[{low}-{high}/{step}].x")]
    assert names == [f"n{number:0{width}}.x" for number in range(first, last + 1, step)]


@given(st.lists(HOSTS.filter(lambda host: host.user is None), min_size=1, max_size=6))
def test_no_slot_is_lost_by_merging(hosts: list[Host]) -> None:
    merged = parse_hosts(",".join(map(written, hosts)))
    assert [host.name for host in merged] == list(dict.fromkeys(host.name for host in hosts))
    assert sum(host.slots or 1 for host in merged) == sum(host.slots or 1 for host in hosts)


PIECES = st.sampled_from(
    ["a", "gpu", "[", "]", ",", ":", "@", "-", "/", "1", "01", "9", "::", "%", ".", " ", "\n", "0"]
)


@given(st.text() | st.lists(PIECES, max_size=14).map("".join))
def test_any_text_gives_hosts_or_one_clear_line(text: str) -> None:
    try:
        hosts = parse_hosts(text)
    except BadHost as error:
        assert "\n" not in str(error)
        return
    assert hosts
    assert len({host.name for host in hosts}) == len(hosts)
    for host in hosts:
        assert host.slots is None or host.slots >= 1
        assert not set(host.name) & set(",[]@/ \n")
        assert not host.name.startswith("-")


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


JOB = {"SLURM_JOB_ID": "4711"}


def slurm(nodes, tasks=None, **more):
    said = {} if tasks is None else {"SLURM_TASKS_PER_NODE": tasks}
    return {**JOB, "SLURM_JOB_NODELIST": nodes, **said, **more}


ASKED = {"SLURM_NTASKS": "9"}
SLURM = [
    (slurm("n1", "1"), {"n1": 1}),
    (slurm("n1"), {"n1": 1}),
    (slurm("n[1-3]", "2(x3)", **ASKED), {"n1": 2, "n2": 2, "n3": 2}),
    (
        slurm("gpu[01-03,07],login", "2(x3),1,16", **ASKED),
        {"gpu01": 2, "gpu02": 2, "gpu03": 2, "gpu07": 1, "login": 16},
    ),
    (slurm("r[1-2]n[1-2]", "4(x4)", **ASKED), {"r1n1": 4, "r1n2": 4, "r2n1": 4, "r2n2": 4}),
    (slurm("n[099-101]", "1(x3)"), {"n099": 1, "n100": 1, "n101": 1}),
    # one task on each node, to start the launcher: the GPUs are what counts
    (slurm("n[1-2]", "1(x2)", SLURM_GPUS_PER_NODE="8"), {"n1": 8, "n2": 8}),
    (slurm("n[1-2]", "1(x2)", SLURM_NTASKS="2", SLURM_GPUS_PER_NODE="a100:8"), {"n1": 8, "n2": 8}),
    (slurm("n[1-2]", "1(x2)", SLURM_GPUS_ON_NODE="4"), {"n1": 4, "n2": 4}),
    (slurm("n1", "1", SLURM_GPUS_PER_NODE="a100:2,v100:3"), {"n1": 5}),
    # tasks that were asked for count before GPUs; those that are merely processors do not
    (slurm("n[1-2]", "4(x2)", SLURM_NTASKS_PER_NODE="4", SLURM_GPUS_PER_NODE="8"), {"n1": 4, "n2": 4}),
    (slurm("n[1-2]", "64(x2)", SLURM_GPUS_PER_NODE="8"), {"n1": 8, "n2": 8}),
    (slurm("n[1-2]", "64(x2)"), {"n1": 64, "n2": 64}),
]


@pytest.mark.parametrize(("environ", "slots"), SLURM)
def test_slurm(environ, slots):
    found = allocation(environ)
    assert found is not None
    assert found.origin == "Slurm job 4711"
    assert {host.name: host.slots for host in found.hosts} == slots
    assert list(slots) == [host.name for host in found.hosts]


@pytest.mark.parametrize(
    ("environ", "error"),
    [
        (slurm("n[1-2]", "two"), "SLURM_TASKS_PER_NODE=two can't be read; it should look like"),
        (slurm("n[1-2]", "1(x3)"), "does not have 2 nodes, as SLURM_JOB_NODELIST has"),
        (slurm("n[1-2]", "1"), "does not have 2 nodes, as SLURM_JOB_NODELIST has"),
        (slurm("n[1-2]", "1(x999999999)"), "does not have 2 nodes, as SLURM_JOB_NODELIST has"),
        (slurm("n[1-"), "range"),
        (slurm("n1", "0"), "has no hosts"),
    ],
)
def test_malformed_variables_of_slurm_are_refused(environ, error):
    with pytest.raises((BadUsage, BadHost), match=error):
        allocation(environ)


FILES = {
    "/lsf": "a\na\nb\nb\nb\n",
    "/csm": "batch3\nh1\nh1\nh2\nh2\n",
    "/pbs": "node1.example.com\nnode1.example.com\nnode2.example.com\n",
    "/sge": "a.example.com 4 all.q@a.example.com UNDEFINED\nb.example.com 2 all.q@b.example.com <NULL>\n",
    "/bad": "a four\n",
    "/etc/mpi/hostfile": "job-worker-0 slots=2\njob-worker-1 slots=2\n",
    "/intel": "job-worker-0:2\njob-worker-1:1\n",
    "/empty": "",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
OTHERS = [
    ({"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": "/lsf", "LSB_MCPU_HOSTS": "x 9"}, "LSF job 7", {"a": 2, "b": 3}),
    ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 16 b 8 "}, "LSF job 7", {"a": 16, "b": 8}),
    (
        {"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": "/csm", "CSM_ALLOCATION_ID": "1"},
        "LSF job 7",
        {"h1": 2, "h2": 2},
    ),
    (
        {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "batch1 1 h1 42 h2 42", "CSM_ALLOCATION_ID": "1"},
        "LSF job 7",
        {"h1": 42, "h2": 42},
    ),
    (
        {"PBS_JOBID": "8.pbs", "PBS_NODEFILE": "/pbs"},
        "PBS job 8.pbs",
        {"node1.example.com": 2, "node2.example.com": 1},
    ),
    ({"JOB_ID": "9", "PE_HOSTFILE": "/sge"}, "Grid Engine job 9", {"a.example.com": 4, "b.example.com": 2}),
    (
        POD | {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"},
        "the MPI operator's job",
        {"job-worker-0": 2, "job-worker-1": 2},
    ),
    (
        POD | {"I_MPI_HYDRA_HOST_FILE": "/intel"},
        "the MPI operator's job",
        {"job-worker-0": 2, "job-worker-1": 1},
    ),
]


@pytest.mark.parametrize(("environ", "origin", "slots"), OTHERS)
def test_other_schedulers(environ, origin, slots):
    found = allocation(environ, FILES.__getitem__)
    assert found is not None
    assert (found.origin, {host.name: host.slots for host in found.hosts}) == (origin, slots)
    assert found.remote_agent is None


@pytest.mark.parametrize(
    ("agent", "expected"),
    [("/etc/mpi/kubexec.sh", "/etc/mpi/kubexec.sh"), ("/usr/bin/ssh -q", None), ("ssh", None)],
)
def test_the_remote_agent_of_the_mpi_operator(agent, expected):
    environ = POD | {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile", "OMPI_MCA_plm_rsh_agent": agent}
    found = allocation(environ, FILES.__getitem__)
    assert found is not None
    assert found.remote_agent == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        JOB,
        {"SLURM_JOB_NODELIST": "n1"},
        {"LSB_JOBID": "7"},
        {"PBS_JOBID": "8"},
        {"JOB_ID": "9"},
        {"JOB_ID": "a CI's own"},
        {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"},
    ],
)
def test_no_allocation(environ):
    assert allocation(environ, FILES.__getitem__) is None


@pytest.mark.parametrize(
    ("environ", "error"),
    [
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 16 b"}, "hosts and numbers in turn"),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a x"}, "hosts and numbers in turn"),
        ({"JOB_ID": "9", "PE_HOSTFILE": "/bad"}, "must have lines of a host and its slots"),
        ({"PBS_JOBID": "8", "PBS_NODEFILE": "/empty"}, "has no hosts"),
    ],
)
def test_malformed_variables_and_files_are_refused(environ, error):
    with pytest.raises(BadUsage, match=error):
        allocation(environ, FILES.__getitem__)


def test_a_file_that_is_not_there(tmp_path):
    path = tmp_path / "nodes"
    environ = {"PBS_JOBID": "8", "PBS_NODEFILE": str(path)}
    with pytest.raises(BadUsage, match="nodes, which the scheduler names: No such file"):
        allocation(environ)
    path.write_text("a\n")
    found = allocation(environ)
    assert found is not None
    assert found.hosts[0].name == "a"


def test_outside_of_lsf_there_are_no_slots():
    assert lsf_slots({}) is None
