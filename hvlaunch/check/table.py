"""The checks: every compared value, in the order of the table."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from hvlaunch.check import Check, Flaw, Level, Outlier, Show, Values, high, low, same, same_if_any
from hvlaunch.console.status import size_words

__all__ = ["CHECKS"]

_GIB = 1 << 30
_MIB = 1 << 20
_UNLIMITED = 1 << 62
_BRING = "--sync copies the project to all hosts"
_BUSY = _GIB
"""Bytes of a GPU's memory in use: a driver alone takes less."""


def _at(part: str, name: str) -> Callable[[Values], Any]:
    """Return a function for reading a value of a part."""
    return lambda values: values[part][name]


def _size(value: float) -> str:
    return "unlimited" if value >= _UNLIMITED else size_words(value)


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if abs(value) < 1 else f"{value:.1f} s"


def _number(value: float) -> str:
    return "unlimited" if value >= _UNLIMITED else f"{value:g}"


def _slots(values: Values) -> int:
    """Return the number of workers for the host: its slots, else one for each GPU."""
    return values["session"]["slots"] or len(values["gpus"]["gpus"] if values["gpus"] else ()) or 1


# Software


def _judge_program(value: str, _values: Values) -> Iterable[Flaw]:
    yield Flaw("error", value, "install it there, or name it by its path; --setup builds an environment")


def _judge_cuda(value: str, values: Values) -> Iterable[Flaw]:
    driver = values["gpus"] and values["gpus"]["driver_cuda"]
    # Within a major version, an older driver runs newer programs.
    if driver is not None and _major(value) > _major(driver):
        text = f"torch is built for CUDA {value}, and the driver runs CUDA {driver} at most"
        yield Flaw("error", text, "a newer driver, or a torch for an older CUDA")


def _major(version: str) -> int:
    number = version.partition(".")[0]
    return int(number) if number.isdigit() else 0


# The machine


def _cpus(values: Values) -> float:
    machine = values["machine"]
    quota = machine["cpu_quota"]
    return float(machine["cpus"] if quota is None else min(machine["cpus"], quota))


def _judge_cpus(value: float, values: Values) -> Iterable[Flaw]:
    slots = _slots(values)
    if value < min(slots, 1) or (value < slots and values["session"]["slots"]):
        yield Flaw(
            "warning",
            f"{value:g} processors for {slots} {'worker' if slots == 1 else 'workers'}",
            "fewer slots, or a higher limit of the cgroup (cpu.max) or the container",
        )


def _judge_available(value: int, values: Values) -> Iterable[Flaw]:
    slots = _slots(values)
    if value < slots * _GIB // 2:
        text = f"{_size(value)} of memory are free for {slots} {'worker' if slots == 1 else 'workers'}"
        yield Flaw(
            "error", text, "end other programs there, or raise the limit of the cgroup or the container"
        )


def _judge_nofile(value: int, _values: Values) -> Iterable[Flaw]:
    least, usual = 256, 1024
    if value < usual:
        remedy = "LimitNOFILE of sshd's service, or nofile in /etc/security/limits.conf"
        yield Flaw("error" if value < least else "warning", f"only {value} files may be open", remedy)


def _judge_memlock(value: int, values: Values) -> Iterable[Flaw]:
    if _ports(values) and value < 64 * _MIB:
        yield Flaw(
            "error",
            f"{_size(value)} may be locked, and InfiniBand needs more",
            "memlock unlimited in /etc/security/limits.conf, or LimitMEMLOCK of sshd's service",
        )


def _judge_shm(value: int, values: Values) -> Iterable[Flaw]:
    free = values["machine"]["shm_free"] or 0
    remedy = "docker run --shm-size=16g, or mount -o remount,size=16g /dev/shm"
    if free < 16 * _MIB:
        yield Flaw("error", f"{_size(free)} of shared memory are free", remedy)
    elif value <= 64 * _MIB:
        yield Flaw(
            "warning", f"{_size(value)} of shared memory are too little for data loaders and NCCL", remedy
        )


def _judge_commits(value: int, values: Values) -> Iterable[Flaw]:
    slots = _slots(values)
    if value < slots * values["machine"]["commit_least"]:
        workers = "worker" if slots == 1 else "workers"
        text = f"{_size(value)} of memory for commits are hardly enough for {slots} {workers}"
        yield Flaw("note", text, "a larger /dev/shm (docker run --shm-size=16g), or more memory")


