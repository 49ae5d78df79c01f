"""Stacks of this host's workers, by the best means on the host.

py-spy reads Python's stacks from outside, without stopping the process. Else faulthandler writes them, if the process
has registered its signal (hvlaunch/torch/__init__.py). Else the kernel tells where it holds the process.
"""

from __future__ import annotations

import glob
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
import zlib

from hvlaunch.agent.proc import command_of, descendants, parents, read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO, Dict, List, Optional, Sequence, Tuple

    Stack = Dict[str, Any]
    Frame = List[Any]
    from typing import Dict, List

__all__ = [
    "STACK_SIGNAL",
    "Search",
    "answer",
    "find_py_spy",
    "packed",
    "shortened",
    "take_py_spy",
    "take_stacks",
]


STACK_SIGNAL = signal.SIGRTMIN + 11
"""As in hvlaunch/torch/__init__.py."""
_MOST_PROCESSES = 1024
_MOST_THREADS = 64
_MOST_FRAMES = 128
_MOST_LINES = 1 << 30
_CUTS = ((_MOST_THREADS, _MOST_FRAMES), (8, 64), (2, 32), (1, 16), (1, 4))
"""Numbers of threads per process, and of innermost frames per thread, tried until the answer is short enough."""
_LONGEST_NAME = 256
_LONGEST_PATH = 1024
_AT_ONCE = 2 * (os.cpu_count() or 1)
_WRITTEN = 0.02
"""Seconds of silence after which faulthandler has written everything."""
_LOOK = 0.005
_TRIES = 3
_READ = 1 << 16
_MOST_OUTPUT = 8 << 20
# Functions at the bottom of every kernel stack: they say nothing about the wait.
_ENTRIES = (
    "entry_",
    "do_syscall",
    "el0",
    "invoke_syscall",
    "ret_from",
    "__do_sys",
    "__x64_sys",
    "__arm64_sys",
)
_MOST_ANSWER = 2 << 20
_MOST_PROGRAM = 64 << 20
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"


def answer(question: Dict[str, Any]) -> Dict[str, Any]:
    """Take the stacks of `workers` (rank and pid). `lacks` is the architecture of a host without py-spy.

    If a file or module is `sought` (kind and name), `has` tells if this host has it.
    """
    deadline = time.monotonic() + question["seconds"]
    # The search runs while stacks are taken: both have the same time.
    search = _search(question)
    py_spy = find_py_spy(question["scratch"], sys.executable)
    workers = [(rank, pid) for rank, pid in question["workers"]]
    seconds, native = question["seconds"], question["native"]
    stacks = take_stacks(workers, seconds, question["scratch"], py_spy, native=native)
    lacks = None if py_spy else os.uname().machine
    message = {**packed(shortened(stacks, _MOST_ANSWER)), "lacks": lacks}
    return message if search is None else {**message, "has": search.result(deadline)}


def _search(question: Dict[str, Any]) -> Optional[Search]:
    """Begin to look for the file or module that another host lacked, with the Python of a worker here if possible."""
    if "sought" not in question:
        return None
    trees = descendants([pid for _, pid in question["workers"]], parents())
    pids = [pid for tree in trees.values() for pid in tree]
    kind, name = question["sought"]
    return Search(kind, name, next(filter(_is_python, pids), pids[0])) if pids else None


def take_py_spy(question: Dict[str, Any]) -> Dict[str, Any]:
    """Store the py-spy that came with the question in the job's directory. Raises OSError, zlib.error."""
    program = zlib.decompressobj().decompress(question["data"], _MOST_PROGRAM)
    path = os.path.join(question["scratch"], "py-spy")
    # Exclusive and without links: the file will be run.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(path + ".part", flags, 0o700), "wb") as file:
        file.write(program)
    os.rename(path + ".part", path)
    return {}


def find_py_spy(scratch: str, python: str) -> Optional[str]:
    """Find py-spy: the host's own on the PATH, beside this Python, or the program from the driver."""
    beside = os.path.join(os.path.dirname(python), "py-spy")
    for path in (shutil.which("py-spy"), beside, os.path.join(scratch, "py-spy")):
        if path is not None and os.access(path, os.X_OK):
            return path
    return None


def take_stacks(
    workers: Sequence[Tuple[int, int]],
    seconds: float,
    scratch: str,
    py_spy: Optional[str],
    *,
    native: bool = False,
) -> List[Stack]:
    """Take the stacks of these workers (rank and pid) and their descendants, within so many seconds.

    `native` adds frames of C and C++, for which each process is stopped for a moment.
    """
    deadline = time.monotonic() + seconds
    ranks = {pid: rank for rank, pid in workers}
    trees = descendants(ranks, parents())
    stacks = [_of_kernel(ranks[root], pid, root) for root, tree in trees.items() for pid in tree][
        :_MOST_PROCESSES
    ]
    pythons = [stack for stack in stacks if _is_python(stack["pid"])]
    if py_spy is not None:
        _Spying(py_spy, native).run(pythons, deadline)
    else:
        for stack in pythons:
            stack["problem"] = "no py-spy there; pip install 'hvlaunch[stacks]' where hvlaunch runs"
    _by_faulthandler([stack for stack in pythons if stack["source"] == "kernel"], scratch, deadline)
    return stacks


