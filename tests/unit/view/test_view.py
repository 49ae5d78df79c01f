"""The view of a job: the model, its time line and its feed, and the view in words."""

import pytest

from hvlaunch.console.output_store import Stored
from hvlaunch.view.model import Feed, Model, RankProgress, Tails, as_json, slowest_rank
from hvlaunch.view.text import bar, host_cells, newest_lines_with, plain, size, steps, strip, verdict
from hvlaunch.view.timeline import Timeline
from tests.unit.view.scenes import SCENES


def worker(rank, host="a", state="working", **more):
    return {
        "rank": rank,
        "local_rank": 0,
        "host": host,
        "slot": 0,
        "start": 0,
        "round": 0,
        "state": state,
        **more,
    }


def at(step, total=None, rate=None):
    return {"step": step, "total": total, "rate": rate, "metrics": {}}


def host(name, state="ready", *, is_excluded=False):
    return {"host": name, "state": state, "is_listed": True, "is_excluded": is_excluded}


def job(workers, hosts):
    state = {"number": 0, "size": len(workers), "state": "running", "elapsed": 1.0, "ended": []}
    about = {"id": "0123456789ab", "name": "demo", "command": ["train"], "began": 1000.0, "pid": 1}
    return {**about, "phase": "running", "round": state, "workers": workers, "hosts": hosts}


def sample(name, workers=(), gpus=()):
    return {
        "host": name, "time": 1.0, "cores": 8, "cpu": 2.0, "load": 1.0, "memory_used": 4 << 30, "memory_total": 16 << 30,
        "network_in": 0.0, "network_out": 0.0, "disk_read": 0.0, "disk_write": 0.0, "free": {}, "workers": list(workers),
        "gpus": list(gpus), "problems": [],
    }  # fmt: skip


def worker_sample(rank, state="R", gpus=(), last_output=0.5):
    return {
        "rank": rank, "pid": 100 + rank, "processes": 1, "cpu": 0.5, "cpu_time": 3.0, "memory": 1 << 30, "state": state,
        "threads": 1, "waits_in": None, "io": 0, "last_output": last_output, "gpus": list(gpus),
    }  # fmt: skip


def gpu(index, utilization):
    return {"index": index, "utilization": utilization, "memory_used": 2 << 30, "memory_total": 8 << 30}


def shown(workers, hosts, samples=(), model=None, now=1010.0):
    return (model or Model()).view(job(workers, hosts), samples, now)


def test_a_host_has_its_ranks_with_what_they_use():
    gpus = [gpu(0, 0.25), gpu(1, 0.75)]
    samples = [sample("a", [worker_sample(0, gpus=[1]), worker_sample(1)], gpus)]
    (row,) = shown([worker(0), worker(1)], [host("a")], samples).hosts
    assert (row.cpu, row.cores, row.gpu, row.gpu_memory_used) == (2.0, 8, 0.5, 4 << 30)
    first, second = row.ranks
    assert (first.pid, first.cpu, first.memory, first.gpu, first.gpu_memory) == (
        100,
        0.5,
        1 << 30,
        0.75,
        2 << 30,
    )
    assert (second.pid, second.gpu) == (101, None)


def test_commits_in_memory_are_noted():
    samples = [{**sample("a", [worker_sample(0)]), "commits": 3 << 30}, {**sample("b"), "commits": 0}]
    rows = {row.host: row for row in shown([worker(0)], [host("a"), host("b")], samples).hosts}
    assert (rows["a"].commits, rows["b"].commits) == (3 << 30, 0)
    assert host_cells(rows["a"])[-1] == "commits: 3.0G"
    assert host_cells(rows["b"])[-1] == ""


def test_states_are_shown_without_samples():
    view = shown([worker(0), worker(1, "b")], [host("a"), host("b")])
    assert not view.is_sampled
    assert [(row.host, row.cpu, [one.cpu for one in row.ranks]) for row in view.hosts] == [
        ("a", None, [None]),
        ("b", None, [None]),
    ]


