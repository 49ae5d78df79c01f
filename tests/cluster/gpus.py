"""Four GPUs for each test host: NVML is a stand-in that reads files."""

import shutil
import subprocess
from base64 import b64encode
from collections.abc import Sequence

import pytest

from tests.testhosts.hosts import TestHosts

__all__ = ["add_gpus"]

# Four GPUs: a file `pid-N` has the process on GPU N, and `busy-N` puts it to work.
NVML = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <unistd.h>
typedef struct { int number; } *nvmlDevice_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu, compute; } nvmlProcessInfo_t;
static struct { int number; } gpus[4] = {{0}, {1}, {2}, {3}};
static int number_in(const char *kind, int number) {
    char path[99]; int value = 0; FILE *file;
    snprintf(path, sizeof path, "/run/gpus/%s-%d", kind, number);
    if (!(file = fopen(path, "r"))) return 0;
    if (fscanf(file, "%d", &value) != 1) value = 0;
    fclose(file); return value;
}
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 4; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) { *device = (nvmlDevice_t)&gpus[index]; return 0; }
int nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) { snprintf(name, length, "H100"); return 0; }
int nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    char host[64]; gethostname(host, sizeof host); snprintf(uuid, length, "GPU-%s-%d", host, device->number); return 0;
}
int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    memory->total = 80ull << 30; memory->used = number_in("pid", device->number) ? 9ull << 30 : 1 << 20; return 0;
}
int nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) { rates->gpu = number_in("busy", device->number); return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *processes) {
    int pid = number_in("pid", device->number); *count = pid ? 1 : 0; if (pid) processes[0].pid = pid; return 0;
}
"""


def add_gpus(hosts: TestHosts, names: Sequence[str] | None = None) -> None:
    """Give each of these hosts, or all, four GPUs."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    source = hosts.state / "libnvidia-ml.so.1"
    command = ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(source)]
    subprocess.run(command, input=NVML.encode(), check=True)
    library = b64encode(source.read_bytes()).decode()
    for host in hosts if names is None else map(hosts.__getitem__, names):
        put = "mkdir -m 755 /run/gpus; base64 -d > /run/gpus/libnvidia-ml.so.1; cd /run/gpus; chmod 755 *"
        host.run(["sh", "-c", put], input=library, check=True)
        # The loader's list of libraries, with one more.
        lines = "printf '/run/gpus\\ninclude /etc/ld.so.conf\\n' > /run/gpus/conf && ldconfig -X -f /run/gpus/conf -C /run/gpus/cache"
        host.run(["sh", "-c", f"{lines} && mount --bind /run/gpus/cache /etc/ld.so.cache"], check=True)