def shortened(stacks: List[Stack], most: int) -> List[Stack]:
    """Shorten the stacks to this many characters of JSON: fewer threads, then fewer frames, then fewer processes."""
    for threads, frames in _CUTS:
        for stack in stacks:
            stack["threads"] = stack["threads"][:threads]
            for thread in stack["threads"]:
                thread["frames"] = thread["frames"][-frames:]
        # The innermost frames say what a thread waits for, so the outermost go first.
        if len(json.dumps(stacks)) <= most:
            return stacks
    # Children go first: the workers' own processes say most.
    stacks.sort(key=lambda stack: bool(stack["is_child"]))
    while len(json.dumps(stacks)) > most:
        del stacks[len(stacks) // 2 :]
    return stacks


def packed(stacks: Sequence[Stack]) -> Dict[str, Any]:
    """Replace threads by numbers, so each thread travels once. Most ranks do the same."""
    numbers: Dict[str, int] = {}
    threads: List[Stack] = []
    entries = []
    for stack in stacks:
        own_numbers = []
        for thread in stack["threads"]:
            number = numbers.setdefault(json.dumps(thread), len(numbers))
            if number == len(threads):
                threads.append(thread)
            own_numbers.append(number)
        entries.append(dict(stack, threads=own_numbers))
    return {"threads": threads, "stacks": entries}


def _is_python(pid: int) -> bool:
    try:
        name = os.path.basename(os.readlink("/proc/%d/exe" % pid))
    except OSError:
        return (read_text("/proc/%d/comm" % pid) or "").startswith("python")
    return name.startswith(("python", "pypy")) or "/libpython" in (read_text("/proc/%d/maps" % pid) or "")


# The kernel


def _of_kernel(rank: int, pid: int, root: int) -> Stack:
    """Read the kernel's view of each thread, as far as it tells."""
    threads = []
    try:
        tids = sorted(os.listdir("/proc/%d/task" % pid), key=int)
    except OSError:
        tids = []
    for tid in tids[:_MOST_THREADS]:
        at = "/proc/%d/task/%s" % (pid, tid)
        threads.append(
            {
                "name": _plain((read_text(at + "/comm") or "?").strip(), _LONGEST_NAME),
                "is_python": False,
                "frames": _kernel_frames(at),
            }
        )
    return {
        "rank": rank,
        "pid": pid,
        "command": command_of(pid),
        "is_child": pid != root,
        "source": "kernel",
        "problem": None,
        "threads": threads,
    }


def _kernel_frames(at: str) -> List[Frame]:
    """Return the kernel stack if it is readable (by root), else the waiting function, else the running program."""
    stack = [
        line.split()[-1].partition("+")[0]
        for line in (read_text(at + "/stack") or "").splitlines()
        if line.strip()
    ]
    waits = (read_text(at + "/wchan") or "").strip()
    stack = [name for name in stack if not name.startswith(_ENTRIES)]
    names = stack[::-1] or ([waits] if waits not in ("", "0") else [])
    if not names:
        state = (read_text(at + "/stat") or ")").rpartition(")")[2].split()[:1]
        names = [{"R": "running", "T": "stopped", "t": "traced", "Z": "ended"}.get("".join(state), "waiting")]
    return [[_plain(name, _LONGEST_NAME), "", 0] for name in names[:_MOST_FRAMES]]


# py-spy


class _Spying:
    """Runs several py-spy at a time, a process each. Their answers replace the kernel's view."""

    def __init__(self, py_spy: str, native: bool) -> None:
        # Without --nonblocking it stops the process for a moment, which its frames of C need.
        self._command = [py_spy, "dump", "--json", *(["--native"] if native else ["--nonblocking"]), "--pid"]
        self._selector = selectors.DefaultSelector()
        # Keyed by the descriptor of its output: process, stack, output so far, number of the try.
        self._running: Dict[int, Tuple[subprocess.Popen[bytes], Stack, bytearray, int]] = {}

    def run(self, stacks: Sequence[Stack], deadline: float) -> None:
        """Run py-spy for these stacks. Stacks without an answer before the deadline keep the kernel's view."""
        waiting = [(stack, 1) for stack in stacks][::-1]
        try:
            while (waiting or self._running) and time.monotonic() < deadline:
                while waiting and len(self._running) < _AT_ONCE:
                    self._start(*waiting.pop())
                for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                    again = self._read(key.fd)
                    if again is not None:
                        waiting.append(again)
        finally:
            late = [stack for _, stack, _, _ in self._running.values()] + [stack for stack, _ in waiting]
            for process, _, _, _ in self._running.values():
                process.kill()
                process.wait()
                process.stdout.close()  # type: ignore[union-attr]
            self._selector.close()
        for stack in late:
            stack["problem"] = stack["problem"] or "py-spy was not ready in time"

    def _start(self, stack: Stack, number: int) -> None:
        try:
            process = subprocess.Popen(
                [*self._command, str(stack["pid"])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                close_fds=True,
            )
        except OSError as error:
            stack["problem"] = "py-spy does not start: %s" % (error.strerror or error)
            return
        fd = process.stdout.fileno()  # type: ignore[union-attr]
        self._running[fd] = process, stack, bytearray(), number
        self._selector.register(fd, selectors.EVENT_READ)

    def _read(self, fd: int) -> Optional[Tuple[Stack, int]]:
        """Read more of its output; return the process if py-spy has to try again."""
        process, stack, output, number = self._running[fd]
        data = os.read(fd, _READ)
        output += data
        if data and len(output) < _MOST_OUTPUT:
            return None
        self._selector.unregister(fd)
        del self._running[fd]
        process.stdout.close()  # type: ignore[union-attr]
        if process.wait() == 0 and _take(stack, bytes(output)):
            return None
        stack["problem"] = _why_not(stack["pid"], output.decode("utf-8", "replace"))
        # A process that changes while it is read gives nonsense: another try mostly succeeds.
        is_torn = "ermission" not in stack["problem"] and number < _TRIES  # it changed while it was read
        return (stack, number + 1) if is_torn and os.path.exists("/proc/%d" % stack["pid"]) else None


def _take(stack: Stack, output: bytes) -> bool:
    """Take py-spy's output; return True if it has the expected form."""
    try:
        threads = json.loads(output)
        by_order = [
            (
                thread["os_thread_id"] != stack["pid"],
                _thread(thread["thread_name"] or "MainThread", thread["frames"]),
            )
            for thread in threads
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    if not by_order:
        return False
    by_order.sort(key=lambda entry: entry[0])
    stack.update(source="py-spy", problem=None, threads=[thread for _, thread in by_order][:_MOST_THREADS])
    return True


def _thread(name: str, frames: Sequence[Dict[str, Any]]) -> Stack:
    """Convert a thread of py-spy, which has the innermost frame first."""
    converted = [
        [
            _plain(frame["name"], _LONGEST_NAME),
            _plain(frame["filename"] or "", _LONGEST_PATH),
            min(max(0, int(frame["line"])), _MOST_LINES),
        ]
        for frame in frames[:_MOST_FRAMES]
    ]
    return {"name": _plain(name, _LONGEST_NAME), "is_python": True, "frames": converted[::-1]}


def _why_not(pid: int, words: str) -> str:
    """Explain py-spy's failure and name a remedy, in a line."""
    try:
        owner = os.stat("/proc/%d" % pid).st_uid
    except OSError:
        return "it has ended"
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    if "ermission" in words or "not permitted" in words:
        if owner not in (os.geteuid(), 0) and os.geteuid() != 0:
            return "no permission: it runs as another user (uid %d)" % owner
        scope = (read_text(_YAMA) or "0").strip()
        if scope != "0":
            return (
                "no permission: sysctl kernel.yama.ptrace_scope=0 there (it is %s), or import hvlaunch.torch"
                % scope
            )
        return "no permission: give the container SYS_PTRACE (--cap-add SYS_PTRACE), or import hvlaunch.torch"
    if "python version" in words or "nsupported" in words:
        return "py-spy does not know this Python: pip install -U py-spy, or import hvlaunch.torch"
    return _plain("py-spy: " + (lines[0] if lines else "no answer"), _LONGEST_NAME)


# faulthandler


def _by_faulthandler(stacks: Sequence[Stack], scratch: str, deadline: float) -> None:
    """Signal the processes with a faulthandler, at once."""
    signalled = []
    for stack in stacks:
        path = os.path.join(scratch, "stack.%d" % stack["pid"])
        if _has_registered(stack["pid"], path):
            try:
                file = open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")  # noqa: SIM115
                # Only text written from now on is the answer to this signal.
                file.seek(0, os.SEEK_END)
                os.kill(stack["pid"], STACK_SIGNAL)
            except OSError:  # it is no file, or the process is no more
                continue
            signalled.append((stack, file))
    for stack, file in signalled:
        with file:
            threads = _parse(_written(file, deadline))
        if threads:
            stack.update(source="faulthandler", threads=threads)


def _has_registered(pid: int, path: str) -> bool:
    """True if the process catches the signal and has the answer's file open: any other process would die of the signal."""
    for line in (read_text("/proc/%d/status" % pid) or "").splitlines():
        if line.startswith("SigCgt:") and int(line.split()[1], 16) >> (STACK_SIGNAL - 1) & 1:
            break
    else:
        return False
    try:
        ours = os.stat(path)
        return any(os.path.samestat(os.stat(fd), ours) for fd in glob.glob("/proc/%d/fd/*" % pid))
    except OSError:  # there is no such file, or the process has just closed another
        return False


def _written(file: BinaryIO, deadline: float) -> str:
    """Read the text appended to the file, until the process falls silent."""
    text, since = b"", time.monotonic()
    while time.monotonic() < deadline and len(text) < _MOST_OUTPUT:
        more = file.read(_READ) or b""
        if more:
            text, since = text + more, time.monotonic()
        elif text and time.monotonic() >= since + _WRITTEN:
            break
        else:
            time.sleep(_LOOK)
    return text.decode("utf-8", "replace")


def _parse(text: str) -> List[Stack]:
    """Parse faulthandler's text. Its last thread is the process's first."""
    threads: List[Stack] = []
    for line in text.splitlines():
        words = line.strip()
        if words.endswith("(most recent call first):"):
            threads.append({"name": "thread", "is_python": True, "frames": []})
        elif threads and words.startswith('File "'):
            file, _, tail = words[6:].rpartition('", line ')
            number, _, function = tail.partition(" in ")
            if (
                number.isdigit()
                and len(number) < len(str(_MOST_LINES))
                and len(threads[-1]["frames"]) < _MOST_FRAMES
            ):
                frame = [_plain(function or "?", _LONGEST_NAME), _plain(file, _LONGEST_PATH), int(number)]
                threads[-1]["frames"].insert(0, frame)
    if threads:
        threads[-1]["name"] = "MainThread"
    # faulthandler writes the newest thread first.
    return threads[::-1][:_MOST_THREADS]


def _plain(text: str, most: int) -> str:
    text = text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= most else text[: most - 3] + "..."


_THERE, _NOT_THERE = 10, 11
"""Exit codes outside Python's own."""
_FILE = "import os, sys; sys.exit(%d if os.path.exists(sys.argv[1]) else %d)" % (_THERE, _NOT_THERE)
_MODULE = """
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
sys.path[:0] = sys.argv[2:]
first, *rest = sys.argv[1].split(".")
spec, name = find_spec(first), first
for part in rest:
    path = getattr(spec, "submodule_search_locations", None)
    name += "." + part
    spec = PathFinder.find_spec(name, path) if path else None
sys.exit(%d if spec else %d)
""" % (_THERE, _NOT_THERE)
"""Program to find a module without an import, which would run the package."""


class Search:
    """Searches for a module or file, from the start on, in a process of its own: a file system may hang.

    A module is searched for by the worker's own Python. `kind` is `module` or `file`; `pid` is a worker here.
    """

    def __init__(self, kind: str, name: str, pid: int) -> None:
        self._process: Optional[subprocess.Popen[bytes]] = None
        words = (
            _module_search(name, pid) if kind == "module" else [sys.executable, "-I", "-S", "-c", _FILE, name]
        )
        if words is None:
            return
        try:
            self._process = subprocess.Popen(
                words,
                cwd="/proc/%d/cwd" % pid,
                env=_environment(pid) if kind == "module" else {},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except (OSError, ValueError):
            pass

    def result(self, deadline: float) -> Optional[bool]:
        """Return the result, or None without a result before `deadline` of time.monotonic()."""
        if self._process is None:
            return None
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return None
        return {_THERE: True, _NOT_THERE: False}.get(code)


def _module_search(name: str, pid: int) -> Optional[List[str]]:
    """Return the command for the process's own Python; None for another program."""
    words = (read_text("/proc/%d/cmdline" % pid) or "").split("\0")[:-1]
    try:
        runs = os.readlink("/proc/%d/exe" % pid)
        cwd = os.readlink("/proc/%d/cwd" % pid)
    except OSError:
        return None
    if not words or not os.path.basename(runs).startswith(("python", "pypy")):
        return None
    # Called by its own name, the Python finds its virtual environment.
    called = shutil.which(words[0], path=_environment(pid).get("PATH"))
    python = called if called and os.path.realpath(called) == runs else runs
    scripts = [word for word in words[1:] if not word.startswith("-") and word.endswith(".py")]
    beside = [os.path.dirname(os.path.join(cwd, scripts[0]))] if scripts else []
    return [python, "-c", _MODULE, name, *beside]


def _environment(pid: int) -> Dict[str, str]:
    lines = (read_text("/proc/%d/environ" % pid) or "").split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line[1:])