@pytest.mark.parametrize(
    ("workers", "hosts", "samples", "first_host", "first_rank"),
    [
        ([worker(0), worker(1, "b", "hanging")], [host("a"), host("b")], [], "b", 1),
        ([worker(0), worker(1, state="starting")], [host("a")], [], "a", 1),
        ([worker(0), worker(1, "b")], [host("a"), host("b", "parting")], [], "b", 1),
        ([worker(0), worker(1)], [host("a")], [sample("a", [worker_sample(0), worker_sample(1, "T")])], "a", 1),
        ([worker(0, progress=at(5, rate=0.1)), worker(1, "b", progress=at(4))], [host("a"), host("b")], [], "b", 1),
    ],
    ids=["hanging", "starting", "host leaves", "stopped", "behind"],
)  # fmt: skip
def test_the_worst_comes_first(workers, hosts, samples, first_host, first_rank):
    view = shown(workers, hosts, samples)
    assert (view.hosts[0].host, view.hosts[0].ranks[0].rank) == (first_host, first_rank)


def test_hosts_that_the_job_does_not_use_are_left_out():
    gone = {**host("b", "none"), "is_listed": False}
    assert [row.host for row in shown([worker(0)], [host("a"), gone]).hosts] == ["a"]


@pytest.mark.parametrize(
    ("progress", "rank"),
    [
        ({0: RankProgress(5), 1: RankProgress(4), 2: RankProgress(5)}, None),
        ({0: RankProgress(5, rate=1.0), 1: RankProgress(5, rate=1.0), 2: RankProgress(5, rate=0.5)}, 2),
        ({0: RankProgress(5, rate=1.0), 1: RankProgress(5, rate=0.95)}, None),
        ({0: RankProgress(500, rate=100.0), 1: RankProgress(440, rate=98.0)}, None),
        ({0: RankProgress(500, rate=0.2), 1: RankProgress(499, rate=0.2)}, 1),
        ({0: RankProgress(5), 1: RankProgress(5)}, None),
        ({0: RankProgress(5)}, None),
        ({}, None),
    ],
)
def test_the_slowest_rank(progress, rank):
    assert slowest_rank(progress) == rank


def test_a_rank_shows_the_step_that_it_tells():
    (row,) = shown([worker(0, progress=at(8, total=20, rate=2.5))], [host("a")]).ranks
    assert (row.step, row.total, row.rate) == (8, 20, 2.5)


def test_last_lines_have_no_control_sequences():
    model = Model()
    model.add_output(
        [Stored(1.0, "stdout", b"first\n\x1b[31msecond\x1b[0m \x07\n", 0), Stored(1.0, "said", b"no rank's")]
    )
    (row,) = shown([worker(0)], [host("a")], model=model).ranks
    assert (row.line, row.printed) == (r"second \x07", 24)


def test_a_view_is_data():
    view = as_json(shown([worker(0)], [host("a")], [sample("a", [worker_sample(0)])]))
    assert view["hosts"][0]["ranks"][0]["pid"] == 100
    assert (view["id"], view["ending"], view["round"]) == ("0123456789ab", None, 0)


def test_end_is_shown_with_the_last_lines_of_its_rank():
    model = Model()
    model.add_output([Stored(1.0, "stderr", b"Traceback\nValueError: x\n", 1)])
    end = {
        "time": "2026-11-22T10:00:00.000Z",
        "type": "job_ended",
        "exit_code": 1,
        "rank": 1,
        "host": "a",
        "cause": "exit code 1",
    }
    model.add_events([end])
    view = shown([worker(1)], [host("a")], model=model)
    assert view.phase == "ended"
    assert view.ending is not None
    assert (view.ending.exit_code, view.ending.rank, view.ending.lines) == (
        1,
        1,
        ("Traceback", "ValueError: x"),
    )


def test_a_plain_table_has_the_columns_that_are_known():
    view = shown([worker(0), worker(1)], [host("a")])
    text = plain(view, 80)
    assert "job 0123456789ab (demo): running, round 0 running, 2 of 2 workers on 1 host," in text
    assert "HOST  RANK  STATE" in text
    assert "CPU" not in text
    assert "CPU" in plain(shown([worker(0)], [host("a")], [sample("a", [worker_sample(0)])]), 200)


