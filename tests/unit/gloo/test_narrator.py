"""The narrator's messages and status lines for histories of events."""

import itertools
from typing import Any

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.errors import ConnectFailed, HostLost
from hvlaunch.job import ConsoleOptions, ElasticOptions, JobResult
from hvlaunch.watch import ended_well
from hvlaunch.watch.narrator import Narrator

from .history import History, facts, ready, spec

BAD = ConnectFailed("refused", host="b").problem


class Told(History):
    """A history with a narrator."""

    def __init__(self, hosts="a:2,b:2", *, console=None, **options):
        job = spec(hosts, console=console or ConsoleOptions(), **options)
        super().__init__(job)
        self.texts: list[str] = []
        self.statuses: list[Any] = []
        self.narrator = Narrator(
            job, self.texts.append, lambda ask: self.statuses.append(ask and ask()), lambda: self.now
        )

    @property
    def status(self):
        """The messages so far."""
        return [status and status.text for status in self.statuses]

    def play(self, *events):
        new: list[do.Action] = []
        for event in events:
            actions = super().play(event)
            self.narrator.watch(event, actions, self.now)
            new += actions
        return new

    def find(self):
        """Let the hosts reach each other."""
        for probe in self.of(do.Probe):
            self.play(on.HostProbed(probe.host, probe.target, probe.addresses[0], probe.agent))


@pytest.mark.parametrize("quiet", [False, True])
def test_a_job_that_goes_well_has_a_line_at_its_start(quiet):
    told = Told(console=ConsoleOptions(quiet=quiet)).start()
    began = ["4 workers on 2 hosts"]
    assert told.texts == ([] if quiet else began)
    told.now += 75.0
    for host in "ab":
        told.exit(host, 0)
        told.exit(host, 1)
    told.close()
    assert told.result.exit_code == 0
    assert told.texts == ([] if quiet else began)


@pytest.mark.parametrize(
    ("has_lost", "line"),
    [
        (False, "done after 1 min 15 s, exit code 0"),
        (True, "done after 1 min 15 s, but not all of the output was written, exit code 74"),
    ],
)
def test_the_last_line_of_a_job_that_goes_well(has_lost, line):
    assert ended_well(JobResult(exit_code=0, elapsed=75.0), has_lost=has_lost) == line


def test_a_job_that_fails_has_its_report_at_the_end():
    told = Told("a:1").start()
    told.exit("a", 0, 3)
    told.close()
    assert len(told.texts) == 1


def test_assumed_slots_are_said():
    told = Told("a,b").start()
    assert told.texts[0] == (
        "no number of workers was given, and hosts a and b have no GPU: each gets 1 worker"
        "; try: --slots-per-host 8, for a worker on each processor"
    )
    told = Told("a,b:1").start({"a": facts(1, gpus=2)})
    assert not [text for text in told.texts if "no GPU" in text]


def test_status_shows_hosts_that_are_not_ready():
    told = Told("gpu01:1,gpu02:1,gpu03:1,gpu04:1")
    told.play(on.Began(), on.HostConnected("gpu03"))
    assert told.status == [
        "connecting 0/4, 0 s\nstart: gpu[01-04]",
        "connecting 0/4, 0 s\nstart: gpu[01-02,04]\nagent: gpu03",
    ]
    told.now += 12.3
    stages = {"gpu01": "log in", "gpu02": "resolve", "gpu04": "connect"}
    told.play(
        *(on.HostStage(host, stage) for host, stage in stages.items()), on.HostStage("stranger", "connect")
    )
    rows = ["connecting 0/4, 12 s", "resolve: gpu02", "connect: gpu04", "log in: gpu01", "agent: gpu03"]
    assert told.status[-1] == "\n".join(rows)
    told.play(on.HostReady("gpu03", facts(3)), on.HostReady("gpu01", facts(1)))
    assert told.status[-1] == "connecting 2/4, 12 s\nresolve: gpu02\nconnect: gpu04"
    assert told.statuses[-1][1:] == (2, 4)
    told.play(on.HostFailed("gpu04", BAD))
    assert told.status[-1] == "connecting 2/4, 1 failed, 12 s\nresolve: gpu02"
    told.play(on.HostStage("gpu02", "passphrase"))
    assert told.status[-1] == "connecting 2/4, 1 failed, 12 s\npassphrase: gpu02"
    told.play(on.HostReady("gpu02", facts(2)))
    assert "gpu02" not in (told.status[-1] or "")
    assert told.engine.phase.name in ("CLOSING", "DONE")
    told.close()
    assert told.status[-1] is None


