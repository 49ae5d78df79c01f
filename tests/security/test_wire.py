"""A sniffer on the bridge between the hosts, and one in the middle: what they read, and what they can change."""

import contextlib
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import cluster, session_hosts
from tests.cluster.jobs import HVLAUNCH, Job
from tests.cluster.slurm_site import MUNGED, SLURMCTLD, SlurmSite
from tests.cluster.test_torchrun import TOKEN_FILE
from tests.cluster.torchrun_agents import Agent, rendezvous, tell_to_stop, wait_for_round
from tests.testhosts.hosts import TestHosts, missing, wait_until
from tests.testhosts.places import Place

__all__ = ["cluster", "session_hosts"]

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(300),
]
HERE = Path(__file__).parent
MARK, PORT = 77, 7777
TLS, SSH = "\x16", "SSH-"
HANDSHAKE = 2000  # bytes: it is shorter

WORKER = """
import os, socket, sys
from hvlaunch.rendezvous.client import Client
client = Client.from_environment()
rank, size = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
client.put("scope-that-is-secret", rank, b"value-of-" + os.environ["API_KEY"].encode())
client.wait_all("scope-that-is-secret", [str(other) for other in range(size)], 60)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anybody:
    anybody.sendto(b"in the clear on purpose, by rank " + rank.encode(), (sys.argv[1], 9))
print("TOKEN", os.environ["HVLAUNCH_TOKEN"], flush=True)
"""


