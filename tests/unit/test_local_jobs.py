"""Whole jobs on this machine, through the command line: output, stdin, signals, ends."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from hvlaunch.agent.facts import free_port
from hvlaunch.engine import replay
from hvlaunch.engine.lifecycle import Phase
from hvlaunch.watch.journal import entries
from tests.testhosts.places import wait_until

HVLAUNCH = [sys.executable, "-m", "hvlaunch"]
DEADLINE = 100.0


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [*HVLAUNCH, *map(str, arguments)]
    options = {"stdin": subprocess.DEVNULL, **options} if "input" not in options else options
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False, **options)  # type: ignore[call-overload,no-any-return]


def marked(mark: str) -> list[int]:
    """Processes of this machine that have the mark as a word of their command."""
    return [
        one.pid
        for one in psutil.process_iter(["cmdline"])
        if mark in (one.info["cmdline"] or []) and one.info["cmdline"][0] != sys.executable
    ]


@pytest.fixture
def mark(request: pytest.FixtureRequest) -> Iterator[str]:
    mark = f"mark-{os.getpid()}-{request.node.name}"
    yield mark
    wait_until(lambda: not marked(mark), "a worker was left behind")


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*HVLAUNCH, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_ports_are_those_that_a_firewall_lets_through() -> None:
    with closing(free_port((10_000, 19_000))) as reserved:  # neither an agent nor the kernel chooses there
        port = reserved.getsockname()[1]
        done = run("-np", 1, "--rendezvous-port", port, "true")
        assert done.returncode == 2
        assert done.stderr == (
            f"hvlaunch: the rendezvous can't listen on 127.0.0.1 port {port}: Address already in use; "
            "try: another port\n"
        )
    words = "$HVLAUNCH_RENDEZVOUS $MASTER_PORT $HVLAUNCH_WORKER_PORTS"
    ports = f"{port + 1}-{port + 20}"
    done = run("-np", 1, "--rendezvous-port", port, "--worker-port-range", ports, "sh", "-c", f"echo {words}")
    assert done.returncode == 0, done.stderr
    rendezvous, master_port, told = done.stdout.split()[1:]
    assert rendezvous == f"http://127.0.0.1:{port}"
    assert port < int(master_port) <= port + 20
    assert told == ports


def test_output_is_prefixed_and_kept_apart() -> None:
    done = run("--quiet", "-np", 2, "sh", "-c", "echo out $RANK; echo err $RANK >&2; printf unfinished")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [
        "[0]<stdout>: out 0",
        "[0]<stdout>: unfinished",
        "[1]<stdout>: out 1",
        "[1]<stdout>: unfinished",
    ]
    assert sorted(done.stderr.splitlines()) == ["[0]<stderr>: err 0", "[1]<stderr>: err 1"]


def test_a_silent_and_quiet_job_prints_nothing() -> None:
    done = run("--quiet", "-np", 2, "true")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("size", [1, 2, 11])
def test_output_files_are_raw_and_padded(tmp_path: Path, size: int) -> None:
    folder = tmp_path / "out"
    done = run("-np", size, "--output-filename", folder, "sh", "-c", "printf 'a\\rb\\n'; echo e$RANK >&2")
    assert done.returncode == 0
    width = len(str(size - 1))
    for rank in range(size):
        files = folder / "latest" / f"rank.{rank:0{width}}"
        assert (files / "stdout").read_bytes() == b"a\rb\n"
        assert (files / "stderr").read_bytes() == f"e{rank}\n".encode()


def test_a_directory_that_cannot_be_made_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("-np", 1, "--output-filename", tmp_path / "file", "touch", tmp_path / "started")
    assert done.returncode == 2
    assert str(tmp_path / "file") in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("0", {0: "hello", 1: ""}), ("all", {0: "hello", 1: "hello"}), ("none", {0: "", 1: ""})],
)
def test_stdin(policy: str, expected: dict[int, str]) -> None:
    done = run("-np", 2, "--stdin", policy, "sh", "-c", "echo got $(cat)", input="hello\n")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}]<stdout>: got {text}".rstrip() for rank, text in expected.items()
    ]


def test_much_stdin_arrives_whole() -> None:
    text = "".join(f"{number}\n" for number in range(500_000))
    done = run("-np", 2, "wc", "-c", input=text)
    assert done.returncode == 0
    assert f"[0]<stdout>: {len(text)}\n" in done.stdout


@pytest.mark.parametrize("closed", [(0,), (0, 1), (0, 1, 2)])
def test_closed_streams_are_empty_ones(closed: tuple[int, ...]) -> None:
    words = [f"{number}<&-" if number == 0 else f"{number}>&-" for number in closed]
    command = " ".join([sys.executable, "-m", "hvlaunch", "-np", "1", "sh", "-c", "'cat; exit 5'", *words])
    done = subprocess.run(["sh", "-c", command], timeout=DEADLINE, check=False, capture_output=True)
    assert done.returncode == 5


def test_a_worker_that_reads_no_stdin_ends_all_the_same() -> None:
    assert run("-np", 1, "true", input="x" * 1_000_000).returncode == 0


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -SEGV $$", 139), ("exit 255", 255)],
)
def test_the_exit_code_is_the_workers(script: str, code: int) -> None:
    assert run("-np", 2, "sh", "-c", f"[ $RANK = 1 ] && {{ {script}; }} || sleep 0").returncode == code


def test_a_failure_stops_the_rest_and_is_reported_last(mark: str) -> None:
    script = '[ $RANK = 2 ] || exec sleep 3600; echo "it broke" >&2; exit 3'
    done = run("--quiet", "-np", 3, "sh", "-c", script, mark)
    assert done.returncode == 3
    report = done.stderr.splitlines()
    assert report[0] == "[2]<stderr>: it broke"
    assert report[1].startswith("hvlaunch: rank 2 of 3 on host localhost failed first, after ")
    assert report[1].endswith("exit code 3")
    assert "    it broke" in report
    assert "    2 stopped by hvlaunch (SIGTERM): ranks 0-1" in report


def test_the_traceback_of_the_error_file_is_in_the_report() -> None:
    script = (
        "import json, os, sys; open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(json.dumps("
        "{'message': {'message': 'ValueError: no', 'extraInfo': {'py_callstack': 'Traceback: line 1', 'timestamp': '1'}}}"
        ")); sys.exit(4)"
    )
    done = run("-np", 1, sys.executable, "-c", script)
    assert done.returncode == 4
    assert "Traceback: line 1" in done.stderr


def test_signals_for_the_workers_reach_them_and_only_them(tmp_path: Path) -> None:
    script = "trap 'echo one' USR1; trap 'echo two; exit 0' USR2; echo ready; while :; do sleep 0.05; done"
    job = start("-np", 2, "sh", "-c", script)
    assert job.stdout is not None
    lines = [job.stdout.readline() for _ in range(2)]
    assert all("ready" in line for line in lines)
    job.send_signal(signal.SIGUSR1)
    assert sorted(job.stdout.readline() for _ in range(2)) == ["[0]<stdout>: one\n", "[1]<stdout>: one\n"]
    job.send_signal(signal.SIGUSR2)
    assert job.wait(DEADLINE) == 0
    assert sorted(job.stdout.read().splitlines()) == ["[0]<stdout>: two", "[1]<stdout>: two"]


LEAVES = 'sleep 777 & echo $! >> "$0"; setsid sleep 778 & echo $! >> "$0"; sleep 0.2'
IN_ANOTHER_NAMESPACE = """
import os, subprocess, sys
# The end of the namespace's first process, which this is, would end all others.
code = subprocess.call(sys.argv[2:])
for pid in map(int, open(sys.argv[1])):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        continue
    print("left", pid)
