"""Replaying journals. The fixture in conftest.py replays those of all other histories."""

import signal
import subprocess
import sys

import pytest

from hvlaunch.engine import causes as why
from hvlaunch.engine import codec as journal
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine import replay
from hvlaunch.engine.codec import FORMAT, BadData, Begin, Entry, encode
from hvlaunch.engine.lifecycle import Phase
from hvlaunch.errors import HostLost

from .history import PORT, History, facts, spec


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