def test_status_of_hosts_that_get_files_is_not_connecting():
    told = Told("gpu01:1,gpu02:1,gpu03:1")
    told.play(on.Began(), on.HostStage("gpu01", "files 30% of 2.0 GB"), on.HostStage("gpu02", "log in"))
    assert (told.status[-1] or "").startswith("connecting 0/3, 0 s\nstart: gpu03\nlog in: gpu02\nfiles 30%")
    told.play(*(on.HostStage(host, "files 40% of 2.0 GB") for host in ("gpu01", "gpu02", "gpu03")))
    assert told.status[-1] == "preparing 0/3, 0 s\nfiles 40% of 2.0 GB: gpu[01-03]"
    told.close()


def test_status_ends_when_workers_start():
    told = Told()
    told.connect()
    assert told.status[-1] == "connected 2/2, 0 s: finding addresses by which the hosts reach each other"
    told.wire()
    assert told.status[-1] is None
    seen = len(told.status)
    told.exit("a", 0, 1)
    assert len(told.status) == seen


def test_status_of_an_elastic_job_ends_when_it_has_started():
    job = Told("a:1,b:1", elastic=ElasticOptions(min_np=1))
    job.play(on.Began(), *ready("a", 1))
    job.now += 60.0
    job.play(on.Tick())
    assert job.of(do.Start)
    assert job.status[-1] is None


def test_status_shows_the_wait_for_the_first_hosts_of_a_pool():
    job = Told("a:1", elastic=ElasticOptions(min_np=1, discovery_script="cat pool"))
    job.play(on.Began(), on.HostsDiscovered(()))
    assert job.status[-1] == "waiting for the first hosts of the pool"


def test_status_ends_after_an_interrupt():
    told = Told()
    told.play(on.Began(), on.Interrupted(2))
    assert told.status[-1] is None


def test_details():
    told = Told(verbose=True)
    told.now = 100.0
    told.play(on.Began())
    told.now = 100.25
    told.play(on.HostConnected("a"), on.HostConnected("b"))
    told.play(
        on.HostReady("a", facts(1, python="3.11.7", gpus=8)),
        on.HostReady("b", facts(2, python="3.9.2", cpus=1)),
    )
    told.wire()
    for host, slot, pid in (("a", 0, 11), ("b", 0, 7), ("a", 1, 12), ("b", 1, 9)):
        told.play(on.WorkerStarted(host, 0, slot, pid))
    for host in "ab":
        told.exit(host, 0)
        told.exit(host, 1)
    told.close()
    wanted = [
        "host a: connected after 0.25 s",
        "host a: ready after 0.25 s: Python 3.11.7, 8 CPUs, 8 GPUs",
        "host b: ready after 0.25 s: Python 3.9.2, 1 CPU",
        "host a: reaches the rendezvous at 10.0.0.100",
        "host a: started ranks 0-1, pids 11-12",
        "host b: started ranks 2-3, pids 7,9",
        "host b: closed",
    ]
    assert [text for text in told.texts if text in wanted] == wanted
    network = [text for text in told.texts if "MASTER_ADDR=" in text and text.startswith("host ")]
    assert network == [
        "host a: MASTER_ADDR=10.0.0.1 MASTER_PORT=20001 on eth0, rendezvous at 10.0.0.100:4711",
        "host b: MASTER_ADDR=10.0.0.1 MASTER_PORT=20001 on eth0, rendezvous at 10.0.0.100:4711",
    ]
    assert any(text.startswith("host b: reaches host a at 10.0.0.1") for text in told.texts)
    assert any(text.startswith("4 workers on 2 hosts") for text in told.texts)


