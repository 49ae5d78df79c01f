import threading

from hvlaunch.gloo.driver.outgoing import Outgoing


def test_relayed_frames_and_others_take_turns() -> None:
    outgoing: Outgoing[bytes] = Outgoing()
    for number in range(4):
        outgoing.put(b"relayed %d" % number, relayed=True)
    outgoing.put(b"own 0")
    outgoing.put(b"own 1")
    outgoing.put_first(b"hello")
    outgoing.close()
    got = list(iter(outgoing.get, None))
    assert got == [
        b"hello",
        b"relayed 0",
        b"own 0",
        b"relayed 1",
        b"own 1",
        b"relayed 2",
        b"relayed 3",
    ]


def test_who_waits_is_woken_by_a_frame_and_by_the_end() -> None:
    outgoing: Outgoing[bytes] = Outgoing()
    got: list[bytes | None] = []
    reader = threading.Thread(target=lambda: got.extend([outgoing.get(), outgoing.get(), outgoing.get()]))
    reader.start()
    outgoing.put(b"x", relayed=True)
    outgoing.close()
    reader.join(60)
    assert got == [b"x", None, None]