def test_workers_of_roles_are_named_by_them():
    workers = [worker(0, role="train:0"), worker(1, role="gen:0")]
    lines = plain(shown(workers, [host("a")]), 80).splitlines()
    assert [line.split()[0] for line in lines if "working" in line][-2:] == ["train:0", "gen:0"]


def test_thousand_ranks_are_folded_by_host_with_the_worst_ranks():
    workers = [worker(rank, f"h{rank // 8}", "hanging" if rank == 777 else "working") for rank in range(1000)]
    text = plain(shown(workers, [host(f"h{number}") for number in range(125)]), 120)
    lines = text.splitlines()
    assert lines[0] == "Hung: rank 777  on host h97"
    assert lines[4].startswith("h97")
    assert "1 hanging, 7 working" in lines[4]
    assert [line.split()[:3] for line in lines if line.startswith("h97 ")][-1] == ["h97", "777", "hanging"]
    assert len(lines) < 150
    assert max(map(len, lines)) <= 120


def test_rounds_and_failures_in_one_line():
    model = Model()
    stamp = "1970-01-01T00:{}:00.000Z".format
    model.add_events(
        [
            {"type": "round_starting", "time": stamp("17"), "round": 0, "workers": 1, "hosts": ["a"]},
            {"type": "round_broken", "time": stamp("18"), "round": 0, "cause": "rank 0 failed"},
            {"type": "round_starting", "time": stamp("19"), "round": 1, "workers": 1, "hosts": ["a"]},
        ]
    )
    assert strip(shown([worker(0)], [host("a")], model=model, now=1000 + 200), 20) == "--000000x-----111111"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0B"),
        (999, "999B"),
        (1000, "1.0K"),
        (5 << 20, "5.0M"),
        (123 << 30, "123G"),
        (1 << 50, "1.0P"),
    ],
)
def test_a_size_in_few_letters(count, text):
    assert size(count) == text


def test_other_figures():
    assert [steps(None, None, None), steps(3, None, None), steps(3, 10, 2.5)] == ["-", "3", "3/10 2.5/s"]
    assert [bar(0.5, 4), bar(2.0, 2), bar(0.0625, 2)] == ["██  ", "██", "▏ "]


STAMP = "1970-01-01T00:00:01.000Z"


class Driver:
    """Answers as the control socket does."""

    def __init__(self) -> None:
        self.pid = 1
        self.events: list[dict[str, object]] = []
        self.samples: dict[str, object] | None = None
        self.asked: list[str] = []

    def ask(self, path):
        self.asked.append(path)
        if path == "/job":
            about = {"id": "0123456789ab", "name": None, "command": ["x"], "began": 0.0, "pid": self.pid}
            return {**about, "phase": "running", "round": None, "workers": [], "hosts": []}
        if path == "/samples":
            return self.samples
        number = int(path.partition("since=")[2].partition("&")[0])
        return {"next": max(number, len(self.events)), "missed": 0, "events": self.events[number:]}


def ready(name):
    return {"type": "host_ready", "time": STAMP, "host": name}


def texts(view):
    return [moment.text for moment in view.moments]


def feed_of(driver):
    return Feed(driver.ask, list, lambda: 10.0)


def test_events_are_asked_for_once():
    driver = Driver()
    feed = feed_of(driver)
    driver.events = [ready("a")]
    feed.current_view()
    driver.events.append(ready("b"))
    assert texts(feed.current_view()) == ["a is ready", "b is ready"]
    feed.await_news(3)
    assert driver.asked[-1] == "/events?since=2&wait=3"


def test_new_driver_is_asked_for_all_events():
    driver = Driver()
    feed = feed_of(driver)
    driver.events = [ready("a"), ready("b"), ready("c")]
    feed.current_view()
    driver.pid, driver.events = 2, [ready("a"), ready("b")]
    assert texts(feed.current_view()) == ["a is ready", "b is ready"]


