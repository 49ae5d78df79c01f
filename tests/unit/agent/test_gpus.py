"""GPUs, without one: the C compiler makes a library with NVML's functions and structures."""

import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from hvlaunch.agent.errands.observer import samples as module
from hvlaunch.agent.errands.observer.nvml import Library
from hvlaunch.agent.errands.observer.samples import Gpus
from tests.testhosts.places import wait_until

# The declarations are those of nvml.h.
NVML = r"""
#include <stdio.h>
typedef struct { int number; } *nvmlDevice_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned int pid; unsigned long long usedGpuMemory; unsigned int gpuInstanceId, computeInstanceId; } nvmlProcessInfo_t;
typedef struct { nvmlDevice_t device; unsigned long long eventType, eventData; unsigned int gpuInstanceId, computeInstanceId; } nvmlEventData_t;
static struct { int number; } gpus[2] = {{0}, {1}};
static int events = 3;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) { *device = (nvmlDevice_t)&gpus[index]; return 0; }
int nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) { snprintf(name, length, "GPU %d", device->number); return 0; }
int nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) { snprintf(uuid, length, "GPU-%d", device->number); return 0; }
int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) { memory->total = 80ull << 30; memory->free = 79ull << 30; memory->used = 1ull << 30; return 0; }
int nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) { if (device->number) return 3; rates->gpu = 97; rates->memory = 5; return 0; }
int nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *power) { *power = 345678; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *energy) { if (device->number) return 3; *energy = 5000000000500; return 0; }
int nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned int *temperature) { *temperature = sensor == 0 ? 61 : 0; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) { *reasons = 0x1 | 0x4 | 0x40; return 0; }
int nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int kind, int counter, unsigned long long *count) { *count = kind == 1 && counter == 0 ? 1ull << 40 : 9; return 0; }
typedef struct { unsigned char uuid[16]; int status; unsigned int clique; unsigned char state; } nvmlGpuFabricInfo_t;
int nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info) {
    for (int i = 0; i < 16; i++) info->uuid[i] = i;
    info->clique = 7; info->state = device->number ? 2 : 3; return 0;
}
int nvmlEventSetCreate(int **set) { *set = &events; return 0; }
int nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long kinds, int *set) { return kinds == 8 && set == &events ? 0 : 2; }
int nvmlEventSetWait_v2(int *set, nvmlEventData_t *data, unsigned int timeout) {
    if (set != &events || timeout || !events) return 10;
    events--; data->device = (nvmlDevice_t)&gpus[1]; data->eventType = 8; data->eventData = 31 + events; return 0;
}
int FUNCTION(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *found) {
    if (*count < 2) return 7;
    *count = 2; found[0].pid = 100 + device->number; found[1].pid = 200; return 0;
}
"""


def library(directory: Path, function: str = "nvmlDeviceGetComputeRunningProcesses_v3") -> str:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    path = directory / "libnvidia-ml.so.1"
    command = ["cc", "-shared", "-fPIC", "-w", f"-DFUNCTION={function}", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=NVML.encode(), check=True)
    return str(path)


@pytest.mark.parametrize("version", ["_v3", "_v2"])
def test_nvml_structures_are_read(tmp_path: Path, version: str) -> None:
    asked = Library(library(tmp_path, f"nvmlDeviceGetComputeRunningProcesses{version}"))
    first, second = asked.read()
    assert first == {
        "index": 0,
        "name": "GPU 0",
        "utilization": 0.97,
        "memory_used": 1 << 30,
        "memory_total": 80 << 30,
        "power": 345.678,
        "energy_joules": 5000000000.5,
        "temperature": 61,
        "throttled": ["power cap", "hardware thermal slowdown"],
        "ecc_errors": 1 << 40,
        "xids": [],
        "pids": [100, 200],
        "clock": None,
    }
    assert (second["utilization"], second["xids"], second["pids"]) == (0.0, [33, 32, 31], [101, 200])
    assert asked.read()[1]["xids"] == [33, 32, 31]
    # The second GPU is still joining its cluster.
    assert asked.clusters() == ["000102030405060708090a0b0c0d0e0f/7"]


def test_a_missing_library_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WITHIN", 60.0)
    gpus_found, problem = Gpus(lambda: True).now(time.monotonic())
    assert gpus_found == []
    assert problem is not None
    assert problem.startswith("GPUs: libnvidia-ml.so.1: cannot open")


def test_without_a_device_nvml_is_not_loaded() -> None:
    assert Gpus(lambda: False).now(0.0) == ([], None)


def test_a_library_that_hangs_is_reported_and_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    started: list[int] = []

    def hang() -> list[dict[str, object]]:
        started.append(1)
        go_on.wait()
        return [{"index": 0}]

    monkeypatch.setattr(module, "_reader", lambda: hang)
    monkeypatch.setattr(module, "_WITHIN", 0.01)
    monkeypatch.setattr(module, "_HANGS_AFTER", 0.05)
    gpus = Gpus(lambda: True)
    assert gpus.now(time.monotonic()) == ([], None)
    wait_until(lambda: gpus.now(time.monotonic())[1] is not None, "the news")
    assert started == [1]
    go_on.set()
    assert wait_until(lambda: gpus.now(time.monotonic())[0], "figures") == [{"index": 0}]