# GPUs


def _gpus(name: str) -> Callable[[Values], Any]:
    """Return a function for reading a value of all GPUs; None for a host without GPUs."""
    return lambda values: [gpu[name] for gpu in values["gpus"]["gpus"]] or None


def _judge_count(value: int, values: Values) -> Iterable[Flaw]:
    slots = values["session"]["slots"]
    if slots and value and slots > value:
        text = f"{slots} slots, and {value} {'GPU' if value == 1 else 'GPUs'}"
        yield Flaw("warning", text, "as many slots as GPUs")


def _model(values: Values) -> str | None:
    return ", ".join(sorted({gpu["name"] for gpu in values["gpus"]["gpus"]})) or None


def _memory(values: Values) -> int | None:
    return min((gpu["memory"] for gpu in values["gpus"]["gpus"]), default=None)


def _generation(values: Values) -> int | None:
    numbers = [gpu["pcie_generation_max"] for gpu in values["gpus"]["gpus"]]
    return min((number for number in numbers if number is not None), default=None)


def _each(judge: Callable[[Mapping[str, Any]], Flaw | None]) -> Callable[[Any, Values], Iterator[Flaw]]:
    """Turn the judgement of a GPU into a judgement of all GPUs."""

    def judge_all(_value: Any, values: Values) -> Iterator[Flaw]:
        for index, gpu in enumerate(values["gpus"]["gpus"]):
            fault = judge(gpu)
            if fault is not None:
                yield fault._replace(text=f"GPU {index}: {fault.text}")

    return judge_all


def _judge_use(gpu: Mapping[str, Any]) -> Flaw | None:
    if not gpu["users"] and gpu["memory_used"] < _BUSY:
        return None
    users = "; ".join(gpu["users"]) or "a process that can't be seen from here"
    return Flaw(
        "error",
        f"{_size(gpu['memory_used'])} are in use by {users}",
        "wait for its end, or leave the GPU out by CUDA_VISIBLE_DEVICES",
    )


def _in_use(values: Values) -> str | None:
    gpus = values["gpus"]["gpus"]
    count = sum(bool(gpu["users"]) or gpu["memory_used"] >= _BUSY for gpu in gpus)
    return f"{count} of {len(gpus)}" if gpus else None


def _judge_ecc(gpu: Mapping[str, Any]) -> Flaw | None:
    if gpu["ecc_errors"]:
        return Flaw(
            "warning",
            f"{gpu['ecc_errors']} uncorrected ECC errors since the driver was loaded",
            "nvidia-smi -q -d ECC; reset the GPU, and replace it if they come back",
        )
    return None


def _judge_remapping(gpu: Mapping[str, Any]) -> Flaw | None:
    if gpu["remap_failed"]:
        return Flaw("error", "a row of its memory could not be remapped", "replace the GPU")
    if gpu["remap_pending"]:
        return Flaw("error", "a row of its memory waits to be remapped", "nvidia-smi --gpu-reset, or reboot")
    return None


_OWN_XIDS = (13, 31, 43, 45)
"""Xid errors caused by programs: foreign memory, and a stop by the user."""
_FATAL_XIDS = (48, 64, 74, 79, 95, 119, 120, 140)
"""Xid errors of hardware in need of a reset or a repair."""


def _judge_xids(gpu: Mapping[str, Any]) -> Flaw | None:
    xids = [xid for xid in gpu["xids"] if xid not in _OWN_XIDS]
    if not xids:
        return None
    is_fatal = not {*xids}.isdisjoint(_FATAL_XIDS)
    text = f"Xid {', '.join(map(str, xids))} since boot, in the kernel's log"
    return Flaw(
        "error" if is_fatal else "warning", text, "reset the GPU or reboot; replace it if they return"
    )


def _judge_slowdown(gpu: Mapping[str, Any]) -> Flaw | None:
    slowed = [reason for reason in gpu["slowed"] if reason not in ("power cap", "sync boost")]
    if not slowed:
        return None
    return Flaw("warning", f"slowed: {', '.join(slowed)}", "look at its cooling and power supply")


