"""hvlaunch on a real GPU: make gpu-tests. Each test host sees the machine's GPU, so one is enough; a host has one worker."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hvlaunch.agent.errands.observer.nvml import Library
from hvlaunch.errors import EXIT_HUNG
from tests.cluster.elastic_jobs import ElasticJob, Work
from tests.cluster.jobs import HVLAUNCH, Job
from tests.testhosts.hosts import CHECKOUT, TestHosts, wait_until

PROGRAMS = Path(__file__).parent / "programs"
EXAMPLES = CHECKOUT / "examples"
RECORDED = CHECKOUT / "tests" / "unit" / "torch" / "horovod_results.json"
LIMIT = 120.0
GPUS = torch.cuda.device_count()
IS_NCCL2 = {"ProcessGroupNCCL": "0", "ProcessGroupNCCL2": "1"}
CLASSES = [
    pytest.param(
        value, id=name, marks=pytest.mark.skipif(not hasattr(dist, name), reason=f"torch {torch.__version__}")
    )
    for name, value in IS_NCCL2.items()
]
"""The classes of NCCL's groups, by TORCH_DIST_USE_NCCL2; torch has the second one since 2.14."""

pytestmark = pytest.mark.timeout(300)


def done(hosts: TestHosts, *words: object) -> Job:
    """A job that ends well."""
    job = Job(hosts, words)
    assert job.code(LIMIT) == 0, job.stdout[-3000:] + job.stderr[-6000:]
    return job


def script(name: str, *words: object) -> tuple[object, ...]:
    return sys.executable, PROGRAMS / name, *words


def test_a_host_without_slots_has_a_worker_for_each_gpu(cluster: TestHosts) -> None:
    job = done(cluster, "-v", "-H", "a,b", "printenv", "LOCAL_WORLD_SIZE")
    assert re.findall(r"^\[\d+\]<stdout>: ?(\d+)$", job.stdout, re.MULTILINE) == [str(GPUS)] * 2 * GPUS
    assert f"{GPUS} GPU" in job.stderr
    job = done(cluster, "-H", "a:4,b:4", "--nproc-per-node", "gpu", "printenv", "RANK")
    assert len(job.stdout.splitlines()) == 2 * GPUS


def test_nvml_agrees_with_nvidia_smi() -> None:
    query = "--query-gpu=index,name,memory.total,ecc.errors.uncorrected.volatile.total"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    gpus = Library().read()
    assert len(gpus) == len(lines) == GPUS
    for gpu, line in zip(gpus, lines, strict=True):
        index, name, memory, errors = (word.strip() for word in line.split(","))
        assert (str(gpu["index"]), gpu["name"]) == (index, name)
        assert gpu["memory_total"] == pytest.approx(int(memory) << 20, rel=0.02)
        assert gpu["ecc_errors"] == (int(errors) if errors.isdigit() else 0)
        assert 20 < gpu["temperature"] < 100
        assert 20 < gpu["power"] < 1000


def test_what_a_gpu_does_is_measured(cluster: TestHosts) -> None:
    job = Job(cluster, ["-H", "a:1", *script("computes.py")]).saw("computes")

    def busy() -> str | None:
        shown = cluster.driver.run([*HVLAUNCH, "metrics"], check=True, cwd=CHECKOUT).stdout
        found = re.search(r"^hvlaunch_gpu_utilization_ratio\{.*\} (\S+)$", shown, re.MULTILINE)
        return shown if found is not None and float(found[1]) > 0.5 else None

    try:
        shown = wait_until(busy, "the GPU is busy", LIMIT)
    finally:
        job.process.terminate()
        job.code(LIMIT)
    used = re.search(r"^hvlaunch_gpu_memory_used_bytes\{.*\} (\S+)$", shown, re.MULTILINE)
    assert used is not None, shown
    assert float(used[1]) > 1 << 30


@pytest.mark.parametrize("nccl2", CLASSES)
def test_a_script_meets_by_nccl_in_each_of_the_ways(cluster: TestHosts, nccl2: str) -> None:
    setting = f"TORCH_DIST_USE_NCCL2={nccl2}"
    job = done(cluster, "-H", "a:1,b:1,c:1", "-x", setting, *script("four_ways.py"))
    for way in ("env", "scheme", "store", "eager"):
        assert job.stdout.count(f"{way} is right") == 3, job.stdout


@pytest.mark.parametrize("name", ["ddp_digits.py", "fsdp2_digits.py", "init_digits.py"])
def test_the_examples_train_on_gpus(cluster: TestHosts, name: str) -> None:
    pytest.importorskip("sklearn")
    job = done(cluster, "-H", "a:1,b:1", sys.executable, EXAMPLES / name)
    shares = [float(share) for share in re.findall(r"accuracy (0\.\d+)", job.stdout)]
    assert shares, job.stdout
    assert shares[-1] > 0.9


def test_it_comes_to_what_horovod_came_to(cluster: TestHosts) -> None:
    job = done(cluster, "-H", "a:1,b:1,c:1", *script("as_horovod.py", RECORDED))
    report: dict[str, Any] = json.loads(job.stdout.partition("done ")[2])
    assert (report["backend"], report["device"]) == ("nccl", "cuda:0")
    assert report["apart"] < 1e-6
    assert report["large"] == [3.0, 3.0]
    assert report["polled"] == 3.0
    assert report["differs"] == {}


class Trainings:
    def __init__(self, cluster: TestHosts, events: Path, nccl2: str) -> None:
        self.cluster, self.events = cluster, events
        self.settings = ["-x", f"TORCH_DIST_USE_NCCL2={nccl2}"]
        self.jobs: list[ElasticJob] = []

    def start(self, program: str, *options: object) -> ElasticJob:
        work = Work(str(PROGRAMS / program), sys.executable)
        job = ElasticJob(
            self.cluster, work, self.events, "a:1,b:1,c:1", "--min-np", 1, *self.settings, *options
        )
        self.jobs.append(job)
        return job


