"""One worker on this host: how it is started, fed, signalled, and what is known of its end."""

import errno
import os
import signal
import time
from typing import Any, Dict, List, Optional, Sequence

__all__ = ["CannotStart", "OomWatch", "Worker", "exit_of", "start"]

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_RESET = [
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGCHLD,
    signal.SIGTTIN,
]
_ERROR_FILE_LIMIT = 1 << 18


class CannotStart(Exception):
    """The kernel takes no such command. `code` is what a shell would exit with."""

    def __init__(self, code: int, cause: str) -> None:
        super().__init__(cause)
        self.code = code
        self.cause = cause


class Worker:
    """A running worker. `output` maps a stream's name to our end of its pipe; `stdin` is ours too, or None."""

    def __init__(
        self, slot: int, pid: int, output: Dict[str, int], stdin: Optional[int], error_file: str
    ) -> None:
        self.slot = slot
        self.pid = pid
        self.output = output
        self.stdin = stdin
        self.error_file = error_file
        self.killed = False

    def send_signal(self, number: int, *, group: bool) -> None:
        """Signal the worker, with `group` all of its process group; nothing where it has ended."""
        self.killed = self.killed or number == signal.SIGKILL
        try:
            (os.killpg if group else os.kill)(self.pid, number)
        except OSError as error:
            if error.errno not in (errno.ESRCH, errno.EPERM):
                raise

    def error_text(self) -> str:
        """What it left in its TORCHELASTIC_ERROR_FILE, at most 256 KiB; empty where nothing."""
        try:
            with open(self.error_file, "rb") as file:
                return file.read(_ERROR_FILE_LIMIT).decode("utf-8", "replace")
        except OSError:
            return ""


def start(slot: int, argv: Sequence[str], env: Dict[str, str], with_stdin: bool) -> Worker:
    """Start `argv` in the current directory, in a session of its own. Raises CannotStart."""
    program = _find(argv[0], env.get("PATH", os.defpath))
    pipes = [os.pipe(), os.pipe()]
    stdin = os.pipe() if with_stdin else (os.open(os.devnull, os.O_RDONLY), -1)
    theirs = [stdin[0], pipes[0][1], pipes[1][1]]
    ours = [pipes[0][0], pipes[1][0], stdin[1]]
    try:
        pid = _spawn(program, argv, env, theirs)
    except OSError as error:
        for fd in ours:
            if fd >= 0:
                os.close(fd)
        raise _reason(error, program, argv, env) from None
    finally:
        for fd in theirs:
            os.close(fd)
    for fd in ours:
        if fd >= 0:
            os.set_blocking(fd, False)
    output = {"stdout": ours[0], "stderr": ours[1]}
    return Worker(slot, pid, output, stdin[1] if with_stdin else None, env.get("TORCHELASTIC_ERROR_FILE", ""))


def _spawn(program: str, argv: Sequence[str], env: Dict[str, str], fds: Sequence[int]) -> int:
    actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)]
    command = [os.fsencode(word) for word in argv]
    variables = {os.fsencode(name): os.fsencode(value) for name, value in env.items()}
    common: Dict[str, Any] = {"file_actions": actions, "setsigmask": [], "setsigdef": _RESET}
    try:
        return os.posix_spawn(program, command, variables, setsid=True, **common)
    except NotImplementedError:  # a C library older than glibc 2.26: a process group is the next best
        return os.posix_spawn(program, command, variables, setpgroup=0, **common)


def _find(name: str, path: str) -> str:
    """The program's file, by the worker's own PATH (posix_spawnp would use the agent's)."""
    if "/" in name:
        return name
    if not name:
        raise CannotStart(_NOT_FOUND, "the command is an empty string")
    denied = None
    for directory in path.split(os.pathsep):
        candidate = os.path.join(directory or ".", name)
        if os.path.isfile(candidate):
            if os.access(candidate, os.X_OK):
                return candidate
            denied = denied or candidate
    if denied is not None:
        raise CannotStart(_NOT_EXECUTABLE, "%s: permission denied" % denied)
    raise CannotStart(_NOT_FOUND, "%s: command not found (PATH=%s)" % (name, path))


def _reason(error: OSError, program: str, argv: Sequence[str], env: Dict[str, str]) -> CannotStart:
    if error.errno == errno.ENOENT and os.path.exists(program):
        return CannotStart(_NOT_FOUND, "%s: its interpreter (first line) was not found" % program)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return CannotStart(_NOT_FOUND, "%s: command not found" % program)
    if error.errno == errno.E2BIG:
        words = list(argv) + ["%s=%s" % item for item in env.items()]
        size = sum(len(os.fsencode(word)) + 1 for word in words)
        return CannotStart(
            _NOT_EXECUTABLE,
            "command and environment take %d bytes, more than this kernel starts a process with "
            "(execve(2): a quarter of the stack limit, ulimit -s)" % size,
        )
    if error.errno == errno.EACCES and os.path.isdir(program):
        return CannotStart(_NOT_EXECUTABLE, "%s: is a directory" % program)
    return CannotStart(_NOT_EXECUTABLE, "%s: %s" % (program, os.strerror(error.errno or 0).lower()))


def exit_of(status: int, max_rss_kib: int) -> Dict[str, Any]:
    """The facts of an `exited` frame from a wait status and ru_maxrss."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    return {"code": code, "signal": number, "max_rss": max_rss_kib * 1024, "at": time.monotonic()}


class OomWatch:
    """Whether the kernel's out-of-memory killer was at work, as far as its counters tell."""

    def __init__(self) -> None:
        self._before = {path: self._count(path) for path in (*self._cgroup_sources(), "/proc/vmstat")}
        self._claimed = 0

    def struck(self) -> bool:
        """True once for each kill that the counters show since the start."""
        kills = max(self._count(path) - before for path, before in self._before.items())
        if kills <= self._claimed:
            return False
        self._claimed += 1
        return True

    @staticmethod
    def _count(path: str) -> int:
        try:
            with open(path) as file:
                for line in file:
                    name, _, value = line.partition(" ")
                    if name == "oom_kill":
                        return int(value)
        except (OSError, ValueError):
            pass
        return 0

    @staticmethod
    def _cgroup_sources() -> List[str]:
        try:
            with open("/proc/self/cgroup") as file:
                lines = [line.rstrip("\n").split(":", 2) for line in file]
        except OSError:
            return []
        return [
            "/sys/fs/cgroup%s/memory.events" % line[2].rstrip("/") for line in lines if line[:2] == ["0", ""]
        ]
