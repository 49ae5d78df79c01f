"""Batch scripts of Slurm on three hosts without Slurm: scripts after public examples, and how jobs end."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

from tests.cluster.gpus import add_gpus
from tests.cluster.jobs import HVLAUNCH
from tests.testhosts.hosts import TestHosts, wait_until

SCRIPTS = Path(__file__).parent / "sbatch"
HOSTS = ("-H", "a,b,c")


class Batch:
    """A directory with the scripts, and a state directory of its own."""

    def __init__(self, cluster: TestHosts, folder: Path) -> None:
        self.folder = folder / "work"
        shutil.copytree(SCRIPTS, self.folder)
        (self.folder / "logs").mkdir()
        self.driver = cluster.driver
        paths = [str(self.folder / "bin"), str(Path(sys.executable).parent), self.driver.env["PATH"]]
        self.env = {**self.driver.env, "XDG_STATE_HOME": str(folder / "state"), "PATH": ":".join(paths)}

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = self.driver.popen(
            [*HVLAUNCH, *words],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return process

    def run(self, *words: str, timeout: float = 120.0) -> tuple[int, str, str]:
        """Return the exit code, stdout and stderr of hvlaunch."""
        process = self.start(*words)
        output, errors = process.communicate(timeout=timeout)
        return process.returncode, output.decode(), errors.decode()

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def batch(cluster: TestHosts) -> Iterator[Batch]:
    with TemporaryDirectory(prefix="hvlaunch-sbatch-", dir="/var/tmp") as folder:
        yield Batch(cluster, Path(folder))


class Script(NamedTuple):
    """A script and what it writes: in each file, each text so many times."""

    name: str
    files: Mapping[str, Mapping[str, int]]
    words: Sequence[str] = ()
    code: int = 0


STEPS = {
    f"{task} of 6, local {task % 2}, node {task // 2} on {'abc'[task // 2]} met all": 1 for task in range(6)
}
LIGHTNING = Script("lightning.sh", {"slurm-1.out": STEPS}, ["myenv"])
PYTHON = Script(
    "python.batch",
    {"slurm-1.out": {"2 nodes ['0: from stdin', '1: from stdin'] ['x', 'y z']": 1}},
    ["x", "y z"],
    5,
)
PYTORCH = Script(
    "pytorch.sh",
    {"slurm-1.out": {"Node IP: 10.": 1, **{f"rank {rank} of 3: sum 3": 1 for rank in range(3)}}},
)
OTHERS = [
    Script(
        "accelerate.sh",
        {
            "O-multinode.1": {
                **{
                    f"accelerate on {'abc'[node]}, machine {node} of 3: launch --num_processes 12": 1
                    for node in range(3)
                },
                "--main_process_ip a --main_process_port 29500 complete_nlp_example.py --mixed_precision fp16": 3,
            },
            "E-multinode.1": {},
        },
    ),
    Script(
        "jax.sh",
        {
            "jax-1.log": {
                "of 4, local": 4,
                "met all": 4,
                "on c": 0,
                **{f"coordinator a,b,c {n}\n": 1 for n in range(6)},
            }
        },
    ),
    Script(
        "deepspeed.sh",
        {
            "tr1-13B-1.out": {
                **{
                    f"launcher on {'abc'[node]}: --nproc_per_node 4 --nnodes 3 --master_addr a --master_port 9901 "
                    f"--node_rank {node} train_gpt.py --deepspeed --world 12\n": 1
                    for node in range(3)
                },
                "world 12 at a:9901\n": 3,
            }
        },
    ),
    Script(
        "submitit.sh",
        {
            f"logs/1_{task}_{rank}_log.{end}": {text: 1}
            for task in range(3)
            for rank in range(2)
            for end, text in (("out", f"{task + 1} 1 {task} {rank} 2 2 slurm\n"), ("err", "to stderr\n"))
        },
    ),
    Script("ray.sh", {"slurm-1.out": {"\n2 workers joined\n": 1}}),
    Script(
        "perlmutter.sh",
        {
            "vit-era5-1.out": {
                f"rank {rank} of 4 local {rank % 2} at a:29500 devices 1,0 -v 3\n": 1 for rank in range(4)
            }
        },
        ["-v", "3"],
    ),
    Script("jean_zay.sh", {"TravailGPU1.out": {f"tache {rank} de 4\n": 1 for rank in range(4)}}),
    Script(
        "sweep.sh",
        {
            f"sweep_1-0{task}.txt": {f"task {task} of 3 on a: rate {rate}\n": 1}
            for task, rate in ((1, "0.1"), (2, "bad"), (3, "0.001"))
        },
        code=1,
    ),
]


def check(batch: Batch, script: Script, *words: str) -> None:
    code, output, errors = batch.run("sbatch", "--wait", *words, *HOSTS, script.name, *script.words)
    written = {name: batch.text(name) for name in script.files}
    assert (code, output) == (script.code, "Submitted batch job 1\n"), (errors, written)
    for name, texts in script.files.items():
        assert (batch.folder / name).exists(), list(batch.folder.iterdir())
        assert {text: written[name].count(text) for text in texts} == texts, (written, errors)


@pytest.mark.parametrize("script", [LIGHTNING, PYTHON], ids=lambda script: script.name)
def test_public_scripts(batch: Batch, script: Script) -> None:
    check(batch, script)


@pytest.mark.long
@pytest.mark.parametrize("script", OTHERS, ids=lambda script: script.name)
def test_more_public_scripts(batch: Batch, script: Script) -> None:
    check(batch, script)


def put(batch: Batch, name: str, text: str) -> None:
    (batch.folder / name).write_text(text)


def test_job_of_its_own_is_stopped_by_its_number_and_ends_in_time(batch: Batch, cluster: TestHosts) -> None:
    put(
        batch,
        "stay.sh",
        "#!/bin/bash\n#SBATCH -N 3 -J stay\ntrap 'echo got TERM; exit 9' TERM\n"
        "srun sh -c 'echo task; exec sleep 600' &\nwait\n",
    )
    assert batch.run("sbatch", *HOSTS, "stay.sh") == (0, "Submitted batch job 1\n", "")
    wait_until(lambda: batch.text("slurm-1.out").count("task") == 3, "its tasks", 60.0)
    assert re.search(r"^\w+ +1\.0 +running +3 +a,b,c ", batch.run("jobs")[1], re.MULTILINE)
    assert batch.run("stop", "1")[0] == 0
    assert batch.text("slurm-1.out").endswith("task\ngot TERM\n")
    # The next one outlives `--wait`; the process around its steps is killed, and its steps and script end nevertheless.
    waiting = batch.start("sbatch", "--wait", *HOSTS, "stay.sh")
    wait_until(lambda: batch.text("slurm-2.out").count("task") == 3, "its tasks", 60.0)
    cluster.driver.run(["pkill", "-9", "-f", "sbatch --run .*/queue 2$"], check=True)
    waiting.communicate(timeout=60.0)
    assert waiting.returncode == 137
    wait_until(lambda: not any(host.user_processes() for host in cluster), "nothing runs", 60.0)
    # The script outlives its step by what its trap does.
    put(
        batch,
        "slow.sh",
        "#!/bin/sh\n#SBATCH -t 0:02\ntrap 'echo saves; exit 4' TERM\nsrun sleep 600\necho step ended with $?\n",
    )
    assert batch.run("sbatch", "--wait", *HOSTS, "slow.sh")[0] == 4
    assert "the job is stopped: its time limit of 2.0 s is over\n" in batch.text("slurm-3.out")
    assert "saves\n" in batch.text("slurm-3.out")


@pytest.mark.long
def test_job_with_leases_keeps_its_gpus_from_the_first_step_to_the_last(
    new_hosts: Callable[..., TestHosts],
) -> None:
    hosts = new_hosts(["a", "b", "c"])
    add_gpus(hosts)
    lease = ("--lease-gpus", "--lease-directory", "/tmp/leases", *HOSTS)
    with TemporaryDirectory(prefix="hvlaunch-sbatch-", dir="/var/tmp") as folder:
        batch = Batch(hosts, Path(folder))
        # One of PyTorch's: 3 hosts with a GPU each, though one host has 4.
        check(batch, PYTORCH, *lease[:-2])
        put(
            batch,
            "two.sh",
            "#!/bin/sh\n#SBATCH -N 2 --gres=gpu:h100:3 -J two\nsrun -l printenv CUDA_VISIBLE_DEVICES | sort\n"
            "until [ -e go ]; do sleep 0.1; done\n"
            "srun -l --ntasks-per-node=3 --gpus-per-task=1 sh -c 'echo $SLURM_LOCALID $CUDA_VISIBLE_DEVICES' | sort\n",
        )
        put(batch, "three.sh", "#!/bin/sh\n#SBATCH -N 2 --gpus=4\nprintenv CUDA_VISIBLE_DEVICES\n")
        assert batch.run("sbatch", *lease, "two.sh")[0] == 0
        wait_until(lambda: "1: GPU-" in batch.text("slurm-2.out"), "its first step", 60.0)
        # Between two steps the GPUs are still leased: 6 of 12, so there are not two hosts with 2.
        shown = batch.run("hosts", *lease[1:])[1]
        assert len(re.findall(r"^[ab] +\d +root +two \(2\) ", shown, re.MULTILINE)) == 6, shown
        assert batch.run("sbatch", *lease, "three.sh")[0] == 0
        wait_until(lambda: "waits for 4 GPUs" in batch.run("logs", "3")[2], "its turn", 60.0)
        put(batch, "go", "")
        wait_until(lambda: "GPU-" in batch.text("slurm-3.out"), "the second job", 60.0)
        assert batch.text("slurm-2.out").splitlines()[-6:] == [
            f"{task}: {task % 3} GPU-{'ab'[task // 3]}-{task % 3}" for task in range(6)
        ]
        wait_until(lambda: not any(host.user_processes() for host in hosts), "nothing runs", 60.0)
