from hvlaunch.gloo.driver.lease import Lease


def test_signs_of_life_are_due_four_times_in_a_lease() -> None:
    lease = Lease(8.0, 100.0)
    assert lease.look({}, 100.0) == (True, [])
    assert lease.deadline == 102.0
    assert lease.look({}, 101.0) == (False, [])
    assert lease.look({}, 102.0) == (True, [])


def test_they_are_never_further_apart_than_five_seconds() -> None:
    lease = Lease(3600.0, 0.0)
    lease.look({}, 0.0)
    assert lease.deadline == 5.0


def test_a_host_is_silent_as_soon_as_the_lease_is_over() -> None:
    lease = Lease(5.0, 0.0)
    heard = {"a": 0.3, "b": 0.3}
    now = 0.0
    while now < 5.0:
        _, silent = lease.look(heard, now)
        assert silent == []
        heard["b"] = now = lease.deadline
    assert now == 5.0  # a sign of life is due; the next thing to happen is the end of a's lease
    lease.look(heard, now)
    assert lease.deadline == 5.3
    assert lease.look(heard, 5.3) == (False, ["a"])


def test_a_driver_that_was_stopped_blames_no_host_for_it() -> None:
    lease = Lease(4.0, 0.0)
    lease.look({"a": 0.0}, 0.0)
    assert lease.look({"a": 0.0}, 60.0) == (True, [])
    for now in (61.0, 62.0, 63.0):
        assert lease.look({"a": 0.0}, now) == (True, [])
    assert lease.look({"a": 0.0}, 64.0) == (True, ["a"])