class Wiretap:
    """What a sniffer has written to `file`."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def has(self, text: str) -> bool:
        return text.encode() in self._file.read_bytes()

    def check(self, job_output: str, *secrets: str) -> None:
        """It has heard the job, and none of its secrets."""
        wait_until(lambda: self.has("in the clear on purpose, by rank 0"), "the sniffer hears", 20)
        token = re.findall(r"TOKEN (\S+)", job_output)[0]
        heard = [text for text in (token, "scope-that-is-secret", *secrets) if self.has(text)]
        assert heard == []


@contextlib.contextmanager
def sniffing(folder: Path, namespace: str | None) -> Iterator[Wiretap]:
    """Everything that passes in a network namespace (a file), None: this machine's own."""
    file = folder / "packets"
    enter = [] if namespace is None else ["nsenter", f"--net={namespace}"]
    process = subprocess.Popen(
        [*enter, sys.executable, str(HERE / "sniffer.py"), str(file)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        yield Wiretap(file)
    finally:
        process.kill()
        process.communicate()


def on_the_bridge(hosts: TestHosts, folder: Path) -> contextlib.AbstractContextManager[Wiretap]:
    return sniffing(folder, f"/proc/{hosts.keeper.pid}/ns/net")


@pytest.fixture
def secret() -> str:
    return f"s3cr3t-{secrets.token_hex(16)}"


def words(hosts: TestHosts, secret: str, note: str) -> list[object]:
    return ["-x", f"API_KEY={secret}", sys.executable, "-c", WORKER, hosts.driver.address, note]


def test_ssh(cluster: TestHosts, tmp_path: Path, secret: str) -> None:
    with on_the_bridge(cluster, tmp_path) as wiretap:
        job = Job(cluster, ["-H", "a:1,b:1", *words(cluster, secret, "a-word-of-the-command")])
        assert job.code() == 0, job.stderr
        wiretap.check(job.stdout, secret, "a-word-of-the-command")


@pytest.mark.parametrize("mpirun", ["mpirun.openmpi", "mpirun.mpich"])
def test_mpi(cluster: TestHosts, tmp_path: Path, secret: str, mpirun: str) -> None:
    if shutil.which(mpirun) is None:
        pytest.skip(f"no {mpirun}")
    with on_the_bridge(cluster, tmp_path) as wiretap:
        flags = ["--mpi", "--mpirun", mpirun, "-H", "a:1,b:1"]
        job = Job(cluster, [*flags, *words(cluster, secret, "a-word-of-the-command")])
        assert job.code(120) == 0, job.stderr
        wiretap.check(job.stdout, secret, "a-word-of-the-command")


@pytest.mark.skipif(
    not all(Path(program).exists() for program in (SLURMCTLD, MUNGED)), reason="no Slurm, or no munge"
)
@pytest.mark.xdist_group("slurm")
def test_srun(tmp_path: Path, secret: str) -> None:
    (tmp_path / "slurm").mkdir()
    with SlurmSite(tmp_path / "slurm") as slurm, sniffing(tmp_path, None) as wiretap:
        file = tmp_path / "env"
        file.write_text(f"API_KEY={secret}\n")
        script = tmp_path / "script"
        script.write_text(WORKER)
        job = slurm.in_job(
            ["-N2", "-n2"],
            [*HVLAUNCH, "--srun", "--env-file", file, sys.executable, script, "127.0.0.1", "a-word-of-it"],
        )
        assert job.returncode == 0, job.stderr
        wiretap.check(job.stdout, secret)
        # salloc itself shows Slurm the command line that it runs; what hvlaunch starts is not in it.
        assert not wiretap.has(f"value-of-{secret}")


@pytest.mark.xdist_group("torch")
def test_torchrun(cluster: TestHosts, tmp_path: Path) -> None:
    with on_the_bridge(cluster, tmp_path) as wiretap, rendezvous(cluster, tmp_path / "token") as options:
        everyone = ["--nnodes=2", "--rdzv-id=run-that-is-secret", *options, f"--rdzv-conf={TOKEN_FILE}"]
        agents = [Agent(cluster[name], everyone) for name in "ab"]
        wait_for_round(agents, 1)
        tell_to_stop(cluster)
        assert [agent.code() for agent in agents] == [0, 0]
        # torch's own store between the nodes is not ours, and is plain.
        assert wiretap.has(cluster.driver.address) or (tmp_path / "packets").stat().st_size > 10_000
        assert not wiretap.has((tmp_path / "token").read_text().strip())
        assert not wiretap.has("/torchrun.run-that-is-secret")


@contextlib.contextmanager
def in_the_middle(
    place: Place, how: str, first: str = TLS, spared: int = HANDSHAKE
) -> Iterator["subprocess.Popen[str]"]:
    """Of all connections that begin in the place; what it prints is read from the process."""
    rule = ["OUTPUT", "-p", "tcp", "-m", "mark", "!", "--mark", str(MARK), "!", "-o", "lo"]
    aside = ["-j", "REDIRECT", "--to-ports", str(PORT)]
    process = place.popen(
        [sys.executable, str(HERE / "middle.py"), str(PORT), how, str(MARK), first, str(spared)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        place.run(["iptables", "-t", "nat", "-A", *rule, *aside], check=True)
        yield process
    finally:
        place.run(["iptables", "-t", "nat", "-D", *rule, *aside])
        process.communicate()  # it ends with its stdin: to kill what entered the host's namespaces would leave it there


CLIENT = """
import os, sys
from hvlaunch.rendezvous.client import Client
client = Client.from_environment(timeout=6)
client.put("s", "k", b"a" * 10_000)
print("PUT", flush=True)
print("GOT", client.get("s", "k") == b"a" * 10_000, flush=True)
"""


@pytest.mark.parametrize("how", ["change", "answer"])
def test_modified_bytes_are_refused(cluster: TestHosts, how: str) -> None:
    with in_the_middle(cluster["a"], how) as middle:
        job = Job(cluster, ["--rendezvous-relay", "never", "-H", "a:1", sys.executable, "-c", CLIENT])
        code = job.code()
        assert middle.stdout is not None
        assert middle.stdout.readline() == "met\n"
    assert "GOT True" not in job.stdout
    assert "GOT False" not in job.stdout
    assert code != 0
    assert "RendezvousUnreachable" in job.stderr


# What a changed length makes the host wait for never comes, and only the time tells.
@pytest.mark.parametrize("how", ["change", "answer"])
def test_a_modified_ssh_stream_runs_no_command(cluster: TestHosts, how: str) -> None:
    with in_the_middle(cluster.driver, how, SSH) as middle:
        job = Job(cluster, ["--start-timeout", 6, "-H", "a:1", "touch", "/run/home/root/ran"])
        assert job.code() == 69
        assert middle.stdout is not None
        assert middle.stdout.readline() == "met\n"
    assert "hvlaunch: host a: " in job.stderr
    assert not (cluster["a"].home / "root" / "ran").exists()


@pytest.mark.parametrize("how", ["change", "answer"])
def test_a_launchers_agent_whose_call_was_changed(cluster: TestHosts, how: str) -> None:
    """What it says is not believed, and what it is told is not done."""
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("no mpirun.openmpi")
    with in_the_middle(cluster["a"], how) as middle:
        flags = ["--mpi", "--mpirun", "mpirun.openmpi", "--start-timeout", 10, "--lease", 4, "-H", "a:1"]
        script = f"touch /run/home/root/told-{how}; head -c 100000 /dev/zero"
        job = Job(cluster, [*flags, "sh", "-c", script])
        assert job.code() != 0
        assert middle.stdout is not None
        assert middle.stdout.readline() == "met\n"
    assert "hvlaunch: host a: " in job.stderr
    assert not (cluster["a"].home / "root" / "told-answer").exists()


@pytest.mark.xdist_group("torch")
def test_torchruns_nodes_whose_requests_are_changed(cluster: TestHosts, tmp_path: Path) -> None:
    """What was changed is not taken: a node gets through by other connections, or ends with one clear error."""
    with contextlib.ExitStack() as stack:
        options = stack.enter_context(rendezvous(cluster, tmp_path / "token"))
        agents, middles = [], []
        for name, how, spared in (("a", "change and answer", HANDSHAKE), ("b", "repeat", 0)):
            middles.append(stack.enter_context(in_the_middle(cluster[name], how, spared=spared)))
            words = ["--nnodes=1", f"--rdzv-id={name}", *options]
            agents.append(Agent(cluster[name], [*words, f"--rdzv-conf={TOKEN_FILE},read_timeout=3"]))
        other, refused = agents
        for middle in middles:
            assert middle.stdout is not None
            assert [middle.stdout.readline() for _ in range(3)] == ["met\n"] * 3  # the third connection
        assert refused.code() == 1
        assert "RendezvousConnectionError: rendezvous https://" in refused.output
        assert "TLS failed" in refused.output
        assert refused.reports() == []
        wait_for_round([other], 1)
        tell_to_stop(cluster)
        assert other.code() == 0
