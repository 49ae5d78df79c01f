"""Calls functions on hosts, and prints what came of it as JSON: `functions.py HOSTS NAME ...`, or `pool=NAME` for the hosts."""

import json
import os
import socket
import sys
import time
from typing import Any

import hvlaunch


def rank() -> int:
    return int(os.environ["RANK"])


def place() -> Any:
    return rank(), os.environ["HVLAUNCH_HOST"], socket.gethostname()


def fail() -> None:
    if rank() == 2:
        raise LookupError("nothing there")
    time.sleep(600)


def large(size: int) -> bytes:
    return bytes([rank()]) * size


def wait() -> None:
    print("ready", flush=True)
    time.sleep(600)


def modules() -> Any:
    import cloudpickle

    from hvlaunch.rendezvous import client

    return sys.executable, cloudpickle.__file__, client.__file__


def error_of(error: hvlaunch.WorkerFailed) -> Any:
    ends = sorted((end.rank, end.host, end.stopped) for end in error.others)
    return error.rank, error.host, repr(error.__cause__), error.traceback, ends


def main(hosts: str, name: str, *words: str) -> Any:
    _, _, pool = hosts.partition("pool=")
    launcher = hvlaunch.Launcher(
        hosts=None if pool else hosts, pool=pool or None, quiet=True, lease=5.0, grace=1.0, cwd="/"
    )
    match name:
        case "places":
            return launcher.run(place)
        case "fail":
            try:
                return launcher.run(fail)
            except hvlaunch.WorkerFailed as error:
                return error_of(error)
        case "large":
            size = int(words[0])
            results = launcher.run(large, (size,))
            return [len(each) == size and each.count(each[:1]) == size for each in results]
        case "wait":
            try:
                return launcher.run(wait)
            except hvlaunch.JobFailed as error:
                return error.problem.kind, error.host
            except KeyboardInterrupt:
                return "interrupted"
        case "modules":
            return launcher.run(modules)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
