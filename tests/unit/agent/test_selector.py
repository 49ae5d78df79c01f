"""The agent's selector does what EpollSelector does."""

import os
import socket
from contextlib import closing

from hvlaunch.agent.quick import READ, WRITE, Selector


def test_selector_returns_ready_files_with_their_events() -> None:
    with closing(Selector()) as selector:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            selector.register(ours, READ | WRITE, "both")
            assert selector.select(None) == [("both", WRITE)]
            theirs.send(b"x")
            assert selector.select(None) == [("both", READ | WRITE)]
            selector.modify(ours, READ, "reading")
            assert selector.select(None) == [("reading", READ)]
            ours.recv(1)
            assert selector.select(0.0) == []
            assert ours.fileno() in selector
            selector.unregister(ours)
            assert ours.fileno() not in selector
            theirs.send(b"x")
            assert selector.select(0.0) == []


def test_end_of_the_other_side_wakes_the_selector() -> None:
    with closing(Selector()) as selector:
        read, write = os.pipe()
        selector.register(read, READ, "reader")
        os.close(write)
        assert selector.select(None) == [("reader", READ)]
        selector.unregister(read)
        os.close(read)
        read, write = os.pipe()
        selector.register(write, WRITE, "writer")
        assert selector.select(None) == [("writer", WRITE)]
        os.close(read)
        assert selector.select(None) == [("writer", WRITE)]
        selector.unregister(write)
        os.close(write)
