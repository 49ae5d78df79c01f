"""Diagnosis: why a worker failed, and what to try, from how it ended and its last words."""

import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from signal import SIGABRT, SIGBUS, SIGFPE, SIGHUP, SIGILL, SIGINT, SIGKILL, SIGSEGV, SIGTERM
from typing import Literal

from hvlaunch.job import WorkerExit
from hvlaunch.report.evidence import Evidence

__all__ = ["Kind", "Role", "advice", "exception", "kind", "role", "sought", "start_advice"]

Kind = Literal[
    "not started",
    "host memory",
    "gpu memory",
    "missing module",
    "missing file",
    "port taken",
    "disk full",
    "timeout",
    "lost connection",
    "exception",
    "signal",
    "exit code",
]
"""Why a worker failed. The last three kinds are used if nothing more specific is known."""

Role = Literal[
    "cause", "failed", "consequence", "stopped", "finished", "not started", "never started", "unknown"
]
"""A worker's part in the job's end: first cause, own failure, consequence of another failure, …"""

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_MODULE = re.compile(r"No module named '?([A-Za-z_][\w.]*)")
_FILE = re.compile(r"(?:No such file or directory: |can't open file )'([^']+)'")
_LAST_WORDS: Mapping[Kind, re.Pattern[str]] = {
    "gpu memory": re.compile(
        r"(?:CUDA|HIP|XPU)(?: error:)? out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY"
    ),
    "host memory": re.compile(r"\bMemoryError|bad_alloc|[Cc]annot allocate memory|can't allocate memory"),
    "missing module": re.compile(rf"{_MODULE.pattern}|error while loading shared libraries"),
    "missing file": re.compile(rf"FileNotFoundError|{_FILE.pattern}|: No such file or directory"),
    "disk full": re.compile("No space left on device"),
    "timeout": re.compile(
        r"(?i)timed out waiting|watchdog caught collective operation timeout|nccl operation timed out|failed timed out after"
        r"|work timed out during finalize|socket timeout|socket has timed out"
        r"|wait timeout|barrier timed out|passed? monitoredbarrier"
    ),
}
"""In order of precedence: of several errors of NCCL or CUDA, the more specific text wins."""


def kind(worker: WorkerExit, evidence: Evidence) -> Kind:
    """Return the most specific kind of failure that the evidence supports."""
    if worker.not_started is not None or worker.exit_code in (_NOT_EXECUTABLE, _NOT_FOUND):
        return "not started"
    # Before the signal: the kernel ends a process for want of memory by SIGKILL.
    if worker.oom_killed:
        return "host memory"
    if worker.port_taken_by is not None:
        return "port taken"
    # SIGABRT often follows an error whose text says more than the signal.
    if worker.signal is not None and worker.signal != SIGABRT and not worker.stopped:
        return "signal"
    words = "\n".join(evidence.verdict)
    if (named := next((name for name, text in _LAST_WORDS.items() if text.search(words)), None)) is not None:
        return named
    if evidence.has_lost_connection:
        return "lost connection"
    if evidence.has_traceback:
        return "exception"
    return "exit code" if worker.signal is None else "signal"


def exception(evidence: Evidence) -> str | None:
    """Return the first line of the exception's message, if there is a traceback."""
    return evidence.verdict[0] if evidence.has_traceback and evidence.verdict else None


def sought(words: str) -> tuple[Literal["module", "file"], str] | None:
    """Return the module or file that a worker did not find, by its last words."""
    for noun, pattern in (("module", _MODULE), ("file", _FILE)):
        if matches := [*pattern.finditer(words)]:
            return ("module" if noun == "module" else "file"), matches[-1][1].rstrip(".")
    return None


def role(worker: WorkerExit, cause: WorkerExit | None, evidence: Evidence | None) -> Role:
    """Return what this worker's end had to do with the job's end."""
    if worker is cause:
        return "cause"
    if worker.not_started is not None:
        return "not started"
    if worker.ok:
        return "finished"
    if worker.stopped:
        return "stopped"
    has_lost = evidence is not None and evidence.has_lost_connection
    return "consequence" if has_lost or worker.look == "consequence" else "failed"


_SERVICE = re.compile(
    r"^hvlaunch: ([\w.+-]+)(?:: No such file or directory$| .*has ended before the command$)"
)
"""Messages of agent/services about a program missing on its host."""
_NO_FILE = "FileNotFoundError|can't open file|No such file or directory"
_ITS_PATH = re.compile(r"(?<= )'([^']+)'|([^\s:']+): No such file or directory")