def test_relaying_host_is_a_detail():
    events = (
        on.RendezvousReached("a", "127.0.0.1", ("10.9.9.9", "fd00::9"), 40123),
        on.RendezvousReached("b", "127.0.0.1", (), 40124),
    )
    for verbose in (False, True):
        told = Told(verbose=verbose)
        told.play(on.Began(), *events)
        assert [text for text in told.texts if "relay" in text] == verbose * [
            "host a: its agent relays to the rendezvous, at 127.0.0.1:40123 (can't reach it at 10.9.9.9, fd00::9)",
            "host b: its agent relays to the rendezvous, at 127.0.0.1:40124",
        ]


def test_traceback_of_an_agent_is_a_detail():
    parting = on.HostParting(
        "a", HostLost("lost: its agent ends: KeyError: 'port'", host="a").problem, "Traceback …"
    )
    for verbose in (False, True):
        told = Told(verbose=verbose)
        told.play(on.Began(), parting)
        assert [text for text in told.texts if "Traceback" in text] == verbose * ["host a: | Traceback …"]


@pytest.mark.parametrize(("quiet", "notes"), [(False, True), (True, False)])
def test_quiet_leaves_errors(quiet, notes):
    told = Told(console=ConsoleOptions(quiet=quiet)).start()
    told.play(on.Interrupted(2))
    assert any("got SIGINT" in text for text in told.texts) is notes
    for host in "ab":
        told.exit(host, 0, None, 2)
        told.exit(host, 1, None, 2)
    told.play(on.HostClosed("a", 3), on.HostGone("b", ConnectFailed("lost", host="b").problem))
    assert any("3 processes of the job can't be killed" in text for text in told.texts)
    assert "host b: lost" in told.texts
    assert bool(told.status) is notes


@pytest.mark.parametrize(
    ("ranks", "quiet", "count"),
    [((range(4, 9), range(20, 21)), False, 1), ((range(4, 9),), True, 0), ((range(3, 9),), False, 0)],
)
def test_ranks_beyond_the_job_get_a_warning(ranks, quiet, count):
    told = Told(console=ConsoleOptions(ranks=ranks, quiet=quiet)).start()
    assert told.texts.count("--ranks: the job has only ranks 0-3, so no output is shown") == count


@pytest.mark.parametrize("quiet", [False, True])
def test_noise_on_a_host_is_said_unless_quiet(quiet):
    told = Told(console=ConsoleOptions(quiet=quiet)).start()
    told.play(on.HostNoise("b", "backup: 1 of 5"))
    noise = [text for text in told.texts if text.startswith("host b: ") and text.endswith(": backup: 1 of 5")]
    assert len(noise) == (not quiet)


@pytest.mark.parametrize("quiet", [False, True])
def test_lost_connection_and_its_return_are_said_unless_quiet(quiet):
    told = Told(console=ConsoleOptions(quiet=quiet)).start()
    told.play(on.HostAway("b", "reset by peer"), on.HostBack("b", 2.14))
    words = [
        text
        for text in told.texts
        if text.startswith("host b: ") and "connect" in text and "after" not in text
    ]
    words += [text for text in told.texts if "connected again" in text]
    lost, back = (
        "host b: the connection is lost (reset by peer); connecting again",
        "host b: connected again after 2.1 s",
    )
    assert (lost in words, back in words) == (not quiet, not quiet)


@pytest.mark.parametrize("on_hang", ["warn", "stop", "restart"])
def test_reason_of_a_hang_is_said_once(on_hang):
    told = Told(on_hang=on_hang).start()
    told.play(on.JobHangs(60.0, (1,), "rank 1 waits"))
    in_report = 0
    if on_hang != "warn":
        for host, slot in itertools.product("ab", range(2)):
            told.exit(host, slot, signal=15)
        told.close()
        assert told.result.error is not None
        in_report = told.result.error.cause.count("rank 1 waits")
    assert sum(text.count("rank 1 waits") for text in told.texts) + in_report == 1
