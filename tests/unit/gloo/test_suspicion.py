"""Suspicion: who is suspected when, and who is asked to vouch."""

import pytest

from hvlaunch.driver.links.suspicion import Suspicion, Vouch

PULSE = 0.5


class Watch:
    """A clock that calls check() whenever it is due; hosts in `dead` answer nothing from then on, those in `cut` only to others."""

    def __init__(self, hosts: str = "abcd", seconds: float = 1.5) -> None:
        self.suspicion = Suspicion(seconds, 0.0)
        self.hosts = list(hosts)
        self.now = 0.0
        self.dead: set[str] = set()
        self.cut: set[str] = set()
        self.since: dict[str, float] = {}
        self.acknowledged: dict[str, float] = {}
        self.late = 0.0
        self.asked: list[Vouch] = []

    def prove(self) -> None:
        for vouch in self.suspicion.to_prove(self.hosts, self.now):
            self._answer(vouch)

    def _answer(self, vouch: Vouch) -> None:
        unreachable = vouch.host in self.dead or vouch.voucher in self.dead | self.cut
        if not unreachable:
            self.suspicion.vouched(*vouch, self.now)

    def until(self, end: float) -> list[str]:
        """Play to the first suspicion, at `end` at the latest."""
        while self.now < end:
            due = min(self.suspicion.deadline, self.now + PULSE)
            self.now, self.late = due + self.late, 0.0
            silent = self.dead | self.cut
            for host in silent:
                self.since.setdefault(host, self.now)
            self.since = {host: at for host, at in self.since.items() if host in silent}
            heard = {host: self.now - 0.01 for host in self.hosts if host not in silent}
            requests, suspected = self.suspicion.check(
                self.since, heard, self.acknowledged.get, self.now, due
            )
            self.asked += requests
            for vouch in requests:
                self._answer(vouch)
            if suspected:
                return suspected
        return []


@pytest.fixture
def watch() -> Watch:
    made = Watch()
    made.prove()
    return made


def test_a_host_without_any_sign_of_life_is_suspected_in_time(watch: Watch) -> None:
    assert watch.until(20.0) == []
    watch.dead.add("c")
    assert watch.until(30.0) == ["c"]
    assert 1.5 <= watch.now - watch.since["c"] <= 1.85
    assert {vouch.voucher for vouch in watch.asked} == {"a", "b", "d"}


def test_a_host_in_reach_of_others_is_not_suspected(watch: Watch) -> None:
    watch.cut.add("c")
    assert watch.until(60.0) == []
    watch.dead.add("c")
    assert watch.until(65.0) == ["c"]


def test_no_host_is_suspected_while_all_are_silent(watch: Watch) -> None:
    watch.dead.update("abcd")
    assert watch.until(60.0) == []


def test_several_hosts_are_suspected_at_once(watch: Watch) -> None:
    watch.dead.update("bc")
    assert sorted(watch.until(60.0)) == ["b", "c"]


def test_a_host_behind_a_firewall_is_not_suspected() -> None:
    watch = Watch()  # a firewall between all hosts
    watch.dead.add("c")
    assert watch.until(60.0) == []


def test_a_host_with_an_answering_kernel_is_not_suspected(watch: Watch) -> None:
    watch.dead.add("c")
    watch.acknowledged["c"] = 1e9
    assert watch.until(30.0) == []


def test_a_late_driver_accuses_no_host(watch: Watch) -> None:
    watch.dead.add("c")
    watch.until(1.2)
    watch.late = 5.0  # it was stopped: answers may wait unread
    assert watch.until(7.0) == []
    assert watch.until(20.0) == ["c"]
    assert watch.now >= 6.2 + 1.5


def test_an_answer_ends_the_suspicion(watch: Watch) -> None:
    watch.dead.add("c")
    assert watch.until(20.0) == ["c"]
    watch.dead.clear()
    assert watch.until(40.0) == []


def test_a_new_agent_has_to_be_reached_anew(watch: Watch) -> None:
    watch.suspicion.forget("c")
    watch.dead.add("c")
    assert watch.until(60.0) == []


def test_requests_to_prove_are_few() -> None:
    suspicion = Suspicion(1.5, 0.0)
    hosts = [f"h{number}" for number in range(1000)]
    requests = suspicion.to_prove(hosts, 0.0)
    assert len(requests) == 3000
    assert suspicion.to_prove(hosts, 5.0) == []
    for vouch in requests[:2000]:
        suspicion.vouched(*vouch, 1.0)
    assert len(suspicion.to_prove(hosts, 11.0)) == 1000
    assert suspicion.to_prove(["a"], 0.0) == []
    assert sorted(suspicion.to_prove(["a", "b"], 0.0)) == [Vouch("a", "b"), Vouch("b", "a")]
