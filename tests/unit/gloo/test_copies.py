"""The driver's orders for commits, with errands of this test: a host that hangs delays no other."""

import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from hvlaunch.agent.commits import KeptCommit
from hvlaunch.driver.links.errands import Errand
from hvlaunch.driver.observing import copies
from hvlaunch.driver.observing.copies import Copies
from hvlaunch.driver.observing.observing import _Kept
from hvlaunch.job import ElasticOptions
from hvlaunch.rendezvous.messages import KEPT
from hvlaunch.rendezvous.serving import RendezvousServer
from tests.testhosts import places

LONG = 30.0
COMMIT = ["default.0", 0, 5, 1, 10, 100]


wait_until = partial(places.wait_until, what="the copies get on", timeout=LONG)


class Host:
    """A host whose errand answers at once, unless it hangs from the beginning, or from its first order on."""

    def __init__(self, name: str, hangs: str = "") -> None:
        self.host = SimpleNamespace(name=name)
        self.last_heard, self.is_closed, self.has_parted, self.is_away = 0.0, False, False, False
        self.scratch = f"/tmp/hvlaunch-{name}"
        self.errands = self
        self.hangs = hangs
        self.own: list[Any] = []
        self.copies: list[Any] = []
        self.more: dict[str, Any] = {}
        self.orders: list[Any] = []
        self.starts: list[Any] = []
        self._lines = b""

    def start(self, name: str, arguments: Any, _limits: Any) -> Errand:
        errand = Errand(name, len(self.starts), self.host.name, self._send, None, lambda _errand: None)
        self.starts.append((errand, arguments))
        if self.hangs != "start":
            errand.take_data(b'{"port": 1000}\n')
        return errand

    def _send(self, _number: int, action: str, body: bytes = b"", **_more: Any) -> None:
        if action == "data":
            *lines, self._lines = (self._lines + body).split(b"\n")
            for line in lines:
                self._obey(json.loads(line))

    def _obey(self, order: Any) -> None:
        self.orders.append(order)
        if self.hangs:
            return
        self.copies += [item["commit"] for item in order.get("fetch", ())]
        answer = {"own": self.own, "copies": self.copies, "problems": [], "bytes": 0, "seconds": 0.0}
        answer |= {"is_saving": False, "save_seconds": 0.0, "trouble": "", "directory": ""}
        self.starts[-1][0].take_data(json.dumps({**answer, **self.more}).encode() + b"\n")


class Words(list[str]):
    """What the copies have said."""

    copies: Copies


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copies, "_LOOK", 0.01)
    started = []
    words = Words()

    def start(*hosts: Host, count: int = 1, **more: Any) -> Words:
        server: Any = SimpleNamespace(put=lambda *_: None)
        links: Any = lambda: hosts  # noqa: E731 (the hosts stand for their links)
        words.copies = Copies(server, links, lambda _: None, count, words.append, **more)
        started.append(words.copies)
        return words

    yield start
    for item in started:
        item.stop()


