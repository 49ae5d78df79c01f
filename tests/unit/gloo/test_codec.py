"""All events, all actions and what a job begins with: what is decoded from JSON is what was encoded."""

import json
import math
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvlaunch.engine import actions as do
from hvlaunch.engine import codec
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.codec import BadData, decode, encode
from hvlaunch.errors import Problem
from hvlaunch.job import ConsoleOptions, Host, JobSpec, SSHOptions

from .history import facts

EVENTS, ACTIONS = get_args(on.Event), get_args(do.Action)
KINDS = [*((on.Event, kind) for kind in EVENTS), *((do.Action, kind) for kind in ACTIONS), (JobSpec, JobSpec)]
ODD = "\udcff"
"""What Python makes of a byte that is no UTF-8."""

st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(str, st.text(max_size=8) | st.just(ODD))
st.register_type_strategy(Path, st.text(max_size=8).map(Path))
st.register_type_strategy(range, st.builds(range, st.integers(), st.integers(), st.integers(min_value=1)))
st.register_type_strategy(
    Problem,
    st.recursive(
        st.builds(Problem, errors=st.just(())),
        lambda problems: st.builds(Problem, errors=st.tuples(problems, problems)),
        max_leaves=4,
    ),
)


def through_json(kind: Any, value: object) -> Any:
    return decode(kind, json.loads(json.dumps(encode(kind, value), allow_nan=False)))