def test_ended_job_is_not_asked_for_its_state():
    driver = Driver()
    items = [Stored(1.0, "stdout", b"last words\n", 3)]
    feed = Feed(driver.ask, lambda: [items.pop()] if items else [], lambda: 10.0)
    feed.current_view()
    driver.events = [{"type": "job_ended", "time": STAMP, "exit_code": 1, "rank": 3}]
    driver.asked.clear()
    view = feed.current_view()
    assert feed.has_ended
    assert "/job" not in driver.asked
    assert view.ending is not None
    assert view.ending.lines == ("last words",)


def test_driver_without_samples_has_a_view():
    assert not feed_of(Driver()).current_view().is_sampled


@pytest.mark.parametrize("name", SCENES)
def test_the_verdict(name):
    scene = SCENES[name]
    assert verdict(scene.view()) == (scene.tone, scene.verdict, scene.detail)


def test_ranks_that_others_wait_for_are_marked():
    states = {row.rank: row.state for row in SCENES["hung"].view().ranks}
    assert {rank for rank, state in states.items() if state == "hanging"} == {3, 7}


def test_a_lost_host_stays_in_the_view():
    states = {row.host: row.state for row in SCENES["smaller"].view().hosts}
    assert states == {"gpu1": "ready", "gpu2": "excluded", "gpu3": "ready", "gpu4": "ready"}


@pytest.mark.parametrize(
    ("pieces", "line"),
    [
        ([b"one\ntwo\n"], "two"),
        ([b"one\ntw", b"o"], "two"),
        ([b"one\n", b"\n \n"], "one"),
        ([b"10%\r20%\r", b"30%\r"], "30%"),
        ([b"10%\r20%\n"], "20%"),
        ([b"win\r\n"], "win"),
        ([b"x" * 9000], "x" * 512),
        ([b"\xff\n"], "\ufffd"),
        ([], ""),
    ],
)
def test_the_last_line(pieces, line):
    tails = Tails()
    for piece in pieces:
        tails.feed(0, "stdout", piece)
    assert tails.line(0) == line


def test_streams_are_not_mixed_up():
    tails = Tails()
    tails.feed(0, "stdout", b"out")
    tails.feed(0, "stderr", b"err\n")
    tails.feed(0, "stdout", b"put\n")
    assert tails.lines(0) == ["err", "output"]


def item(text, rank=0, kind="stdout", time=1.0):
    return Stored(time, kind, text, rank)


ITEMS = [
    item(b"Epoch 1\nloss ", time=1.0),
    item(b"epoch other\n", 1, time=2.0),
    item(b"0.5\n", time=3.0),
    item(b"oops: EPOCH\n", 1, "stderr", time=4.0),
    Stored(5.0, "said", b"epoch, says hvlaunch"),
    item(b"tail", 1, time=6.0),
    item(b"", 1, "stdout ended", time=7.0),
]


@pytest.mark.parametrize(
    ("text", "ranks", "count", "found"),
    [
        ("epoch", None, 10, ["Epoch 1", "epoch other", "oops: EPOCH", "epoch, says hvlaunch"]),
        ("epoch", {1}, 10, ["epoch other", "oops: EPOCH"]),
        ("epoch", None, 2, ["oops: EPOCH", "epoch, says hvlaunch"]),
        ("loss 0", None, 10, ["loss 0.5"]),
        ("tail", None, 10, ["tail"]),
        ("nothing", None, 10, []),
    ],
)
def test_lines_with_a_text(text, ranks, count, found):
    lines = newest_lines_with(ITEMS, text, ranks, count)
    assert [line["text"] for line in lines] == found


def test_unfinished_line_is_found():
    assert newest_lines_with([item(b"half a li")], "half", None, 5)[0]["rank"] == 0


def record(kind, second, **fields):
    return {"time": f"1970-01-01T00:00:{second:02}.000Z", "job": "j", "type": kind, **fields}


def seen(*records):
    timeline = Timeline()
    for one in records:
        timeline.add_event(one)
    return timeline


