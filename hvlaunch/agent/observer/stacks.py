"""What the workers of this host are doing: the stacks of their processes, by the best means that there is.

py-spy reads those of Python from outside, without stopping them. Else faulthandler writes them, in processes that have
registered a signal for it (hvlaunch/torch/beginning.py). Else the kernel says where it holds the process.
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

from hvlaunch.agent.observer.proc import command_of, descendants, parents, read_text

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
"""As in hvlaunch/torch/beginning.py."""
_MOST_PROCESSES = 1024
_MOST_THREADS = 64
_MOST_FRAMES = 128
_MOST_LINES = 1 << 30
_CUTS = ((_MOST_THREADS, _MOST_FRAMES), (8, 64), (2, 32), (1, 16), (1, 4))
"""How many threads of each process, and how many of their innermost frames."""
_LONGEST_NAME = 256
_LONGEST_PATH = 1024
_AT_ONCE = 2 * (os.cpu_count() or 1)
_WRITTEN = 0.02
"""Seconds without another byte after which faulthandler has written all."""
_LOOK = 0.005
_TRIES = 3
_READ = 1 << 16
_MOST_OUTPUT = 8 << 20
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
    """The stacks of `workers` (rank and pid), and the machine's architecture where it has no py-spy.

    Where something is `sought` (what and name), `has` tells whether it is here.
    """
    deadline = time.monotonic() + question["seconds"]
    search = _search(question)
    py_spy = find_py_spy(question["scratch"], sys.executable)
    workers = [(rank, pid) for rank, pid in question["workers"]]
    seconds, native = question["seconds"], question["native"]
    found = take_stacks(workers, seconds, question["scratch"], py_spy, native=native)
    lacks = None if py_spy else os.uname().machine
    said = {**packed(shortened(found, _MOST_ANSWER)), "lacks": lacks}
    return said if search is None else {**said, "has": search.result(deadline)}


def _search(question: Dict[str, Any]) -> Optional[Search]:
    """For what another host's worker did not find, by the eyes of a Python among this host's workers, if there is one."""
    if "sought" not in question:
        return None
    trees = descendants([pid for _, pid in question["workers"]], parents())
    pids = [pid for tree in trees.values() for pid in tree]
    what, name = question["sought"]
    return Search(what, name, next(filter(_is_python, pids), pids[0])) if pids else None


def take_py_spy(question: Dict[str, Any]) -> Dict[str, Any]:
    """Put the program that comes with the question into the job's directory. Raises OSError, zlib.error."""
    program = zlib.decompressobj().decompress(question["data"], _MOST_PROGRAM)
    path = os.path.join(question["scratch"], "py-spy")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(path + ".part", flags, 0o700), "wb") as file:
        file.write(program)
    os.rename(path + ".part", path)
    return {}


def find_py_spy(scratch: str, python: str) -> Optional[str]:
    """The host's own, on the PATH or beside this Python; or the one that the driver has brought."""
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
    """The stacks of these workers (rank and pid) and of all their descendants, within so many seconds.

    `native`: with the frames of C and C++, for which each process is stopped for a moment.
    """
    deadline = time.monotonic() + seconds
    ranks = {pid: rank for rank, pid in workers}
    trees = descendants(ranks, parents())
    found = [_of_kernel(ranks[root], pid, root) for root, tree in trees.items() for pid in tree][
        :_MOST_PROCESSES
    ]
    pythons = [one for one in found if _is_python(one["pid"])]
    if py_spy is not None:
        _Spying(py_spy, native).run(pythons, deadline)
    else:
        for one in pythons:
            one["problem"] = "no py-spy there; pip install 'hvlaunch[stacks]' where hvlaunch runs"
    _by_faulthandler([one for one in pythons if one["source"] == "kernel"], scratch, deadline)
    return found


