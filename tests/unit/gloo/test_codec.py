"""Encoding and decoding of events, actions and job specifications: both directions are exact. Journals are replayed.

The fixture in conftest.py replays those of all other histories."""

import json
import math
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import codec, replay
from hvlaunch.engine import codec as journal
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.codec import FORMAT, BadData, Begin, Entry, decode, encode
from hvlaunch.engine.lifecycle import Phase
from hvlaunch.errors import HostLost, Problem
from hvlaunch.job import ConsoleOptions, Host, JobSpec, SSHOptions

from .history import PORT, History, facts, spec

EVENTS, ACTIONS = get_args(on.Event), get_args(do.Action)
KINDS = [*((on.Event, kind) for kind in EVENTS), *((do.Action, kind) for kind in ACTIONS), (JobSpec, JobSpec)]
ODD = "\udcff"
"""Python's text for a byte outside of UTF-8."""

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
_NEEDED = {field.name for field in fields(JobSpec) if field.default is field.default_factory is MISSING}
st.register_type_strategy(
    JobSpec,
    st.fixed_dictionaries(
        {name: st.from_type(kind) for name, kind in get_type_hints(JobSpec).items() if name in _NEEDED}
    ).map(lambda values: JobSpec(**values)),
)


def through_json(kind: Any, value: object) -> Any:
    return decode(kind, json.loads(json.dumps(encode(kind, value), allow_nan=False)))


