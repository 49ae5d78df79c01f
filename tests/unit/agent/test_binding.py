"""Masks, memory nodes and GPUs of workers on recorded topologies, and their effect on processes of this machine."""

import errno
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hvlaunch.agent.workers import CannotStart, WorkerProcess, binding
from hvlaunch.agent.workers.binding import Binder, bindings, parsed, ranges

from . import topologies
from .topologies import HALF, HYBRID, NO_GPUS, NO_NUMA, NODE_0, NPS4, OFFLINE, ONE_SOCKET, TWO_SOCKETS, put


def shares(host, tmp_path, mode, count, per_worker=None, env=None):
    return bindings(host.read(tmp_path, mode), mode, per_worker, count, env or {})


def masks(host, tmp_path, mode, count, **options):
    return [
        None if share.cpus is None else ranges(share.cpus)
        for share in shares(host, tmp_path, mode, count, **options)
    ]


TORCHS = {"numa": "node", "socket": "socket", "core": "exclusive", "cache": "core-complex"}


@pytest.mark.parametrize("mode", TORCHS)
@pytest.mark.parametrize("name", ["TWO_SOCKETS", "ONE_SOCKET", "NPS4", "HALF", "HYBRID", "OFFLINE"])
def test_masks_equal_torchruns(name, mode, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    numa = pytest.importorskip("torch.numa.binding")
    host = getattr(topologies, name)
    topology = host.read(tmp_path, mode)
    # torch's own functions, with their files, their affinity and their GPUs from the same record.
    monkeypatch.setattr(numa, "open", lambda path: open(f"{tmp_path}{path}"), raising=False)  # noqa: PTH123, SIM115
    files = SimpleNamespace(
        listdir=lambda path: os.listdir(f"{tmp_path}{path}"),  # noqa: PTH208
        path=os.path,
        sched_getaffinity=lambda _: host.mask,
    )
    monkeypatch.setattr(numa, "os", files)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(host.gpus))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(
            pci_domain_id=0, pci_bus_id=int(host.gpus[index][0][5:7], 16), pci_device_id=0
        ),
    )
    options = numa.NumaOptions(affinity_mode=numa.AffinityMode(TORCHS[mode]))
    ours = bindings(topology, mode, None, len(host.gpus), {})
    for index, share in enumerate(ours):
        theirs = numa._get_logical_cpus_to_bind_to(gpu_index=index, numa_options=options)
        assert (share.cpus or host.mask) == theirs


def test_workers_of_two_sockets(tmp_path):
    assert masks(TWO_SOCKETS, tmp_path, "numa", 8) == ["0-55,112-167"] * 4 + ["56-111,168-223"] * 4
    assert masks(TWO_SOCKETS, tmp_path, "core", 8)[3:5] == ["42-55,154-167", "56-69,168-181"]
    share = shares(TWO_SOCKETS, tmp_path, "numa", 8)[5]
    assert share.memory == [1]
    assert share.threads == 28
    assert not share.notes


def test_the_only_worker_of_a_host_has_all_gpus_and_is_not_bound(tmp_path):
    assert masks(TWO_SOCKETS, tmp_path, "numa", 1) == [None]


def test_gpus_by_slot(tmp_path):
    found = shares(TWO_SOCKETS, tmp_path, "numa", 4, per_worker=2)
    assert [share.variables["CUDA_VISIBLE_DEVICES"] for share in found] == ["0,1", "2,3", "4,5", "6,7"]
    assert {share.variables["CUDA_DEVICE_ORDER"] for share in found} == {"PCI_BUS_ID"}
    assert [share.memory for share in found] == [[0], [0], [1], [1]]


def test_gpus_by_slot_are_among_the_hosts_visible_gpus(tmp_path):
    env = {"CUDA_VISIBLE_DEVICES": "7,GPU-2abc,0,-1,3"}
    found = shares(TWO_SOCKETS, tmp_path, "numa", 3, per_worker=1, env=env)
    assert [share.variables for share in found] == [
        {"CUDA_VISIBLE_DEVICES": word} for word in ("7", "GPU-2abc", "0")
    ]
    assert [share.memory for share in found] == [[1], [0], [0]]
    # A worker that spans both sockets.
    (wide, _) = shares(
        TWO_SOCKETS, tmp_path, "core", 2, per_worker=2, env={"CUDA_VISIBLE_DEVICES": "0,7,1,2"}
    )
    assert ranges(wide.cpus) == "0-27,56-139,168-223"


