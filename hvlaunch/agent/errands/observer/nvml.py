"""NVIDIA's management library (NVML) by ctypes. nvml.h declares its functions and constants."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_int, c_uint, c_ulonglong, c_void_p

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional

__all__ = ["Library", "NoGpus", "NvmlError"]

# Bits of nvmlDeviceGetCurrentClocksThrottleReasons. Idle clocks and clocks that an administrator has set are no fault,
# so their bits are left out.
_THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}

_LIBRARY = "libnvidia-ml.so.1"
_MORE, _NO_FUNCTION = 7, 13  # NVML_ERROR_INSUFFICIENT_SIZE, NVML_ERROR_FUNCTION_NOT_FOUND
_TEMPERATURE_GPU, _UNCORRECTED, _SINCE_START, _XID = 0, 1, 0, 8
_JOINED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED
_CLOCK_SM = 1
_IDLE = 0x1  # of the throttle reasons
_MOST_PROCESSES = 256
_MOST_XIDS = 16
_NAME = 96


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class _ProcessV1(ctypes.Structure):
    _fields_ = (("pid", c_uint), ("used", c_ulonglong))


class _ProcessV2(ctypes.Structure):
    _fields_ = (
        ("pid", c_uint),
        ("used", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    )


class _Pci(ctypes.Structure):
    _fields_ = (
        ("old_name", c_char * 16),
        ("numbers", c_uint * 5),
        ("name", c_char * 32),
    )


class _Event(ctypes.Structure):
    _fields_ = (
        ("device", c_void_p),
        ("kind", c_ulonglong),
        ("data", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    )


class _FabricInfo(ctypes.Structure):
    _fields_ = (
        ("uuid", ctypes.c_ubyte * 16),
        ("status", c_uint),
        ("clique", c_uint),
        ("state", ctypes.c_ubyte),
    )


_PROCESSES = (
    ("nvmlDeviceGetComputeRunningProcesses_v3", _ProcessV2),
    ("nvmlDeviceGetComputeRunningProcesses_v2", _ProcessV2),
    ("nvmlDeviceGetComputeRunningProcesses", _ProcessV1),
)
# Names with a version first: an old library has the plain name alone.
_WAITS = ("nvmlEventSetWait_v2", "nvmlEventSetWait")


class NoGpus(Exception):
    """NVML can't be loaded, or does not fit the driver."""


