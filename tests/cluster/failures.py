"""Twenty ways for a job to fail on real hosts, for tests/cluster/test_failures.py. Clocks of the hosts are weeks apart.

Rank 1, on host b, is the cause where a worker is, if nothing else is said.
"""

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["CASES", "Case", "golden", "write_files"]

OTHERS = '[ "$RANK" = 1 ] || exec sleep 600; '
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:31337"
NCCL = (
    "[rank1]:[E1123 05:33:04.1 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=42, OpType=ALLREDUCE) ran for 600000 milliseconds before timing out."
)
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.5 GiB is free."
GROW = "x = []\nwhile True: x.append(bytearray(1 << 22))"


class Case(NamedTuple):
    """A job: options, and the command of each worker; `{shared}` is a directory that all hosts see, `{python}` this Python."""

    name: str
    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    hosts: str = "hosts"
    """Which hostfile."""


def shell(name: str, script: str, *options: str, others: str = OTHERS, hosts: str = "hosts") -> Case:
    return Case(name, ("sh", "-c", others + script), options, hosts)


WAITS = "import os, time\nif os.environ['RANK'] != '1': time.sleep(600)\n"
SCRIPTS = {
    "exception": WAITS + "raise ValueError('bad learning rate')\n",
    "assert": WAITS + "batch = 0\nassert batch > 0, 'an empty batch'\n",
    "unpicklable": WAITS + "import pickle, threading\npickle.dumps(threading.Lock())\n",
    "cuda-memory": WAITS + f"class OutOfMemoryError(RuntimeError): pass\nraise OutOfMemoryError('{CUDA}')\n",
    "missing-module": "import time\nimport only_elsewhere\ntime.sleep(600)\n",
    "missing-file": "import time\nopen('/run/only-elsewhere.npy').close()\ntime.sleep(600)\n",
    "host-memory": WAITS + GROW + "\n",
}
"""The last three fail, or have what they need, by where they are."""

CASES = (
    Case("start-timeout", ("true",), ("--start-timeout", "9"), hosts="sleepy"),
    shell("exit-code", "exit 7"),
    *(Case(name, ("{python}", f"{{shared}}/{name}.py")) for name in SCRIPTS if name != "host-memory"),
    Case("host-memory", ("{python}", "{shared}/host-memory.py"), hosts="small"),
    shell("segfault", "kill -SEGV $$"),
    shell(
        "abort", "echo 'terminate called after throwing an instance of std::bad_weak_ptr' >&2; kill -ABRT $$"
    ),
    shell("sigterm", "kill -TERM $$"),
    shell("sigkill", "kill -KILL $$"),
    shell("nccl-timeout", f"echo '{NCCL}' >&2; exit 1", "--settle", "0.2"),
    shell(
        "consequence",
        f"[ $RANK = 0 ] && touch {{shared}}/left && echo '{GLOO}' >&2 && exit 1; [ $RANK = 1 ] || exec sleep 600; "
        # 2 s: a busy machine's clocks are compared to about a second, and the order of the two ends is to be certain.
        "until [ -e {shared}/left ]; do sleep 0.1; done; sleep 2; echo 'ValueError: bad batch' >&2; exit 3",
        "--settle",
        "60",
        others="",
    ),
    shell(
        "ended-early",
        "[ $RANK = 1 ] && touch {shared}/early && exit 0; [ $RANK = 2 ] && exec sleep 600; "
        # 2 s: as above.
        "until [ -e {shared}/early ]; do sleep 0.1; done; sleep 2; "
        "echo 'RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv' >&2; exit 1",
        "--settle",
        "0.2",
        others="",
    ),
    shell("command-not-found", "no-such-command", others=OTHERS),
    Case("not-found", ("no-such-program",)),
    Case("not-executable", ("{shared}/program",)),
    Case("no-directory", ("true",), ("--cwd", "/no/such/directory")),
    Case(
        "no-restarts-left",
        ("sh", "-c", "echo round $HVLAUNCH_ROUND >&2; exit 3"),
        ("--min-np", "1", "--max-restarts", "1", "--blacklist-cooldown-range", "0.05", "0.05"),
        hosts="one",
    ),
    Case("hang", ("sleep", "600"), ("--on-hang", "stop", "--hang-timeout", "2")),
    Case(
        "full-disk",
        ("sh", "-c", "yes | head -c 3000000"),
        ("--output-filename", "{disk}/logs", "--ranks", "9"),
    ),
)

