"""What a hostile hostfile, discovery script, DNS answer or environment could do to the driver."""

import resource
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from hvlaunch.errors import BadHost, BadUsage, ConnectFailed, DiscoveryFailed, HvlaunchError
from hvlaunch.gloo import controller as ways
from hvlaunch.gloo.controller import run
from hvlaunch.hosts import local
from hvlaunch.hosts.discovery import HostScript
from hvlaunch.hosts.local import Address, is_here_by_dns, is_local
from hvlaunch.hosts.parse import allocation, parse_hostfile, parse_hosts, read_hostfile
from hvlaunch.job import ElasticOptions, Host, JobSpec
from hvlaunch.ssh import Connection

LIMIT = 60.0
OURS: Address = (socket.AF_INET, ("127.0.0.1", 0))


def script(tmp_path: Path, text: str) -> HostScript:
    path = tmp_path / "find"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return HostScript(str(path), LIMIT)


@pytest.mark.parametrize("name", ["gpu01", "gpu01.example.org", "login"])
def test_dns_does_not_make_a_host_this_machine(name: str) -> None:
    """Whoever answers for DNS would choose that workers run here, and no host key would be asked for."""
    assert not is_local(Host(name), resolve=lambda _: [OURS])


def test_a_host_that_is_this_machine_by_dns_alone_gets_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "is_here_by_dns", partial(is_here_by_dns, resolve=lambda _: [OURS]))

    def refuse(host: Host, _timeout: float | None = None) -> Connection:
        raise ConnectFailed("refused", host=host.name, hint="start sshd")

    hint = (
        "if gpu01 is this machine, as DNS says: write localhost, or put gpu01 in /etc/hosts; else start sshd"
    )
    for host, words in ((Host("gpu01"), hint), (Host("gpu01", port=2222), "start sshd")):
        with pytest.raises(ConnectFailed) as caught:
            ways._connect(JobSpec(hosts=(host,), command=("true",), cwd="/"), refuse, host)
        assert str(caught.value) == f"host gpu01: refused; try: {words}"


def test_names_of_this_machines_own_need_no_ssh() -> None:
    hostname = socket.gethostname()
    for name in (hostname, f"{hostname.partition('.')[0]}", "127.0.0.1", "::1"):
        assert is_local(Host(name), resolve=lambda _: [OURS])


def test_hosts_of_etc_hosts_need_no_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts").write_text("127.0.1.1 Alias other # last\n192.0.2.1 far\nbad line\n")
    monkeypatch.setattr(local, "_HOSTS_FILE", tmp_path / "hosts")
    local._hosts_file.cache_clear()
    try:
        found = [
            name
            for name in ("alias", "other", "last", "far", "line")
            if is_local(Host(name), resolve=lambda _: [OURS])
        ]
    finally:
        local._hosts_file.cache_clear()
    assert found == ["alias", "other"]


@pytest.mark.parametrize("word", ["python=/tmp/evil", "identity=/dev/zero"])
def test_a_discovery_script_names_no_file_of_this_machine(tmp_path: Path, word: str) -> None:
    with pytest.raises(
        BadHost, match="is allowed only in a hostfile that you named and that only you can change"
    ):
        script(tmp_path, f"echo localhost:4 {word}").read_hosts()


def test_a_program_that_comes_into_the_hostfile_later_does_not_run_here(tmp_path: Path) -> None:
    """The hostfile is read again while the job runs, and has then what it had not when the user started it."""
    evil = tmp_path / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    evil.chmod(0o755)
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"localhost slots=1 python={evil}\n")
    spec = JobSpec(
        command=("true",),
        hosts=(Host("localhost", 1),),
        cwd="/",
        start_timeout=10.0,
        elastic=ElasticOptions(min_np=1, hostfile=hostfile, elastic_timeout=2.0),
    )
    with (tmp_path / "out").open("wb") as out, Path("/dev/null").open() as nothing:
        result = run(spec, stdout=out, stderr=out, stdin=nothing.fileno())
    assert result.exit_code != 0
    assert not (tmp_path / "ran").exists()
    assert b"may not name a program of this machine" in (tmp_path / "out").read_bytes()


