"""What -H takes."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlaunch.errors import BadHost
from hvlaunch.hosts.parse import MAX_SLOTS, parse_host, parse_hosts
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