_TEXTS = (
    (
        # Horovod's own words, in horovod/common/gloo/http_store.cc.
        "HTTP request failed",
        "--horovod, if these are Horovod's workers: they can't send the job's token",
    ),
    (
        "CUDA out of memory|OutOfMemoryError|CUDA error: out of memory",
        "a smaller batch; on {host}, nvidia-smi shows who else uses the GPU",
    ),
    (
        "MemoryError|bad_alloc|Cannot allocate memory|can't allocate memory",
        "a smaller batch, fewer workers on {host} or fewer data loader processes; free -h there shows its memory",
    ),
    (
        "shared memory|/dev/shm",
        "a larger /dev/shm on {host} (containers: --shm-size, --ipc=host), or DataLoader(num_workers=0)",
    ),
    (
        r"DataLoader worker \(pid",
        "DataLoader(num_workers=0) to see its own error; dmesg -T | grep -i oom on {host} if it was killed",
    ),
    ("No space left on device", "df -h on {host}; /dev/shm and the temporary directory count too"),
    ("Too many open files", "a higher limit of open files on {host} (ulimit -n)"),
    (
        "Address already in use|EADDRINUSE",
        (
            "another port for the script; ss -ltnp on {host} shows which process uses this one. At MASTER_PORT, which is kept "
            "for rank 0, a socket of the script's own needs SO_REUSEADDR"
        ),
    ),
    (
        "ModuleNotFoundError|ImportError|error while loading shared libraries",
        "install what is missing on {host} too, in the script's environment there (or -x PYTHONPATH=…, LD_LIBRARY_PATH)",
    ),
    (
        _NO_FILE,
        "the file must be on {host} too, under the same path (a shared directory, rsync, or --cwd)",
    ),
    (
        "invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device|Duplicate GPU detected",
        "no more slots on {host} than nvidia-smi shows GPUs there, and torch.cuda.set_device(LOCAL_RANK)",
    ),
    (
        "device-side assert triggered|illegal memory access|CUDA error: (?:misaligned address|unspecified launch failure)",
        "-x CUDA_LAUNCH_BLOCKING=1, for a traceback that ends at the line: often an index or a label is out of range",
    ),
    (
        "uncorrectable ECC error|CUDA error: unknown error|fallen off the bus|GPU is lost",
        "nvidia-smi -q -d ECC and dmesg -T | grep -i xid on {host}: the GPU may be broken; --exclude {host}",
    ),
    (
        "CUDA-capable device.* busy or unavailable",
        "nvidia-smi on {host} shows who else uses the GPU, and whether its compute mode lets only one process have it",
    ),
    (
        "no kernel image is available for execution|driver version is insufficient|driver on your system is too old",
        "nvidia-smi on {host} shows its GPU, its driver and the newest CUDA for that: the script's packages are made for others",
    ),
    (
        "in Lightning, but the product .* does not match the world size",
        "Trainer(devices=…, num_nodes=…) from LOCAL_WORLD_SIZE and GROUP_WORLD_SIZE, or that many slots and hosts",
    ),
    (
        "terminate called without an active exception",
        'see docs/guides/frameworks.md, "The end of a script with Gloo": a thread of torch was still working when Python ended',
    ),
)

_LOCAL = "localhost"
_A_PATH = "check the path; a relative one starts at the working directory (--cwd)"
_LOCAL_TEXTS: tuple[tuple[str, str], ...] = (
    (
        "ModuleNotFoundError|ImportError|error while loading shared libraries",
        "install what is missing in the script's environment (or -x PYTHONPATH=…, LD_LIBRARY_PATH)",
    ),
    (_NO_FILE, _A_PATH),
)
"""These come first for a worker on this machine, because no other host exists to compare with."""

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=\S*(?=: command not found)")
_QUOTED_COMMAND = re.compile(r".* .*: command not found")

_FAULTHANDLER = "-x PYTHONFAULTHANDLER=1, which prints the Python stack at the crash"
_SIGNALS: dict[int, str] = {
    SIGSEGV: _FAULTHANDLER,
    SIGABRT: _FAULTHANDLER + "; the lines above may say why it aborted",
    SIGFPE: _FAULTHANDLER,
    SIGBUS: "df -h /dev/shm on {host}: it is often full when a process gets SIGBUS; or " + _FAULTHANDLER,
    SIGILL: "packages built for the CPU of {host}, which lacks an instruction that these use",
    SIGKILL: "dmesg -T | grep -i -e oom -e killed on {host}: SIGKILL came from outside hvlaunch, mostly because"
    " memory ran out, or from a scheduler",
    SIGTERM: "look at the logs of {host} and its scheduler: SIGTERM came from outside hvlaunch, mostly for a time limit or a shutdown",
    SIGINT: "look at the logs of {host}: SIGINT came from outside hvlaunch",
    SIGHUP: "look at the logs of {host}: SIGHUP came from outside hvlaunch",
}