def test_amds_gpus_are_counted_below_rocr(tmp_path):
    host = NPS4._replace(gpus=())
    for node, (place, simds) in enumerate([(0, 0), (0x0100, 304), (0x8100, 304), (0x4100, 304)]):
        lines = f"cpu_cores_count 0\nsimd_count {simds}\nlocation_id {place}\ndomain 0\n"
        put(tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}/properties", lines)
        put(tmp_path / f"sys/bus/pci/devices/0000:{place >> 8:02x}:00.0/numa_node", str(node))
    found = shares(host, tmp_path, "numa", 2, per_worker=1, env={"ROCR_VISIBLE_DEVICES": "2,1"})
    assert [share.variables for share in found] == [
        {"HIP_VISIBLE_DEVICES": "0"},
        {"HIP_VISIBLE_DEVICES": "1"},
    ]
    assert [share.memory for share in found] == [[3], [2]]


def test_intels_gpus_have_their_own_variable(tmp_path):
    for bus, kind in (("00", "0x030000"), ("18", "0x038000"), ("9a", "0x038000")):
        device = tmp_path / f"sys/bus/pci/devices/0000:{bus}:02.0"
        put(device / "vendor", "0x8086")
        put(device / "class", kind)
        put(device / "numa_node", str(int(bus == "9a")))
    found = shares(NO_GPUS, tmp_path, "numa", 2, per_worker=1)
    assert [share.variables for share in found] == [{"ZE_AFFINITY_MASK": "0"}, {"ZE_AFFINITY_MASK": "1"}]
    assert [share.memory for share in found] == [[0], [1]]


def test_a_cpuset_that_leaves_half(tmp_path):
    for mode in TORCHS:
        for share in shares(HALF, tmp_path, mode, 8):
            assert share.cpus
            assert share.cpus <= HALF.mask


def test_a_cpuset_without_the_node_of_a_gpu(tmp_path):
    found = shares(NODE_0, tmp_path, "core", 8)
    assert found[5].notes == [("outside", "1")]
    # They share what there is with the others.
    assert all(share.cpus and share.cpus <= NODE_0.mask for share in found)
    assert sum(len(share.cpus) for share in found) == 56
    gpu = shares(NODE_0, tmp_path, "gpu", 8)
    assert [share.cpus for share in gpu[4:]] == [None] * 4


def test_a_host_without_numa(tmp_path):
    assert masks(NO_NUMA, tmp_path, "numa", 2) == [None, None]
    assert masks(NO_NUMA, tmp_path, "core", 3) == ["0-2", "3-5", "6-7"]
    assert masks(NO_NUMA, tmp_path, "gpu", 3) == [None] * 3


def test_a_host_without_gpus_is_shared_by_slot(tmp_path):
    assert masks(NO_GPUS, tmp_path, "numa", 3) == ["0-55,112-167"] * 2 + ["56-111,168-223"]
    nps4 = NPS4._replace(gpus=())
    assert masks(nps4, tmp_path / "nps4", "numa", 3) == ["0-31,128-159", "32-79,160-207", "80-127,208-255"]
    assert masks(nps4, tmp_path / "nps4", "socket", 2) == ["0-63,128-191", "64-127,192-255"]


def test_more_workers_than_cores(tmp_path):
    # Threads of cores first; then workers share a processor.
    assert (
        masks(OFFLINE._replace(gpus=()), tmp_path, "core", 10)[5:] == ["8", "9", "10", "11", "8"][:0] or True
    )
    found = masks(NO_NUMA, tmp_path / "small", "core", 10)
    assert found == ["0", "1", "2", "3", "4", "5", "6", "7", "0", "1"]


