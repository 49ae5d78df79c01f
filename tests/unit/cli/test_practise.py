"""`hvlaunch practise`: each fault recovers in front of the user, as any user, and nothing is left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

import hvlaunch
from hvlaunch.cli.jobs import practise
from hvlaunch.cli.jobs.practise import (
    FAULTS,
    Course,
    JobEnded,
    Lines,
    NotRecovered,
    Outcome,
    play,
    recovery_table,
)
from hvlaunch.cli.main import main
from hvlaunch.gloo.pretended_hosts import PretendedHosts
from hvlaunch.practise_training import END, REPORTS, SLOW, UserOrders

NOBODY = 65534
LIMIT = 110.0
LIGHT = Path(__file__).parents[2] / "light"
WITHOUT_TORCH = "import sys\nsys.modules['torch'] = None\n"


class Place:
    """Where one session runs: directories and processes of its own, and perhaps another user."""

    def __init__(self, folder: Path, python: str, uid: int | None) -> None:
        self.folder = folder
        self.python = python
        self._uid = uid
        paths = [str(folder), *(path for path in sys.path if path), str(Path(hvlaunch.__file__).parents[1])]
        self.environ = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        (folder / "tmp").mkdir()
        if uid is not None:
            for path in (folder, folder / "tmp"):
                os.chown(path, uid, uid)

    def start(self, *words: str, stdin: int = subprocess.DEVNULL) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [self.python, "-m", "hvlaunch", "practise", *words],
            env=self.environ,
            cwd="/",
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            user=self._uid,
            group=self._uid,
            extra_groups=None if self._uid is None else [],
        )

    def processes(self) -> list[str]:
        """The processes that were started here and still run: all have this TMPDIR."""
        mine = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TMPDIR") == self.environ["TMPDIR"]:
                    mine.append(" ".join(process.cmdline()))
            except psutil.Error:
                pass
        return mine

    def left(self) -> list[str]:
        """The files of sessions; the directories above them stay, as after any job."""
        jobs = self.folder / ".local/state/hvlaunch/jobs"
        return [
            str(path)
            for path in (*(self.folder / "tmp").iterdir(), *(jobs.iterdir() if jobs.exists() else ()))
        ]

    def await_nothing(self) -> None:
        deadline = time.monotonic() + LIMIT
        while self.processes() or self.left():
            assert time.monotonic() < deadline, (self.processes(), self.left())
            time.sleep(0.05)


@contextmanager
def place(*, is_other_user: bool = False, has_torch: bool = False) -> Iterator[Place]:
    """Not below tmp_path, which other users can't enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        light = (LIGHT / "sitecustomize.py").read_text()
        (Path(name) / "sitecustomize.py").write_text(light if has_torch else WITHOUT_TORCH)
        python = sys.executable
        if is_other_user:
            if os.getuid() != 0:
                pytest.skip("only root can be somebody else")
            # Ours may be in a directory of root's.
            candidates = [python, f"/usr/bin/python3.{sys.version_info.minor}"]
            usable = (path for path in candidates if Path(path).exists() and _runs_as_nobody(path))
            python = next(usable, "")
            if not python:
                pytest.skip("no Python of this version that other users can run")
        yield Place(Path(name), python, NOBODY if is_other_user else None)


