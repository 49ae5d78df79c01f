"""A printer on sinks in memory, for tests."""

import io
import os
import threading

from hvlaunch.console.printer import Printer

__all__ = ["WAIT", "Console", "Failing", "Gate", "Told"]

WAIT = 20


class Console:
    """A printer on two sinks in memory, and what it acknowledged."""

    def __init__(self, stdout=None, stderr=None, **options):
        self.stdout = stdout or io.BytesIO()
        self.stderr = stderr or io.BytesIO()
        self.done = []
        self.printer = Printer(self.stdout, self.stderr, **options)

    def output(self, rank, data, stream="stdout"):
        self.printer.output(rank, stream, data, self.done.append)

    def close(self):
        assert self.printer.close(WAIT)
        return self.stdout.getvalue(), self.stderr.getvalue()


class Gate(io.BytesIO):
    """A sink that takes nothing until it is opened."""

    def __init__(self):
        super().__init__()
        self.open = threading.Event()
        self.entered = threading.Event()
        self.writes = []

    def write(self, data):
        self.entered.set()
        assert self.open.wait(WAIT)
        self.writes.append(bytes(data))
        return super().write(data)


class Failing(io.BytesIO):
    def __init__(self, code):
        super().__init__()
        self.code = code
        self.tries = 0

    def write(self, data):
        self.tries += 1
        raise OSError(self.code, os.strerror(self.code))


class Told(io.BytesIO):
    """A sink that tells when it has this text, in any order of lines."""

    def __init__(self, text):
        super().__init__()
        self.text = text
        self.event = threading.Event()

    def write(self, data):
        size = super().write(data)
        if len(self.getvalue()) >= len(self.text):
            self.event.set()
        return size
