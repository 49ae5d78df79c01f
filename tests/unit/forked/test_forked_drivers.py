"""Drivers that a fork server forks are as those that were started: of command lines, and of functions."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hvlaunch.outside.forked import GO, READY, REFUSED, SOCKET
from tests.unit.forked.place import (
    DEADLINE,
    HVLAUNCH,
    OTHER_SETTING,
    PARENTS,
    ROOT,
    Place,
    new_place,
    wait_until,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no fork server")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with new_place() as one:
        yield one


SAME = {
    "output": f"{HVLAUNCH} --pool p -np 2 sh -c 'echo out $RANK; echo err $RANK >&2' 2>&1 | sort",
    "stderr": f"{HVLAUNCH} --pool p -np 1 sh -c 'echo err >&2' 2>&1 >/dev/null",
    "exit code": f"{HVLAUNCH} --pool=p -np 1 sh -c 'exit 3'",
    "a signal": f"{HVLAUNCH} -np 1 --pool p sh -c 'kill -9 $$'",
    "by the environment": f"HVLAUNCH_POOL=p {HVLAUNCH} -np 1 echo hello",
    "bad usage": f"{HVLAUNCH} --pool p -np 0 true",
    "an unknown option": f"{HVLAUNCH} --pool p --nonsense true",
    "no command": f"{HVLAUNCH} --pool p",
    "no such host": f"{HVLAUNCH} --pool p -H nowhere true",
    "not a job": f"{HVLAUNCH} --pool p --version",
    "a plan": f"{HVLAUNCH} --pool p --dry-run true | grep -v -i uuid",
    "a word": f"HVLAUNCH_POOL=p {sys.executable} -m hvlaunch pool status | grep -c hosts",
    "another directory": f"cd /usr/lib && PYTHONPATH={ROOT} {HVLAUNCH} --pool p -np 1 pwd",
    "a variable": f"HVLAUNCH_MARK=of-a-job FOO='a b' {HVLAUNCH} --pool p -np 1 sh -c 'echo $FOO'",
    "stdin": f"printf 'a\\nb' | {HVLAUNCH} --pool p -np 1 cat",
    "stdin that is closed": f"{HVLAUNCH} --pool p -np 1 cat <&-",
    "stdout that is closed": f"{HVLAUNCH} --pool p -np 1 echo hello >&-",
    "stderr that is closed": f"{HVLAUNCH} --pool p -np 1 sh -c 'echo hello >&2' 2>&-",
    "stdout that is full": f"{HVLAUNCH} --pool p -np 1 echo hello >/dev/full",
    "a reader that goes": f"{HVLAUNCH} --pool p -np 1 yes | head -c 2",
    "few descriptors": f"ulimit -S -n 20; {HVLAUNCH} --pool p true",
    "a limit": f"ulimit -S -c 0; ulimit -S -s 1024; {HVLAUNCH} --pool p -np 1 sh -c 'ulimit -S -c; ulimit -S -s'",
    "a umask": f"umask 027; d=$(mktemp -d); {HVLAUNCH} --pool p -np 1 --output-filename $d/o echo hi; stat -c %a $d/o; umask",
    "no encoding": f"LC_ALL=C {HVLAUNCH} --pool p -np 1 --nonsens\xe9 true",
    "odd words": f"{HVLAUNCH} --pool p -np 1 printf '%s|' '' 'a\nb' \"$(printf '\\377')\" é | od -c",
    "a processor": f"taskset -c 0 {HVLAUNCH} --pool p -np 1 taskset -pc 0 | cut -d: -f2; true",
    "an exported function": "f() { echo hi; }; export -f f 2>/dev/null; " + f"{HVLAUNCH} --pool p -np 1 true",
}


@pytest.mark.parametrize("script", SAME.values(), ids=SAME)
def test_it_is_as_one_that_was_started(place: Place, script: str) -> None:
    forked, started = place.run(script), place.run(script, OTHER_SETTING)

    def said(text: str) -> str:
        return re.sub(r"/tmp/tmp\.\w+|\d+\.\d+ ?s|job [0-9a-f]{12}|\d+ ms|127.0.0.1:\d+", "", text)

    assert [forked.returncode, said(forked.stdout), said(forked.stderr)] == [
        started.returncode,
        said(started.stdout),
        said(started.stderr),
    ]


def test_what_can_not_be_had_by_a_fork_is_started(place: Place) -> None:
    script = f"{HVLAUNCH} --pool p -np 1 {PARENTS}"
    assert "hvl-driver" in place.run(script).stdout
    assert "hvl-driver" not in place.run(script, OTHER_SETTING).stdout
    for other in ("ulimit -n 500", "export LC_ALL=C", "export OPENSSL_CONF=/dev/null"):
        assert "hvl-driver" not in place.run(f"{other}; {script}").stdout, other
    assert "hvl-driver" not in place.run(script.replace(" -m", " -O -m")).stdout
    assert "hvl-driver" not in place.run(f"nice -n 3 {script}").stdout


TRAP = "trap 'echo got USR1' USR1; trap 'echo got TERM; exit 4' TERM; trap 'echo got INT; exit 5' INT; echo ready; while :; do sleep 0.05; done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
@pytest.mark.parametrize("is_forked", [True, False], ids=["forked", "started"])
def test_signals_reach_it(place: Place, number: signal.Signals, is_forked: bool) -> None:
    job = place.popen(f'exec {HVLAUNCH} --pool p -np 1 sh -c "{TRAP}"', None if is_forked else OTHER_SETTING)
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    assert bool(place.drivers()) is is_forked
    job.send_signal(signal.SIGUSR1)
    assert job.stdout.readline() == "got USR1\n"
    job.send_signal(number)
    if number == signal.SIGQUIT:  # asks for stacks
        assert job.stderr is not None
        assert "hvlaunch: " in job.stderr.readline()
        job.send_signal(signal.SIGTERM)
    stdout, _ = job.communicate(timeout=DEADLINE)
    expected = {signal.SIGINT: ("got INT\n", 130)}.get(number, ("got TERM\n", 128 + signal.SIGTERM))
    if number == signal.SIGHUP:
        expected = ("got TERM\n", 128 + signal.SIGHUP)
    assert (stdout, job.returncode) == expected
    wait_until(lambda: not place.drivers(), "the driver has ended")


def test_ignored_signals_stay_ignored(place: Place) -> None:
    job = place.popen(
        f"trap '' HUP INT; exec {HVLAUNCH} --pool p -np 1 sh -c 'echo ready; sleep 1; echo done'"
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGHUP)
    job.send_signal(signal.SIGINT)
    stdout, stderr = job.communicate(timeout=DEADLINE)
    assert (stdout, job.returncode) == ("done\n", 0), stderr


def running(place: Place, mark: str, env: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    """A job whose worker runs until it is stopped."""
    job = place.popen(f"exec {HVLAUNCH} --pool p -np 1 sh -c 'echo ready; exec sleep {mark}'", env)
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    return job


def sleepers(mark: str) -> list[int]:
    return [one.pid for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", mark]]


def test_who_has_asked_is_killed(place: Place) -> None:
    job = running(place, "86401")
    [driver] = place.drivers()
    job.kill()
    job.communicate(timeout=DEADLINE)
    wait_until(lambda: not driver.is_running(), "the driver has ended too")
    wait_until(lambda: not sleepers("86401"), "and its worker")


def test_the_driver_is_killed(place: Place) -> None:
    job = running(place, "86402")
    [driver] = place.drivers()
    driver.kill()
    job.communicate(timeout=DEADLINE)
    assert job.returncode == -signal.SIGKILL
    wait_until(lambda: not sleepers("86402"), "the worker has ended")


def test_the_fork_server_is_killed_and_the_next_job_starts_as_ever(place: Place) -> None:
    job = running(place, "86403")
    place.server.kill()
    job.communicate(timeout=DEADLINE)
    assert job.returncode == -signal.SIGKILL
    wait_until(lambda: not sleepers("86403"), "the worker has ended")
    after = place.run(f"{HVLAUNCH} --pool p -np 1 {PARENTS}")
    assert after.returncode == 0
    assert "hvl-driver" not in after.stdout
    place.forks.close()
    place.forks = place.begin()


def test_the_fork_server_does_not_answer_and_no_job_runs_twice(place: Place, tmp_path: Path) -> None:
    place.server.suspend()
    try:
        job = place.run(f"{HVLAUNCH} --pool p -np 1 sh -c 'echo ran >> {tmp_path}/file'")
        assert job.returncode == 0, job.stderr
    finally:
        place.server.resume()
    wait_until(place.is_forked, "the server goes on")
    assert (tmp_path / "file").read_text() == "ran\n"


def test_the_pool_ends_while_a_driver_runs(place: Place) -> None:
    job = running(place, "86404")
    [driver], server = place.drivers(), place.server
    place.forks.close()
    assert driver.is_running()
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=DEADLINE)
    assert job.returncode == 128 + signal.SIGTERM
    wait_until(
        lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "the server has ended"
    )
    place.forks = place.begin()


def test_somebody_ends_all_processes(place: Place) -> None:
    """As systemd does: the driver has the time that it takes to stop its job."""
    job, server = running(place, "86405"), place.server
    for each in (server, *place.drivers()):
        each.terminate()
    _, stderr = job.communicate(timeout=DEADLINE)
    assert job.returncode == 128 + signal.SIGTERM, stderr
    wait_until(
        lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "the server has ended"
    )
    place.forks.close()
    place.forks = place.begin()


def test_the_spare_is_killed(place: Place) -> None:
    def spares() -> list[psutil.Process]:
        return [each for each in place.server.children() if each.name() == "hvl-spare"]

    wait_until(spares, "there is one while no job runs")
    for number in (signal.SIGTERM, signal.SIGKILL):
        for each in spares():
            each.send_signal(number)
        wait_until(lambda: not spares(), "it has ended")
        assert place.is_forked()
        wait_until(spares, "there is one after the job")


def test_jobs_at_once(place: Place) -> None:
    jobs = [running(place, "86408") for _ in range(4)]
    assert len(place.drivers()) == 4
    for job in jobs:
        job.terminate()
    assert {job.communicate(timeout=DEADLINE)[0] for job in jobs} == {""}
    assert [job.returncode for job in jobs] == [128 + signal.SIGTERM] * 4
    wait_until(lambda: not sleepers("86408"), "all have ended")


def test_what_is_loaded_beforehand_is_all_that_a_driver_loads(place: Place) -> None:
    """But what is for hosts that are this machine, and what is small."""
    ran = place.run(f"{sys.executable} -X importtime -m hvlaunch --pool p true")
    imported = {line.rsplit("|", 1)[-1].strip() for line in ran.stderr.splitlines() if "import time:" in line}
    assert "hvlaunch.driver.loop" in imported
    code = "import sys; from hvlaunch.forked.server import preload; preload(); print(*sys.modules)"
    loaded = place.run(f"{sys.executable} -c '{code}'").stdout.split()
    missing = {name for name in imported - {*loaded} if name.startswith("hvlaunch")}
    assert missing <= {
        "hvlaunch.cli.by_fork",
        "hvlaunch.hosts.outer_job",
        "hvlaunch.hosts.own_variables",
        "hvlaunch.ssh.pipes",
    }


def link(place: Place) -> socket.socket:
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(DEADLINE)
    one.connect(str(place.directory.path / SOCKET))
    return one


STRANGE = {
    "nothing": b"",
    "half a head": b"\0\0",
    "a length without more": b"\0\0\1\0",
    "too long": b"\x7f\xff\xff\xff" + b"x" * 1000,
    "no counts": b"\0\0\0\4abcd",
    "counts of more than there is": b"\0\0\0\7\x39\x39,9\0a\0",
    "negative counts": b"\0\0\0\4-1\0a",
    "more than the request": b"\0\0\0\1a" + bytes([GO]),
    "signals at once": bytes([0, 0, 0, 1, 65, GO, signal.SIGKILL, signal.SIGTERM]),
}


@pytest.mark.parametrize("data", STRANGE.values(), ids=STRANGE)
@pytest.mark.parametrize("descriptors", [0, 1, 5, 20])
def test_what_is_no_request_is_refused(place: Place, data: bytes, descriptors: int) -> None:
    before = place.server.num_fds()
    with link(place) as one, Path(os.devnull).open() as null:
        if data:
            socket.send_fds(one, [data], [null.fileno()] * descriptors)
        one.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):  # it has hung up, with something unread
            assert one.recv(100)[:1] in (b"", bytes([REFUSED]))
            assert one.recv(100) == b""
    wait_until(lambda: place.server.num_fds() == before, "its descriptors are closed")
    assert not place.drivers()


def test_who_never_goes_on_is_in_nobodys_way(place: Place) -> None:
    with link(place) as silent, link(place) as slow:
        slow.sendall(b"\0\0\1\0half a re")
        assert place.is_forked()
        assert silent.recv(1) == b""
        assert slow.recv(1) == b""


def test_who_was_answered_and_goes_has_begun_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from hvlaunch.outside import forked

    for name in [name for name in os.environ if name.startswith("HVLAUNCH")]:
        monkeypatch.delenv(name)
    said: list[int] = []

    def receive(one: socket.socket) -> tuple[int, int]:
        data = one.recv(forked.ANSWER_SIZE)
        said.append(data[0])
        return REFUSED, 0

    monkeypatch.setattr(forked, "_receive", receive)
    with Path(os.devnull).open("r+b") as null:
        streams = [null.fileno()] * 4
        assert (
            forked.begin_driver(str(place.directory.path), "function", streams, argv=["x"], environ={})
            is None
        )
    assert said == [READY]
    assert not place.drivers()


def test_secrets_of_the_command_line_are_hidden(place: Place) -> None:
    job = place.popen(
        f"exec {HVLAUNCH} --pool p -np 1 -x KEY=secret -xWORD=hidden sh -c 'echo ready; exec sleep 86406'"
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    wait_until(lambda: "secret" not in " ".join(psutil.Process(job.pid).cmdline()), "it is hidden")
    assert [word for word in psutil.Process(job.pid).cmdline() if "KEY" in word or "WORD" in word] == [
        "KEY=******",
        "-xWORD=******",
    ]
    job.terminate()
    job.communicate(timeout=DEADLINE)


def test_a_job_that_leaves_at_its_start(place: Place) -> None:
    job = place.run(f"{HVLAUNCH} --pool p -np 1 --detach sleep 86407")
    assert re.fullmatch(r"[0-9a-f]{12}\n", job.stdout), job.stderr
    wait_until(lambda: not place.drivers(), "who has told its id is gone")
    wait_until(lambda: sleepers("86407"), "it runs")
    server = place.server
    server.kill()
    place.forks.close()
    assert "running" in place.run(f"{sys.executable} -m hvlaunch jobs").stdout
    assert place.run(f"{sys.executable} -m hvlaunch stop {job.stdout.strip()}").returncode == 0
    wait_until(lambda: not sleepers("86407"), "it has ended")
    place.forks = place.begin()


CALLS = """
import os, psutil, hvlaunch, sys, time
launcher = hvlaunch.Launcher(pool="p", np=1, quiet=True)
def parents():
    import psutil
    return [each.name() for each in psutil.Process().parents()]