def _judge_pcie(gpu: Mapping[str, Any]) -> Flaw | None:
    width, most = gpu["pcie_width"], gpu["pcie_width_max"]
    if width is None or most is None or width >= most:
        return None
    return Flaw("warning", f"PCIe x{width} of x{most}", "seat the card anew; look at its riser and slot")


def _clocks(values: Values) -> Any:
    """Return the clocks of busy GPUs, and clocks set by an administrator: an idle GPU may take any."""
    clocks = [
        (gpu["name"], index, kind, gpu[kind])
        for index, gpu in enumerate(values["gpus"]["gpus"])
        for kind in ("clock", "clock_set")
        if gpu[kind] and not (kind == "clock" and gpu["is_idle"])
    ]
    return clocks or None


def _show_clocks(clocks: Any) -> str:
    numbers = sorted({clock for *_, clock in clocks})
    return f"{numbers[0]} MHz" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} MHz"


def _compare_clocks(values: Mapping[str, Any], _show: Show) -> Iterator[Outlier]:
    """Compare all GPUs of a model, on all hosts."""
    clocks: dict[tuple[str, str], list[int]] = {}
    for listed in values.values():
        for name, _, kind, clock in listed or ():
            clocks.setdefault((name, kind), []).append(clock)
    for host, listed in values.items():
        for name, index, kind, clock in listed or ():
            middle = median(clocks[name, kind])
            if clock < 0.7 * middle:
                yield Outlier(host, f"GPU {index}: {clock} MHz, and {middle:.0f} MHz in the middle of all")


# Files


_SPACE: Mapping[Level, int] = {"error": 16 * _MIB, "warning": _GIB}
_INODES: Mapping[Level, int] = {"error": 100, "warning": 1000}


def _judge_place(name: str, words: str, remedy: str) -> Callable[[Any, Values], Iterable[Flaw]]:
    def judge(_value: Any, values: Values) -> Iterator[Flaw]:
        place = values["files"][name]
        if place["problem"] is not None:
            yield Flaw("error", f"{words}: {place['problem']}", remedy)
            return
        if "ro" in (place["options"] or "").split(",") and name == "scratch":
            yield Flaw("error", f"{words} can't be written", "mount it for writing")
        for free, levels, text, remedy_of in (
            (place["free"], _SPACE, f"{words} has {_size(place['free'] or 0)} left", "remove files there"),
            (
                place["inodes_free"],
                _INODES,
                f"{words} has room for {place['inodes_free']} more files",
                "remove small files there: df -i",
            ),
        ):
            level = next(
                (level for level, least in levels.items() if free is not None and free < least), None
            )
            if level is not None:
                yield Flaw(level, text, remedy_of)

    return judge


def _mount(values: Values) -> str | None:
    place = values["files"]["cwd"]
    return None if place["type"] is None else str(place["type"])


def _script(values: Values) -> Any:
    """Return the script's hash, or why it can't be read."""
    files = values["files"]
    return files["script_problem"] or files["script"]


def _judge_script(value: str, values: Values) -> Iterable[Flaw]:
    if values["files"]["script_problem"] is not None:
        yield Flaw("error", f"the script can't be read: {value.lower()}", _BRING)


# The network