def are_alike(first: object, second: object) -> bool:
    """True for equal values of the same classes at every level: 1 differs from 1.0, and a tuple from a list."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return list(first) == list(second) and all(map(are_alike, first.values(), second.values()))
    if first.__class__ is not second.__class__:
        return False
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(are_alike, first, second))
    if names := getattr(first, "__dataclass_fields__", ()):
        return all(are_alike(getattr(first, name), getattr(second, name)) for name in names)
    return first == second


def test_examples_cover_every_event_and_action():
    classes = {
        thing
        for module in (on, do, tell)
        for thing in vars(module).values()
        if isinstance(thing, type) and thing.__module__ == module.__name__
    }
    assert classes - set(EVENTS) - set(ACTIONS) == {
        on.HostFacts,
        on.Sign,
        on.WorkerPackages,
        do.HostAddress,
        do.HostNetwork,
        do.Step,
    }


@pytest.mark.parametrize(("union", "kind"), KINDS)
def test_decoding_reverses_encoding(union: Any, kind: type) -> None:
    @settings(max_examples=30)
    @given(st.from_type(kind))
    def check(value: object) -> None:
        decoded = through_json(union, value)
        assert decoded == value
        assert are_alike(decoded, value)

    check()


def test_a_job_with_every_option():
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
    decoded = through_json(JobSpec, spec)
    assert decoded == spec
    assert list(decoded.env) == ["B", "A"]


@pytest.mark.parametrize("number", [math.inf, -math.inf, 0.1, 1e300])
def test_special_numbers_survive(number: float) -> None:
    assert through_json(do.Action, do.Stop("a", (do.Step(9, number),))).steps[0].after == number


def test_nan_survives():
    assert math.isnan(through_json(tell.Interrupting, tell.Interrupting(2, math.nan)).grace)


def test_an_enums_number_is_a_number():
    decoded = through_json(on.Event, on.Interrupted(signal.SIGINT))
    assert decoded == on.Interrupted(2)
    assert type(decoded.signal) is int
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
def test_other_data_than_events_is_refused(data: object, text: str) -> None:
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
def test_fields_of_another_type_are_refused(kind: Any, data: object) -> None:
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
def test_values_of_another_type_are_not_encoded(kind: Any, value: object, text: str) -> None:
    with pytest.raises(BadData, match=text):
        encode(kind, value)


class WithCallable(NamedTuple):
    call: Any


def test_an_unknown_type_is_a_programming_error():
    with pytest.raises(TypeError, match="nothing is known of"):
        encode(WithCallable, WithCallable(print))


class Inner(NamedTuple):
    number: int


class Outer(NamedTuple):
    inner: tuple[Inner, ...]


def test_prepared_types_are_inspected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []

    def hints(kind: Any) -> dict[str, Any]:
        looked.append(kind)
        return get_type_hints(kind)

    monkeypatch.setattr(codec, "get_type_hints", hints)
    codec.prepare(Outer)
    assert looked == [Outer, Inner]
    assert encode(Outer, Outer((Inner(1),))) == {"inner": [{"number": 1}]}
    assert looked == [Outer, Inner]


def ended() -> History:
    job = History(spec("a:1,b:1")).start()
    job.exit("a", 0, 3)
    job.exit("b", 0, None, 15)
    job.close()
    return job


def test_replay_restores_the_state_after_each_entry() -> None:
    job = ended()
    phases = [replay(job.journal[:count]).phase for count in range(1, len(job.journal) + 1)]
    assert phases[0] is Phase.CONNECTING
    assert phases[-1] is Phase.DONE
    assert sorted(phases, key=list(Phase).index) == phases


def test_a_replayed_engine_continues() -> None:
    job = History(spec("a:1,b:1")).start()
    engine = replay(job.journal)
    event = on.Interrupted(signal.SIGTERM)
    assert engine.handle(event, job.now) == job.play(event)
    assert engine.deadline == job.engine.deadline


def test_the_first_entry() -> None:
    job = History(spec("a:1", env={"A": "1"}))
    assert job.journal == [encode(Begin, Begin(FORMAT, "0", "j0b", spec("a:1", env={"A": "1"}), PORT))]


def changed(job: History, **fields: object) -> list[Entry]:
    """Return the journal with other actions in its last turn with actions."""
    number = max(number for number, entry in enumerate(job.journal) if entry.get("actions"))
    entries = [*job.journal]
    entries[number] = {**entries[number], **fields}
    return entries


def test_different_actions_are_reported() -> None:
    job = ended()
    with pytest.raises(journal.Diverged) as caught:
        replay(changed(job, actions=[]))
    assert caught.value.number == len(job.journal) - 2
    assert "HostClosed(host='b', left=0, pids=()): the journal has None, and now it is Finish(result=" in str(
        caught.value
    )
    assert not caught.value.turn.actions
    assert len(caught.value.actions) == 1
    finish = job.journal[-1]["actions"]
    with pytest.raises(journal.Diverged, match=r"the journal has Finish\(.*, and now it is None"):
        replay(changed(job, actions=finish * 2))


def test_an_action_of_another_class_is_different() -> None:
    """Named tuples are equal if their fields are."""
    first, second = tell.JobEnding(why.RestartsUsedUp(5)), tell.JobEnding(why.StartsFailed(5))
    assert first == second
    turn = journal.DecidedTurn(0.0, on.Tick(), (first,))
    assert "the journal has JobEnding(cause=RestartsUsedUp(" in str(journal.Diverged(0, turn, [second]))


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([], "a journal without entries"),
        ([{}], "format None of a journal; 1 is known"),
        ([{"format": 2}], "format 2 of a journal"),
        ([{"format": 1}], "has not the fields of Begin"),
    ],
)
def test_malformed_journals(entries: list[Entry], text: str) -> None:
    with pytest.raises(BadData, match=text):
        replay(entries)


def test_malformed_turns() -> None:
    job = ended()
    with pytest.raises(BadData, match="has not the fields of DecidedTurn"):
        replay([job.journal[0], job.journal[0]])
    with pytest.raises(BadData, match=r"event: .* is none of Began"):
        replay(changed(job, event={"is": "Bang"}))


def test_another_state_leads_to_other_actions() -> None:
    job = History(spec("a:1,b:1"))
    job.connect({"b": facts(2, cwd_error="none")})
    event = on.HostGone("a", HostLost("lost", host="a").problem)
    job.play(event)
    assert replay(job.journal).phase is not Phase.CONNECTING
    with pytest.raises(journal.Diverged):
        replay(job.journal[:1] + job.journal[2:])


def test_replay_is_imported_on_first_use() -> None:
    script = (
        "import sys, hvlaunch.gloo.controller\n"
        "assert not {name for name in sys.modules if name.endswith(('.codec', '.journal', '.sentences'))}\n"
        "from hvlaunch.engine import replay\n"
        "assert 'hvlaunch.engine.codec' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_engine_exports_replay_alone() -> None:
    import hvlaunch.engine

    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        hvlaunch.engine.nonsense  # noqa: B018