def are_alike(one: object, other: object) -> bool:
    """Equal, of the same classes, all the way down: 1 is not 1.0, nor a tuple a list or another tuple."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(map(are_alike, one.values(), other.values()))
    if one.__class__ is not other.__class__:
        return False
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(are_alike, one, other))
    if hasattr(one, "__slots__") and hasattr(one, "__dataclass_fields__"):
        names = one.__dataclass_fields__
        return all(are_alike(getattr(one, name), getattr(other, name)) for name in names)
    return one == other


def test_these_are_all_that_there_are():
    classes = {
        thing
        for module in (on, do, tell)
        for thing in vars(module).values()
        if isinstance(thing, type) and thing.__module__ == module.__name__
    }
    assert classes - set(EVENTS) - set(ACTIONS) == {
        on.HostFacts,
        on.Sign,
        do.HostAddress,
        do.HostNetwork,
        do.Step,
    }


@pytest.mark.parametrize(("union", "kind"), KINDS)
def test_what_is_decoded_is_what_was_encoded(union: Any, kind: type) -> None:
    @settings(max_examples=30)
    @given(st.from_type(kind))
    def check(value: object) -> None:
        found = through_json(union, value)
        assert found == value
        assert are_alike(found, value)

    check()


def test_a_job_with_all_that_there_may_be():
    spec = JobSpec(
        command=("train", ODD),
        hosts=(Host("a", slots=2, user="me", port=22, identity="~/key", python="py", address="::1"),),
        cwd="/work",
        env={"B": "1", "A": ODD},
        console=ConsoleOptions(ranks=(range(2), range(5, 9, 2))),
        ssh=SSHOptions(config=Path("/etc/ssh/config")),
        events=Path("e"),
        worker_ports=(1, 2),
    )
    found = through_json(JobSpec, spec)
    assert found == spec
    assert list(found.env) == ["B", "A"]


@pytest.mark.parametrize("number", [math.inf, -math.inf, 0.1, 1e300])
def test_every_number_has_its_way(number: float) -> None:
    assert through_json(do.Action, do.Stop("a", (do.Step(9, number),))).steps[0].after == number


def test_no_number_stays_none():
    assert math.isnan(through_json(tell.Interrupting, tell.Interrupting(2, math.nan)).grace)


def test_the_number_of_an_enum_is_a_number():
    found = through_json(on.Event, on.Interrupted(signal.SIGINT))
    assert found == on.Interrupted(2)
    assert type(found.signal) is int
    assert type(through_json(do.Step, do.Step(9, 1)).after) is float


BEAT = {
    "is": "WorkerBeat",
    "host": "a",
    "slot": 0,
    "start": 0,
    "commit": 5,
    "is_last": False,
    "round": -1,
    "is_done": False,
}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({**BEAT, "slot": "0"}, "slot: '0' is no int"),
        ({**BEAT, "slot": True}, "slot: True is no int"),
        ({**BEAT, "slot": 0.0}, "slot: 0.0 is no int"),
        ({**BEAT, "host": None}, "host: None is no str"),
        ({**BEAT, "is_last": 0}, "is_last: 0 is no bool"),
        ({**BEAT, "more": 0}, "has not the fields of WorkerBeat"),
        ({name: BEAT[name] for name in BEAT if name != "slot"}, "has not the fields of WorkerBeat"),
        ({**BEAT, "is": "Leave"}, "is none of Began, HostsDiscovered"),
        ({**BEAT, "is": []}, "is none of Began"),
        ({name: BEAT[name] for name in BEAT if name != "is"}, "is none of Began"),
        (None, "None is none of Began"),
        ([], r"\[\] is none of Began"),
        ({"is": "HostsDiscovered", "hosts": {}}, r"hosts: \{\} is no list"),
        ({"is": "HostClosed", "host": "a", "left": None, "pids": []}, "left: None is no int"),
    ],
)
def test_what_is_no_event_is_refused(data: object, text: str) -> None:
    with pytest.raises(BadData, match=text):
        decode(on.Event, data)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (float, "1.0"),
        (float, True),
        (float, None),
        (Path, 1),
        (range, [1, 2]),
        (range, [1, 2, 0]),
        (range, [1, 2, "3"]),
        (Literal["a", "b"], "c"),
        (Literal["a", "b"], []),
        (tuple[int, str], [1]),
        (tuple[int, ...], [1, "2"]),
        (tuple[int, ...], "12"),
        (Mapping[str, int], [["a", 1]]),
        (Mapping[str, int], {"a": "1"}),
        (int | None, "1"),
    ],
)
def test_what_is_of_another_type_is_refused(kind: Any, data: object) -> None:
    with pytest.raises(BadData):
        decode(kind, data)


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (on.Event, do.Release("a"), "is none of Began"),
        (on.Event, "Began", "is none of Began"),
        (on.Event, on.HostProbed("a", "b", ValueError("x")), r"address: ValueError\('x'\) is no str"),  # type: ignore[arg-type]
        (on.Event, on.HostsDiscovered([Host("a")]), "hosts: .* is no tuple"),  # type: ignore[arg-type]
        (on.Event, on.HostReady("a", facts(1, cpus="8")), "facts.cpus: '8' is no int"),
        (do.Action, do.Abandon(3), "host: 3 is no str"),  # type: ignore[arg-type]
        (float, "1", "is no float"),
        (Path, "x", "is no Path"),
        (range, (1, 2, 3), "is no range"),
        (Mapping[str, int], {1: 1}, "no mapping of names"),
        (on.HostFacts, do.Abandon("a"), "is no HostFacts"),
    ],
)
def test_what_is_no_such_thing_is_not_encoded(kind: Any, value: object, text: str) -> None:
    with pytest.raises(BadData, match=text):
        encode(kind, value)


class WithCallable(NamedTuple):
    call: Any


def test_a_type_that_nobody_can_write_down_is_a_mistake_of_ours():
    with pytest.raises(TypeError, match="nothing is known of"):
        encode(WithCallable, WithCallable(print))


class Inner(NamedTuple):
    number: int


class Outer(NamedTuple):
    inner: tuple[Inner, ...]


def test_what_was_prepared_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []

    def hints(kind: Any) -> dict[str, Any]:
        looked.append(kind)
        return get_type_hints(kind)

    monkeypatch.setattr(codec, "get_type_hints", hints)
    codec.prepare(Outer)
    assert looked == [Outer, Inner]
    assert encode(Outer, Outer((Inner(1),))) == {"inner": [{"number": 1}]}
    assert looked == [Outer, Inner]