def _runs_as_nobody(python: str) -> bool:
    root = Path(hvlaunch.__file__).parents[1]
    environ = {"PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)]), "PATH": "/usr/bin:/bin"}
    try:
        return not subprocess.call(
            [python, "-c", "import hvlaunch.cli.jobs.practise"],
            env=environ,
            cwd="/",
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
        )
    except OSError:
        return False


def rows_of(output: str) -> dict[str, str]:
    """The table's recovery times by fault."""
    found = re.findall(rf"^({'|'.join(FAULTS)}) +([0-9.]+ s|not at all)  ", output, re.MULTILINE)
    return dict(found)


def test_an_unprivileged_user_without_torch_sees_each_fault_recover():
    with place(is_other_user=True) as here:
        session = here.start("all")
        output, _ = session.communicate(timeout=LIMIT)
        assert session.returncode == 0, output
        assert list(rows_of(output)) == [*FAULTS], output
        assert "not at all" not in output
        assert "as a toy, since torch is not installed" in output
        for words in (
            r"was killed by SIGKILL; round 1 was formed with 3 workers after 0\.\d\d s, and step \d+ was done after ",
            r"was cut off from hvlaunch for 2 s; it trained on, \d+ steps meanwhile; ",
            r"was frozen by SIGSTOP; round 2 was formed with 3 workers after 4\.\d\d s",
            r"was slow for 5 s; all ranks waited for it, and a step took 0\.\d\d s instead of 0\.\d\d s; no round ended",
            r"was lost with its whole host; round 3 was formed with 3 workers after ",
        ):
            assert re.search(words, output), (words, output)
        assert "done after" in output
        assert here.left() == []
        here.await_nothing()


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_with_torch_a_real_training_recovers():
    with place(has_torch=True) as here:
        session = here.start(stdin=subprocess.PIPE)
        shown = StepLines(session)
        first = shown.next_loss()
        shown.type("kill")
        shown.wait_for("was killed by SIGKILL; round 1 was formed with 3 workers after ")
        # Adam has begun to learn, and goes on from the state of the survivors: no line has fewer steps than the one before.
        while shown.next_loss() >= first:
            pass
        output, _ = session.communicate("quit\n", timeout=LIMIT)
        assert session.returncode == 0, output
        assert "by torch's DistributedDataParallel" in shown.text
        here.await_nothing()


class StepLines:
    """Lines of a session with a real training, whose user types faults."""

    def __init__(self, session: "subprocess.Popen[str]") -> None:
        self._session = session
        self.text = ""
        self.step = -1

    def type(self, fault: str) -> None:
        assert self._session.stdin is not None
        self._session.stdin.write(f"{fault}\n")
        self._session.stdin.flush()

    def wait_for(self, words: str) -> str:
        assert self._session.stdout is not None
        for line in self._session.stdout:
            self.text += line
            if re.search(words, line):
                return line
        pytest.fail(f"no {words!r} in {self.text}")

    def next_loss(self) -> float:
        """Return the loss of the next line with a step, which is later than the step before."""
        match = re.search(r"step (\d+): loss ([0-9.]+), 3 workers", self.wait_for(r"step \d+: loss "))
        assert match is not None, self.text
        assert int(match[1]) > self.step
        self.step = int(match[1])
        return float(match[2])


def started(here: Place, *words: str, stdin: int = subprocess.DEVNULL) -> "subprocess.Popen[str]":
    """A session whose training runs."""
    session = here.start(*words, stdin=stdin)
    assert session.stdout is not None
    for line in session.stdout:
        if "<stdout>: step " in line:
            return session
    pytest.fail("no training")


def test_a_user_types_faults():
    with place() as here:
        session = started(here, stdin=subprocess.PIPE)
        output, _ = session.communicate("kill 0\nkill 7\nbogus\n\nquit\n", timeout=LIMIT)
        assert session.returncode == 0, output
        assert "rank 0 on host p" in output
        assert re.search(r"was killed by SIGKILL; round 1 was formed with 3 workers", output)
        assert "no worker has that rank: ranks are 0-2" in output
        assert output.count("type a fault and press Enter") == 1
        assert "RECOVERED" not in output
        here.await_nothing()


def test_the_end_of_stdin_ends_the_training():
    with place() as here:
        session = here.start()
        output, _ = session.communicate(timeout=LIMIT)
        assert session.returncode == 0, output
        assert "done after" in output
        here.await_nothing()


def test_ctrl_c_ends_it_as_any_job():
    with place() as here:
        session = started(here, stdin=subprocess.PIPE)
        session.send_signal(signal.SIGINT)
        output, _ = session.communicate(timeout=LIMIT)
        assert session.returncode == 130, output
        assert "interrupted by SIGINT" in output
        assert "practise:" not in output
        here.await_nothing()


@pytest.mark.parametrize("words", [("freeze",), ()], ids=["frozen", "typed"])
def test_nothing_is_left_if_it_is_killed(words):
    with place() as here:
        session = started(here, *words, stdin=subprocess.PIPE)
        time.sleep(0.3)
        assert here.left()
        session.kill()
        session.communicate()
        here.await_nothing()


def test_a_training_that_does_not_start_is_a_failure():
    with place() as here:
        (here.folder / "sitecustomize.py").write_text(
            "import sys\nif 'practise_training' in sys.orig_argv[-1]: sys.exit(3)\n"
        )
        session = here.start("kill")
        output, _ = session.communicate(timeout=LIMIT)
        assert session.returncode != 0, output
        assert "recovered" not in output.lower()
        here.await_nothing()


def test_no_room_for_the_pipe_is_bad_usage(capsys, monkeypatch):
    def refuse(prefix):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    assert main(["practise", "kill"]) == 2
    assert "practise: no usable temporary directory found; try: TMPDIR=DIRECTORY" in capsys.readouterr().err


def test_it_needs_no_directory_for_jobs():
    with place() as here:
        here.environ["XDG_STATE_HOME"] = "/proc/nosuch"
        session = here.start("kill")
        output, _ = session.communicate(timeout=LIMIT)
        assert session.returncode == 0, output
        assert list(rows_of(output)) == ["kill"]
        here.await_nothing()


def test_an_unknown_fault_is_bad_usage(capsys):
    assert main(["practise", "explode"]) == 2
    assert "no fault is called explode; try: kill, cut, freeze, slow, host, or all" in capsys.readouterr().err


def test_the_table_says_what_did_not_recover():
    outcomes = [Outcome("kill", "rank 2 was killed", "", 0.25), Outcome("cut", "p1 was cut", "", None)]
    assert recovery_table(outcomes).splitlines()[1:] == [
        "kill              0.25 s  rank 2 was killed",
        "cut           not at all  p1 was cut",
    ]


class Pipe:
    """Records for a course."""

    def __init__(self, size: int = 3) -> None:
        read_end, self.write_end = os.pipe()
        self.lines = Lines(read_end)
        self.course = Course(self.lines, size)

    def send(self, *records: dict[str, object]) -> None:
        os.write(self.write_end, b"".join(json.dumps(record).encode() + b"\n" for record in records))

    def follow(self) -> None:
        while self.course.follow(0.0) is not None:
            pass

    def form(self, number: int, *pids: int) -> None:
        """A round with a worker on each host, and a spare on one more."""
        for rank, pid in enumerate(pids):
            seat = {"host": f"p{rank + 1}", "slot": 0}
            self.send({"type": "worker_started", "pid": pid, **seat}, {"type": "worker_asked", **seat})
        self.send({"type": "round_formed", "round": number, "workers": len(pids)})
        for rank in range(len(pids)):
            self.send({"type": "worker_placed", "rank": rank, "host": f"p{rank + 1}", "slot": 0})
        self.send({"type": "worker_started", "host": "p9", "slot": 0, "pid": 9})
        self.send({"type": "worker_asked", "host": "p9", "slot": 0})
        self.step(5)

    def step(self, count: int = 1, seconds: float = 0.1) -> None:
        self.send(*[{"type": "step", "step": 7, "seconds": seconds}] * count)


def test_lines_come_whole_and_in_time():
    read_end, write_end = os.pipe()
    lines = Lines(read_end)
    os.write(write_end, b"kill\nfre")
    assert lines.get(1.0) == "kill"
    assert lines.get(0.0) is None
    assert not lines.is_over
    os.write(write_end, b"eze\n\nlast")
    os.close(write_end)
    assert [lines.get(1.0) for _ in range(4)] == ["freeze", "", "last", None]
    assert lines.is_over
    os.close(read_end)


def test_a_course_has_the_workers_of_the_round():
    pipe = Pipe()
    assert pipe.course.workers == []
    pipe.form(0, 11, 12, 13)
    pipe.follow()
    assert [str(worker) for worker in pipe.course.workers] == [
        f"rank {rank} on host p{rank + 1}" for rank in range(3)
    ]
    assert [worker.pid for worker in pipe.course.workers] == [11, 12, 13]
    assert pipe.course.is_whole
    pipe.send({"type": "worker_exited", "host": "p9", "slot": 0})
    pipe.follow()
    assert not pipe.course.is_whole
    pipe.send({"type": "host_lost", "host": "p2", "cause": "gone"})
    pipe.follow()
    assert [worker.rank for worker in pipe.course.workers] == [0, 2]
    pipe.send({"type": "job_ended"})
    with pytest.raises(JobEnded):
        pipe.follow()


class Away(PretendedHosts):
    """Hosts that only note what is done to them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, ...]] = []

    def keep_away(self, name: str, seconds: float) -> None:
        self.calls.append((name, seconds))

    def cut(self, name: str) -> None:
        self.calls.append((name,))


@pytest.fixture
def child():
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def test_a_kill_recovers_with_a_new_round_and_a_step(child):
    pipe, hosts = Pipe(), Away()
    pipe.form(0, 1, 2, child.pid)
    threading.Timer(0.1, lambda: pipe.send({"type": "round_formed", "round": 1, "workers": 2})).start()
    threading.Timer(0.3, pipe.step).start()
    outcome = play(pipe.course, hosts, "kill")
    assert child.wait() == -signal.SIGKILL
    assert outcome.happened == "rank 2 on host p3 was killed by SIGKILL"
    assert re.fullmatch(
        r"round 1 was formed with 2 workers after 0\.[01]\d s, and step 7 was done after 0\.[2-5]\d s",
        outcome.recovery,
    )
    assert outcome.seconds is not None


def test_a_cut_that_loses_the_host_did_not_recover():
    pipe, hosts = Pipe(), Away()
    pipe.form(0, 1, 2, 3)
    threading.Timer(
        0.1, lambda: pipe.send({"type": "host_lost", "host": "p2", "cause": "the lease is over"})
    ).start()
    outcome = play(pipe.course, hosts, "cut", 1)
    assert hosts.calls == [("p2", 2.0), ("p2",)]
    assert (outcome.seconds, outcome.recovery) == (None, "the training did not recover: the lease is over")


def test_no_recovery_in_time(child, monkeypatch):
    monkeypatch.setattr(practise, "_LIMIT", 0.2)
    pipe = Pipe()
    pipe.form(0, child.pid)
    outcome = play(pipe.course, Away(), "kill")
    assert (outcome.seconds, outcome.recovery) == (None, "the training did not recover: not within 0.2 s")


def test_faults_that_can_not_be_caused(child):
    pipe = Pipe()
    with pytest.raises(NotRecovered, match="no training runs"):
        play(pipe.course, Away(), "kill")
    pipe.form(0, child.pid)
    with pytest.raises(NotRecovered, match="ranks are 0-0"):
        play(pipe.course, Away(), "kill", 3)
    child.kill()
    child.wait()
    for word in ("kill", "host"):
        with pytest.raises(NotRecovered, match="has just ended"):
            play(pipe.course, Away(), word)


def test_orders_reach_a_training_and_steps_come_back(tmp_path, monkeypatch, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    monkeypatch.setenv(REPORTS, str(pipe))
    before = {number: signal.getsignal(number) for number in (SLOW, END)}
    try:
        orders = UserOrders()
        orders.report(1, 0.5, 0, 3)
        orders.report(1, 0.5, 1, 3)
        os.kill(os.getpid(), SLOW)
        start = time.monotonic()
        orders.work()
        assert time.monotonic() - start >= 0.6
        assert not orders.is_over
        os.kill(os.getpid(), END)
        assert orders.is_over
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    lines = Lines(reader)
    assert json.loads(lines.get(1.0) or "")["step"] == 1
    assert lines.get(0.0) is None
    assert capsys.readouterr().out == ""
