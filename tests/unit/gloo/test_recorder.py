"""Records of a job's events; docs/events.md describes each."""

import json
import re
from pathlib import Path

from hvlaunch.errors import DiscoveryFailed, HostLost
from hvlaunch.gloo.engine import actions as do
from hvlaunch.gloo.engine import events as on
from hvlaunch.gloo.engine.actions import HostNetwork
from hvlaunch.gloo.watch.recorder import Recorder
from hvlaunch.hosts.placement import place
from hvlaunch.job import Host

from .history import History, facts, spec

PAGE = Path(__file__).parents[3] / "docs" / "events.md"
SECRET = "hunter2-in-the-environment"


class Recorded(History):
    """A history with a recorder that listens."""

    def __init__(self, hosts="a:2,b:1"):
        job = spec(hosts, env={"SECRET": SECRET}, np=3)
        super().__init__(job)
        self.records = []
        self.recorder = Recorder(job, "0123abcd", self.records.append, wall=lambda: 1795222953.1239)

    def play(self, *events):
        new = []
        for event in events:
            actions = super().play(event)
            self.recorder.see(event, actions, self.now)
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
    types = [record["type"] for record in job.records if record["type"] != "message"]
    assert types[0] == "job_started"
    assert types[-1] == "job_ended"
    assert types.index("workers_starting") < types.index("worker_started") < types.index("worker_exited")
    assert all(
        list(record)[:3] == ["time", "job", "type"]
        and record["job"] == "0123abcd"
        and record["time"] == "2026-11-21T01:02:33.123Z"
        for record in job.records
    )


def test_what_is_told_of_each():
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
    }
    assert job.typed("worker_exited")[1]["signal"] == "SIGTERM"
    assert job.typed("workers_stopping")[0]["steps"][0] == {"signal": "SIGTERM", "after": 0.0}
    assert job.typed("user_signal") == [{"signal": "SIGUSR1"}]
    assert job.typed("host_closed") == [{"host": "a", "left": 0}, {"host": "b", "left": 0}]
    assert job.typed("job_ended") == [
        {"exit_code": 3, "elapsed": 0.0, "rank": 2, "host": "b", "interrupted": None, "error": None}
    ]


def lost_job():
    job = Recorded()
    job.play(on.Began(), on.HostConnected("a"))
    error = HostLost("lost: silent", host="b", hint="ping b")
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
    job.play(on.WorkerNotStarted("a", 0, 0, 127, "train: command not found"))
    job.play(on.HostGone("b", HostLost("lost", host="b")), on.Interrupted(2), on.Tick())
    return job


def test_what_could_not_be_started_and_what_was_lost():
    job = odd_job()
    (record,) = job.typed("worker_not_started")
    assert record["code"] == 127
    assert record["cause"] == "train: command not found"
    assert job.typed("host_lost") == [{"host": "b", "error": "HostLost", "cause": "lost", "hint": None}]
    assert job.typed("host_noise") == [{"host": "a", "text": "backup: 1 of 5"}]
    assert job.typed("interrupted") == [{"signal": "SIGINT"}]


def elastic_job():
    """What only elastic jobs have."""
    job = Recorded()
    one = place([("a", 1)])[0]
    network = HostNetwork(master_addr="m", master_port=0, interface=None, rendezvous=None)
    for event, actions in (
        (on.HostsDiscovered([Host("a", 1)]), [do.Start("a", 0, [one], network, facts(1), [3], [2])]),
        (on.WorkerAsked("a", 3, 2, -1, -1), [do.Assign("a", 3, 2, 1, one, network, 0)]),
        (on.WorkerSuspended("a", 0, 3, 2), [do.Break(1, "rank 0 is stopped"), do.Change(2, "2 more")]),
        (on.DiscoveryFailed(DiscoveryFailed("no cloud")), [do.GroupState("HEALTHY", 1)]),
        (on.WorkerBeat("a", 3, 2, 5), [do.Leave("a", 3, 2, "training is done")]),
    ):
        job.recorder.see(event, actions, 1.0)
    return job


def test_rounds_are_told():
    job = elastic_job()
    who = {"host": "a", "rank": 0, "slot": 3}
    assert job.typed("worker_asked") == [{**who, "after_round": -1, "commit": -1, "cause": None}]
    assert job.typed("worker_placed") == [{**who, "start": 2, "round": 1, "size": 1}]
    assert job.typed("worker_suspended") == [{**who, "start": 2, "round": 0}]
    assert job.typed("worker_dismissed") == [{**who, "start": 2, "cause": "training is done"}]
    assert job.typed("round_broken") == [{"round": 1, "cause": "rank 0 is stopped"}]
    assert job.typed("hosts_discovered") == [{"hosts": [{"host": "a", "slots": 1}]}]


def documented():
    """By type, the fields that docs/events.md lists."""
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", fields)) for name, _, fields in rows}


def test_the_documentation_lists_every_record_and_field():
    pages = documented()
    common = {"time", "job", "type"}
    seen = {}
    for job in (failing_job(), lost_job(), odd_job(), elastic_job()):
        for record in job.records:
            seen.setdefault(record["type"], set()).update(record.keys() - common)
    assert seen.keys() == pages.keys()
    for name, fields in seen.items():
        assert fields <= pages[name], name
        assert pages[name] - fields <= {"cause", "hint"}, name


def test_no_secret_and_no_command_is_recorded():
    for job in (failing_job(), odd_job()):
        text = json.dumps(job.records)
        assert SECRET not in text
        assert '"train"' not in text
