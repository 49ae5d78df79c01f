"""The driver's process: signals as events, and stdin: every byte once, to every target, and no more than the window."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from queue import SimpleQueue
from threading import Thread

import pytest

from hvlaunch.driver.observing import Inquiry, StacksWanted
from hvlaunch.driver.process import StdinPump, signals_as_events
from hvlaunch.engine import events as on


@pytest.mark.parametrize(
    ("number", "event"),
    [
        (signal.SIGINT, on.Interrupted(signal.SIGINT)),
        (signal.SIGTERM, on.Interrupted(signal.SIGTERM)),
        (signal.SIGHUP, on.Interrupted(signal.SIGHUP)),
        (signal.SIGUSR1, on.UserSignal(signal.SIGUSR1)),
        (signal.SIGUSR2, on.UserSignal(signal.SIGUSR2)),
    ],
)
def test_each_is_an_event_and_handlers_come_back(number: signal.Signals, event: on.Event) -> None:
    before = signal.getsignal(number)
    got: list[on.Event | Inquiry | StacksWanted] = []
    with signals_as_events(got.append):
        os.kill(os.getpid(), number)
    assert got == [event]
    assert signal.getsignal(number) is before


def test_hangup_may_have_its_own_handler() -> None:
    got: list[on.Event | Inquiry | StacksWanted] = []
    with signals_as_events(got.append, lambda: got.append(on.Began())):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
    assert got == [on.Began(), on.Interrupted(signal.SIGTERM)]


def test_sigquit_asks_for_stacks() -> None:
    wanted = StacksWanted(lambda _found: None)
    got: list[on.Event | Inquiry | StacksWanted] = []
    before = signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell's job in the background ignores it
    try:
        with signals_as_events(got.append, on_quit=lambda: got.append(wanted)):
            os.kill(os.getpid(), signal.SIGQUIT)
        assert signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGQUIT, before)
    assert got == [wanted]


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    got: list[on.Event | Inquiry | StacksWanted] = []
    try:
        with signals_as_events(got.append):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert got == []


def test_another_thread_may_run_a_job_too() -> None:
    before = signal.getsignal(signal.SIGINT)
    inside: list[object] = []

    def run() -> None:
        with signals_as_events(lambda _event: None):
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert inside == [before]


def test_signal_from_two_senders_counts_once() -> None:
    now = 0.0
    got: list[on.Event | Inquiry | StacksWanted] = []

    def send(*numbers: signal.Signals) -> None:
        for number in numbers:
            before = len(wakes)
            os.kill(os.getpid(), number)
            while len(wakes) == before:
                time.sleep(0.001)

    wakes: list[float] = []

    def clock() -> float:
        wakes.append(now)
        return now

    with signals_as_events(got.append, clock=clock):
        send(signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR1)
        send(signal.SIGINT)
        now = 0.19
        send(signal.SIGTERM, signal.SIGHUP)
        now = 0.41
        send(signal.SIGTERM, signal.SIGHUP)
    assert got == [
        on.Interrupted(signal.SIGTERM),
        on.Interrupted(signal.SIGINT),
        on.Interrupted(signal.SIGHUP),
        on.UserSignal(signal.SIGUSR1),
        on.UserSignal(signal.SIGUSR1),
        on.Interrupted(signal.SIGINT),
        on.Interrupted(signal.SIGTERM),
    ]


def test_signals_that_come_at_once_are_heard_while_the_main_thread_waits() -> None:
    """The kernel delivers the second signal to another thread, and the main thread does not wake."""
    script = (
        "import threading, queue, os, signal; from hvlaunch.driver.process import signals_as_events\n"
        "events = queue.SimpleQueue()\n"
        "for _ in range(4): threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "with signals_as_events(events.put):\n"
        "    print('ready', flush=True)\n"
        "    while True: print(events.get().signal, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        for _ in range(300):
            process.send_signal(signal.SIGUSR1)
            process.send_signal(signal.SIGUSR2)
            both = [process.stdout.readline() for _ in range(2)]
            assert sorted(both) == [f"{number}\n" for number in (signal.SIGUSR1, signal.SIGUSR2)]
    finally:
        process.kill()
        process.wait()


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
