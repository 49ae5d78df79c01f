"""Worker processes of this host: start and signals of each."""

from __future__ import annotations

import os

from hvlaunch.agent.quick import signal
from hvlaunch.agent.reaper import send_signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Sequence

__all__ = ["CannotStart", "WorkerProcess", "enter", "find", "spawn", "start", "start_of"]

_STREAMS = ("stdout", "stderr", "result")
"""Descriptors 1, 2 and 3 of a worker; only a worker that calls a function has the last."""

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


class CannotStart(Exception):
    """The command can't be started. `code` is the exit code that a shell would have."""

    def __init__(self, code: int, cause: str) -> None:
        super().__init__(cause)
        self.code = code
        self.cause = cause


class WorkerProcess:
    """A running worker. `output` maps each stream to the agent's end of its pipe; so is `stdin`, or None."""

    def __init__(
        self, slot: int, pid: int, output: Dict[str, int], stdin: Optional[int], error_file: str
    ) -> None:
        self.slot = slot
        self.pid = pid
        self.output = output
        self.stdin = stdin
        self.error_file = error_file
        self.killed = False
        self.marks: List[bytes] = []
        """NAME=VALUE in the environment that it was started with, if it has got another one since."""

    def send_signal(self, number: int, *, group: bool) -> None:
        """Signal the worker, with `group` its process group too; ignore a worker that has ended."""
        # SIGKILL goes to the whole group, and SIGINT too, as from a terminal. Other signals go to the group's programs only:
        # forked helpers such as data loaders are their parent's to end.
        self.killed = self.killed or number == signal.SIGKILL
        pids = [self.pid]
        if group and number in (signal.SIGKILL, signal.SIGINT):
            pids = [-self.pid]
        elif group:
            from hvlaunch.agent.workers.diagnosis import programs_of  # noqa: PLC0415 (most jobs end by themselves)

            pids = programs_of(self.pid) or [-self.pid]
        for pid in pids:
            send_signal(pid, number)


def enter(path: str) -> Optional[str]:
    """Enter the directory, where workers start from now on; return the error, None for success."""
    try:
        os.chdir(path)
    except OSError as error:
        return os.strerror(error.errno or 0)
    # Shells and programs show PWD rather than the resolved path; it must not be the login shell's.
    os.environ["PWD"] = path
    return None


def start(
    slot: int,
    argv: Sequence[str],
    env: Dict[str, str],
    with_stdin: bool,
    with_result: bool = False,
    more: Sequence[int] = (),
) -> WorkerProcess:
    """Start `argv` in the current directory, in a session of its own, with `more` descriptors. Raises CannotStart."""
    program = find(argv[0] if argv else "", env.get("PATH", os.defpath))
    streams = _STREAMS if with_result else _STREAMS[:-1]
    fds: List[int] = []
    try:
        for _ in streams:
            fds.extend(os.pipe())
        fds.extend(os.pipe() if with_stdin else [os.open(os.devnull, os.O_RDONLY)])
        output, (their_stdin, *stdin) = fds[: 2 * len(streams)], fds[2 * len(streams) :]
        ours, theirs = output[::2], [their_stdin, *output[1::2]]
        pid = spawn(program, argv, env, [*theirs, *more])
    except (OSError, ValueError) as error:
        for fd in fds:
            os.close(fd)
        from hvlaunch.agent.workers.diagnosis import reason  # noqa: PLC0415 (most commands can be started)

        raise CannotStart(*reason(error, program, argv, env)) from None
    for fd in theirs:
        os.close(fd)
    for fd in (*ours, *stdin):
        os.set_blocking(fd, False)
    return WorkerProcess(
        slot,
        pid,
        dict(zip(streams, ours)),  # noqa: B905 (Python 3.8 has no strict=)
        stdin[0] if stdin else None,
        env.get("TORCHELASTIC_ERROR_FILE", ""),
    )


def spawn(program: str, argv: Sequence[str], env: Dict[str, str], fds: Sequence[int]) -> int:
    """Start a process and return its pid; `fds` become its first descriptors. Raises OSError, ValueError."""
    actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)]
    command = [os.fsencode(word) for word in argv]
    variables = {os.fsencode(name): os.fsencode(value) for name, value in env.items()}
    # The agent ignores SIGPIPE and handles others: a worker starts with the defaults, and with no signal blocked.
    all_signals = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    common: Dict[str, Any] = {"file_actions": actions, "setsigmask": [], "setsigdef": all_signals}
    try:
        # posix_spawn and not fork: the agent has threads, and its pages need not be copied.
        return os.posix_spawn(program, command, variables, setsid=True, **common)
    except NotImplementedError:  # glibc before 2.26 has no setsid here: a process group is the next best
        return os.posix_spawn(program, command, variables, setpgroup=0, **common)


def find(name: str, path: str) -> str:
    """Return the path of the program. Raises CannotStart."""
    # The worker's own PATH decides: posix_spawnp would search the agent's.
    if "/" in name:
        return name
    if not name:
        raise CannotStart(_NOT_FOUND, "the command is empty")
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


def start_of(path: str, size: int) -> str:
    """Return the first `size` bytes of a worker's file as text; empty if the file can't be read."""
    try:
        # Without O_NONBLOCK, a FIFO that the worker put there would block the agent.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError):
        return ""
    try:
        return os.read(fd, size).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