print(*launcher.run(parents)[0])
here = psutil.Process()
before = here.num_fds(), here.num_threads()
for index in range(int(sys.argv[1])):
    assert launcher.run(lambda: index) == [index]
deadline = time.monotonic() + 30
while (here.num_fds(), here.num_threads()) != before and time.monotonic() < deadline:
    time.sleep(0.01)  # a thread that has done its work may still be ending
print((here.num_fds(), here.num_threads()) == before, len(here.children()))
"""


def test_functions_run_and_leave_nothing(place: Place, tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(CALLS)
    done = place.run(f"PYTHONPATH={ROOT} {sys.executable} {tmp_path}/calls.py 20")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "hvl-driver" in first
    assert second == "True 0"
    wait_until(lambda: not place.drivers(), "no driver is left")


WAITS = """
import os, sys, threading, time, hvlaunch
def wait():
    import time
    print("ready", flush=True)
    time.sleep(86400)
job = hvlaunch.Launcher(pool="p", np=1).start(wait, show=True)
if sys.argv[1] == "stop":
    sys.stdin.readline()
    job.stop()
    try:
        job.wait()
    except hvlaunch.JobStopped as error:
        print("stopped by", error.signal if hasattr(error, "signal") else error)
    else:
        print("waited")
elif sys.argv[1] == "child":
    if os.fork() == 0:
        time.sleep(86400)
    time.sleep(86400)
else:
    time.sleep(86400)
"""


@pytest.mark.parametrize("how", ["alone", "child"])
def test_a_caller_that_is_killed_leaves_no_job(place: Place, tmp_path: Path, how: str) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    caller = place.popen(f"PYTHONPATH={ROOT} exec {sys.executable} {tmp_path}/waits.py {how}")
    assert caller.stdout is not None
    assert "ready" in caller.stdout.readline()
    assert place.drivers()
    others = psutil.Process(caller.pid).children()
    caller.kill()
    wait_until(lambda: not place.drivers(), "the job has ended")
    for each in others:
        each.kill()
    caller.communicate(timeout=DEADLINE)