@pytest.mark.parametrize("moment", ["start", "order"])
def test_a_hung_errand_delays_no_other_host(
    begin: Callable[..., Words], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    if moment == "order":
        monkeypatch.setattr(copies, "_PATIENCE", 0.2)
    a, b, c = Host("a", moment), Host("b"), Host("c")
    b.own = [COMMIT]
    words = begin(a, b, c)
    wait_until(lambda: c.copies == [COMMIT])
    if moment == "order":
        assert words == ["commits are not copied: host a: its copying process does not answer"]
        assert len(a.starts) == 1


def test_another_errand_follows_a_hung_one(
    begin: Callable[..., Words], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_PATIENCE", 0.2)
    monkeypatch.setattr(copies, "_RETRY", 0.1)
    a, b = Host("a", "start"), Host("b")
    b.own = [COMMIT]
    begin(a, b)
    wait_until(lambda: len(a.starts) == 1)
    a.hangs = ""
    wait_until(lambda: a.copies == [COMMIT])


def test_signs_of_life_are_no_answers(begin: Callable[..., Words]) -> None:
    a, b = Host("a"), Host("b")
    b.own = [COMMIT]
    obey = a._obey

    def slowly(order: Any) -> None:
        if order.get("fetch"):
            errand = a.starts[-1][0]
            for _ in range(4):
                errand.take_data(b"{}\n")
        obey(order)

    a._obey = slowly  # type: ignore[method-assign]
    words = begin(a, b)
    wait_until(lambda: a.copies == [COMMIT])
    assert words == []


def test_the_newest_complete_version_is_saved_once(begin: Callable[..., Words]) -> None:
    a, b = Host("a"), Host("b")
    ranks = [[f"default.{rank}", 0, 5, 2, 10, 100] for rank in range(2)]
    newer = ["default.0", 0, 6, 2, 10, 100]
    shared = ["elastic-1", 0, 6, 0, 10, 100]
    a.own, b.own = [newer, ranks[0], shared], [ranks[1], shared]
    words = begin(a, b, count=0, save=("/disk", 0.01))
    wait_until(lambda: len(b.orders) > 5)
    saves = {
        host.host.name: [order["save"] for order in host.orders if order.get("save") is not None]
        for host in (a, b)
    }
    # A state of all ranks is written by one host.
    assert saves == {"a": [[ranks[0], shared]], "b": [[ranks[1]]]}
    assert a.starts[0][1]["save_to"] == "/disk"
    assert words == []


def test_a_save_is_repeated_if_its_errand_ends_before_the_answer(
    begin: Callable[..., Words], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_PATIENCE", 0.2)
    monkeypatch.setattr(copies, "_RETRY", 0.1)
    a = Host("a")
    a.own = [COMMIT]
    obey = a._obey

    def hang_once(order: Any) -> None:
        is_first = order.get("save") and not any(order.get("save") for order in a.orders)
        a.hangs = "save" if is_first else ""
        obey(order)

    a._obey = hang_once  # type: ignore[method-assign]
    begin(a, save=("/disk", 0.01))
    wait_until(lambda: [order["save"] for order in a.orders if order.get("save")] == [[COMMIT], [COMMIT]])


def test_trouble_is_said_once_and_another_save_follows(begin: Callable[..., Words]) -> None:
    a = Host("a")
    a.own = [COMMIT]
    a.more = {"trouble": "No space left on device"}
    words = begin(a, save=("/disk", 0.01))
    wait_until(lambda: len([order for order in a.orders if order.get("save")]) > 2)
    assert words == ["commits are not saved to /disk: host a: No space left on device"]


def test_different_directories_of_one_name_are_told_once(begin: Callable[..., Words]) -> None:
    a, b, c = Host("a"), Host("b"), Host("c")
    a.own = [COMMIT]
    a.more, b.more = {"directory": "1" * 32}, {"directory": "2" * 32}
    words = begin(a, b, c, count=0, save=("/disk", 0.01))
    wait_until(lambda: words and [order for order in a.orders if order.get("save")])
    assert words == [
        "commits are not saved: /disk is another directory on host b than on host a; try: a directory that all hosts share"
    ]


def test_a_disk_that_does_not_answer_is_named(begin: Callable[..., Words]) -> None:
    a = Host("a")
    a.own = [COMMIT]
    a.more = {"is_saving": True}
    words = begin(a, save=("/disk", 0.05))
    wait_until(lambda: words)
    assert words == ["commits are not saved to /disk: host a: still writing after 0 s"]
    assert not [order for order in a.orders if order.get("save")]


def test_a_job_without_commits_is_told_so(
    begin: Callable[..., Words], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_FIRST", 0.1)
    words = begin(Host("a"), save=("/disk", 0.05))
    wait_until(lambda: words)
    assert words == ["commits are not saved to /disk: no worker has committed anything yet"]


@pytest.mark.parametrize("has_saved", [False, True])
def test_ranks_without_a_common_step_are_named_once_with_their_steps(
    begin: Callable[..., Words], monkeypatch: pytest.MonkeyPatch, has_saved: bool
) -> None:
    monkeypatch.setattr(copies, "_FIRST", 0.1)
    a, b = Host("a"), Host("b")
    if has_saved:
        a.own, b.own = [["default.0", 1, 5, 2, 10, 100]], [["default.1", 1, 5, 2, 10, 100]]
    words = begin(a, b, count=0, save=("/disk", 0.01))
    if has_saved:
        wait_until(lambda: any(order.get("save") for order in b.orders))
    b.own = [["default.1", 1, step, 2, 10, 100] for step in (7, 8)]
    a.own = [["default.0", 1, step, 2, 10, 100] for step in (119, 120, 118)]
    # An earlier round's ranks have ended.
    a.own.append(["default.2", 0, 500, 3, 10, 100])
    wait_until(lambda: words)
    seen = len(a.orders)
    a.own = [["default.0", 1, 121, 2, 10, 100]]
    wait_until(lambda: len(a.orders) > seen + 20)
    assert len(words) == 1
    assert words[0] == (
        "commits are not saved to /disk: ranks commit different steps: rank 0 step 120, rank 1 step 8; "
        "try: commits at the same steps, or save(..., shared=True) if all ranks have equal values"
    )
    assert words.copies.save_trouble() == "ranks commit different steps: rank 0 step 121, rank 1 step 8"
    b.own.append(["default.1", 1, 121, 2, 10, 100])
    wait_until(lambda: any(121 in item for order in a.orders for item in order.get("save") or ()))
    assert words.copies.save_trouble() is None


def test_ranks_that_never_commit_are_named_and_many_ranks_are_few_words() -> None:
    commits = {"a": [KeptCommit(f"default.{rank}", 1, 10 * rank, 9, 1, 1) for rank in range(8)]}
    assert copies._drift(commits) == (
        "rank 7 step 70, rank 6 step 60, rank 5 step 50, ..., rank 1 step 10, rank 0 step 0, rank 8 none"
    )
    assert copies._drift({"a": [KeptCommit("elastic-1", 0, 5, 0, 1, 1)]}) is None
    assert copies._drift({}) is None


def test_ranks_in_step_are_not_called_apart(
    begin: Callable[..., Words], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may be a moment behind at each look."""
    monkeypatch.setattr(copies, "_FIRST", 0.1)
    a = Host("a")
    obey = a._obey

    def commit(order: Any) -> None:
        step = len(a.orders) + 2
        a.own = [
            [f"default.{rank}", 0, number, 2, 10, 100]
            for rank in range(2)
            for number in (step - rank, step - rank - 1)
        ]
        obey(order)

    a._obey = commit  # type: ignore[method-assign]
    words = begin(a, count=0, save=("/disk", 0.01))
    wait_until(lambda: len([order for order in a.orders if order.get("save")]) > 20)
    assert words == []


def cost(step: Any, delayed: Any = 1.5, whole: Any = 0.5, **more: Any) -> bytes:
    report = {"step": step, "total": None, "metrics": {"delayed": delayed, "whole": whole}, **more}
    return json.dumps(report).encode()


def test_costs_need_a_known_worker_and_the_right_form() -> None:
    with RendezvousServer("t0ken", host="127.0.0.1") as server:
        unused: Any = None
        known = [("a", 0, 0), ("b", 1, 2)]
        kept = _Kept(ElasticOptions(min_np=1), unused, unused, server, print, lambda *worker: worker in known)
        # A killed driver may have had reports before.
        server.put(KEPT, "cost.a/0/0", cost(3))
        kept.open()
        server.put(KEPT, "cost.a/0/0", cost(4))
        for nonsense in (b"", b"\xff", b"[" * 500, b" " * 2000 + cost(9), cost(-1), cost(9, "1"), cost(9, delayed=None),
                         cost(9, whole=-1.0), cost(9, more=1), b'{"step": 9, "total": null, "metrics": {}}'):  # fmt: skip
            server.put(KEPT, "cost.b/1/2", nonsense)
        for name in ("cost.c/0/0", "cost.a", "cost.a/0/00", "cost."):
            server.put(KEPT, name, cost(9))
        server.put(KEPT, "cost.b/1/2", cost(2, 0.5, 0.75))
        wait_until(lambda: kept.costs()["commits"] == 6)
        assert kept.costs() == {"commits": 6, "delayed": 2.0, "whole": 0.75, "saves": (), "trouble": None}


def test_a_save_has_the_time_of_its_slowest_host(begin: Callable[..., Words]) -> None:
    a, b = Host("a"), Host("b")
    ranks = [[f"default.{rank}", 0, 5, 2, 10, 100] for rank in range(2)]
    a.own, b.own = [ranks[0]], [ranks[1]]
    a.more, b.more = {"save_seconds": 3.0}, {"save_seconds": 4.5}
    started = begin(a, b, count=0, save=("/disk", 0.01))
    wait_until(started.copies.save_times)
    assert set(started.copies.save_times()) == {4.5}


def test_a_failed_save_has_no_time(begin: Callable[..., Words]) -> None:
    a = Host("a")
    a.own = [COMMIT]
    a.more = {"trouble": "No space left on device", "save_seconds": 3.0}
    started = begin(a, save=("/disk", 0.01))
    wait_until(lambda: len([order for order in a.orders if order.get("save")]) > 2)
    assert not started.copies.save_times()


def test_a_lack_of_memory_is_said_once_although_its_numbers_change(
    begin: Callable[..., Words], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_PAUSE", 0.01)
    hosts = [Host("h1"), Host("h2")]
    hosts[0].own = [COMMIT]
    obey = hosts[1]._obey
    attempts: list[int] = []

    def refuse(order: Any) -> None:
        if order.get("fetch"):
            attempts.append(len(attempts))
            hosts[1].more = {"problems": [f"they need 1.{len(attempts)} GB more"]}
            order = {**order, "fetch": []}
        obey(order)

    hosts[1]._obey = refuse  # type: ignore[method-assign]
    words = begin(*hosts)
    wait_until(lambda: len(attempts) > 2)
    assert words == ["commits are not copied: host h2: they need 1.1 GB more"]
