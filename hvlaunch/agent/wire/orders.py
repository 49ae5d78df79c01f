"""Forms of the frames from the driver; docs/internals/wire.md, explains them."""

from __future__ import annotations

from hvlaunch.agent.wire.frames import ERRAND_CHUNK, LONGEST_ARGUMENTS, STREAMS
from hvlaunch.agent.wire.shapes import (
    PORT,
    Choice,
    Form,
    exactly,
    flag,
    mapping,
    number,
    of,
    or_null,
    pair,
    record,
    several,
    text,
    whole,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Union

__all__ = ["ORDERS", "PLAN"]

# The limits only keep a broken driver from filling the host's memory: no real job comes near.
_ALL = 1 << 28
_COUNT = whole(0, 1 << 53)
_SLOT = whole(0, 1 << 31)
# 64 is SIGRTMAX; 0 would be a mere test for the process.
_SIGNAL = whole(1, 64)
_SECONDS = number(0, 1 << 53)
_NAME = text(1 << 10)
_WORDS = text(_ALL, raw=True)
"""A text of the user: a path, a command, a variable."""
_VARIABLES = mapping(_WORDS, _WORDS, 1 << 20)
_RENDEZVOUS = {
    "candidates": several(pair(_NAME, PORT), 1 << 12),
    "key": _NAME,
    "relay": of("auto", "always", "never"),
}
_ID = whole(1, 1 << 53)
_HAVE = exactly(_COUNT, STREAMS)

ORDERS: Dict[str, Union[Form, Choice]] = {
    "hello": Form(
        protocol=_COUNT,
        name=_WORDS,
        key=_NAME,
        known_as=or_null(_NAME),
        cwd=_WORDS,
        gpus=flag,
        ports=or_null(pair(PORT, PORT)),
        elastic=or_null(_SECONDS),
        processes=whole(1, 1 << 16),
        rendezvous=or_null(record(_RENDEZVOUS)),
        session=or_null(_NAME),
    ),
    "modules": Form(1 << 20),
    "call": Form(1 << 20, 1),
    "probe": Form(target=_NAME, agent=_COUNT, addresses=several(_NAME, 1 << 12), port=PORT, key=_NAME),
    "start": Form(_ALL, 1, round=_SLOT),
    "stdin": Form(1 << 20, slot=_SLOT),
    "stop": Form(slots=or_null(several(_SLOT, 1 << 20)), steps=several(pair(_SIGNAL, _SECONDS), 1 << 10)),
    "signal": Form(slots=or_null(several(_SLOT, 1 << 20)), signal=_SIGNAL),
    "ack": Form(bytes=_COUNT),
    "relay": Choice(
        "what",
        data=Form(1 << 20, 1, id=_ID),
        end=Form(id=_ID),
        close=Form(id=_ID),
        credit=Form(id=_ID, bytes=_COUNT),
    ),
    "errand": Choice(
        "what",
        code=Form(1 << 20, 1, name=_NAME),
        start=Form(
            LONGEST_ARGUMENTS,
            1,
            id=_ID,
            name=_NAME,
            seconds=or_null(_SECONDS),
            memory=or_null(_COUNT),
            output=or_null(_COUNT),
        ),
        data=Form(ERRAND_CHUNK, 1, id=_ID),
        end=Form(id=_ID),
        credit=Form(id=_ID, bytes=_COUNT),
        stop=Form(id=_ID),
    ),
    "ping": Form(),
    "patience": Form(seconds=_SECONDS),
    "have": Form(frames=_HAVE),
    "leave": Form(),
    "bye": Form(),
}

# A shape of its own and no form: the plan is the body of a frame, because headers have a lower limit.
PLAN = record(
    {
        "argv": several(_WORDS, 1 << 22),
        "defaults": _VARIABLES,
        "env": _VARIABLES,
        "result": flag,
        "workers": several(
            record({"slot": _SLOT, "start": _SLOT, "env": _VARIABLES, "stdin": flag}), 1 << 16
        ),
    }
)
"""The body of a `start`."""
