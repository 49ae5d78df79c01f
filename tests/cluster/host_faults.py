"""Faults of hosts, made in test hosts: what `hvlaunch check` has to find there, and how it comes to be.

A host reads `.bashrc` when it starts the agent: variables and limits stand there. Two libraries stand in for what a test
host has not: NVML with two GPUs, and a clock and a file system that are wrong or slow.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.testhosts.hosts import TestHosts
from tests.unit.agent.fabrics import write_tree
from tests.unit.agent.harness import interpreter

__all__ = ["FAULTS", "WORK", "Fault", "make_fault", "make_libraries", "prepare_host"]

WORK = "/run/home/work"
_LIB = "/run/home/lib"
_NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { int number; } *nvmlDevice_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned int pid; unsigned long long used; unsigned int a, b; } nvmlProcessInfo_t;
typedef struct { char old[16]; unsigned int numbers[5]; char name[32]; } nvmlPciInfo_t;
static struct { int number; } gpus[2] = {{0}, {1}};
static long set(const char *name, long otherwise) { const char *value = getenv(name); return value ? atol(value) : otherwise; }
/* Only the second GPU has the fault. */
static long of(nvmlDevice_t device, const char *name, long otherwise) { return device->number ? set(name, otherwise) : otherwise; }
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = set("GPU_CUDA", 12080); return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = set("GPU_COUNT", 2); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) { *device = (nvmlDevice_t)&gpus[index]; return 0; }
int nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) { const char *other = getenv("GPU_NAME"); strncpy(name, other ? other : "NVIDIA H100 80GB HBM3", length); return 0; }
int nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) { snprintf(pci->name, 32, "00000000:%d:00.0", 17 + device->number); return 0; }
int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) { memory->total = 80ull << 30; memory->used = of(device, "GPU_USED", 4l << 20); return 0; }
int nvmlDeviceGetClockInfo(nvmlDevice_t device, int kind, unsigned int *clock) { *clock = of(device, "GPU_CLOCK", 1980); return 0; }
int nvmlDeviceGetApplicationsClock(nvmlDevice_t device, int kind, unsigned int *clock) { *clock = 1980; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) { *reasons = of(device, "GPU_REASONS", 0); return 0; }
int nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) { *current = *pending = set("GPU_ECC_ON", 1); return 0; }
int nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int kind, int counter, unsigned long long *count) { *count = of(device, "GPU_ECC", 0); return 0; }
int nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *a, unsigned int *b, unsigned int *pending, unsigned int *failed) { *a = *b = *failed = 0; *pending = of(device, "GPU_REMAP", 0); return 0; }
int nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned int *width) { *width = of(device, "GPU_WIDTH", 16); return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned int *width) { *width = 16; return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned int *number) { *number = 5; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *list) {
    *count = of(device, "GPU_PID", 0) ? 1 : 0; list[0].pid = of(device, "GPU_PID", 0); return 0;
}
"""
# The file system is slow: the length is tested.
_PRELOADED = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t kind, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(kind, at);
    const char *ahead = getenv("FAULT_CLOCK");
    if (kind == CLOCK_REALTIME && ahead) at->tv_sec += atol(ahead);
    return code;
}
int getrlimit64(__rlimit_resource_t kind, struct rlimit64 *limit) {
    static int (*real)(__rlimit_resource_t, struct rlimit64 *);
    if (!real) real = dlsym(RTLD_NEXT, "getrlimit64");
    int code = real(kind, limit);
    const char *most = getenv("FAULT_MEMLOCK");
    /* A test host may not raise its limit. */
    if (kind == RLIMIT_MEMLOCK) limit->rlim_cur = most ? atol(most) : RLIM64_INFINITY;
    return code;
}
int open64(const char *path, int flags, ...) {
    static int (*real)(const char *, int, ...);
    if (!real) real = dlsym(RTLD_NEXT, "open64");
    va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more);
    const char *slow = getenv("FAULT_SLOW_FILE");
    if (slow && strstr(path, slow)) sleep(2);
    return real(path, flags, mode);
}
"""
_INTERFACES = ["ens3np0 400 11.0.0.72/16 pci=3b"]
_PORTS = ["mlx5_0 Ethernet 400 net=ens3np0 pci=3b", "mlx5_1 InfiniBand 400 pci=5e"]
_FABRICS = {
    "good": _PORTS,
    "v1": [f"{_PORTS[0]} gids=v1", _PORTS[1]],
    "down": [_PORTS[0], f"{_PORTS[1]} DOWN"],
}


class Fault(NamedTuple):
    """A fault of one host."""

    name: str
    subject: str
    """The check that finds it."""
    level: str
    text: str
    """A part of the finding."""
    bashrc: str = ""
    shell: str = ""
    """Commands on the host, before the check."""


FAULTS = (
    Fault("another torch", "torch", "error", "2.5.1 here, 2.6.0 on the others", shell=f"sed -i s/2.6.0/2.5.1/ {_LIB}/torch/version.py"),
    Fault("another NCCL", "nccl", "error", "2.19.3 here, 2.21.5 on the others", shell=f"mv {_LIB}/nvidia_nccl_cu12-2.21.5.dist-info {_LIB}/nvidia_nccl_cu12-2.19.3.dist-info"),
    Fault("another Python", "python", "warning", "3.8", shell=f"ln -sf {interpreter('3.8')} {WORK}/python"),
    Fault("no Python", "program", "error", "no such program", shell=f"rm {WORK}/python"),
    Fault("a driver that is too old for CUDA", "cuda", "error", "built for CUDA 12.4, and the driver runs CUDA 11.8", "export GPU_CUDA=11080"),
    Fault("clock ahead", "clock", "warning", "30.0 s ahead", "export FAULT_CLOCK=30"),
    Fault("clock behind", "clock", "warning", "behind", "export FAULT_CLOCK=-90"),
    Fault("disk full", "cwd", "error", "has 0 B left", shell=f"cp {WORK}/* /tmp; mount -t tmpfs -o size=64k none {WORK}; cp -P /tmp/python /tmp/train.py {WORK}; cat /dev/zero >{WORK}/full 2>/dev/null || true"),
    Fault("no inodes", "cwd", "error", "room for 0 more files", shell=f"cp -P {WORK}/* /tmp; mount -t tmpfs -o nr_inodes=3 none {WORK}; cp -P /tmp/python /tmp/train.py {WORK}"),
    Fault("no working directory", "cwd", "error", "no such file or directory", shell=f"mv {WORK} {WORK}.away"),
    Fault("nofile 64", "nofile", "error", "only 64 files", "ulimit -n 64"),
    Fault("nofile 512", "nofile", "warning", "only 512 files", "ulimit -n 512"),
    Fault("small shared memory", "shm", "error", "of shared memory are free", shell="mount -t tmpfs -o size=1m none /dev/shm"),
    Fault("shared memory as docker's", "shm", "warning", "too little for data loaders", shell="mount -t tmpfs -o size=64m none /dev/shm"),
    Fault("code of another version", "script", "error", "here", shell=f"echo '# new' >>{WORK}/train.py"),
    Fault("half a CPU", "cpus", "warning", "0.5 processors for 2 workers"),
    Fault("little memory", "available", "error", "of memory are free for 2 workers"),
    Fault("load", "load", "warning", "99", shell="echo 198.0 90.0 80.0 1/200 300 >/run/loadavg; mount --bind /run/loadavg /proc/loadavg"),
    Fault("a foreign process on the GPU", "gpu-use", "error", "GPU 1: 4.19 MB are in use by root, pid 1: ", "export GPU_PID=1"),
    Fault("memory of a GPU in use by a container", "gpu-use", "error", "GPU 1: 42.9 GB are in use by a process that can't be seen", "export GPU_USED=42949672960"),
    Fault("Xid 79", "gpu-xid", "error", "GPU 1: Xid 79", shell="echo '4,1,2,-;NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus.' >/run/kmsg; mount --bind /run/kmsg /dev/kmsg"),
    Fault("low clock", "gpu-clock", "warning", "GPU 1: 345 MHz, and 1980 MHz", "export GPU_CLOCK=345"),
    Fault("narrow PCIe", "gpu-pcie", "warning", "GPU 1: PCIe x4 of x16", "export GPU_WIDTH=4"),
    Fault("ECC errors", "gpu-ecc", "warning", "GPU 1: 7 uncorrected ECC errors", "export GPU_ECC=7"),
    Fault("a row to be remapped", "gpu-rows", "error", "GPU 1: a row", "export GPU_REMAP=1"),
    Fault("a GPU slowed by heat", "gpu-slowdown", "warning", "GPU 1: slowed: hardware thermal slowdown", "export GPU_REASONS=64"),
    Fault("a GPU that is missing", "gpus", "warning", "2 slots, and 1 GPU", "export GPU_COUNT=1"),
    Fault("another model of GPU", "gpu", "warning", "NVIDIA A100 here, NVIDIA H100", "export GPU_NAME='NVIDIA A100'"),
    Fault("a slow file system", "open", "warning", "2.0 s here", "export FAULT_SLOW_FILE=/train.py"),
    Fault("RoCE v1", "gids", "error", "RoCE v1, subnet", shell="rm -r /run/class/infiniband; cp -r FABRICS/v1/sys/class/infiniband /run/class"),
    Fault("a port that is down", "rdma", "warning", "1 x Ethernet 400 Gbit/s here", shell="rm -r /run/class/infiniband; cp -r FABRICS/down/sys/class/infiniband /run/class"),
    Fault("little memory to lock", "memlock", "error", "65.5 kB may be locked", "export FAULT_MEMLOCK=65536"),
    Fault("another MTU", "mtu", "warning", "1400 here, 1500 on the others", shell="ip link set dev $(ls /sys/class/net | grep -v '^lo$' | head -1) mtu 1400"),
    Fault("a proxy", "proxies", "warning", "https_proxy=http://proxy:3128 here, none on the others", "export https_proxy=http://me:secret@proxy:3128"),
    Fault("little space for temporary files", "scratch", "warning", "left", shell="mount -t tmpfs -o size=64m none /tmp"),
    Fault("no sshd", "ssh", "error", ""),
)  # fmt: skip


def make_libraries(directory: Path) -> None:
    """Compile the libraries, and write the recorded trees of /sys."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    for name, text in (("libnvidia-ml.so.1", _NVML), ("preloaded.so", _PRELOADED)):
        words = ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(directory / name), "-ldl"]
        subprocess.run(words, input=text.encode(), check=True)
    for name, ports in _FABRICS.items():
        write_tree(directory / name, _INTERFACES, ports)


