"""Whether the failure report names the worker that failed for an error of its own, and not one that lost it.

    python benchmarks/culprit.py --runs 50
    python benchmarks/culprit.py --only torch --hvlaunch "python -m hvlaunch"    # another version's, in its environment

Local jobs whose workers repeat a collective, until one of them fails (culprit_worker.py). Counted are the jobs whose
report names that worker, quotes its error if it had one, and whose exit code is its own. After an exception, torch and
jaxlib may abort the process while Python ends; then its own code is that of SIGABRT.
"""

import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser
from benchmarks.culprit_worker import ERROR, KINDS, PROGRAMS
from benchmarks.measure import heading, table

WORKER = str(Path(__file__).with_name("culprit_worker.py"))
WORKERS = {"torch": 2, "horovod-like": 4, "horovod": 4, "jax": 2}
FLAGS = {"horovod": ["--horovod"]}
NAMED = re.compile(r"^hvlaunch: rank (\d+) of \d+ ", re.MULTILINE)
ABORTED = 134
LIMIT = 120
"""Seconds for a job."""


def is_right(hvlaunch: list[str], python: str, program: str, kind: str, culprit: int) -> tuple[bool, str]:
    """Whether one job's report is; and the report."""
    size = WORKERS[program]
    argv = [*hvlaunch, *FLAGS.get(program, []), "-np", str(size), python, WORKER, program, kind, str(culprit)]
    done = subprocess.run(
        argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=LIMIT, check=False
    )
    start = done.stderr.find("\nhvlaunch: rank ") + 1
    report = done.stderr[start:]
    named = NAMED.search(report)
    quotes = ERROR in report or not kind.startswith("exception")
    is_named = named is not None and int(named[1]) == culprit
    codes = {KINDS[kind][1], *([ABORTED] if kind.startswith("exception") else [])}
    return is_named and quotes and done.returncode in codes, report


def has(python: str, module: str) -> bool:
    """Whether this interpreter has the module; what plays Horovod's workers needs none."""
    if module == "horovod-like":
        return True
    return (
        subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0
    )


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="jobs of each kind")
    parser.add_argument("--only", choices=list(PROGRAMS), help="this program alone")
    parser.add_argument("--hvlaunch", default=f"{sys.executable} -m hvlaunch", metavar="COMMAND")
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="PATH",
        help="the workers' interpreter; for JAX and Horovod, perhaps",
    )
    parser.add_argument("--wrong", action="store_true", help="print the reports that are wrong")
    args = parser.parse_args()
    rows = []
    right_of_all = Counter[bool]()
    for program in [args.only] if args.only else PROGRAMS:
        if not has(args.python, program):
            rows.append([program, "", "not installed"])
            continue
        for kind in KINDS:
            right = 0
            for run in range(args.runs):
                good, report = is_right(
                    shlex.split(args.hvlaunch), args.python, program, kind, run % WORKERS[program]
                )
                right += good
                right_of_all[good] += 1
                if args.wrong and not good:
                    print(f"{program}, {kind}, run {run}:\n{report}", file=sys.stderr)
            rows.append([program, kind, f"{right} of {args.runs}"])
            print(*rows[-1], sep=": ", file=sys.stderr, flush=True)
    print(heading("The report names the culprit"))
    print(table(["program", "how it fails", "right"], rows))
    return 1 if right_of_all[False] else 0


if __name__ == "__main__":
    sys.exit(main())
