"""Jobs under faults: one fault each, at a random moment, judged by code, named cause, leftovers, lost lines and time; by seed.

    python benchmarks/faults.py --jobs 500 --seed 1 --at-once 4
    python benchmarks/faults.py --kind "an agent gets SIGKILL" --seed 7 --jobs 1     plays a job again
    python benchmarks/faults.py --list                                               all kinds of faults

On hosts made of namespaces on this machine (root, iproute2, iptables, sshd): workers that print numbered lines, on three hosts behind
one jump host. A job is static (by ssh, with relay, behind the jump host, with --ssh-client openssh), under mpirun, or elastic (by restarts, in
the process). A job that comes to something else than it must is kept, with its events and output, and its command is
printed. The exit code is 1 then.
"""

import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser, need_hosts
from benchmarks.faulty.kind import FORMS, Kind
from benchmarks.faulty.kinds import KINDS
from benchmarks.faulty.table import table
from benchmarks.faulty.trial import Result, Trial, hosts_for
from benchmarks.measure import heading

MOST = 6
"""Problems of one job that are printed; FOLDER/result has all."""


class Lane(threading.Thread):
    """Hosts of its own, on which it plays one job after the other."""

    def __init__(
        self, work: "queue.SimpleQueue[tuple[Kind, int] | None]", folder: Path, form: str | None
    ) -> None:
        super().__init__()
        self._work = work
        self._folder = folder
        self._form = FORMS[form] if form else None
        self.results: list[Result] = []
        self.start()

    def run(self) -> None:
        while (job := self._work.get()) is not None:
            with hosts_for(self._folder) as hosts:
                while job is not None and self._played(
                    Trial(hosts, *job, self._folder / str(job[1]), self._form)
                ):
                    job = self._work.get()
            if job is None:
                return

    def _played(self, trial: Trial) -> bool:
        """Whether the hosts can be used again."""
        try:
            result = trial.run()
        except Exception as error:  # noqa: BLE001 (one job must not end the others)
            result = trial.result
            result.problems.append(f"the benchmark itself: {error!r}")
        self.results.append(result)
        if result.problems:
            result.kept = trial.folder
        else:
            shutil.rmtree(trial.folder)
        tell(result)
        return not result.problems


def tell(result: Result) -> None:
    code = "none" if result.code is None else result.code
    words = f"{result.kind.name} ({result.form.name}, {result.moment}): {code} after {result.seconds:.1f} s"
    print(time.strftime("%H:%M:%S"), words + (", missed" if result.missed else ""), flush=True)
    for problem in result.problems[:MOST]:
        print(f"    WRONG: {problem[:200]}")
    if result.problems:
        again = f"python benchmarks/faults.py --jobs 1 --seed {result.seed} --kind '{result.kind.name}'"
        print(f"    again: {again} --form '{result.form.name}'\n    kept in {result.kept}", flush=True)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--jobs", type=int, default=len(KINDS), help=f"how many (default {len(KINDS)}: one of each kind)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first job; the next one has the next seed"
    )
    parser.add_argument(
        "--kind", action="append", choices=list(KINDS), metavar="KIND", help="these only; may be repeated"
    )
    parser.add_argument("--form", choices=list(FORMS), help="jobs of this form only")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="jobs at a time")
    parser.add_argument("--list", action="store_true", help="print all kinds of faults")
    options = parser.parse_args()
    if options.list:
        print(
            "\n".join(
                f"{kind.name} ({', '.join(form.name for form in kind.forms)})" for kind in KINDS.values()
            )
        )
        return 0
    need_hosts()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(
            number, signal.SIG_DFL
        )  # in the background they are ignored, and by all that is started here
    kinds = [KINDS[name] for name in options.kind or KINDS]
    if options.form:
        kinds = [kind for kind in kinds if FORMS[options.form] in kind.forms]
    work: queue.SimpleQueue[tuple[Kind, int] | None] = queue.SimpleQueue()
    for seed in range(options.seed, options.seed + options.jobs):
        work.put((kinds[(seed - options.seed) % len(kinds)], seed))
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir="/var/tmp"))  # hosts have a /tmp of their own
    lanes = [Lane(work, folder, options.form) for _ in range(options.at_once)]
    for _ in lanes:
        work.put(None)
    for lane in lanes:
        lane.join()
    results = [result for lane in lanes for result in lane.results]
    print(heading(f"{len(results)} jobs, {len({result.kind.name for result in results})} kinds of faults"))
    print(table(results))
    if not any(result.problems for result in results):
        shutil.rmtree(folder)
    return int(any(result.problems for result in results))


if __name__ == "__main__":
    sys.exit(main())