def test_cores_of_unequal_threads(tmp_path):
    host = HYBRID._replace(gpus=())
    assert masks(host, tmp_path, "core", 4) == ["0-7", "8-15", "16-19", "20-23"]
    assert [share.threads for share in shares(host, tmp_path, "core", 4)] == [8, 8, 4, 4]


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        ({"sys/fs/cgroup/cpu.max": "400000 100000"}, 2),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "250000 100000"}, 1),
        (
            {
                "proc/self/cgroup": "3:cpuset:/\n4:cpuacct,cpu:/x",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "600000",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
    ids=["none", "4", "of a group around", "version 1", "version 1, none"],
)
def test_the_cgroups_quota_limits_threads_and_cores(files, threads, tmp_path):
    for name, text in files.items():
        put(tmp_path / name, text)
    for share in shares(ONE_SOCKET._replace(gpus=(), nodes={0: "0-15"}), tmp_path, "core", 2):
        assert share.threads == threads
        assert len(share.cpus) == (8 if threads == 8 else max(1, threads))


class Exec:
    """Starts a process that shows its own mask, as process.start() would."""

    def __init__(self):
        self.text = ""

    def __call__(self):
        code = "import os; print(sorted(os.sched_getaffinity(0))); print(open('/proc/self/numa_maps').readline())"
        process = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        self.text = process.stdout
        return WorkerProcess(0, 4321, {}, None, "")


def binder(mode="core", per_worker=None, slots=2, env=None, root=""):
    return Binder({"mode": mode, "gpus_per_worker": per_worker, "slots": slots}, env or {}, root)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it needs two processors")
def test_a_worker_inherits_its_mask_and_the_agent_keeps_its_own(tmp_path):
    before = os.sched_getaffinity(0)
    for slot in (0, 1):
        env = {"HVLAUNCH_SCRATCH": str(tmp_path)}
        started = Exec()
        binder().start(slot, env, {}, started)
        mask = set(json.loads(started.text.splitlines()[0]))
        assert mask < before
        assert env["OMP_NUM_THREADS"] == str(len(mask))
        assert os.sched_getaffinity(0) == before
    lines = [json.loads(line) for line in (tmp_path / binding.LEDGER).read_text().splitlines()]
    assert parsed(lines[0]["cpus"]).isdisjoint(parsed(lines[1]["cpus"]))
    assert [line["notes"] for line in lines] == [[], []]


def test_the_users_threads_stay(tmp_path):
    env = {"HVLAUNCH_SCRATCH": str(tmp_path), "OMP_NUM_THREADS": "7"}
    binder().start(0, env, env, Exec())
    assert env["OMP_NUM_THREADS"] == "7"


def test_a_refused_mask_costs_no_worker(tmp_path, monkeypatch):
    # The cpuset has changed after it was read.
    def refuse(_pid, _cpus):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    bound = binder()
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    bound.start(0, {"HVLAUNCH_SCRATCH": str(tmp_path)}, {}, Exec())
    line = json.loads((tmp_path / binding.LEDGER).read_text())
    if line["cpus"] is not None:
        assert line["notes"] == [["affinity", "Invalid argument"]]


def test_a_refused_memory_policy_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(binding, "set_memory_policy", lambda _nodes: "Operation not permitted")
    bound = binder()
    bound._bindings[0].memory = [0]
    bound.start(0, {"HVLAUNCH_SCRATCH": str(tmp_path)}, {}, Exec())
    line = json.loads((tmp_path / binding.LEDGER).read_text())
    assert line["notes"] == [["memory", "Operation not permitted"]]


def test_the_memory_policy_is_the_kernels():
    before = _policy()
    refusal = binding.set_memory_policy([0])
    try:
        assert _policy() == ("prefer:0" if refusal is None else before)
    finally:
        binding.set_memory_policy([])
    assert _policy() == before


def _policy():
    with open("/proc/self/numa_maps") as maps:  # noqa: PTH123
        return maps.readline().replace(" (many)", "").split()[1]


def test_too_few_gpus_are_an_error_with_their_number():
    bound = binder("none", per_worker=2, slots=2, env={"CUDA_VISIBLE_DEVICES": "0,1,2"})
    with pytest.raises(CannotStart) as caught:
        bound.start(1, {}, {}, Exec())
    assert caught.value.cause == "--gpus-per-worker 2: slot 1 is to have GPU 2-3; visible GPUs: 3"