sys.exit(code)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="a new PID namespace takes root")
def test_job_with_the_proc_of_another_pid_namespace_leaves_nothing(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    inside = [sys.executable, "-c", IN_ANOTHER_NAMESPACE, pids, *HVLAUNCH, "-np", 2, "sh", "-c", LEAVES, pids]
    job = subprocess.run(
        ["unshare", "--pid", "--fork", *map(str, inside)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    if job.stderr.startswith("unshare:"):
        pytest.skip(job.stderr)
    assert (job.returncode, job.stdout) == (0, "")
    assert len(pids.read_text().split()) == 4
    assert job.stderr.count("/proc shows another PID namespace") == 1


STOPS_ITSELF = """
import os, signal, sys, time
if os.environ["HVLAUNCH_RANK"] == "1" and not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    os.kill(os.getpid(), signal.SIGSTOP)
while os.environ["HVLAUNCH_ROUND"] == "0":
    time.sleep(0.05)
"""


def test_elastic_job_continues_soon_after_a_worker_is_stopped(tmp_path: Path) -> None:
    # This time is for silence without a known reason.
    options = "-np", 2, "--min-np", 1, "--worker-timeout", 10 * DEADLINE
    job = run(*options, sys.executable, "-c", STOPS_ITSELF, tmp_path / "stopped")
    assert "round 0 ends: rank 1 on host localhost is stopped\n" in job.stderr
    assert job.returncode == 0


def test_ctrl_c_lets_workers_finish_what_they_do() -> None:
    script = "import time\ntry:\n print('ready', flush=True); time.sleep(3600)\nexcept KeyboardInterrupt:\n print('saved', flush=True)"
    job = start("-np", 2, sys.executable, "-c", script)
    assert job.stdout is not None
    assert all("ready" in job.stdout.readline() for _ in range(2))
    job.send_signal(signal.SIGINT)
    out, err = job.communicate(timeout=DEADLINE)
    assert job.returncode == 130
    assert out.count("saved") == 2
    assert "interrupted by SIGINT" in err


def test_a_killed_driver_leaves_nothing(mark: str) -> None:
    job = start("-np", 2, "sh", "-c", "echo ready; exec sleep 3600", mark)
    assert job.stdout is not None
    assert all("ready" in job.stdout.readline() for _ in range(2))
    job.kill()
    job.wait(DEADLINE)


def test_a_reader_that_goes_ends_the_job(mark: str) -> None:
    job = start("-np", 2, "sh", "-c", "while echo line; do :; done", mark)
    assert job.stdout is not None
    job.stdout.readline()
    job.stdout.close()
    assert job.wait(DEADLINE) == 128 + signal.SIGPIPE


def test_a_reader_that_is_slow_slows_the_workers_down_and_loses_nothing() -> None:
    count = 400_000
    job = start("-np", 2, "seq", count)
    assert job.stdout is not None
    seen = {0: 0, 1: 0}
    for number, line in enumerate(job.stdout):
        rank, value = int(line[1]), int(line.partition(": ")[2])
        assert value == seen[rank] + 1
        seen[rank] = value
        if number == 1000:
            os.kill(job.pid, 0)
    assert job.wait(DEADLINE) == 0
    assert seen == {0: count, 1: count}


def test_signals_that_come_while_the_end_is_told_change_nothing_of_it(tmp_path: Path) -> None:
    """Nobody reads stdout for a while, so that the end takes a while."""
    events = tmp_path / "events"
    job = start("--grace", 30, "--events", events, "-np", 1, "sh", "-c", "yes | head -c 1000000; exit 5")
    wait_until(lambda: events.exists() and "job_ended" in events.read_text(), "the job ends")
    for _ in range(20):
        job.terminate()
        time.sleep(0.02)
    _, stderr = job.communicate()
    assert job.returncode == 5
    assert "rank 0 of 1 on host localhost failed" in stderr


def test_hup_stays_ignored_under_nohup() -> None:
    job = subprocess.Popen(
        ["nohup", *HVLAUNCH, "-np", "1", "sh", "-c", "echo ready; read line; echo $line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    assert job.stdin is not None
    while "ready" not in (line := job.stdout.readline()):
        assert line
    job.send_signal(signal.SIGHUP)
    out, _ = job.communicate("went on\n", timeout=DEADLINE)
    assert job.returncode == 0
    assert "went on" in out


def test_workers_do_not_take_over_the_drivers_place_in_a_job_around_it() -> None:
    """As in a batch script of Slurm, where SLURM_PROCID is 0 for all that it starts on its node."""
    around = {"SLURM_PROCID": "0", "PMI_RANK": "0", "HVLAUNCH_ELASTIC": "1", "SLURM_JOB_NAME": "train"}
    script = 'echo "$RANK:$SLURM_PROCID:$PMI_RANK:$HVLAUNCH_ELASTIC:$SLURM_JOB_NAME"'
    done = run("-np", 2, "--prefix", "", "sh", "-c", script, env={**os.environ, **around})
    assert sorted(done.stdout.split()) == ["0::::train", "1::::train"]


def test_a_job_that_ends_with_a_rank_stops_the_others(mark: str) -> None:
    script = f'[ $RANK = 0 ] && exit; exec sh -c "sleep 1000; :" {mark}'
    done = run("-np", 3, "--end-with-rank", 0, "sh", "-c", script)
    assert done.returncode == 0
    assert "the job ends: rank 0 on host localhost is done (--end-with-rank)" in done.stderr


def test_a_local_job_loads_only_what_it_needs() -> None:
    script = (
        "import sys; from hvlaunch.cli.main import main; code = main(['-np', '2', 'true']);"
        "print(code, sorted({'paramiko', 'rich', 'torch', 'ClusterShell', 'psutil', 'rich_argparse'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE, check=True
    )
    assert done.stdout == "0 []\n"


def test_no_rank_port_is_used_twice() -> None:
    """Two jobs at once on one machine get different ports for rank 0's store."""
    jobs = [start("-np", 1, "sh", "-c", "echo $MASTER_PORT; sleep 0.2") for _ in range(3)]
    ports = {job.communicate(timeout=DEADLINE)[0] for job in jobs}
    assert len(ports) == 3


def test_a_journal_replays_in_another_process_and_opens_nothing(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    script = "echo $HVLAUNCH_TOKEN ${HVLAUNCH_JOURNAL-unset}; exit 3"
    options = ("-np", 2, "-x", "SECRET=of-the-user", "--prefix", "")
    environ = {**os.environ, "HVLAUNCH_JOURNAL": str(journal)}
    done = run(*options, "sh", "-c", script, env=environ)
    assert done.returncode == 3
    token, name = done.stdout.split()[:2]
    assert len(token) == 64
    assert name == "unset"
    text = journal.read_text()
    assert token not in text
    assert "SECRET" in text
    assert journal.stat().st_mode & 0o777 == 0o600
    engine = replay(entries(journal))
    assert engine.phase is Phase.DONE
    again = run("-np", 1, "true", env=environ)
    assert (again.returncode, again.stderr) == (2, f"hvlaunch: journal {journal}: file exists\n")


def test_an_agent_of_this_machine_that_another_python_runs_has_all_its_modules(tmp_path: Path) -> None:
    hosts, script = tmp_path / "hosts", tmp_path / "script"
    hosts.write_text(f"localhost slots=1 python={sys.executable}\n")
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = run("--hostfile", hosts, script)
    assert done.returncode == 127, done.stderr
    assert "(first line) was not found" in done.stderr


@pytest.mark.parametrize("options", [(), ("--verbose",)])
def test_tracebacks_after_ctrl_c_are_counted_and_not_shown(options: tuple[str, ...], tmp_path: Path) -> None:
    script = "import time; print('ready', flush=True); time.sleep(1000)"
    job = start(*options, "-np", 2, "--output-filename", tmp_path, sys.executable, "-c", script)
    assert job.stdout is not None
    assert [job.stdout.readline().partition(">: ")[2] for _ in range(2)] == ["ready\n"] * 2
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=DEADLINE)
    assert job.returncode == 130
    is_shown = bool(options)
    assert err.count("KeyboardInterrupt") == (2 if is_shown else 0)
    assert ("hvlaunch: 2 tracebacks after Ctrl-C not shown; --verbose shows them\n" in err) is not is_shown
    # Files have all output.
    assert all(
        "KeyboardInterrupt" in path.read_text() for path in (tmp_path / "latest").glob("rank.*/stderr")
    )


SERVE = """
import socket, sys
number = int(sys.argv[1])
listener = socket.create_server(("", number))  # with SO_REUSEADDR, as servers do
print(*sys.argv[1:])
"""


def test_places_in_the_command_name_hosts_and_free_ports() -> None:
    job = run(
        *("--templates", "--per-host", "-H", "localhost:4,127.0.0.1:4", "--quiet", "--prefix", "{rank}: "),
        *(sys.executable, "-c", SERVE, "{own_port:x}", "{port:x}", "{node_rank}/{nnodes}", "{slots:auto}"),
        *("{hosts}", "{first:--head --ip={host_ip}}", "{others:--join {master_addr}}", "${rank}"),
    )
    assert job.returncode == 0, job.stderr
    lines = dict(line.split(": ", 1) for line in job.stdout.splitlines())
    (own, common, *first), (other, same, *second) = (lines[rank].split() for rank in ("0", "1"))
    assert own == common == same != other
    assert first[:4] == ["0/2", "4", "localhost,127.0.0.1", "--head"]
    assert first[5:] == second[5:] == ["${rank}"]
    assert second[:4] == ["1/2", "4", "localhost,127.0.0.1", "--join"]
    assert first[4] == f"--ip={second[4]}"


def test_each_round_gets_other_ports(tmp_path: Path) -> None:
    fails_once = f"echo $1 $2; mkdir {tmp_path}/again && exit 3; exit 0"
    job = run(
        *("--templates", "-np", 1, "--max-restarts", 1, "--quiet", "--prefix", ""),
        *("sh", "-c", fails_once, "sh", "{port:x}", "{master_port}"),
    )
    assert job.returncode == 0, job.stderr
    ports = [port for line in job.stdout.splitlines() for port in line.split()]
    assert len(set(ports)) == len(ports) == 4


def test_without_templates_braces_stay() -> None:
    assert run("-np", 1, "--quiet", "--prefix", "", "echo", "{rank}", "{rnk}").stdout == "{rank} {rnk}\n"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it needs two processors")
def test_bound_workers_have_processors_of_their_own_within_the_cpuset() -> None:
    script = "import os; print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
    done = run("-np", 2, "--bind", "core", sys.executable, "-c", script)
    masks = sorted(line.partition(": ")[2] for line in done.stdout.splitlines())
    assert len(set(masks)) == 2, done
    # A cpuset with a single processor: the workers share it, and no error reaches the user.
    last = max(os.sched_getaffinity(0))
    words = ["-np", "2", "--bind", "core", sys.executable, "-c", script]
    command = ["taskset", "-c", str(last), *HVLAUNCH, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True)
    assert {line.partition(": ")[2] for line in done.stdout.splitlines()} == {f"[{last}] 1"}
    assert "Invalid argument" not in done.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it needs two processors")
def test_a_replaced_worker_has_the_processors_of_its_slot(tmp_path: Path) -> None:
    # Rank 1 fails once; rank 0 waits for the round that follows.
    script = f"""
import os, sys, time
print("mask", os.environ["HVLAUNCH_WORKER"], sorted(os.sched_getaffinity(0)), flush=True)
if os.environ["HVLAUNCH_ROUND"] == "0":
    if os.environ["RANK"] == "1":
        while not os.path.exists({str(tmp_path / "there")!r}):
            time.sleep(0.01)
        sys.exit(1)
    open({str(tmp_path / "there")!r}, "w")
    time.sleep(600)
"""
    job = run("-np", 2, "--max-restarts", 1, "--grace", 1, "--bind", "core", sys.executable, "-c", script)
    assert job.returncode == 0, job.stderr
    seen = dict(line.partition("mask ")[2].split(" ", 1) for line in job.stdout.splitlines())
    masks = [{seen[f"localhost/{slot}/{start}"] for start in (0, 1)} for slot in (0, 1)]
    # The same processors for both workers of a slot, and others for the other slot.
    assert [len(mask) for mask in masks] == [1, 1], seen
    assert masks[0] != masks[1]


def test_workers_see_gpus_by_slot_within_the_hosts_own_choice() -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "6,4,2,0"}
    script = 'echo "$CUDA_VISIBLE_DEVICES $LOCAL_RANK $HVLAUNCH_LOCAL_RANK"'
    done = run("-np", 2, "--gpus-per-worker", 2, "sh", "-c", script, env=env)
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>: 6,4 0 0", "[1]<stdout>: 2,0 0 1"]
    done = run("-np", 3, "--gpus-per-worker", 2, "sh", "-c", script, env=env)
    assert done.returncode == 126
    assert "--gpus-per-worker 2: slot 2 is to have GPU 4-5; visible GPUs: 4" in done.stderr


TAKE_PORT = "import socket, sys; socket.socket().bind(('', int(sys.argv[1].rpartition(':')[2])))"


def test_a_port_of_a_role_stays_taken_when_the_next_role_starts() -> None:
    """Programs other than the role's own, which reuses the address as servers do."""
    taker = shlex.join([sys.executable, "-c", TAKE_PORT])
    done = run("--role", "a=1: sleep 60 {own_port:x}", "--role", f"b=1: {taker} {{role:a:0:x}}")
    assert done.returncode == 1
    assert "b:0 (rank 1 of 2) on host localhost failed first" in done.stderr
    assert "Address already in use" in done.stderr


FAILS_ONCE = """
import os, pathlib, sys, time
record = pathlib.Path("waiting")
def waiting(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\\n"
    except OSError:
        return False
if os.environ["HVLAUNCH_ROUND"] == "0":
    children = f"/proc/{os.getppid()}/task/{os.getppid()}/children"
    while len(pids := [pid for pid in open(children).read().split() if waiting(pid)]) < 2:
        time.sleep(0.01)
    if os.environ["HVLAUNCH_RANK"] == "1":
        record.write_text(" ".join(pids))
        os.kill(os.getpid(), 9)
    time.sleep(100)
print(str(os.getpid()) in record.read_text().split(), "json" in sys.modules, sys.argv[1:])
"""


def test_preloaded_workers_replace_failed_ones(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS_ONCE)
    words = "-np", 2, "-H", "localhost:2", "--min-np", 2, "--preload", "json", sys.executable, "train.py", 1
    done = run(*words, cwd=tmp_path)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (
        0,
        [f"[{rank}]<stdout>: True True ['1']" for rank in range(2)],
    ), done.stderr


def test_preload_that_fails_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    words = "-np", 2, "-H", "localhost:2", "--min-np", 2, "--preload", "no_such", sys.executable, "train.py"
    done = run(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout.count("1\n")) == (0, 2)
    cause = "ModuleNotFoundError: No module named 'no_such'"
    assert [line for line in done.stderr.splitlines() if "preload" in line] == [
        f"hvlaunch: host localhost: --preload has no effect from now on, and workers start as usual: {cause}"
    ]
