"""Signals of the driver's process as events."""

import os
import signal
import threading

import pytest

from hvlaunch.gloo.driver.inquiry import Inquiry, StacksWanted
from hvlaunch.gloo.driver.signals import signals_as_events
from hvlaunch.gloo.engine import events as on


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


def test_a_hangup_may_mean_something_else() -> None:
    got: list[on.Event | Inquiry | StacksWanted] = []
    with signals_as_events(got.append, on.Began()):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
    assert got == [on.Began(), on.Interrupted(signal.SIGTERM)]


def test_the_key_for_a_core_asks_for_stacks() -> None:
    wanted = StacksWanted(lambda _found: None)
    got: list[on.Event | Inquiry | StacksWanted] = []
    before = signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell's job in the background ignores it
    try:
        with signals_as_events(got.append, None, wanted):
            os.kill(os.getpid(), signal.SIGQUIT)
        assert signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGQUIT, before)
    assert got == [wanted]


def test_what_is_ignored_stays_ignored() -> None:
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
