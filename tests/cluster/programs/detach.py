"""A worker that does what orphans are made of, says `ready`, and then what its arguments say.

    detach.py [--ignore-term] [--exit RANK=CODE]

Starts a child, a child in a session of its own, a daemon (forked twice), and a daemon with an empty
environment; each sleeps for an hour. Ends at once with CODE if it is the rank named; with
`--exit all=0`, every rank ends.
"""

import os
import signal
import subprocess
import sys
import time

SLEEP = [
    sys.executable,
    "-I",
    "-S",
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)",
]
DETACHED = ["sh", "-c", 'setsid "$@" </dev/null >/dev/null 2>&1 &', "sh", *SLEEP]


def main() -> None:
    arguments = sys.argv[1:]
    if "--ignore-term" in arguments:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    subprocess.Popen(SLEEP)
    subprocess.Popen(SLEEP, start_new_session=True)
    subprocess.run(DETACHED, check=True)
    subprocess.run(DETACHED, check=True, env={})
    print("ready", flush=True)
    if "--exit" in arguments:
        who, _, code = arguments[arguments.index("--exit") + 1].partition("=")
        if who in ("all", os.environ["RANK"]):
            sys.exit(int(code))
    time.sleep(3600)


main()