def _ports(values: Values) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the active RDMA ports, with the names of their adapters."""
    return [
        (adapter["name"], port)
        for adapter in values["network"]["fabric"]["adapters"]
        for port in adapter["ports"]
        if port["state"] == "ACTIVE"
    ]


def _rdma(values: Values) -> str | None:
    kinds = Counter((port["link"], port["rate"]) for _, port in _ports(values))
    words = [f"{number} x {link} {rate:g} Gbit/s" for (link, rate), number in sorted(kinds.items())]
    if not words and values["network"]["fabric"]["adapters"]:
        return "no active port"
    return ", ".join(words) or None


def _judge_rdma(_value: str, values: Values) -> Iterator[Flaw]:
    closed = [
        adapter["name"]
        for adapter in values["network"]["fabric"]["adapters"]
        if not adapter["is_open"] and any(port["state"] == "ACTIVE" for port in adapter["ports"])
    ]
    if closed:
        text = f"this user may not use {', '.join(closed)}, so NCCL takes TCP"
        yield Flaw("warning", text, "let the user's group use /dev/infiniband/uverbs*")


def _gids(values: Values) -> str | None:
    """Return the versions of RoCE and the InfiniBand subnets of the active ports."""
    kinds = set()
    for _, port in _ports(values):
        for gid in port["gids"]:
            is_roce = port["link"] == "Ethernet"
            kinds.add(gid["kind"].replace("IB/", "") if is_roce else f"subnet {gid['gid'][:19]}")
    return ", ".join(sorted(kinds)) or None


def _interface(values: Values) -> Mapping[str, Any]:
    name = values["network"]["interface"]
    return next(entry for entry in values["network"]["fabric"]["interfaces"] if entry["name"] == name)


def _proxies(values: Values) -> str | None:
    return ", ".join(f"{name}={value}" for name, value in values["network"]["proxies"].items()) or None


# The session


def _compare_clock(values: Mapping[str, Any], _show: Show) -> Iterator[Outlier]:
    offsets = {host: value for host, value in values.items() if value is not None}
    middle = median(offset for offset, _ in offsets.values()) if offsets else 0.0
    for host, (offset, error) in offsets.items():
        difference = offset - middle
        if abs(difference) > 1.0 + error:
            way = "ahead" if difference > 0 else "behind"
            text = (
                f"{_seconds(abs(difference))} {way} of the others"
                if difference > 0
                else f"{_seconds(-difference)} behind the others"
            )
            yield Outlier(host, f"{text} (± {_seconds(error)})")


def _clock(values: Values) -> Any:
    session = values["session"]
    return None if session["clock"] is None else (session["clock"], session["clock_error"])


CHECKS: tuple[Check, ...] = (
    Check(
        "start",
        _at("session", "start"),
        "seconds until hvlaunch's agent answered",
        _seconds,
        high(4, 5.0),
        remedy="look at its load, and at DNS and GSSAPI in sshd_config: UseDNS no",
    ),
    Check(
        "clock",
        _clock,
        "offset from this machine's clock, in seconds",
        lambda value: f"{_seconds(value[0])} (± {_seconds(value[1])})",
        _compare_clock,
        remedy="chronyc makestep, or timedatectl set-ntp true",
    ),
    Check(
        "program",
        _at("software", "missing"),
        "why the command's Python can't be started",
        judge=_judge_program,
    ),
    Check("python", _at("software", "python"), "version of the command's Python", compare=same, remedy="--setup, or one environment for all hosts"),
    Check("torch", _at("software", "torch"), "version of torch", compare=same, level="error", remedy="the same version on all hosts: --env uv, or --setup"),
    Check("cuda", _at("software", "cuda"), "version of CUDA that torch is built for", compare=same, remedy="the same build of torch on all hosts", judge=_judge_cuda),
    Check("nccl", _at("software", "nccl"), "version of NCCL's package", compare=same, level="error", remedy="the same build of torch on all hosts"),
    Check("driver", _at("software", "driver"), "version of NVIDIA's driver", compare=same, remedy="the same driver on all hosts"),
    Check("system", _at("software", "system"), "the operating system", compare=same, level="note"),
    Check("kernel", _at("machine", "kernel"), "version of the kernel", compare=same, level="note"),
    Check("architecture", _at("machine", "architecture"), "kind of processor", compare=same, level="error", remedy="hosts of one architecture"),
    Check("processor", _at("machine", "processor"), "model of the processor", compare=same, level="note"),
    Check("cpus", _cpus, "processors that workers may use", _number, low(0.75), remedy="look for limits of a cgroup or a container", judge=_judge_cpus),
    Check("load", lambda values: values["machine"]["load"] / values["machine"]["cpus"], "load of the last minute for each processor", lambda value: f"{value:.2g}", high(3, 1.5), remedy="look for other programs there: top"),
    Check("memory", _at("machine", "memory"), "memory in bytes", _size, low(0.75), remedy="look for limits of a cgroup or a container"),
    Check("available", _at("machine", "memory_available"), "free memory in bytes", _size, judge=_judge_available),
    Check("nofile", _at("machine", "nofile"), "limit of open files (ulimit -n)", _number, same, "note", judge=_judge_nofile),
    Check("memlock", _at("machine", "memlock"), "limit of locked memory in bytes (ulimit -l)", _size, same, "note", judge=_judge_memlock),
    Check("shm", _at("machine", "shm"), "size of /dev/shm in bytes", _size, low(0.5), remedy="docker run --shm-size=16g, or mount -o remount,size=16g /dev/shm", judge=_judge_shm),
    Check("commits", _at("machine", "commit_room"), "room for commits in bytes: half of what is free of memory and /dev/shm", _size, judge=_judge_commits),
    Check("gpus", lambda values: len(values["gpus"]["gpus"]), "number of GPUs", _number, same, remedy="nvidia-smi there; look for a GPU that has fallen off the bus: dmesg", judge=_judge_count),
    Check("gpu", _model, "models of the GPUs", compare=same, remedy="hosts with the same GPUs"),
    Check("gpu-memory", _memory, "memory of the smallest GPU in bytes", _size, low(0.9), remedy="hosts with the same GPUs"),
    Check("gpu-use", _in_use, "GPUs that are in use", judge=_each(_judge_use)),
    Check("gpu-ecc", _gpus("ecc"), "whether memory errors are corrected", lambda value: "on" if all(value) else "off", same, "note", judge=_each(_judge_ecc)),
    Check("gpu-rows", _gpus("remap_pending"), "rows of memory that wait to be remapped", lambda value: "good" if not any(value) else "wait", judge=_each(_judge_remapping)),
    Check("gpu-xid", _gpus("xids"), "Xid errors since boot, where the kernel's log can be read", lambda value: "none" if not any(value) else "some", judge=_each(_judge_xids)),
    Check("gpu-clock", _clocks, "clocks in MHz", _show_clocks, _compare_clocks, remedy="nvidia-smi -q -d CLOCK,PERFORMANCE; nvidia-smi -rgc and -rac undo limits"),
    Check("gpu-slowdown", _gpus("slowed"), "reasons for a slower clock", lambda value: "none" if not any(value) else "some", judge=_each(_judge_slowdown)),
    Check("gpu-pcie", _generation, "generation of PCIe", lambda value: f"generation {value}", same, remedy="look at the slot, and at the settings of the firmware", judge=_each(_judge_pcie)),
    Check("cwd", lambda values: values["files"]["cwd"]["free"] or 0, "free bytes in the working directory", _size, judge=_judge_place("cwd", "the working directory", "--cwd DIR, or --sync, which copies the project to the hosts")),
    Check("mount", _mount, "file system of the working directory", compare=same, remedy="mount the same file system on all hosts, or use --sync"),
    Check("script", _script, "hash of the script", lambda value: value[:12], same_if_any, "error", _BRING, _judge_script),
    Check("code", _at("files", "code"), "hash of the Python files below the working directory, unless they are many", lambda value: value[:12], same_if_any, remedy=_BRING),
    Check("commit", _at("files", "commit"), "commit of the git work tree", compare=same_if_any, level="note"),
    Check("open", _at("session", "open"), "seconds to open the script, on all hosts at once", _seconds, high(10, 0.5), remedy="look at the file server; --sync copies the project to local disks"),
    Check("scratch", lambda values: values["files"]["scratch"]["free"] or 0, "free bytes in the job's private directory", _size, judge=_judge_place("scratch", "the directory for temporary files", "make it writable, or set TMPDIR there")),
    Check("interface", _at("network", "interface"), "interface that the host was reached by", compare=same_if_any, level="note"),
    Check("mtu", lambda values: _interface(values)["mtu"], "MTU of the interface", _number, same_if_any, remedy="ip link set dev NAME mtu N, the same on all hosts and switches"),
    Check("speed", lambda values: _interface(values)["speed"], "speed of the interface in Gbit/s", lambda value: f"{value:g} Gbit/s", low(0.9), remedy="look at cable and switch: ethtool NAME"),
    Check("rdma", _rdma, "active InfiniBand and RoCE ports", compare=same, remedy="look at the cable and the switch's port: ibstat, or rdma link", judge=_judge_rdma),
    Check("gids", _gids, "versions of RoCE, and InfiniBand subnets", compare=same, level="error", remedy="the same version and subnet on all hosts; NCCL_IB_ROCE_VERSION_NUM=2 asks for RoCE v2"),
    Check("proxies", _proxies, "variables such as https_proxy", compare=same, remedy="set them on all hosts or on none, and the hosts' names in no_proxy"),
)  # fmt: skip
"""To add a check, add an entry: how to read the value of a host, and how to show, compare and judge it."""
