"""Places in a command: their values, what is no place, and mistakes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlaunch.errors import BadUsage
from hvlaunch.hosts.placement import Placement
from hvlaunch.hosts.templates import Expansion, Neighbour, WorkerPlace, escaped, templates_of

HOSTS = (Neighbour("a", "10.0.0.1", (5, 6)), Neighbour("b", "10.0.0.2", (7, 8)))
FIRST = WorkerPlace(
    Placement("a", 0, 0, 0, size=4, local_size=2, cross_size=2, group_rank=0, group_size=2),
    master_addr="10.0.0.1",
    master_port=29500,
    hosts=HOSTS,
    scratch="/tmp/job",
    secret="s3",
)
LAST = FIRST._replace(at=FIRST.at._replace(rank=3, local_rank=1, group_rank=1, host="b"))


def words(worker: WorkerPlace, *texts: str, **env: str) -> tuple[str, ...]:
    templates = templates_of(texts, env, {"b": 3}, is_per_host=True)
    return Expansion(templates, worker).command()


def test_every_place_has_the_workers_value() -> None:
    texts = (
        "{rank}/{size} {local_rank}/{local_size} {node_rank}/{nnodes}",
        "{host} {host_ip} {hosts} {master_addr}:{master_port}",
        "{port:x} {port:y} {own_port:x} {own_port:y}",
        "{slots:auto}",
        "{each:{host}={host_ip}:{own_port:y}#{node_rank}}",
    )
    assert words(FIRST, *texts) == (
        "0/4 0/2 0/2",
        "a 10.0.0.1 a,b 10.0.0.1:29500",
        "5 6 5 6",
        "auto",
        "a=10.0.0.1:6#0,b=10.0.0.2:8#1",
    )
    assert words(LAST, *texts) == (
        "3/4 1/2 1/2",
        "b 10.0.0.2 a,b 10.0.0.1:29500",
        "5 6 7 8",
        "3",
        "a=10.0.0.1:6#0,b=10.0.0.2:8#1",
    )


def test_words_for_rank_0_or_for_the_others_are_split_before_values_are_put_in() -> None:
    texts = ("{first:--serve '0 0' --port={port:x}}", "{others:--join {hosts}}", "--w={others:1}{first:2}")
    assert words(FIRST, *texts) == ("--serve", "0 0", "--port=5", "--w=2")
    assert words(LAST._replace(hosts=(HOSTS[0]._replace(name="a b; rm"), HOSTS[1])), *texts) == (
        "--join",
        "a b; rm,b",
        "--w=1",
    )


def test_an_ipv6_address_is_in_brackets_before_a_port() -> None:
    hosts = (HOSTS[0]._replace(address="fd00::1"), HOSTS[1]._replace(address="fd00::2"))
    worker = LAST._replace(master_addr="fd00::1", hosts=hosts)
    texts = ("{host_ip}", "{master_addr}:{port:x}", "{each:{host_ip}:{own_port:y}}", "{host_ip}/{host}:1")
    assert words(worker, *texts) == ("fd00::2", "[fd00::1]:5", "[fd00::1]:6,[fd00::2]:8", "fd00::2/b:1")


def test_a_variable_without_value_is_not_set() -> None:
    templates = templates_of((), {"ADDRESS": "{host_ip}", "IS_HEAD": "{first:1}"}, {}, is_per_host=False)
    assert Expansion(templates, FIRST).variables() == {"ADDRESS": "10.0.0.1", "IS_HEAD": "1"}
    assert Expansion(templates, LAST).variables() == {"ADDRESS": "10.0.0.2"}


@pytest.mark.parametrize(
    "text",
    [
        '{"level": {"x": 1}}',
        "${rank}",
        "${unknown}",
        "{}",
        "{0}",
        "{ rank }",
        "{RANK}",
        "{rank",
        "rank}",
        "{{}}",
    ],
)
def test_braces_around_anything_but_a_name_stay(text: str) -> None:
    assert words(LAST, text) == (text,)


def test_a_place_in_json_and_a_place_in_two_braces() -> None:
    assert words(LAST, '{"task": {"index": {rank}}}', "{{rank}}", "{{port:x}}") == (
        '{"task": {"index": 3}}',
        "{rank}",
        "{port:x}",
    )


@given(
    st.text("{}$:r \"'") | st.from_regex(r"\{{0,4}\$?(rank|port:x|each:\{host\}|no)\}{0,4}", fullmatch=True)
)
def test_an_escaped_text_stands_for_itself(text: str) -> None:
    assert words(LAST, escaped(text)) == (text,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{rnk}", r"unknown place \{rnk\}.* \{rank\} .*\{each:TEXT\}; try: \{\{rnk\}\} for the word itself"),
        ("{first:{rnk}}", r"unknown place \{rnk\}"),
        ("{rank:3}", r"\{rank\} takes no text, and \{rank:3\} has one"),
        ("{port}", r"\{port\} needs the name of a port"),
        ("{port:A B}", r"needs the name of a port"),
        ("{first:'}", r"\{first:'\}: no closing quotation"),
        ("{each:{rank}}", r"\{each:TEXT\} may name host, host_ip, node_rank, own_port and slots"),
    ],
)
def test_a_mistake_is_one_error_with_the_place(text: str, message: str) -> None:
    with pytest.raises(BadUsage, match=message):
        words(FIRST, text)


def test_a_hosts_own_port_needs_one_worker_on_each_host() -> None:
    with pytest.raises(BadUsage, match="try: --per-host"):
        templates_of(["{own_port:x}"], {}, {}, is_per_host=False)
    with pytest.raises(BadUsage, match="names 65 ports; 64 are the most"):
        templates_of([f"{{port:p{n}}}" for n in range(65)], {}, {}, is_per_host=True)
