"""--prefix: templates, and what they become for one rank or many."""

from datetime import datetime, timedelta, timezone

import pytest

from hvlaunch.console.prefix import ASCTIME, Prefix
from hvlaunch.errors import BadUsage

NOW = datetime(2026, 11, 7, 1, 2, 3, 456789, tzinfo=timezone(timedelta(hours=1)))


def prefix(template, ranks=(3,), stream="stdout"):
    made = Prefix(template, now=lambda: NOW)
    made.learn_places({0: ("gpu01", 0), 1: ("gpu01", 1), 2: ("gpu02", 0), 3: ("gpu02", 1), 4: ("gpu03", 0)})
    return made.text_for(ranks, stream)


@pytest.mark.parametrize(
    ("template", "made"),
    [
        ("", b""),
        ("> ", b"> "),
        ("[{rank}]<{stream}>: ", b"[3]<stdout>: "),
        ("{host}/{local_rank} ", b"gpu02/1 "),
        ("{rank:03}|{host:>8}|{stream:.3}", b"003|   gpu02|std"),
        ("{{{rank}}}", b"{3}"),
        ("{host!r}{time!s}", b"gpu022026-11-07 01:02:03"),
        ("{rank:{local_rank}}", b"3"),
        ("{rank:{host}}", b"3"),
        ("{rank:c}", b"\x03"),
        ("{time} ", b"2026-11-07 01:02:03 "),
        ("{time:%H:%M:%S.%f %z}", b"01:02:03.456789 +0100"),
        (ASCTIME + "[{rank}]", b"Sat Nov  7 01:02:03 2026[3]"),
        ("é{rank}\udcff", b"\xc3\xa93\xff"),
    ],
)
def test_one_rank(template, made):
    assert prefix(template) == made


@pytest.mark.parametrize(
    ("template", "made"),
    [
        ("[{rank}]<{stream}>: ", b"[0-2,4]<stderr>: "),
        ("{host} {local_rank}: ", b"gpu[01-03] 0-1: "),
        ("{rank:03} {rank:>8}", b"0-2,4    0-2,4"),
        ("{rank:d}|", b"0-2,4|"),
    ],
)
def test_many_ranks(template, made):
    assert prefix(template, (0, 1, 2, 4), "stderr") == made


def test_ranks_with_a_common_host_or_local_rank():
    assert prefix("{host}:{local_rank:02} ", (0, 2, 4)) == b"gpu[01-03]:00 "
    assert prefix("{host}:{local_rank} ", (0, 1)) == b"gpu01:0-1 "


def test_a_rank_may_get_another_place():
    made = Prefix("{host} ")
    made.learn_places({0: ("a", 0)})
    assert made.text_for((0,), "stdout") == b"a "
    made.learn_places({0: ("b", 0)})
    assert made.text_for((0,), "stdout") == b"b "


def test_the_time_is_asked_for_each_time():
    times = iter([NOW, NOW + timedelta(seconds=1)])
    made = Prefix("{time:%S} ", now=lambda: next(times))
    assert [made.text_for((0,), "stdout") for _ in range(2)] == [b"03 ", b"04 "]


def test_the_default_time_is_now():
    before = datetime.now().astimezone()
    made = datetime.fromisoformat(Prefix("{time:%Y-%m-%dT%H:%M:%S.%f%z}").text_for((0,), "stdout").decode())
    assert before <= made <= datetime.now().astimezone()


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{rank:99999999999}", "a field would have thousands of characters"),
        ("{time:%99999Y}", "a field would have thousands of characters"),
        ("{lol}", "unknown field {lol}; try: {rank}, {host}, {local_rank}, {time}, {stream}"),
        ("{rank:{lol}}", "unknown field {lol}"),
        ("{}", "format string contains positional fields"),
        ("{0}", "format string contains positional fields"),
        ("{rank.real}", "a field has no part .real"),
        ("{host[0]}", "a field has no part [0]"),
        ("{host!x}", "unknown conversion specifier"),
        ("{host:d}", "unknown format code 'd'"),
        ("{time:\udcff}", "can't encode"),
        ("{rank", "expected '}' before end of string; try: a format of Python, or {{ and }}"),
        ("rank}", "single '}' encountered"),
        ("a\nb", "must be one line"),
        ("a\rb", "must be one line"),
    ],
)
def test_invalid_templates(template, part):
    with pytest.raises(BadUsage) as caught:
        Prefix(template)
    assert part in str(caught.value)
    assert repr(template) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_roles_are_shown_in_place_of_ranks():
    labelled = Prefix(labels=["train:0", "gen:0", "gen:1"])
    assert labelled.text_for((2,), "stdout") == b"[gen:1]<stdout>: "
    assert labelled.text_for((0, 2), "stderr") == b"[train:0,gen:1]<stderr>: "
