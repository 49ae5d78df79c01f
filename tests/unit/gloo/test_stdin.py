"""The pump: everything once, to everyone, and never more than they take."""

import os
from queue import SimpleQueue
from threading import Thread

from hvlaunch.gloo.stdin import StdinPump


def test_all_of_it_reaches_every_target_and_then_its_end() -> None:
    reader, writer = os.pipe()
    queues: list[SimpleQueue[bytes]] = [SimpleQueue(), SimpleQueue()]
    pump = StdinPump(reader, [queue.put for queue in queues])
    pump.start()
    os.write(writer, b"one\n")
    assert [queue.get(timeout=10) for queue in queues] == [b"one\n"] * 2
    os.close(writer)
    assert [queue.get(timeout=10) for queue in queues] == [b""] * 2


def test_a_reader_that_takes_nothing_stops_the_pump_until_it_does() -> None:
    reader, writer = os.pipe()
    got: SimpleQueue[bytes] = SimpleQueue()
    pump = StdinPump(reader, [got.put])
    pump.start()
    size = 1 << 20
    Thread(target=lambda: (os.write(writer, b"x" * size), os.close(writer)), daemon=True).start()
    received = on_the_way = most = 0
    while data := got.get(timeout=10):
        received += len(data)
        on_the_way += len(data)
        most = max(most, on_the_way)
        if on_the_way >= 1 << 18:
            assert got.empty()
            pump.taken(0, on_the_way)
            on_the_way = 0
    assert received == size
    assert most <= (1 << 18) + (1 << 16)


def test_a_descriptor_that_cannot_be_read_ends_the_pump_without_an_end() -> None:
    reader, writer = os.pipe()
    got: SimpleQueue[bytes] = SimpleQueue()
    pump = StdinPump(writer, [got.put])
    pump._run()
    assert got.empty()
    os.close(reader)
    os.close(writer)
