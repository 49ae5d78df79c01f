"""One job, one fault at a random moment, and what became of both."""

import contextlib
import json
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.faulty.judge import ALLOWANCE, OUTPUT_LOST, Outcome, judge, shown_lines
from benchmarks.faulty.kind import GRACE, LEASE, START, Form, Kind, Must
from benchmarks.faulty.scene import Missed, Pool, Reader, Scene, left_on, until
from tests.cluster.jobs import HVLAUNCH, PROGRAMS
from tests.testhosts.hosts import Driver, Host, TestHosts

__all__ = ["Result", "Trial", "hosts_for"]

WORKER = str(Path(__file__).with_name("worker.py"))
SLOTS = {"a": 1, "b": 2, "c": 1}
GATE = "gate"
NOTE = 8
"""Bytes in which a worker notes how many lines it has written."""
PATIENCE = 60.0
"""Seconds for the workers of a job that nobody has hurt yet to start."""
OPTIONS = {
    "--lease": LEASE,
    "--grace": GRACE,
    "--start-timeout": START,
    "-x": "FAULTS_PROGRAMS",
}
ELASTIC = {
    "--min-np": 1,
    "--worker-timeout": LEASE,
    "--reset-timeout": 10,
    "--exit-grace": 10,
    "--drain-timeout": 5,
    "--discovery-interval": 0.3,
    "--blacklist-cooldown-range": "1 4",
    "--elastic-timeout": 60,
}
STEPPING = """\
#!/bin/sh
shift_clock='import time as _t; _real = _t.time; _file = "{folder}/offset"
def _stepped():
    try: return _real() + float(open(_file).read() or 0)
    except OSError: return _real()
_t.time = _stepped
'
"""


@dataclass(slots=True)
class Result:
    """What came out of it; `problems` is what is wrong. `kept` is where what it said is kept."""

    kind: Kind
    form: Form
    moment: str
    seed: int
    code: int | None = None
    seconds: float = 0.0
    missed: bool = False
    problems: list[str] = field(default_factory=list)
    kept: Path | None = None


def hosts_for(folder: Path) -> TestHosts:
    """The hosts on which one job after the other runs; they see the folder."""
    return TestHosts([*SLOTS, GATE], share=[str(folder)])