BOMBS = {
    "many ranges": "gpu[1-65535]\n" + "".join(f"n{number}-[1-65535]\n" for number in range(1000)),
    "a range of a billion": "gpu[1-1000000000]\n",
    "a product of ranges": "gpu[1-60000]-[1-60000]\n",
    "a million lines": "".join(f"n{number}\n" for number in range(1_000_000)),
    "a million mentions": "a slots=65535\n" * 200_000,
    "a line without an end": "a " * 4_000_000,
    "digits without an end": f"gpu[1-{'9' * 3_000_000}]\n",
}


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))


@pytest.mark.parametrize("name", BOMBS)
def test_a_hostfile_that_would_take_the_memory_or_minutes(tmp_path: Path, name: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(BOMBS[name])
    before = time.process_time()
    done = subprocess.run(
        [sys.executable, "-m", "hvlaunch", "--dry-run", "--hostfile", path, "true"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        preexec_fn=limit_memory,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < 1000
    assert time.process_time() - before < LIMIT


def test_hosts_of_the_command_line_have_the_same_limits() -> None:
    with pytest.raises(BadHost, match="more than 65535 hosts"):
        parse_hosts(",".join(f"n{number}-[1-60000]" for number in range(100)))


def test_slots_of_all_hosts_together_have_a_limit() -> None:
    with pytest.raises(BadHost, match="more than 1048576 slots"):
        parse_hostfile("".join(f"n{number} slots=65535\n" for number in range(17)), "f")


def test_a_device_is_no_hostfile_without_an_end(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="longer than 4 MiB"):
        read_hostfile(Path("/dev/zero"))


@pytest.mark.parametrize("stream", ["", ">&2"])
def test_a_script_that_prints_without_an_end(tmp_path: Path, stream: str) -> None:
    """All of it would be kept; only what is needed is."""
    flooding = script(tmp_path, f"head -c 300000000 /dev/zero {stream}; exit 3")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        DiscoveryFailed, match="ended with status 3" if stream else "printed more than 256 KiB"
    ):
        flooding.read_hosts()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_a_script_can_not_speak_as_hvlaunch(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryFailed) as raised:
        script(tmp_path, "printf 'oops\\nhost a: all is well\\rx\\n' >&2; exit 1").read_hosts()
    lines = str(raised.value).split("\n")[1:]
    assert lines
    assert all(line.startswith("  | ") for line in lines)


@pytest.mark.parametrize(
    "word",
    [
        "-oProxyCommand=touch${IFS}x",
        "--",
        "-",
        "a\0b",
        "a\x1b[2J",
        "a\u202eb",
        "a;b",
        "$(id)",
        "a b|c",
        "../x",
    ],
)
def test_invalid_host_names(word: str) -> None:
    with pytest.raises(BadHost):
        parse_hosts(word)
    with pytest.raises(BadHost):
        parse_hostfile(word, "f")


ENVIRONMENTS = {
    "an option as a name": {"PBS_JOBID": "1", "PBS_NODEFILE": "file", "TEXT": "-oProxyCommand=id"},
    "a control character in a name": {"PBS_JOBID": "1", "PBS_NODEFILE": "file", "TEXT": "a\x1b[2J"},
    "slots without an end": {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "a",
        "SLURM_TASKS_PER_NODE": "9" * 5000,
    },
    "very many slots": {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a", "SLURM_TASKS_PER_NODE": "9" * 12},
    "a billion repeats": {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "a",
        "SLURM_TASKS_PER_NODE": f"1(x{'9' * 4400})",
    },
    "a digit that is no number": {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a ²"},
    "GPUs without an end": {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "a",
        "SLURM_GPUS_PER_NODE": "9" * 5000,
    },
    "a billion nodes": {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a[1-999999999]"},
    "slots of Grid Engine": {"JOB_ID": "1", "PE_HOSTFILE": "file", "TEXT": f"a {'9' * 5000} q\n"},
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_allocation_that_lies(name: str) -> None:
    with pytest.raises(HvlaunchError) as raised:
        allocation(ENVIRONMENTS[name], read=lambda _: ENVIRONMENTS[name]["TEXT"])
    assert isinstance(raised.value, BadUsage)
    assert len(str(raised.value)) < 500
