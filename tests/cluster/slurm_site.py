"""A Slurm of two nodes on this machine: its own munge, controller and daemons, on ports and in files of their own."""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hvlaunch.agent.facts import free_port

__all__ = ["MUNGED", "SLURMCTLD", "SlurmSite"]

SLURMCTLD, SLURMD, MUNGED = "/usr/sbin/slurmctld", "/usr/sbin/slurmd", "/usr/sbin/munged"
PATIENCE = 60.0
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class SlurmSite:
    """Runs while the `with` block lasts; `env` is what its users need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "SlurmSite":  # noqa: PYI034 (typing.Self came with Python 3.11)
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_all(self) -> None:
        munge = self.folder / "munge"
        for name in ("state", "spool.n1", "spool.n2", "munge"):
            (self.folder / name).mkdir(mode=0o755)
        host = socket.gethostname().partition(".")[0]
        ports = _free_ports(3)
        text = CONFIGURATION.format(host=host, folder=self.folder, ports=ports, cpus=os.cpu_count())
        (self.folder / "slurm.conf").write_text(text)
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o600)
        files = [f"--{what}-file={munge}/{what}" for what in ("key", "pid", "log", "seed")]
        self._start([MUNGED, "--foreground", "--force", f"--socket={munge}/socket", *files])
        self._until((munge / "socket").exists, "munged answers")
        self._start([SLURMCTLD, "-D"])
        for node in ("n1", "n2"):
            self._start([SLURMD, "-D", "-N", node])
        idle = ["sinfo", "--noheader", "--states=idle", "--responding", "--format=%D"]
        self._until(lambda: self.run(idle).stdout.strip() == "2", "both nodes are idle")

    def close(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def run(self, command: Sequence[object], timeout: float = 100) -> "subprocess.CompletedProcess[str]":
        """Run a command of a user's, outside of any job."""
        words = list(map(str, command))
        return subprocess.run(
            words, env=self.env, capture_output=True, text=True, timeout=timeout, check=False
        )

    def in_job(
        self, flags: Sequence[object], command: Sequence[object]
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command inside of an allocation of its own."""
        return self.run(["salloc", "--quiet", *flags, *command])

    def _start(self, command: Sequence[str]) -> None:
        with (self.folder / f"{Path(command[0]).name}.out").open("ab") as out:
            self._daemons.append(
                subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            )

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            if time.monotonic() > deadline:
                logs = "\n".join(
                    path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log")
                )
                raise TimeoutError(f"{what}: not within {PATIENCE:g} s\n{logs}")
            time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    sockets = [free_port() for _ in range(count)]
    ports: list[int] = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
