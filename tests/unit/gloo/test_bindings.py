"""The driver's side of --bind: looks at the hosts, one table, and sentences. The observers are this test's."""

import pytest

from hvlaunch.driver.observing import Answer, Target
from hvlaunch.driver.observing.bindings import Bindings, table
from hvlaunch.engine import events as on


def row(rank, **more):
    return {
        "rank": rank,
        "ordered": "0-3",
        "cpus": "0-3",
        "memory": "prefer:0",
        "threads": "4",
        "gpus": "1",
        "other": None,
        "notes": [],
        **more,
    }


class Hosts:
    """Observers with a clock of their own; `rows` are the answers by host."""

    def __init__(self, *, is_verbose=True, mode="numa"):
        self.now = 0.0
        self.calls = []
        self.rows = {"a": [row(0), row(1)], "b": [row(2), row(3)]}
        self.texts: list[str] = []
        self.questions = []
        self.bindings = Bindings(mode, self, lambda: self.now, self.texts.append, is_verbose=is_verbose)  # type: ignore[arg-type]

    def at(self, when, call):
        self.calls.append((when, call))

    def ask(self, kind, question, within, answered):
        for host, rows in self.rows.items():
            workers = {0: 100, 1: 101}
            self.questions.append((kind, question(Target(host, f"/tmp/{host}", workers, {}))))
            answered(Answer(host, rows) if rows else Answer(host, problem="it is gone"))
        return list(self.rows)

    def start(self, host="a"):
        self.bindings.watch(on.WorkerStarted(host, 0, 0, 100), (), self.now)

    def go_on(self, seconds):
        end = self.now + seconds
        while due := [entry for entry in self.calls if entry[0] <= end]:
            entry = min(due, key=lambda entry: entry[0])
            self.calls.remove(entry)
            self.now = entry[0]
            entry[1]()
        self.now = end


def test_the_table_of_a_verbose_job_has_equal_hosts_once():
    hosts = Hosts()
    for _ in range(4):
        hosts.start()
    hosts.go_on(0.4)
    assert not hosts.questions
    hosts.go_on(0.2)
    assert hosts.questions[0] == ("bindings", {"workers": [(0, 100), (1, 101)], "scratch": "/tmp/a"})
    assert len(hosts.questions) == 2
    (text,) = hosts.texts
    assert text.splitlines() == [
        "bindings (--bind numa), from /proc:",
        "  host  worker  processors  memory  threads  GPUs",
        "  a,b   0       0-3         0       4        1",
        "  a,b   1       0-3         0       4        1",
    ]
    # Later looks repeat nothing, and end.
    hosts.go_on(1000.0)
    assert len(hosts.texts) == 1
    assert len(hosts.questions) == 8
    assert not hosts.calls


def test_a_later_start_makes_another_table():
    hosts = Hosts()
    hosts.start()
    hosts.go_on(1.0)
    hosts.rows = {"a": [row(0, cpus="4-7", memory="default", gpus=None)]}
    hosts.start()
    hosts.go_on(1.0)
    assert hosts.texts[1].splitlines()[2].split() == ["a", "0", "4-7", "any", "4", "-"]


def test_another_binder_is_named_once_with_both_masks():
    hosts = Hosts(is_verbose=False)
    hosts.start()
    hosts.go_on(1.0)
    assert hosts.texts == []
    other = {"pid": 4321, "name": "EngineCore", "cpus": "0"}
    hosts.rows["b"] = [row(2), row(3, other=other)]
    hosts.rows["a"] = [row(0, other={**other, "pid": 1}), row(1)]
    hosts.go_on(200.0)
    (text,) = hosts.texts
    assert text == (
        "another program binds too: process 1 (EngineCore) of rank 0 on a has processors 0, and --bind gave 0-3, "
        "and 1 more; try: --bind none, or the program without its own binding"
    )


@pytest.mark.parametrize(
    ("note", "mode", "sentence"),
    [
        (
            ["memory", "Operation not permitted"],
            "numa",
            "a,b: the kernel refuses a memory policy (Operation not permitted); memory comes from the node where a worker runs",
        ),
        (
            ["outside", "1"],
            "numa",
            "a,b: NUMA node 1, which has a worker's GPU, has no processor in the cpuset, so its worker is bound by slot",
        ),
        (["unknown", "3"], "gpu", "a,b: the NUMA node of GPU 3 is not known, so its worker is not bound"),
        (
            ["affinity", "Invalid argument"],
            "core",
            "a,b: the kernel refuses to bind a worker (Invalid argument)",
        ),
    ],
    ids=["memory", "outside", "unknown", "affinity"],
)
def test_what_could_not_be_done_is_said_once(note, mode, sentence):
    hosts = Hosts(is_verbose=False, mode=mode)
    hosts.rows = {name: [row(0, notes=[note]), row(1, notes=[note])] for name in "ab"}
    hosts.start()
    hosts.go_on(1000.0)
    assert hosts.texts == [sentence]


def test_gpus_of_the_same_kind_share_a_sentence():
    hosts = Hosts(is_verbose=False)
    hosts.rows = {"a": [row(0, notes=[["unknown", "0"]]), row(1, notes=[["unknown", "1"]])]}
    hosts.start()
    hosts.go_on(1000.0)
    assert hosts.texts == ["a: the NUMA node of GPU 0, 1 is not known, so its worker is bound by slot"]


@pytest.mark.parametrize(
    "rows",
    [
        None,
        "x",
        [7],
        [row(0, cpus="0\x1b[2J")],
        [row(0, cpus=7)],
        [row(0, notes=[["memory"]])],
        [row(0, other={"pid": 0, "name": "x", "cpus": "0"})],
        [{**row(0), "more": 1}],
        [row(0, notes=[["a word of nobody", "x"]])],
    ],
)
def test_a_hostile_answer_is_not_shown(rows):
    hosts = Hosts(is_verbose=False)
    hosts.rows = {"a": rows}
    hosts.start()
    hosts.go_on(1000.0)
    assert hosts.texts == []


def test_a_long_table_is_cut():
    rows = {f"h{index}": [(str(index), "any", "1", "-")] for index in range(150)}
    lines = table(rows)
    assert len(lines) == 102
    assert lines[-1] == "and 50 more"