def shortened(stacks: List[Stack], most: int) -> List[Stack]:
    """The same in at most so many characters of JSON: with fewer threads, then with fewer frames, then with fewer processes."""
    for threads, frames in _CUTS:
        for one in stacks:
            one["threads"] = one["threads"][:threads]
            for thread in one["threads"]:
                thread["frames"] = thread["frames"][-frames:]
        if len(json.dumps(stacks)) <= most:
            return stacks
    stacks.sort(key=lambda one: bool(one["is_child"]))
    while len(json.dumps(stacks)) > most:
        del stacks[len(stacks) // 2 :]
    return stacks


def packed(stacks: Sequence[Stack]) -> Dict[str, Any]:
    """The same with each thread that is like another once: stacks have the numbers of their threads. Most ranks do the same."""
    numbers: Dict[str, int] = {}
    threads: List[Stack] = []
    found = []
    for one in stacks:
        mine = []
        for thread in one["threads"]:
            number = numbers.setdefault(json.dumps(thread), len(numbers))
            if number == len(threads):
                threads.append(thread)
            mine.append(number)
        found.append(dict(one, threads=mine))
    return {"threads": threads, "stacks": found}


def _is_python(pid: int) -> bool:
    try:
        name = os.path.basename(os.readlink("/proc/%d/exe" % pid))
    except OSError:
        return (read_text("/proc/%d/comm" % pid) or "").startswith("python")
    return name.startswith(("python", "pypy")) or "/libpython" in (read_text("/proc/%d/maps" % pid) or "")


# The kernel


def _of_kernel(rank: int, pid: int, root: int) -> Stack:
    """Where the kernel holds each of its threads, as far as it says so."""
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
    """The whole stack where we may read it (root), else the function that waits; or what runs."""
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
    """Many py-spy at a time, one for each process. What it says takes the place of what the kernel says."""

    def __init__(self, py_spy: str, native: bool) -> None:
        # Without --nonblocking it stops the process for a moment, which its frames of C need.
        self._command = [py_spy, "dump", "--json", *(["--native"] if native else ["--nonblocking"]), "--pid"]
        self._selector = selectors.DefaultSelector()
        self._running: Dict[int, Tuple[subprocess.Popen[bytes], Stack, bytearray, int]] = {}

    def run(self, stacks: Sequence[Stack], deadline: float) -> None:
        """Ask for all of these; those that are not there at the deadline stay as they are."""
        waiting = [(one, 1) for one in stacks][::-1]
        try:
            while (waiting or self._running) and time.monotonic() < deadline:
                while waiting and len(self._running) < _AT_ONCE:
                    self._start(*waiting.pop())
                for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                    again = self._read(key.fd)
                    if again is not None:
                        waiting.append(again)
        finally:
            late = [one for _, one, _, _ in self._running.values()] + [one for one, _ in waiting]
            for process, _, _, _ in self._running.values():
                process.kill()
                process.wait()
                process.stdout.close()  # type: ignore[union-attr]
            self._selector.close()
        for one in late:
            one["problem"] = one["problem"] or "py-spy was not ready in time"

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
        """More of its output; what is to be tried again."""
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
        is_torn = "ermission" not in stack["problem"] and number < _TRIES  # it changed while it was read
        return (stack, number + 1) if is_torn and os.path.exists("/proc/%d" % stack["pid"]) else None


def _take(stack: Stack, output: bytes) -> bool:
    """Whether that was what py-spy says of the process."""
    try:
        threads = json.loads(output)
        found = [
            (
                thread["os_thread_id"] != stack["pid"],
                _thread(thread["thread_name"] or "MainThread", thread["frames"]),
            )
            for thread in threads
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    if not found:
        return False
    found.sort(key=lambda one: one[0])
    stack.update(source="py-spy", problem=None, threads=[thread for _, thread in found][:_MOST_THREADS])
    return True


def _thread(name: str, frames: Sequence[Dict[str, Any]]) -> Stack:
    """Of py-spy, which has the innermost frame first."""
    own = [
        [
            _plain(one["name"], _LONGEST_NAME),
            _plain(one["filename"] or "", _LONGEST_PATH),
            min(max(0, int(one["line"])), _MOST_LINES),
        ]
        for one in frames[:_MOST_FRAMES]
    ]
    return {"name": _plain(name, _LONGEST_NAME), "is_python": True, "frames": own[::-1]}


def _why_not(pid: int, words: str) -> str:
    """Why py-spy says nothing of the process, and what can be done, in one line."""
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
    """Ask those that have registered for it, all at once."""
    asked = []
    for one in stacks:
        path = os.path.join(scratch, "stack.%d" % one["pid"])
        if _has_registered(one["pid"], path):
            try:
                file = open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")  # noqa: SIM115
                file.seek(0, os.SEEK_END)
                os.kill(one["pid"], STACK_SIGNAL)
            except OSError:  # it is no file, or the process is no more
                continue
            asked.append((one, file))
    for one, file in asked:
        with file:
            threads = _parse(_written(file, deadline))
        if threads:
            one.update(source="faulthandler", threads=threads)


def _has_registered(pid: int, path: str) -> bool:
    """Whether it catches the signal, and has the file open that its answer goes to: any other would die of it."""
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
    """What is added to the file, until no more comes."""
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
    """What faulthandler has written; the last thread that it tells of is the first that there was."""
    threads: List[Stack] = []
    for line in text.splitlines():
        words = line.strip()
        if words.endswith("(most recent call first):"):
            threads.append({"name": "thread", "is_python": True, "frames": []})
        elif threads and words.startswith('File "'):
            file, _, rest = words[6:].rpartition('", line ')
            number, _, function = rest.partition(" in ")
            if (
                number.isdigit()
                and len(number) < len(str(_MOST_LINES))
                and len(threads[-1]["frames"]) < _MOST_FRAMES
            ):
                frame = [_plain(function or "?", _LONGEST_NAME), _plain(file, _LONGEST_PATH), int(number)]
                threads[-1]["frames"].insert(0, frame)
    if threads:
        threads[-1]["name"] = "MainThread"
    return threads[::-1][:_MOST_THREADS]


def _plain(text: str, most: int) -> str:
    text = text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= most else text[: most - 3] + "..."


_THERE, _NOT_THERE = 10, 11
"""Exit codes that nothing else has."""
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
"""It imports nothing of the name: finding the parts of a package would run the package."""


class Search:
    """Begins at once, in a process of its own: a file system may hang, and modules are those of the worker's own Python.

    `what` is `module` or `file`; `pid` is that of a worker here.
    """

    def __init__(self, what: str, name: str, pid: int) -> None:
        self._process: Optional[subprocess.Popen[bytes]] = None
        words = (
            _module_search(name, pid) if what == "module" else [sys.executable, "-I", "-S", "-c", _FILE, name]
        )
        if words is None:
            return
        try:
            self._process = subprocess.Popen(
                words,
                cwd="/proc/%d/cwd" % pid,
                env=_environment(pid) if what == "module" else {},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except (OSError, ValueError):
            pass

    def result(self, deadline: float) -> Optional[bool]:
        """None where that is not known by then, of time.monotonic()."""
        if self._process is None:
            return None
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return None
        return {_THERE: True, _NOT_THERE: False}.get(code)


def _module_search(name: str, pid: int) -> Optional[List[str]]:
    """The command, by the Python that the process runs; None where it runs none."""
    words = (read_text("/proc/%d/cmdline" % pid) or "").split("\0")[:-1]
    try:
        runs = os.readlink("/proc/%d/exe" % pid)
        cwd = os.readlink("/proc/%d/cwd" % pid)
    except OSError:
        return None
    if not words or not os.path.basename(runs).startswith(("python", "pypy")):
        return None
    # By the name that it was called by, it finds its virtual environment.
    called = shutil.which(words[0], path=_environment(pid).get("PATH"))
    python = called if called and os.path.realpath(called) == runs else runs
    scripts = [word for word in words[1:] if not word.startswith("-") and word.endswith(".py")]
    beside = [os.path.dirname(os.path.join(cwd, scripts[0]))] if scripts else []
    return [python, "-c", _MODULE, name, *beside]


def _environment(pid: int) -> Dict[str, str]:
    lines = (read_text("/proc/%d/environ" % pid) or "").split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line[1:])