class Trial:
    """A job of this form on the hosts, and one fault of this kind. `seed` decides the rest."""

    def __init__(
        self, hosts: TestHosts, kind: Kind, seed: int, folder: Path, form: Form | None = None
    ) -> None:
        self.random = random.Random(seed)
        self.hosts = hosts
        self.kind = kind
        drawn = self.random.choice(kind.forms)
        self.form = form or drawn
        self.moment = self.random.choice(kind.moments)
        must = kind.must(self.form)
        assert must is not None
        if (
            self.moment == "ending" and self.form.elastic and kind.static
        ):  # when one has ended well, no round follows
            both = "|".join(filter(None, (must.words, kind.static.words)))
            must = replace(must, codes=must.codes + kind.static.codes, words=both)
        self.must: Must = must
        self.folder = folder
        self.result = Result(kind, self.form, self.moment, seed)
        self._at_end: int | None = None

    def run(self) -> Result:
        self._prepare()
        used = [self.hosts[name] for name in SLOTS]
        host = self.random.choice(used)
        with running(self._start()) as job:
            assert job.stdout is not None
            assert job.stderr is not None
            readers = {"stdout": Reader(job.stdout), "stderr": Reader(job.stderr)}
            scene = Scene(
                self.hosts, host, job, self.folder, str(self.folder), self.random, used, self.pool, readers
            )
            with scene.undo:
                try:
                    self._wait(scene)
                    self.result.missed = (
                        job.poll() is not None and not self.kind.prefix
                    )  # it has ended by itself
                    if not self.result.missed:
                        self.kind.play(scene)
                except Missed:
                    self.result.missed = True
                self._judge(scene, self._finish(scene))
        self._clear()
        return self.result

    # The job

    def _prepare(self) -> None:
        for name in ("tmp", "disk"):
            (self.folder / name).mkdir(parents=True)
        self.hosts.driver.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(self.folder / "disk")], check=True
        )
        self.pool = Pool(self.folder, SLOTS)
        config = self.hosts.driver.home / ".ssh" / "config"
        config.write_text(
            "".join(f"Host {name}\n  ProxyJump {GATE}\n" for name in SLOTS) if self.form.jump else ""
        )
        python = shlex.quote(sys.executable)
        inject = 'for word; do shift; case $word in import\\ io*) word="$shift_clock$word";; esac; set -- "$@" "$word"; done\n'
        run = f'case $1 in -m) shift 2; exec {python} -c "$shift_clock"\'import runpy; runpy.run_module("hvlaunch", run_name="__main__", alter_sys=True)\' "$@";; esac\n'
        drop = f"case $1 in {python}) shift;; esac\n"
        stepping = STEPPING.replace("{folder}", str(self.folder))
        self._program("stepping", f'{stepping}{drop}{run}set -- "$@"\n{inject}exec {python} "$@"\n')
        self._program(
            "shifted",
            f'#!/bin/sh\nexec unshare --time --monotonic 1000000 --boottime 1000000 --fork --kill-child {python} "$@"\n',
        )

    def _program(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def _start(self) -> "subprocess.Popen[bytes]":
        options = [word for name, value in OPTIONS.items() for word in (name, *str(value).split())]
        options += ["--events", str(self.folder / "events")]
        if self.form.elastic:
            options += [word for name, value in ELASTIC.items() for word in (name, *str(value).split())]
            options += ["--host-discovery-script", self.pool.command]
        else:
            options += ["-H", ",".join(f"{name}:{slots}" for name, slots in SLOTS.items())]
        options += [*self.form.options, *map(self._named, self.kind.options)]
        whole = self.form.asks or self.form.meets
        ways = ["--asks"] if self.form.asks else ["--meets"] if self.form.meets else []
        worker = [sys.executable, *(() if whole else ("-I", "-S")), WORKER, str(self.folder), *ways]
        env = {**self.hosts.driver.env, "TMPDIR": str(self.folder / "tmp"), "FAULTS_PROGRAMS": str(PROGRAMS)}
        return self.hosts.driver.popen(
            [*map(self._named, self.kind.prefix), *HVLAUNCH, *options, *worker],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def _named(self, word: str) -> str:
        return word.replace("{folder}", str(self.folder)).replace("{disk}", str(self.folder / "disk"))

    # The moment

    def _wait(self, scene: Scene) -> None:
        """Until the random moment."""
        if self.moment == "connecting":
            scene.pause(0.0, 1.0)
            return
        event = "host_ready" if self.moment == "starting" else "worker_started"
        self._until_event(scene, event, 1 if self.moment == "starting" else sum(SLOTS.values()))
        if self.moment == "starting":
            scene.pause(0.0, 0.3)
            return
        started = lambda: scene.job.poll() is not None or len(self._written()) >= sum(SLOTS.values())  # noqa: E731
        until(started, PATIENCE)
        scene.pause(0.0, 1.5)
        if self.moment == "ending":
            self._at_end = self.random.choice((0, 143))
            if self._at_end:
                scene.order("deaf", f"{scene.host.name}.0")
                scene.obeyed(f"{scene.host.name}.0")
                scene.stop()
                scene.caused = None
            else:
                (self.folder / "end").touch()
            scene.pause(0.0, 0.3)

    def _until_event(self, scene: Scene, kind: str, times: int) -> None:
        word = f'"{kind}"'

        def there() -> bool:
            file = next(iter(self.folder.glob("events")), None)
            return scene.job.poll() is not None or (
                file is not None and file.read_text().count(word) >= times
            )

        until(there, PATIENCE)

    def _written(self) -> dict[str, int]:
        """How many lines each worker has written."""
        files = [file for file in self.folder.glob("lines.*") if file.stat().st_size == NOTE]
        return {
            file.name.removeprefix("lines."): int.from_bytes(file.read_bytes(), "little") for file in files
        }

    # The end

    def _finish(self, scene: Scene) -> float:
        """Wait for the job's end; how many seconds it took since its cause. A job that goes on is told after some time that its work is done."""
        caused = scene.caused or time.monotonic()
        goes_on = not self.kind.ends and {0, OUTPUT_LOST} & set(self.must.codes)
        if goes_on:
            least = LEASE + 2.0 if self.must.always and self.moment == "running" else 0.0
            scene.ends(self.random.uniform(least, LEASE + 3.0))
            if scene.job.poll() is None:
                caused = time.monotonic()
            (self.folder / "end").touch()
        limit = max(self.must.within, 30.0 if self.result.missed else 0.0) + ALLOWANCE + 10.0
        if self.result.missed and not goes_on:
            (self.folder / "end").touch()
        until(lambda: scene.job.poll() is not None, caused + limit - time.monotonic())
        return time.monotonic() - caused

    def _judge(self, scene: Scene, seconds: float) -> None:
        code = scene.job.poll()
        left = self._left(scene, self.kind.clean + ALLOWANCE if code is not None else 0.0)
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                scene.job.kill()
        for reader in scene.readers.values():
            reader.pace = None
            reader.join(5.0)
        stdout, stderr = (scene.readers[name].text for name in ("stdout", "stderr"))
        shown = shown_lines(stdout)
        messages = stderr.decode(errors="replace")
        written = self._written()
        self.result.code, self.result.seconds = code, seconds
        outcome = Outcome(
            scene.host.name, code, seconds, messages, written, shown, left, self._at_end, self.moment
        )
        must = replace(self.must, codes=(*self.must.codes, *scene.codes))
        if self.result.missed and not self.kind.ends:
            must = Must((0,), within=30.0)
        self.result.problems = (
            [] if self.result.missed and code is not None else judge(self.kind, must, outcome)
        )
        (self.folder / "stdout").write_bytes(stdout)
        (self.folder / "stderr").write_bytes(stderr)
        result = self.result
        story = {
            "kind": self.kind.name,
            "form": self.form.name,
            "moment": self.moment,
            "host": scene.host.name,
            "seed": result.seed,
            "code": code,
            "seconds": seconds,
            "missed": result.missed,
            "problems": result.problems,
        }
        (self.folder / "result").write_text(json.dumps(story, indent=1))

    def _left(self, scene: Scene, seconds: float) -> list[str]:
        """Processes and files of the job on its hosts and beside hvlaunch, when they had time to go."""

        def found() -> list[str]:
            places: list[Host | Driver] = [*scene.used, self.hosts[GATE], self.hosts.driver]
            running = [f"{place.name}: {one}" for place in places for one in left_on(place)]
            files = [f"{host.name}: /tmp/{file.name}" for host in scene.used for file in scratch(host.pid)]
            own = [f"driver: {file}" for file in (self.folder / "tmp").iterdir()]
            return running + files + own

        found_last = until(lambda: not found(), seconds)
        return [] if found_last else found()

    def _clear(self) -> None:
        """As it was before."""
        for process in left_on(self.hosts.driver):
            with contextlib.suppress(OSError):
                self.hosts.driver.run(["kill", "-9", str(process.pid)])
        self.hosts.driver.run(["umount", "-l", str(self.folder / "disk")])
        if (
            self.kind.leaves
            or self.result.problems
            or any(True for host in self.hosts for _ in left_on(host))
        ):
            for host in self.hosts:
                host.touched = True
        self.hosts.repair()


def scratch(pid: int) -> Sequence[Path]:
    """The directories of jobs in /tmp of the host with this first process."""
    if not pid:
        return []
    try:
        return list(Path(f"/proc/{pid}/root/tmp").glob("hvlaunch-*"))
    except OSError:
        return []


@contextlib.contextmanager
def running(process: "subprocess.Popen[bytes]") -> "Iterator[subprocess.Popen[bytes]]":
    """The process, which is killed at the end if it still runs."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
