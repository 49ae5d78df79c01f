"""The GPUs of this host and their health."""

from __future__ import annotations

import os

from hvlaunch.agent.proc import command_of
from hvlaunch.agent.wire.frames import flag, or_null, plain, record, several, text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional

__all__ = ["SHAPE", "read"]

_COUNT = or_null(whole(0, 1 << 62))
_MOST_GPUS, _MOST_USERS = 64, 16
SHAPE = record(
    {
        "problem": or_null(text(300)),  # why there are none, with a library but no GPUs
        "driver_cuda": or_null(text(64)),  # the newest CUDA that the driver can run
        "gpus": several(
            record(
                {
                    "name": text(96),
                    "memory": whole(0, 1 << 62),
                    "memory_used": whole(0, 1 << 62),
                    "users": several(text(300), _MOST_USERS),  # processes of others
                    "clock": _COUNT,  # MHz of its processors
                    "clock_set": _COUNT,
                    "is_idle": flag,
                    "slowed": several(text(64), 16),
                    "ecc": or_null(flag),
                    "ecc_errors": _COUNT,
                    "remap_pending": _COUNT,
                    "remap_failed": _COUNT,
                    "xids": several(whole(0, 1 << 16), 16),
                    "pcie_width": _COUNT,
                    "pcie_width_max": _COUNT,
                    "pcie_generation_max": _COUNT,
                }
            ),
            _MOST_GPUS,
        ),
    }
)
_KERNEL_LOG = "/dev/kmsg"
_XID = r"(?i)NVRM: Xid \(PCI:([0-9a-f:.]+)\): (\d{1,4})\b"
_LIBRARY = "libnvidia-ml.so.1"
_MOST_RECORDS = 100000


def read(
    arguments: Dict[str, Any],  # noqa: ARG001 (every part has them)
    library: Any = None,
    kernel_log: str = _KERNEL_LOG,
) -> Dict[str, Any]:
    """Return the part; no GPUs on a host without NVIDIA's library. `library` replaces NVML."""
    absence = None if library is not None else _absence()
    if absence is not None:
        # A host without the driver is no news: only the comparison with others tells.
        return _none(absence)
    from hvlaunch.agent.errands.observer.nvml import Library, NoGpus  # noqa: PLC0415 (the driver needs no ctypes)

    try:
        nvml = library or Library(_LIBRARY)
    except NoGpus as error:
        return _none(str(error))
    xids = _xids(kernel_log)
    gpus = [_gpu(health, xids) for health in nvml.health()]
    return {"problem": None, "driver_cuda": nvml.driver_cuda(), "gpus": gpus[:_MOST_GPUS]}


def _absence() -> Optional[str]:
    """Return why NVIDIA's library can't be loaded; None if it can."""
    # The module above this one takes 3 ms, and most hosts without GPUs have no such library.
    try:
        import _ctypes  # noqa: PLC0415 (some builds of Python lack it)

        _ctypes.dlopen(_LIBRARY, 0)
    except (ImportError, AttributeError):
        return None  # as above: nvml tells
    except OSError as error:
        return str(error)
    return None


def _none(problem: str) -> Dict[str, Any]:
    return {"problem": plain(problem, 300), "driver_cuda": None, "gpus": []}


def _gpu(health: Dict[str, Any], xids: Dict[str, List[int]]) -> Dict[str, Any]:
    users = [plain(_user(pid), 300) for pid in health.pop("pids")]
    pci = _bus(health.pop("pci"))
    return dict(
        health,
        name=plain(health["name"], 96),
        users=users[:_MOST_USERS],
        xids=sorted(set(xids.get(pci, ())))[:16],
    )


def _bus(pci: str) -> str:
    """Return bus and device of `00000000:17:00.0`, of which the kernel's messages have fewer digits of the domain."""
    return ":".join(pci.lower().partition(".")[0].split(":")[-2:])


def _xids(path: str) -> Dict[str, List[int]]:
    """Return the Xid errors since boot by bus and device, as far as the kernel lets this user read its log."""
    import re  # noqa: PLC0415 (5 ms, and only for hosts with GPUs)

    xids: Dict[str, List[int]] = {}
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return xids
    try:
        for _ in range(_MOST_RECORDS):
            try:
                # Each read is one message of the kernel.
                data = os.read(log, 8192)
            except BrokenPipeError:
                continue  # messages were overwritten meanwhile
            if not data:
                break
            for bus, number in re.findall(_XID, data.decode("utf-8", "replace")):
                xids.setdefault(_bus(bus), []).append(int(number))
    except OSError:
        pass  # the end of the messages
    finally:
        os.close(log)
    return xids


def _user(pid: int) -> str:
    """Return user, pid and command of a process."""
    import pwd  # noqa: PLC0415 (as re)

    try:
        uid = os.stat("/proc/%d" % pid).st_uid
    except OSError:
        return "pid %d, which this host does not show" % pid
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = "user %d" % uid
    return "%s, pid %d: %s" % (name, pid, command_of(pid))
