"""Runs hvlaunch with these arguments, and beside each host's workers an errand that echoes numbered lines."""

import sys
import threading
import time
from typing import Any

import tests.errands  # noqa: F401 (makes the example an errand)
from hvlaunch.cli.main import main
from hvlaunch.driver.links.errands import Limits
from hvlaunch.driver.links.host_link import HostLink

COUNT = 100
PAUSE = 0.03
PATIENCE = 60.0

_open = HostLink.open


def echo(link: HostLink) -> None:
    """Send a line every few moments, then read them all back."""
    while not link.scratch:  # until the agent has answered
        time.sleep(PAUSE)
    errand = link.errands.start("example", {"act": "echo"}, Limits(seconds=PATIENCE))
    for number in range(COUNT):
        errand.write(b"line %d\n" % number)
        if number == COUNT // 4:
            print("errand: a quarter is sent", file=sys.stderr, flush=True)
        time.sleep(PAUSE)
    errand.close_input()
    assert errand.wait(PATIENCE)
    data = b""
    while part := errand.read(0.0):
        data += part
    assert data == b"".join(b"line %d\n" % number for number in range(COUNT)), data
    result: dict[str, Any] = errand.result()
    print(f"errand: {result['bytes']} of {len(data)} bytes", file=sys.stderr, flush=True)


def open_with_errand(link: HostLink) -> None:
    _open(link)
    threading.Thread(target=echo, args=(link,), daemon=True).start()


setattr(HostLink, "open", open_with_errand)  # noqa: B010 (a method of the class)
main(sys.argv[1:])
