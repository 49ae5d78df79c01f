"""The pump: every byte once, to every target, and no more than the window."""

import os
import pty
import sys
from queue import SimpleQueue
from threading import Thread

from hvlaunch.driver.process import StdinPump


def test_all_input_and_its_end_reach_every_target() -> None:
    reader, writer = os.pipe()
    queues: list[SimpleQueue[bytes]] = [SimpleQueue(), SimpleQueue()]
    pump = StdinPump(reader, [queue.put for queue in queues])
    pump.start()
    os.write(writer, b"one\n")
    assert [queue.get(timeout=60) for queue in queues] == [b"one\n"] * 2
    os.close(writer)
    assert [queue.get(timeout=60) for queue in queues] == [b""] * 2


def test_target_that_does_not_read_stops_the_pump() -> None:
    reader, writer = os.pipe()
    got: SimpleQueue[bytes] = SimpleQueue()
    pump = StdinPump(reader, [got.put])
    pump.start()
    size = 1 << 20

    def write_all() -> None:
        os.write(writer, b"x" * size)
        os.close(writer)

    Thread(target=write_all, daemon=True).start()
    received = on_the_way = most = 0
    while data := got.get(timeout=60):
        received += len(data)
        on_the_way += len(data)
        most = max(most, on_the_way)
        if on_the_way >= 1 << 18:
            assert got.empty()
            pump.taken(0, on_the_way)
            on_the_way = 0
    assert received == size
    assert most <= (1 << 18) + (1 << 16)


def test_a_descriptor_that_cannot_be_read_is_at_its_end() -> None:
    reader, writer = os.pipe()
    got: SimpleQueue[bytes] = SimpleQueue()
    pump = StdinPump(writer, [got.put])
    pump._run()
    assert got.get_nowait() == b""
    os.close(reader)
    os.close(writer)


def test_terminal_has_not_ended_for_a_background_process() -> None:
    """A child in a process group of its own reads the terminal, while this one is in the foreground."""
    script = (
        "import os, signal; from hvlaunch.driver.process import StdinPump; got = []\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.signal(signal.SIGTTIN, signal.SIG_IGN); os.setpgid(0, 0)\n"
        "    StdinPump(0, [got.append])._run(); os._exit(len(got))\n"
        "print('status', os.waitpid(child, 0)[1], flush=True)\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", script])
    said = b""
    try:
        while b"status" not in said or b"\n" not in said.partition(b"status")[2]:
            said += os.read(terminal, 1000)
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    assert b"status 0" in said


def test_each_piece_of_input_is_announced_before_it_is_passed_on() -> None:
    reader, writer = os.pipe()
    calls: SimpleQueue[bytes | None] = SimpleQueue()
    pump = StdinPump(reader, [calls.put], on_input=lambda: calls.put(None))
    pump.start()
    for line in (b"one\n", b"two\n"):
        os.write(writer, line)
        assert calls.get(timeout=60) is None
        assert calls.get(timeout=60) == line
    os.close(writer)
    assert calls.get(timeout=60) == b""
