"""The forms of an agent's frames, as docs/internals/wire.md, describes. Any other frame ends the connection.

A fitting form says nothing about truth or order: expected.py checks the order.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hvlaunch.agent.wire.frames import (
    ERRAND_CHUNK,
    LONGEST_ERROR,
    LONGEST_RESULT,
    LONGEST_TEXT,
    LONGEST_TRACEBACK,
    MOST_ADDRESSES,
    MOST_GPUS,
    OUTPUT_CHUNK,
    RELAY_CHUNK,
    Decoder,
)
from hvlaunch.agent.wire.session import STREAMS
from hvlaunch.agent.wire.shapes import (
    PORT,
    Choice,
    Form,
    address,
    exactly,
    flag,
    mapping,
    number,
    of,
    or_null,
    record,
    several,
    text,
    whole,
)

if TYPE_CHECKING:
    from hvlaunch.agent.wire.shapes import Shape

__all__ = ["REPORTS", "report_decoder"]

_REPLACED = 3
"""Most bytes for one byte of an error file: a byte outside of UTF-8 is sent as a character of three bytes."""
_CODES, _SIGNALS = whole(0, 255), whole(1, 64)
_NOT_STARTED = whole(126, 127)
_COUNT = whole(0, 1 << 31)
_SIZE = whole(0, 1 << 53)
_TIME = number(0, 1 << 40)
_NAME = text(256)
_CAUSE = text(LONGEST_TEXT)
_PORT_HOLDER = {
    "uid": whole(0, (1 << 32) - 1),
    "port": PORT,
    "user": or_null(_NAME),
    "program": or_null(_NAME),
}
_WORKER: "Mapping[str, Shape]" = {"round": _COUNT, "slot": _COUNT, "start": _COUNT}
_ID = whole(1, 1 << 53)
_HAVE = exactly(whole(0, 1 << 53), STREAMS)
_FACTS = {
    "hostname": _NAME,
    "python": text(32),
    "executable": _CAUSE,
    "kernel": _NAME,
    "boot_id": or_null(_NAME),
    "cpus": whole(1, 1 << 16),
    "memory": _SIZE,
    "addresses": mapping(text(64), several(address, MOST_ADDRESSES), MOST_ADDRESSES),
    "clock": _TIME,
    "gpus": several(several(_NAME, 8), MOST_GPUS),
}

# An agent may be any program of another user's making: every number and text has a bound.
REPORTS: Mapping[str, Form | Choice] = {
    "hello": Form(
        protocol=_COUNT,
        facts=record(_FACTS, optional=("gpus",)),
        scratch=_CAUSE,
        beacon_port=or_null(PORT),
        master_port=or_null(PORT),
        cwd_error=or_null(_CAUSE),
        trouble=or_null(_CAUSE),
    ),
    "reached": Form(address=or_null(_NAME), tried=several(_NAME, MOST_ADDRESSES), relay_port=or_null(PORT)),
    "probed": Form(target=_CAUSE, agent=_COUNT, address=or_null(_NAME)),
    "started": Form(fields=_WORKER, pid=whole(1, 1 << 22), at=_TIME),
    "not_started": Form(fields=_WORKER, code=_NOT_STARTED, cause=_CAUSE),
    "output": Form(OUTPUT_CHUNK, fields=_WORKER, stream=of("stdout", "stderr", "result")),
    "exited": Form(
        LONGEST_ERROR * _REPLACED,
        fields=_WORKER,
        code=or_null(_CODES),
        signal=or_null(_SIGNALS),
        max_rss=_SIZE,
        at=_TIME,
        oom_killed=flag,
        port_taken_by=or_null(record(_PORT_HOLDER)),
    ),
    "suspended": Form(fields=_WORKER),
    # The library by name: its text is the driver's own, and no host can put words into a message.
    "alone": Form(fields=_WORKER, library=of("torch", "tensorflow", "mpi4py")),
    "master_port": Form(port=PORT),
    "stdin_taken": Form(slot=_COUNT, bytes=whole(1, 1 << 53)),
    "relay": Choice(
        "what",
        open=Form(id=_ID),
        data=Form(RELAY_CHUNK, 1, id=_ID),
        end=Form(id=_ID),
        close=Form(id=_ID),
        credit=Form(id=_ID, bytes=_SIZE),
    ),
    "errand": Choice(
        "what",
        data=Form(ERRAND_CHUNK, 1, id=_ID),
        credit=Form(id=_ID, bytes=_SIZE),
        done=Form(LONGEST_RESULT, 1, id=_ID),
        failed=Form(id=_ID, reason=of("start", "time", "output", "killed", "stopped"), cause=_CAUSE),
    ),
    "pong": Form(at=_TIME),
    "have": Form(frames=_HAVE),
    "challenge": Form(nonce=text(64)),
    "resumed": Form(have=_HAVE, proof=text(64)),
    "refused": Form(cause=_CAUSE),
    "parting": Form(cause=_CAUSE),
    "fault": Form(LONGEST_TRACEBACK, cause=_CAUSE),
    "bye": Form(left=_COUNT, pids=several(whole(1, 1 << 22), 16)),
}


def report_decoder() -> Decoder:
    """Return a decoder for an agent's bytes; its frames fit the forms."""
    return Decoder(REPORTS, LONGEST_ERROR * _REPLACED)