def test_a_job_in_two_rounds():
    timeline = seen(
        record("host_ready", 1, host="a"),
        record("round_starting", 2, round=0, workers=3, hosts=["a", "b"]),
        record("workers_starting", 2, host="a", round=0, ranks=[0, 1]),
        record("workers_starting", 2, host="b", round=0, ranks=[2]),
        record("worker_exited", 5, host="b", rank=2, round=0, code=None, signal="SIGKILL"),
        record(
            "round_ending",
            6,
            round=0,
            cause="rank 2 on host b was killed",
            reason={"kind": "worker_ended", "rank": 2, "host": "b"},
        ),
        record("worker_exited", 7, host="a", rank=0, round=0, code=None, signal="SIGTERM"),
        record("round_starting", 8, round=1, workers=2, hosts=["a"]),
        record("workers_starting", 8, host="a", round=1, ranks=[0, 1]),
    )
    first, second = timeline.rounds
    assert (first.begin, first.end, first.hosts, first.cause) == (
        2.0,
        6.0,
        {"a": 2, "b": 1},
        "rank 2 on host b was killed",
    )
    assert (second.number, second.end, second.hosts) == (1, None, {"a": 2})
    assert [(one.kind, one.text) for one in timeline.moments(is_elastic=True)] == [
        ("host", "a is ready"),
        ("round", "round 0 begins: 3 workers on a,b"),
        ("failure", "rank 2 on b ended with signal SIGKILL"),
        ("failure", "round 0 ends: rank 2 on host b was killed"),
        ("round", "round 1 begins: 2 workers on a"),
    ]


def test_the_only_round_of_a_static_job_is_not_named():
    timeline = seen(
        record("host_ready", 1, host="a"),
        record("round_starting", 2, round=0, workers=2, hosts=["a"]),
        record("worker_exited", 5, host="a", rank=1, round=0, code=1, signal=None),
    )
    assert [(one.kind, one.text) for one in timeline.moments(is_elastic=False)] == [
        ("host", "a is ready"),
        ("round", "2 workers on a"),
        ("failure", "rank 1 on a ended with exit code 1"),
    ]


def test_workers_that_ask_are_placed_one_by_one():
    timeline = seen(
        record("round_formed", 1, round=0, workers=2, hosts=["a"]),
        record("worker_placed", 1, round=0, host="a", rank=0),
        record("worker_placed", 1, round=0, host="a", rank=1),
        record("worker_placed", 2, round=0, host="b", rank=2),
    )
    assert timeline.rounds[0].hosts == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ({"code": 3, "signal": None}, "rank 0 on a ended with exit code 3"),
        ({"code": None, "signal": "SIGKILL", "oom_killed": True}, "rank 0 on a ended with signal SIGKILL, killed for want of memory"),
    ],
)  # fmt: skip
def test_a_failure_says_how(end, text):
    (moment,) = seen(record("worker_exited", 1, host="a", rank=0, round=0, **end)).moments(is_elastic=True)
    assert (moment.text, moment.host, moment.rank) == (text, "a", 0)


def test_good_end_of_a_worker_is_not_shown():
    assert not seen(record("worker_exited", 1, host="a", rank=0, round=0, code=0, signal=None)).moments(
        is_elastic=True
    )


def test_the_cause_of_a_lost_host():
    (moment,) = seen(
        record("host_lost", 1, host="a", error="HostLost", cause="no answer for 30 s", hint=None)
    ).moments(is_elastic=True)
    assert moment.text == "a is lost: no answer for 30 s"


def test_text_from_elsewhere_is_made_safe():
    (moment,) = seen(record("host_lost", 1, host="a", cause="\x1b[2Jgone")).moments(is_elastic=True)
    assert moment.text == r"a is lost: \x1b[2Jgone"


def test_the_end_of_the_job_ends_its_round():
    timeline = seen(
        record("round_starting", 1, round=0, workers=1, hosts=["a"]), record("job_ended", 4, exit_code=0)
    )
    assert timeline.rounds[0].end == 4.0
    assert timeline.ending is not None


def test_kept_lines_are_bounded():
    timeline = seen(*(record("host_ready", 1, host=f"h{number}") for number in range(1000)))
    moments = timeline.moments(is_elastic=True)
    assert [len(moments), moments[-1].text] == [200, "h999 is ready"]
