"""Recorded topologies of hosts, as the files of /sys and /proc that hvlaunch and torch read."""

import os
from pathlib import Path
from typing import NamedTuple

from hvlaunch.agent.workers.binding import parsed, ranges, read_topology

_WRITTEN: dict[str, Path] = {}
"""Directories with the processors of hosts, by what they show. Each has thousands of files, and no test changes one."""


class Host(NamedTuple):
    """A host: processors by NUMA node, how they share cores, caches and sockets, and GPUs as (address, node)."""

    nodes: dict[int, str]
    cores: list[str]
    caches: list[str]
    sockets: list[str]
    gpus: tuple[tuple[str, int], ...] = ()
    allowed: str = ""
    """The cpuset; empty for all."""
    has_numa: bool = True

    @property
    def cpus(self):
        return {cpu for cpus in self.nodes.values() for cpu in parsed(cpus)}

    @property
    def mask(self):
        return parsed(self.allowed) if self.allowed else self.cpus

    def write(self, root):
        """Write the files below a directory, and return the directory as text."""
        devices = root / "sys/devices"
        shown = repr((self.nodes, self.cores, self.caches, self.sockets, self.has_numa))
        if not _WRITTEN.get(shown, devices).exists():
            _WRITTEN[shown] = devices
            self._write_processors(devices / "system")
        elif _WRITTEN[shown] != devices:
            os.makedirs(devices.parent, exist_ok=True)  # noqa: PTH103 (a path of pytest's)
            devices.unlink(missing_ok=True)
            devices.symlink_to(_WRITTEN[shown])
        for index, (address, node) in enumerate(self.gpus):
            device = root / f"sys/bus/pci/devices/{address}"
            put(device / "numa_node", str(node))
            put(device / "local_cpulist", self.nodes.get(node, ranges(self.cpus)))
            put(
                root / f"proc/driver/nvidia/gpus/{address}/information",
                f"Model:  \t X\nGPU UUID: \t GPU-{index}abc\n",
            )
        return str(root)

    def _write_processors(self, system):
        for node, cpus in self.nodes.items() if self.has_numa else ():
            put(system / f"node/node{node}/cpulist", cpus)
        if self.has_numa:
            put(system / "node/possible", ranges(self.nodes))
            put(system / "node/has_memory", ranges(self.nodes))
        for name, groups in (("thread_siblings_list", self.cores), ("package", self.sockets)):
            for number, group in enumerate(groups):
                for cpu in parsed(group):
                    topology = system / f"cpu/cpu{cpu}/topology"
                    if name == "package":
                        put(topology / "physical_package_id", str(number))
                    else:
                        put(topology / name, group)
        for group in self.caches:
            for cpu in parsed(group):
                # The first level is smaller, and instructions do not count.
                for index, (level, kind, shared) in enumerate(
                    ((1, "Data", str(cpu)), (4, "Instruction", str(cpu)), (3, "Unified", group))
                ):
                    cache = system / f"cpu/cpu{cpu}/cache/index{index}"
                    put(cache / "level", str(level))
                    put(cache / "type", kind)
                    put(cache / "shared_cpu_list", shared)

    def read(self, root, mode):
        return read_topology(mode, self.mask, self.write(root))


def put(path, text):
    os.makedirs(path.parent, exist_ok=True)  # noqa: PTH103 (a path of pytest's)
    path.write_text(text + "\n")


def _pairs(count):
    """Cores of two threads each: the second threads are numbered behind all first ones."""
    return [f"{cpu},{cpu + count}" for cpu in range(count)]


def _slices(cores, size, count):
    return [
        ranges({*range(first, first + size), *range(first + count, first + count + size)})
        for first in range(0, cores, size)
    ]


_GPUS = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")

TWO_SOCKETS = Host(
    nodes={0: "0-55,112-167", 1: "56-111,168-223"},
    cores=_pairs(112),
    caches=["0-55,112-167", "56-111,168-223"],
    sockets=["0-55,112-167", "56-111,168-223"],
    gpus=tuple((f"0000:{bus}:00.0", index // 4) for index, bus in enumerate(_GPUS)),
)
"""As a DGX H100."""
ONE_SOCKET = Host(
    nodes={0: "0-31"},
    cores=_pairs(16),
    caches=["0-31"],
    sockets=["0-31"],
    gpus=tuple((f"0000:{bus}:00.0", -1) for bus in ("01", "41", "81", "c1")),
)
"""Its firmware gives no NUMA node for GPUs."""
NPS4 = Host(
    nodes=dict(enumerate(_slices(128, 16, 128))),
    cores=_pairs(128),
    caches=_slices(128, 4, 128),
    sockets=_slices(128, 64, 128),
    gpus=tuple(
        (f"0000:{bus}:00.0", node)
        for bus, node in zip(
            ("07", "0f", "47", "4e", "87", "90", "b7", "bd"), (3, 3, 1, 1, 7, 7, 5, 5), strict=True
        )
    ),
)
"""As a DGX A100: four nodes for each socket, and caches of four cores."""
HALF = TWO_SOCKETS._replace(allowed="10-40,122-130,60-75,170-200")
NODE_0 = TWO_SOCKETS._replace(allowed="0-55")
"""The cpuset of a container that leaves out the node of half the GPUs."""
NO_NUMA = Host({0: "0-7"}, [str(cpu) for cpu in range(8)], ["0-7"], ["0-7"], has_numa=False)
NO_GPUS = TWO_SOCKETS._replace(gpus=())
HYBRID = Host(
    nodes={0: "0-23"},
    cores=[*(f"{cpu},{cpu + 1}" for cpu in range(0, 16, 2)), *(str(cpu) for cpu in range(16, 24))],
    caches=["0-23"],
    sockets=["0-23"],
    gpus=(("0000:01:00.0", -1), ("0000:02:00.0", -1), ("0000:03:00.0", 0)),
)
"""Eight cores with two threads, and eight with one."""
OFFLINE = Host(
    nodes={0: "0-2,4-7,12-15", 1: "8-11"},
    cores=["0,12", "1,13", "2,14", "15", "4", "5", "6", "7", "8", "9", "10", "11"],
    caches=["0-2,12-15", "4-7", "8-11"],
    sockets=["0-2,4-7,12-15", "8-11"],
    gpus=(("0000:01:00.0", 0), ("0000:02:00.0", 1), ("0000:03:00.0", 0)),
)
"""Processor 3 is offline, and so are the second threads of some."""