def prepare_host(hosts: TestHosts, name: str, libraries: Path, bashrc: str = "") -> None:
    """Make a good host: a project, a torch and an NCCL of files, two GPUs and two ports."""
    home = hosts[name].home
    for folder in ("work", "lib"):
        shutil.rmtree(home / folder, ignore_errors=True)
    (home / "work").mkdir()
    (home / "work/train.py").write_text("raise SystemExit('it was started')\n")
    (home / "work/python").symlink_to(sys.executable)
    (home / "lib/torch").mkdir(parents=True)
    (home / "lib/torch/version.py").write_text("__version__ = '2.6.0'\ncuda = '12.4'\n")
    (home / "lib/nvidia_nccl_cu12-2.21.5.dist-info").mkdir()
    (home / "root/.bashrc").write_text(
        f"export LD_LIBRARY_PATH={libraries} LD_PRELOAD={libraries}/preloaded.so\n{bashrc}\n"
    )
    script = f"""
        mkdir -p /run/class/net /run/dev/upper /run/dev/work
        mount -t overlay -o lowerdir=/dev,upperdir=/run/dev/upper,workdir=/run/dev/work none /dev
        cp -r {libraries}/good/dev/infiniband /dev
        mount --bind /sys/class/net /run/class/net
        cp -r {libraries}/good/sys/class/infiniband /run/class
        cp -r {libraries}/good/sys/class/infiniband_verbs /run/class
        mount --rbind /run/class /sys/class
    """
    hosts[name].touched = True
    hosts[name].run(["sh", "-ec", script], check=True)


def make_fault(hosts: TestHosts, name: str, libraries: Path, fault: Fault) -> None:
    """Make a host with a fault."""
    prepare_host(hosts, name, libraries, fault.bashrc)
    if fault.subject == "ssh":
        hosts[name].stop_sshd()
    elif fault.shell:
        script = fault.shell.replace("FABRICS", str(libraries))
        hosts[name].run(["sh", "-ec", script], check=True)
