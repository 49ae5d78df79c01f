"""Records of a job's events; docs/interfaces/events.md describes each."""

import json
import re
from pathlib import Path
from typing import Any, get_args

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.actions import HostNetwork
from hvlaunch.errors import Defect, DiscoveryFailed, HostLost
from hvlaunch.hosts.placement import Launch, place
from hvlaunch.job import Host
from hvlaunch.watch.recorder import Recorder
from hvlaunch.watch.rounds import Ranks

from .examples import CAUSES, FACTS, STOPPED
from .history import History, facts, spec

PAGE = Path(__file__).parents[3] / "docs" / "interfaces" / "events.md"
SECRET = "hunter2-in-the-environment"


class Recorded(History):
    """A history with a recorder."""

    def __init__(self, hosts="a:2,b:1"):
        job = spec(hosts, env={"SECRET": SECRET}, np=3)
        super().__init__(job)
        self.records: list[dict[str, Any]] = []
        self.ranks = Ranks()
        self.recorder = Recorder(
            job,
            "0123abcd",
            lambda record: self.records.append(dict(record)),
            self.ranks.rank_of,
            wall=lambda: 1795222953.1239,
        )

    def play(self, *events):
        new: list[do.Action] = []
        for event in events:
            actions = super().play(event)
            self.ranks.update(actions)
            self.recorder.watch(event, actions, self.now)
            new += actions
        return new

    def typed(self, name):
        return [
            {key: value for key, value in record.items() if key not in ("time", "job", "type")}
            for record in self.records
            if record["type"] == name
        ]


def failing_job():
    job = Recorded()
    job.start({"a": facts(1, python="3.11.7", gpus=2)})
    for host, slot, pid in (("a", 0, 11), ("a", 1, 12), ("b", 0, 7)):
        job.play(on.WorkerStarted(host, 0, slot, pid))
    job.play(on.UserSignal(10))
    job.exit("b", 0, 3, after=1.5)
    job.exit("a", 0, None, 15, after=1.6)
    job.exit("a", 1, None, 15, after=1.7)
    job.close()
    return job


def test_a_job_from_start_to_end():
    job = failing_job()
    types = [record["type"] for record in job.records if "text" not in record]
    assert types[0] == "job_started"
    assert types[-1] == "job_ended"
    assert types.index("workers_starting") < types.index("worker_started") < types.index("worker_exited")
    assert all(
        list(record)[:3] == ["time", "job", "type"]
        and record["job"] == "0123abcd"
        and record["time"] == "2026-11-21T01:02:33.123Z"
        for record in job.records
    )


def test_fields_of_each_record():
    job = failing_job()
    (started,) = job.typed("job_started")
    assert (started["np"], started["hosts"]) == (3, ["a", "b"])
    assert job.typed("host_ready") == [
        {"host": "a", "python": "3.11.7", "cpus": 8, "gpus": 2},
        {"host": "b", "python": None, "cpus": 8, "gpus": None},
    ]
    assert job.typed("workers_starting")[0]["ranks"] == [0, 1]
    assert job.typed("workers_starting")[1]["master_addr"] == "10.0.0.1"
    assert job.typed("worker_started")[2] == {
        "host": "b",
        "rank": 2,
        "slot": 0,
        "start": 0,
        "round": 0,
        "pid": 7,
    }
    assert job.typed("worker_exited")[0] == {
        "host": "b",
        "rank": 2,
        "slot": 0,
        "start": 0,
        "round": 0,
        "code": 3,
        "signal": None,
        "elapsed": 1.5,
        "max_rss": None,
        "oom_killed": False,
        "port_taken_by": None,
        "look": "silent",
    }
    assert job.typed("worker_exited")[1]["signal"] == "SIGTERM"
    assert job.typed("workers_stopping")[0]["steps"][0] == {"signal": "SIGTERM", "after": 0.0}
    assert job.typed("user_signal") == [{"signal": "SIGUSR1"}]
    assert job.typed("host_closed") == [{"host": "a", "left": 0}, {"host": "b", "left": 0}]
    assert job.typed("job_ended") == [
        {
            "exit_code": 3,
            "has_run": False,
            "elapsed": 0.0,
            "rank": 2,
            "host": "b",
            "first_victim": None,
            "interrupted": None,
            "error": None,
        }
    ]


def lost_job():
    job = Recorded()
    job.play(on.Began(), on.HostConnected("a"))
    error = HostLost("lost: silent", host="b", hint="ping b").problem
    job.play(on.HostParting("a", error), on.HostFailed("b", error))
    return job


def test_errors_have_their_parts():
    job = lost_job()
    assert job.typed("host_failed") == [
        {"host": "b", "error": "HostLost", "cause": "lost: silent", "hint": "ping b"}
    ]
    assert job.typed("host_parting")[0]["error"] == "HostLost"


def odd_job():
    job = Recorded()
    job.start()
    job.play(on.HostNoise("a", "backup: 1 of 5"))
    job.play(on.HostAway("a", "reset by peer"), on.HostBack("a", 1.23456))
    job.play(on.WorkerNotStarted("a", 0, 0, 127, "train: command not found"))
    job.play(on.HostGone("b", HostLost("lost", host="b").problem), on.Interrupted(2), on.Tick())
    job.play(on.ThreadFailed(Defect("printer: ValueError").problem))
    return job