def advice(
    worker: WorkerExit, evidence: Evidence, exists: Callable[[str], bool] = os.path.exists
) -> str | None:
    """Return one specific thing to try, or None if reading the evidence is the best advice.

    `exists` tells whether this machine has a file.
    """
    text = _advice(worker, evidence, exists)
    return text.replace("{host}", worker.host) if text is not None else None


def _is_nowhere(line: str, exists: Callable[[str], bool]) -> bool:
    """Return True if this machine lacks the missing file too, as far as the line names it."""
    path = _ITS_PATH.search(line)
    return path is not None and not exists(path[1] or path[2])


def start_advice(worker: WorkerExit, which: Callable[[str], str | None] = shutil.which) -> str | None:
    """Return what to try if the command could not be started. `which` finds it on this machine."""
    cause = worker.not_started or ""
    if variable := _ASSIGNMENT.match(cause):
        return f"-x {variable[0]}, before the command"
    if _QUOTED_COMMAND.match(cause):
        return (
            "the command and its arguments as separate words, without quotes around all of them; or sh -c '…'"
        )
    if worker.code == _NOT_FOUND:
        return _not_found(cause.partition(": command not found")[0], worker.host, which)
    if "permission denied" in cause:
        return "chmod +x, or put the interpreter before it (python train.py)"
    if "resource temporarily unavailable" in cause:
        return "fewer slots on that host, or a higher limit on processes (ulimit -u there)"
    return None


def _not_found(program: str, host: str, which: Callable[[str], str | None]) -> str:
    here = which(program)
    if program.endswith(".py") and host != _LOCAL:
        return f"python {shlex.quote(program)}, if that host has the file"
    if "/" in program or program.endswith(".py"):
        return _A_PATH if here is None else "install it on that host too, under the same path"
    if which(f"./{program}") is not None:
        return f"./{program}"
    if here is None:
        return "check the spelling; a program outside PATH needs its path (./train in the working directory)"
    return f"install it on that host too (on this machine it is {here}), or a PATH that has it (-x PATH=…)"


def _advice(worker: WorkerExit, evidence: Evidence, exists: Callable[[str], bool]) -> str | None:
    if worker.oom_killed:
        return "a smaller batch, fewer workers on {host} (host:slots), or more memory there (a container's limit counts)"
    if worker.port_taken_by is not None:
        return (
            "the same again, which takes another port; against a user of {host} who takes ports on purpose,"
            ' init_method="hvlaunch://" or hvlaunch.torch, which need no MASTER_PORT'
        )
    # Exit codes come before texts: stderr may quote an older error.
    if worker.exit_code == _NOT_FOUND:
        # A preset's service has no place in the user's command where its path could be.
        if services := [name for line in evidence.lines for name in _SERVICE.findall(line)]:
            return f"install {services[0]} on {{host}}, or a PATH that has it (-x PATH=…)"
        return "the command's full path, or a PATH that has it on {host} (-x PATH=…)"
    if worker.exit_code == _NOT_EXECUTABLE:
        return "chmod +x on {host}, or put the interpreter before it (python train.py)"
    # Workers behind a shell report a signal as 128 + n.
    number = worker.exit_code - 128
    if number in _SIGNALS and number != SIGABRT and not worker.stopped:
        return _SIGNALS[number]
    # The last line first: earlier lines are often general.
    for line in reversed(evidence.verdict):
        for pattern, text in (*(_LOCAL_TEXTS if worker.host == _LOCAL else ()), *_TEXTS):
            if re.search(pattern, line):
                return _A_PATH if pattern == _NO_FILE and _is_nowhere(line, exists) else text
    if evidence.has_lost_connection:
        return (
            "-x NCCL_DEBUG=INFO, or -x TORCH_CPP_LOG_LEVEL=INFO, to see its connections; and check the network between"
            " the hosts (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, a firewall)"
        )
    if number == SIGABRT and not evidence.has_traceback:
        return _SIGNALS[SIGABRT]
    # torchrun's way to report errors: without @record a worker's error goes elsewhere.
    if worker.code == 1 and not evidence.lines:
        return (
            "@record of torch.distributed.elastic.multiprocessing.errors on the script's main(): it wrote nothing"
            " to stderr, and with @record its traceback is shown here"
        )
    return None
