"""Runs hvlaunch in this process and tells, on stdout, when what happened: one `WHAT SECONDS CPU` per line.

SECONDS are of the monotonic clock, which the process that measures shares; CPU is what this process has used so far. Only launch.py --profile needs it.
"""

import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def now() -> tuple[float, float]:
    return time.monotonic(), time.process_time()


INTERPRETER_READY = now()

from hvlaunch.cli.main import main  # noqa: E402
from hvlaunch.driver import loop as driver  # noqa: E402
from hvlaunch.engine import actions as do  # noqa: E402
from hvlaunch.engine import events as on  # noqa: E402
from hvlaunch.engine.engine import Engine  # noqa: E402

LAST_OF = {
    on.HostConnected: "ssh is through on the last host",
    on.HostReady: "the last agent has said hello",
    on.RendezvousReached: "the last host has found the rendezvous",
    on.HostProbed: "the last host has found rank 0's host",
    on.WorkerStarted: "the last worker was started",
    on.WorkerExited: "the last worker has ended",
    on.HostClosed: "the last host is closed",
}
FIRST_OF = {on.Began: "the job begins", on.HostConnected: "ssh is through on the first host"}
moments: dict[str, tuple[float, float]] = {}


class TimedEngine(Engine):
    def handle(self, event: on.Event, at: float) -> list[do.Action]:
        if type(event) in FIRST_OF:
            moments.setdefault(FIRST_OF[type(event)], now())
        if type(event) in LAST_OF:
            moments[LAST_OF[type(event)]] = now()
        wanted = super().handle(event, at)
        if any(isinstance(action, do.Start) for action in wanted):
            moments["the workers are to start"] = now()
        return wanted


if __name__ == "__main__":
    moments["Python has started"] = INTERPRETER_READY
    moments["hvlaunch is imported"] = now()
    vars(driver)["Engine"] = TimedEngine
    with redirect_stdout(sys.stderr):
        code = main(sys.argv[1:])
    moments["hvlaunch is done"] = now()
    for what, (at, cpu) in sorted(moments.items(), key=lambda one: one[1]):
        print(what, at, cpu)
    sys.exit(code)