def test_records_of_failed_starts_and_lost_hosts():
    job = odd_job()
    (record,) = job.typed("worker_not_started")
    assert record["code"] == 127
    assert record["cause"] == "train: command not found"
    assert job.typed("host_lost") == [{"host": "b", "error": "HostLost", "cause": "lost", "hint": None}]
    assert job.typed("host_noise") == [{"host": "a", "text": "backup: 1 of 5"}]
    assert job.typed("host_away") == [{"host": "a", "cause": "reset by peer"}]
    assert job.typed("host_back") == [{"host": "a", "seconds": 1.235}]
    assert job.typed("interrupted") == [{"signal": "SIGINT"}]
    assert job.typed("thread_failed") == [{"error": "Defect", "cause": "printer: ValueError", "hint": None}]


def elastic_job():
    """Records of elastic jobs only."""
    job = Recorded()
    one = place([("a", 1)])[0]
    network = HostNetwork(master_addr="m", master_port=0, interface=None, rendezvous=None)
    steps: tuple[tuple[on.Event, list[do.Action]], ...] = (
        (on.HostsDiscovered((Host("a", 1),)), [do.Start("a", 0, (Launch(3, 2, one),), network, facts(1))]),
        (on.WorkerAsked("a", 3, 2, -1, -1), [do.Assign(1, Launch(3, 2, one), network, 0)]),
        (on.WorkerSuspended("a", 0, 3, 2), [do.Break(1, STOPPED), do.Change(2, why.MoreWorkers(2))]),
        (on.DiscoveryFailed(DiscoveryFailed("no cloud").problem), [do.GroupState("HEALTHY", 1)]),
        (on.WorkerBeat("a", 3, 2, 5), [do.Leave("a", 3, 2, why.TrainingDone())]),
    )
    for event, actions in steps:
        job.ranks.update(actions)
        job.recorder.watch(event, actions, 1.0)
    return job


def test_rounds_are_recorded():
    job = elastic_job()
    who = {"host": "a", "rank": 0, "slot": 3}
    assert job.typed("worker_asked") == [{**who, "after_round": -1, "commit": -1, "cause": None}]
    assert job.typed("worker_placed") == [{**who, "start": 2, "round": 1, "size": 1}]
    assert job.typed("worker_suspended") == [{**who, "start": 2, "round": 0}]
    hangs = {"kind": "worker_hangs", "rank": 0, "host": "a", "how": "stopped", "seconds": 30.0}
    done = {"cause": "training is done", "reason": {"kind": "training_done"}}
    assert job.typed("worker_dismissed") == [{**who, "start": 2, **done}]
    assert job.typed("round_broken") == [
        {"round": 1, "cause": "rank 0 on host a is stopped", "reason": hangs}
    ]
    assert job.typed("hosts_discovered") == [{"hosts": [{"host": "a", "slots": 1}]}]


def facts_of_all_kinds():
    """Every fact, and every cause in one of them."""
    job = Recorded()
    facts = [fact for fact, _ in FACTS]
    facts += [tell.RoundEnding(7, cause) for cause, _, _ in CAUSES]
    job.recorder.watch(on.Tick(), facts, 1.0)
    return job


def test_facts_are_recorded_with_their_fields():
    job = facts_of_all_kinds()
    wanted = {re.sub("(?<!^)([A-Z])", r"_\1", kind.__name__).lower() for kind in get_args(tell.Fact)}
    assert {record["type"] for record in job.records} == wanted
    assert job.typed("host_not_usable")[0] == {
        "host": "b",
        "error": "HostLost",
        "cause": "lost: silent",
        "hint": "ping b",
        "retry_in": 5.0,
        "goes_on": False,
        "text": "host b: lost: silent; try: ping b; the other hosts have too few slots; trying again in 5 s",
    }
    assert job.typed("slots_lacking")[0] == {
        "least": 2,
        "available": 1,
        "seconds": 600.0,
        "text": "waiting for 2 slots (--min-np), for 600 s at most: there is 1",
    }
    assert job.typed("round_formed")[0]["reason"] is None
    assert job.typed("worker_killed")[0]["reason"]["how"] == "stopped"
    assert job.typed("worker_start_failed")[0]["code"] == 3
    assert job.typed("interrupting")[0]["signal"] == "SIGTERM"


def test_each_cause_is_recorded_in_words_and_as_data():
    records = [record for record in facts_of_all_kinds().typed("round_ending") if record["round"] == 7]
    for record, (_, text, reason) in zip(records, CAUSES, strict=True):
        assert (record["cause"], record["reason"]) == (text, reason)


def documented():
    """Return the fields listed in docs/interfaces/events.md, by type and by kind of cause."""
    types, _, kinds = PAGE.read_text().partition("| kind |")
    return [
        {name: set(re.findall(r"`(\w+)`", fields)) for name, _, fields in rows}
        for rows in (
            re.findall(r"^\| `(\w+)` \|(.*)\|(.*)\|$", page, re.MULTILINE) for page in (types, kinds)
        )
    ]


def test_the_documentation_lists_every_record_and_field():
    pages, kinds = documented()
    common = {"time", "job", "type"}
    seen: dict[str, set[str]] = {}
    for job in (failing_job(), lost_job(), odd_job(), elastic_job(), facts_of_all_kinds()):
        for record in job.records:
            seen.setdefault(record["type"], set()).update(record.keys() - common)
    assert seen.keys() == pages.keys()
    for type_, fields in seen.items():
        assert fields <= pages[type_], type_
        assert pages[type_] - fields <= {"cause", "hint"}, type_
    reasons = [reason for _, _, reason in CAUSES]
    assert kinds == {reason["kind"]: reason.keys() - {"kind"} for reason in reasons}


def test_no_secret_and_no_command_is_recorded():
    for job in (failing_job(), odd_job()):
        text = json.dumps(job.records)
        assert SECRET not in text
        assert '"train"' not in text