_NORMAL = (
    (r"\b[0-9.]+ (?:s|min [0-9]+ s)(?= (?:later|earlier)\b)", "N s"),
    (r"N s (?:later|earlier)|at the same time", "N s later"),
    (r"(?:(?<=after )|(?<=progress for ))[0-9.]+ s(?: to [0-9.]+ s)?", "N s"),
    (r"peaked at [0-9.]+ GiB", "peaked at N GiB"),
    (r"had [0-9.]+ of [0-9.]+ GiB in use", "had N of N GiB in use"),
    (r"waits? in [^;\n]*|(?:wait|get on|stand)s? [^;\n]*(?=;|$)", "..."),
    (r"\b[0-9a-f]{12}\b", "JOB"),
    (r"\(PATH=[^)]*\)", "(PATH=...)"),
    (r"\n *[~^]+(?=\n)", ""),
)
_STACKS = ("  Before they were stopped:", "  All their stacks:")
"""What a machine tells that is quick enough, and other tests look at."""
_BY_TIME = ("  host a had", "  host b had", "  host b lacks the")
"""Likewise; these tests look at it."""


def golden(report: dict[str, Any], replaced: dict[str, str]) -> list[str]:
    """What a report says, without what differs from run to run; `? ` begins what a slow machine may not have."""
    cause = report["cause"] or {}
    is_any = report["outcome"] == "not started"  # all of them are alike
    worker = (
        f"rank {cause['rank']} on host {cause['host']}, {cause['kind']}"
        if cause and not is_any
        else "no worker"
    )
    roles = [] if is_any else [f"{one['rank']} {one['role']}" for one in report["workers"]]
    lines = [f"{report['outcome']}, exit code {report['exit_code']}, {worker}; {', '.join(roles)}"]
    for one in report["rounds"]:
        failures = "; ".join(
            f"rank {end['rank']}: {end['end']}, {end['evidence']['lines']}" for end in one["failures"]
        )
        lines.append(f"round {one['number']} of {one['size']}: {one['cause']} ({failures})")
    lines.append("")
    text = report["text"]
    for found, name in sorted(replaced.items(), key=lambda pair: -len(pair[0])):
        text = text.replace(found, name)
    for pattern, name in _NORMAL:
        text = re.sub(pattern, name, text)
    is_stack = False
    for line in text.rstrip("\n").split("\n"):
        is_stack = line.startswith(_STACKS) or (is_stack and line.startswith("    "))
        if not is_stack:
            lines.append(f"? {line}" if line.startswith(_BY_TIME) else line)
    return lines


def write_files(shared: Path, small: str) -> None:
    """Scripts, hostfiles, and Pythons that start agents: with clocks of their own, with little memory, and one that never does."""
    for name, script in SCRIPTS.items():
        (shared / f"{name}.py").write_text(script)
    (shared / "program").write_text("#!/bin/sh\n")  # and not executable
    starters = {
        "a": f'exec unshare --time --monotonic=1000000 --fork --kill-child -- {sys.executable} "$@"',
        "b": f'exec unshare --time --monotonic=4000000 --fork --kill-child -- {sys.executable} "$@"',
        "small": f'echo $$ >{small}/cgroup.procs; exec {sys.executable} "$@"',
        "sleepy": "exec sleep 600",
    }
    for name, line in starters.items():
        path = shared / f"python-{name}"
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    for name, of_b in (("hosts", "b"), ("small", "small")):
        hosts = f"a slots=1 python={shared}/python-a\nb slots=1 python={shared}/python-{of_b}\nc slots=1\n"
        (shared / name).write_text(hosts)
    (shared / "one").write_text("a slots=1\n")
    (shared / "sleepy").write_text(f"b slots=1 python={shared}/python-sleepy\n")
