"""`--include` and `--exclude`, in DeepSpeed's words."""

import pytest

from hvlaunch.errors import BadHost, BadUsage
from hvlaunch.hosts.parse import parse_hosts
from hvlaunch.hosts.selection import select, words_for

HOSTS = parse_hosts("w[0-2]:4,last")


def left(words, how, slots_per_host=None):
    hosts, gpus = select(HOSTS, words, how, slots_per_host)
    return [(host.name, host.slots, gpus.get(host.name)) for host in hosts]


@pytest.mark.parametrize("words", ["w2@w0", "w0,w2", "w[0,2]", "w0@w2"])
def test_hosts_that_are_named_are_used_in_their_own_order(words):
    assert left(words, "include") == [("w0", 4, None), ("w2", 4, None)]
    assert left(words, "exclude") == [("w1", 4, None), ("last", None, None)]


def test_gpus_that_are_named():
    assert left("w1@w0:3,1@last:5", "include") == [("w0", 2, (1, 3)), ("w1", 4, None), ("last", 1, (5,))]


def test_gpus_that_are_not():
    assert left("w0:0,3@w1:0,1,2,3@w2", "exclude") == [("w0", 2, (1, 2)), ("last", None, None)]
    assert left("last:0@w[0-2]", "exclude", slots_per_host=3) == [("last", 2, (1, 2))]


def test_words_for_a_selection():
    hosts = parse_hosts("a:4,[fe80::1]:4,b")
    gpus = {"fe80::1": (0, 2), "b": (5,)}
    assert words_for(hosts, gpus) == "a@[fe80::1]:0,2@b:5"
    assert [(host.name, host.slots) for host in select(hosts, words_for(hosts, gpus), "include").hosts] == [
        ("a", 4),
        ("fe80::1", 2),
        ("b", 1),
    ]
    assert select(hosts, "[fe80::1]@a", "exclude").hosts == (hosts[2],)


@pytest.mark.parametrize(
    ("words", "how", "cause"),
    [
        ("w9", "include", "w9 is not one of the hosts"),
        ("w0:4", "include", "only the slots 0-3"),
        ("last:2", "exclude", "the host's slots are not known"),
        ("w0:a", "include", "after the colon must be those of GPUs"),
        ("w0:", "include", "after the colon must be those of GPUs"),
        ("w0:-1", "exclude", "after the colon must be those of GPUs"),
        ("w0@w0:1", "include", "w0 is named twice"),
        ("w[0-2]@last", "exclude", "no host is left"),
    ],
)
def test_impossible_selections_are_refused(words, how, cause):
    with pytest.raises(BadUsage, match=cause):
        select(HOSTS, words, how)


def test_malformed_hosts_are_refused():
    with pytest.raises(BadHost):
        select(HOSTS, "w0@@w1", "include")
