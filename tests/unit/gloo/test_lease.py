from hvlaunch.driver.links.links import Lease, agents_lease


def unknown(_: str) -> None:
    """Without acknowledgements of kernels."""


class Silent:
    """Host a, last heard at the time 10, and a lease of 8 seconds, checked at each deadline."""

    def __init__(self) -> None:
        self.lease = Lease(8.0, 10.0)
        self.acknowledged: float | None = 10.0

    def look(self, heard: float, now: float) -> list[str]:
        return self.lease.check({"a": heard}, lambda _: self.acknowledged, now)[1]

    def until(self, end: float) -> list[str]:
        """Check until `end`; return the hosts lost at that time. None may be lost earlier."""
        while (now := self.lease.deadline) < end:
            assert self.look(10.0, now) == []
        return self.look(10.0, end)


def test_signs_of_life_are_due_four_times_in_a_lease() -> None:
    lease = Lease(8.0, 100.0)
    assert lease.check({}, unknown, 100.0) == (True, [])
    assert lease.deadline == 102.0
    assert lease.check({}, unknown, 101.0) == (False, [])
    assert lease.check({}, unknown, 102.0) == (True, [])


def test_pings_are_at_most_five_seconds_apart() -> None:
    lease = Lease(3600.0, 0.0)
    lease.check({}, unknown, 0.0)
    assert lease.deadline == 5.0


def test_host_is_lost_a_second_after_the_lease_without_an_answer() -> None:
    assert Silent().until(10.0 + 8.0 + 1.0) == ["a"]


def test_a_host_that_answers_is_not_silent() -> None:
    silent = Silent()
    silent.until(18.9)
    assert silent.look(18.9, 19.0) == []
    assert silent.look(18.9, 26.9) == []


def test_host_whose_kernel_alone_answers_is_lost_as_soon() -> None:
    silent = Silent()
    for now in (12.0, 14.0, 16.0, 18.0):
        silent.until(now)
        silent.acknowledged = now + 0.001
    assert silent.until(19.0) == ["a"]


def test_healed_cut_extends_the_lease_by_its_length() -> None:
    silent = Silent()
    silent.until(18.0)
    silent.acknowledged = 17.2  # the cut was 7.2 s long
    assert silent.until(17.2 + 7.2 + 1.0) == ["a"]


def test_a_link_that_heals_again_and_again_has_twice_the_lease() -> None:
    silent = Silent()
    for acknowledged in (15.0, 20.0, 25.0):
        silent.until(acknowledged + 0.5)
        silent.acknowledged = acknowledged
    assert silent.until(10.0 + 2 * 8.0 + 1.0) == ["a"]


def test_lease_without_acknowledgements_of_the_kernel() -> None:
    silent = Silent()
    silent.acknowledged = None
    assert silent.until(19.0) == ["a"]


def test_agent_waits_longer_than_a_cut_of_the_lease() -> None:
    assert [agents_lease(seconds) for seconds in (4.0, 8.0, 30.0)] == [6.0, 11.0, 36.0]


def test_stopped_driver_blames_no_host() -> None:
    lease = Lease(4.0, 0.0)
    heard = {"a": 0.0}
    lease.check(heard, unknown, 0.0)
    assert lease.check(heard, lambda _: 59.9, 60.0) == (True, [])
    for now in (61.0, 62.0, 63.0, 64.0):
        assert lease.check(heard, unknown, now) == (True, [])
    assert lease.check(heard, unknown, 65.0) == (True, ["a"])


def test_driver_late_in_every_turn_still_gives_a_silent_host_up() -> None:
    lease = Lease(4.0, 0.0)
    heard = {"a": 0.0, "b": 0.0}
    turns = [10.0 * number for number in range(12)]
    lost = []
    for now in turns:
        lost.append(lease.check(heard, unknown, now)[1])
        heard["b"] = now + 0.1
    assert lost[:9] == [[]] * 9  # it was asked in the first, and excused in eight
    assert lost[9] == ["a"]
    assert not any("b" in names for names in lost)


def test_host_silent_for_half_the_lease_is_doubtful() -> None:
    silent = Silent()
    silent.until(13.9)
    assert silent.lease.doubtful == []
    silent.until(14.0)
    assert silent.lease.doubtful == ["a"]
    silent.look(14.1, 14.2)
    assert silent.lease.doubtful == []


def test_host_without_an_answer_at_the_next_ping_is_quiet() -> None:
    lease = Lease(8.0, 10.0, pulse=1.0)
    for now, heard, quiet in (
        (10.0, 9.9, False),
        (11.0, 9.9, True),
        (12.0, 9.9, True),
        (12.5, 12.4, True),
        (13.0, 12.4, False),
    ):
        lease.check({"a": heard}, unknown, now)
        assert lease.quiet == ({"a"} if quiet else set()), now
    lease.check({}, unknown, 14.0)
    assert lease.quiet == set()


def test_late_driver_takes_no_host_for_quiet() -> None:
    lease = Lease(8.0, 10.0, pulse=1.0)
    lease.check({"a": 9.9}, unknown, 10.0)
    lease.check({"a": 9.9}, unknown, 70.0)
    assert lease.quiet == set()