class NvmlError(Exception):
    """A call of NVML has failed."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__("%s: NVML's error %d" % (function, code))
        self.code = code


class Library:
    """The initialised library. Raises NoGpus without a library, or if it does not fit its driver."""

    def __init__(self, path: str = _LIBRARY) -> None:
        try:
            self._nvml = ctypes.CDLL(path)
            self._call("nvmlInit_v2")
            self._devices = self._find_devices()
        except (OSError, NvmlError) as error:
            raise NoGpus(str(error)) from None
        self._events = c_void_p()
        self._xids: Dict[int, List[int]] = {}
        self._watch_xids()

    def read(self) -> List[Dict[str, Any]]:
        """Return the figures of all GPUs. Raises NvmlError if even their memory can't be read."""
        self._hear_xids()
        return [self._device(index, device) for index, device in enumerate(self._devices)]

    def clusters(self) -> List[str]:
        """Return the NVLink clusters with GPUs of this host; only clusters of several hosts have names."""
        names = set()
        for device in self._devices:
            info = _FabricInfo()
            is_read = self._tries("nvmlDeviceGetGpuFabricInfo", device, byref(info))
            if is_read and info.state == _JOINED and any(info.uuid):
                names.add("%s/%d" % (bytes(info.uuid).hex(), info.clique))
        return sorted(names)

    def driver_cuda(self) -> Optional[str]:
        """Return the newest version of CUDA that the driver can run."""
        version = c_int()
        if not self._tries("nvmlSystemGetCudaDriverVersion_v2", byref(version)):
            return None
        return "%d.%d" % (version.value // 1000, version.value % 1000 // 10)

    def health(self) -> List[Dict[str, Any]]:
        """Return the health of all GPUs; None for values unknown to a GPU."""
        return [self._health(device) for device in self._devices]

    def _health(self, device: c_void_p) -> Dict[str, Any]:
        memory, pci = _Memory(), _Pci()
        name = ctypes.create_string_buffer(_NAME)
        self._tries("nvmlDeviceGetMemoryInfo", device, byref(memory))
        self._tries("nvmlDeviceGetName", device, name, c_uint(_NAME))
        self._tries("nvmlDeviceGetPciInfo_v3", device, byref(pci))
        remapped = [c_uint() for _ in range(4)]
        has_remapping = self._tries("nvmlDeviceGetRemappedRows", device, *map(byref, remapped))
        _, _, is_pending, has_failed = (int(count.value) if has_remapping else None for count in remapped)
        reasons = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", device, c_ulonglong)
        kinds = c_uint(_UNCORRECTED), c_uint(_SINCE_START)
        return {
            "name": name.value.decode("utf-8", "replace"),
            "pci": pci.name.decode("ascii", "replace").lower(),
            "memory": memory.total,
            "memory_used": memory.used,
            "clock": self._maybe("nvmlDeviceGetClockInfo", device, c_uint(_CLOCK_SM)),
            "clock_set": self._maybe("nvmlDeviceGetApplicationsClock", device, c_uint(_CLOCK_SM)),
            "is_idle": bool(reasons & _IDLE),
            "slowed": [word for bit, word in _THROTTLES.items() if reasons & bit],
            "ecc": self._ecc(device),
            "ecc_errors": self._maybe("nvmlDeviceGetTotalEccErrors", device, *kinds, kind=c_ulonglong),
            "remap_pending": is_pending,
            "remap_failed": has_failed,
            "pcie_width": self._maybe("nvmlDeviceGetCurrPcieLinkWidth", device),
            "pcie_width_max": self._maybe("nvmlDeviceGetMaxPcieLinkWidth", device),
            "pcie_generation_max": self._maybe("nvmlDeviceGetMaxPcieLinkGeneration", device),
            "pids": self._pids(device),
        }

    def _ecc(self, device: c_void_p) -> Optional[bool]:
        current, pending = c_uint(), c_uint()
        if not self._tries("nvmlDeviceGetEccMode", device, byref(current), byref(pending)):
            return None
        return bool(current.value)

    def _maybe(self, function: str, device: c_void_p, *more: Any, kind: Any = c_uint) -> Optional[int]:
        """Read a number; None if this GPU lacks it."""
        number = kind()
        return int(number.value) if self._tries(function, device, *more, byref(number)) else None

    def read_one(self, index: int) -> Dict[str, Any]:
        """Return the figures of a GPU. Raises NvmlError."""
        return self._device(index, self._devices[index])

    def uuids(self) -> List[str]:
        """Return the names of all GPUs for CUDA_VISIBLE_DEVICES. Raises NvmlError."""
        names = []
        for device in self._devices:
            uuid = ctypes.create_string_buffer(_NAME)
            self._call("nvmlDeviceGetUUID", device, uuid, c_uint(_NAME))
            names.append(uuid.value.decode("ascii", "replace"))
        return names

    def _call(self, function: str, *arguments: Any) -> None:
        """Call a function. Raises NvmlError, also if an old library lacks the function."""
        try:
            code = getattr(self._nvml, function)(*arguments)
        except AttributeError:
            code = _NO_FUNCTION
        if code != 0:
            raise NvmlError(function, code)

    def _tries(self, function: str, *arguments: Any) -> bool:
        """Call a function; return True on success."""
        try:
            self._call(function, *arguments)
        except NvmlError:
            return False
        return True

    def _find_devices(self) -> List[c_void_p]:
        count = c_uint()
        self._call("nvmlDeviceGetCount_v2", byref(count))
        devices = [c_void_p() for _ in range(count.value)]
        for index, device in enumerate(devices):
            self._call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(device))
        return devices

    def _number(self, function: str, device: c_void_p, kind: Any, *more: Any) -> int:
        """Read a number; 0 if this GPU lacks it."""
        number = kind()
        return int(number.value) if self._tries(function, device, *more, byref(number)) else 0

    def _device(self, index: int, device: c_void_p) -> Dict[str, Any]:
        memory, utilization = _Memory(), _Utilization()
        name = ctypes.create_string_buffer(_NAME)
        self._call("nvmlDeviceGetMemoryInfo", device, byref(memory))
        self._call("nvmlDeviceGetName", device, name, c_uint(_NAME))
        self._tries("nvmlDeviceGetUtilizationRates", device, byref(utilization))  # with MIG there is none
        reasons = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", device, c_ulonglong)
        kinds = c_uint(_UNCORRECTED), c_uint(_SINCE_START)
        energy = self._maybe("nvmlDeviceGetTotalEnergyConsumption", device, kind=c_ulonglong)
        return {
            "index": index,
            "name": name.value.decode("utf-8", "replace"),
            "utilization": utilization.gpu / 100,
            "memory_used": memory.used,
            "memory_total": memory.total,
            "power": self._number("nvmlDeviceGetPowerUsage", device, c_uint) / 1000,
            "energy_joules": None if energy is None else energy / 1000,
            "temperature": self._number("nvmlDeviceGetTemperature", device, c_uint, c_uint(_TEMPERATURE_GPU)),
            "throttled": [word for bit, word in _THROTTLES.items() if reasons & bit],
            "ecc_errors": self._number("nvmlDeviceGetTotalEccErrors", device, c_ulonglong, *kinds),
            "xids": self._xids.get(device.value or 0, []),
            "pids": self._pids(device),
            "clock": self._maybe("nvmlDeviceGetClockInfo", device, c_uint(_CLOCK_SM)),
        }

    def _pids(self, device: c_void_p) -> List[int]:
        for function, kind in _PROCESSES:
            processes = (kind * _MOST_PROCESSES)()
            count = c_uint(_MOST_PROCESSES)
            try:
                self._call(function, device, byref(count), processes)
            except NvmlError as error:
                # A function that is missing here has an older name; too many processes fill the array all the same.
                if error.code != _MORE:
                    continue
            return [process.pid for process in processes[: min(count.value, _MOST_PROCESSES)]]
        return []

    def _watch_xids(self) -> None:
        self._tries("nvmlEventSetCreate", byref(self._events))
        for device in self._devices:
            self._tries("nvmlDeviceRegisterEvents", device, c_ulonglong(_XID), self._events)

    def _hear_xids(self) -> None:
        """Collect new Xid errors. NVML reports each once, so they are kept."""
        if not self._events.value:
            return
        # Bounded: a broken GPU may report errors faster than they are read.
        for _ in range(_MOST_XIDS):
            event = self._next_event()
            if event is None:
                return
            device, xid = event
            self._xids[device] = [*self._xids.get(device, ()), xid][-_MOST_XIDS:]

    def _next_event(self) -> Any:
        event = _Event()
        for function in _WAITS:
            try:
                self._call(function, self._events, byref(event), c_uint(0))
            except NvmlError as error:
                if error.code == _NO_FUNCTION:
                    continue
                return None
            return (event.device or 0, event.data) if event.kind & _XID else None
        return None
