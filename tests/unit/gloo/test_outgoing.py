import threading

from hvlaunch.driver.links.session import Outgoing


def test_relayed_frames_and_others_take_turns() -> None:
    outgoing: Outgoing[bytes] = Outgoing()
    for number in range(4):
        outgoing.put(b"relayed %d" % number, relayed=True)
    outgoing.put(b"own 0")
    outgoing.put(b"own 1")
    outgoing.close()
    got = list(iter(outgoing.get, None))
    assert got == [
        b"own 0",
        b"relayed 0",
        b"own 1",
        b"relayed 1",
        b"relayed 2",
        b"relayed 3",
    ]


def test_get_wakes_for_a_frame_and_for_the_end() -> None:
    outgoing: Outgoing[bytes] = Outgoing()
    got: list[bytes | None] = []
    reader = threading.Thread(target=lambda: got.extend([outgoing.get(), outgoing.get(), outgoing.get()]))
    reader.start()
    outgoing.put(b"x", relayed=True)
    outgoing.close()
    reader.join(60)
    assert got == [b"x", None, None]


def test_wait_for_room_ends_when_frames_are_taken_and_at_the_end() -> None:
    outgoing: Outgoing[bytes] = Outgoing()
    passed = threading.Semaphore(0)

    def wait() -> None:
        for most in (1, 0):
            outgoing.wait_for_relayed(most)
            passed.release()

    for _ in range(3):
        outgoing.put(b"x", relayed=True)
    waiter = threading.Thread(target=wait)
    waiter.start()
    assert outgoing.get() == b"x"
    assert not passed.acquire(blocking=False)
    assert outgoing.get() == b"x"
    assert passed.acquire(timeout=60)
    outgoing.put(b"own")
    outgoing.close()
    waiter.join(60)
    assert not waiter.is_alive()