@pytest.fixture(params=CLASSES)
def trainings(request: pytest.FixtureRequest, cluster: TestHosts, tmp_path: Path) -> Iterator[Trainings]:
    trainings = Trainings(cluster, tmp_path / "events.jsonl", request.param)
    yield trainings
    for job in trainings.jobs:
        job.close()
        sys.stdout.write(f"{job.stdout[-1500:]}\n{job.log()}\n{job.stderr[-6000:]}\n")


def test_workers_that_stay_leave_nccls_collectives(trainings: Trainings) -> None:
    job = trainings.start("elastic.py", "--lease", 10)
    number = job.goes_on_with("a:1,b:1,c:1")
    job.signal("KILL", "b")
    assert job.event("worker_exited", host="b", signal="SIGKILL")
    number = job.goes_on_with("a:1,b:1,c:1", after=number)
    assert len(job.events("worker_started")) == 4, "only the killed one is started anew"
    job.kill_agent("c")
    assert job.event("host_lost", host="c")
    number = job.goes_on_with("a:1,b:1", after=number)
    job.pool("a:1,b:1,d:1")
    job.goes_on_with("a:1,b:1,d:1", after=number)
    report = job.finish()
    assert report["kept"] == pytest.approx(1.0, rel=1e-3)
    assert len(job.events("worker_started")) == 5


def test_a_stopped_worker_is_replaced(trainings: Trainings) -> None:
    job = trainings.start("elastic.py", "--hang-timeout", 6, "--on-hang", "restart")
    number = job.goes_on_with("a:1,b:1,c:1")
    job.signal("STOP", "b")
    job.goes_on_with("a:1,b:1,c:1", after=number)
    job.finish()


def test_workers_leave_a_collective_that_takes_longer_than_its_timeout(trainings: Trainings) -> None:
    job = trainings.start("elastic.py", "-x", "COLLECTIVE_SECONDS=15")
    number = job.goes_on_with("a:1,b:1,c:1")
    job.order("b", "step hold")
    job.saw("held b")
    broken = job.event("round_broken")
    job.withdraw("b")
    job.goes_on_with("a:1,b:1,c:1", after=number)
    job.finish()
    assert "longer than its timeout" in str(broken)
    assert len(job.events("worker_started")) == 3, "no worker is started anew"


@pytest.mark.parametrize("kind", ["asleep", "stopped", "left-early", "skips"])
def test_a_hang_is_named(cluster: TestHosts, kind: str) -> None:
    lines = (PROGRAMS / "hangs.py").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith(f"# HERE: {kind}"))
    on_hang = ["--hang-timeout", 6, "--on-hang", "stop", "--grace", 2]
    job = Job(cluster, ["-H", "a:1,b:1,c:1", *on_hang, *script("hangs.py", kind, 1)])
    code = job.code(LIMIT)
    said = next((text for text in job.stderr.splitlines() if "the job is hung: " in text), job.stderr)
    assert code == EXIT_HUNG
    culprit = said.partition("wait for")[0]
    assert "rank 1 (host b)" in culprit
    assert f"hangs.py:{line})" in culprit


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("memory", "a smaller batch; on b, nvidia-smi shows who else uses the GPU"),
        ("ordinal", "no more slots on b than nvidia-smi shows GPUs there"),
        ("kernel", "-x CUDA_LAUNCH_BLOCKING=1, for a traceback that ends at the line"),
    ],
)
def test_a_failure_on_a_gpu_is_told(cluster: TestHosts, kind: str, told: str) -> None:
    job = Job(cluster, ["-H", "a:1,b:1", "--grace", 2, *script("fails.py", kind)])
    assert job.code(LIMIT) != 0
    report = job.stderr.partition("failed first")
    assert "rank 1 of 2 on host b" in report[0].splitlines()[-1]
    assert told in report[2]


def test_check_agrees_with_nvidia_smi(cluster: TestHosts) -> None:
    """Also on a GPU in use: it is an error, which names a process or its memory."""
    fields = "name,memory.total,pcie.link.width.current,pcie.link.width.max,ecc.mode.current"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    words = [*HVLAUNCH, "check", "--json", "-H", "a", sys.executable, "train.py"]
    answer = json.loads(cluster.driver.run(words, cwd=CHECKOUT).stdout)["hosts"]["a"]["details"]
    assert answer["software"]["torch"] == torch.__version__
    assert answer["software"]["cuda"] == torch.version.cuda
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer["software"]["driver"] in (None, driver.stdout.split()[0])
    assert len(answer["gpus"]["gpus"]) == len(lines)
    for gpu, line in zip(answer["gpus"]["gpus"], lines, strict=True):
        name, memory, width, widest, ecc = (word.strip() for word in line.split(","))
        assert gpu["name"] == name
        assert gpu["memory"] == pytest.approx(int(memory) << 20, rel=0.02)
        assert [str(gpu["pcie_width"]), str(gpu["pcie_width_max"])] == [width, widest]
        assert gpu["ecc"] == {"Enabled": True, "Disabled": False}.get(ecc)
    job = Job(cluster, ["-H", "a:1", *script("computes.py")]).saw("computes")
    try:
        answer = json.loads(cluster.driver.run(words, cwd=CHECKOUT).stdout)
    finally:
        job.process.terminate()
        job.code(LIMIT)
    assert [finding for finding in answer["findings"] if finding["subject"] == "gpu-use"] != []
