"""Why a worker did not start, failed, or never met another worker, and which programs are in its group."""

from __future__ import annotations

import errno
import os

from hvlaunch.agent.quick import has_own_proc, in_time
from hvlaunch.agent.workers import start_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

__all__ = ["library_of", "other_user_at", "programs_of", "reason", "was_used"]

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_MAX_STRING_PAGES = 32
"""execve(2): MAX_ARG_STRLEN, in pages."""


def reason(error: Exception, program: str, argv: Sequence[str], env: Dict[str, str]) -> Tuple[int, str]:
    """Return the exit code that a shell would have, and the cause in words."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        return _NOT_EXECUTABLE, "%s: %s" % (program, error)
    # For a script, execve reports a missing interpreter as if the script itself were missing.
    if number == errno.ENOENT and os.path.exists(program):
        return _NOT_FOUND, "%s: its interpreter (first line) was not found" % program
    if number in (errno.ENOENT, errno.ENOTDIR):
        return _NOT_FOUND, "%s: command not found" % program
    if number == errno.E2BIG:
        return _NOT_EXECUTABLE, _too_big(argv, env)
    if number == errno.EACCES and os.path.isdir(program):
        return _NOT_EXECUTABLE, "%s: is a directory" % program
    return _NOT_EXECUTABLE, "%s: %s" % (program, os.strerror(number).lower())


def _too_big(argv: Sequence[str], env: Dict[str, str]) -> str:
    """Return which part of the command and its environment is too long for the kernel."""
    limit = _MAX_STRING_PAGES * os.sysconf("SC_PAGE_SIZE")
    words = [("argument %d" % number, word) for number, word in enumerate(argv)]
    words.extend(("variable %s" % name, "%s=%s" % (name, value)) for name, value in env.items())
    sizes = [(name, len(os.fsencode(word)) + 1) for name, word in words]
    for name, size in sizes:
        if size > limit:
            return "%s has %d bytes; this kernel allows %d for one string (execve(2))" % (name, size, limit)
    return (
        "command and environment have %d bytes, more than this kernel allows "
        "(execve(2): a quarter of the stack limit, ulimit -s)" % sum(size for _, size in sizes)
    )


_LISTENING = "0A"  # TCP_LISTEN


def other_user_at(port: int) -> Optional[Dict[str, Any]]:
    """Return uid, name and program of another user's process on this port; None without such a process."""
    for table in ("tcp", "tcp6"):
        try:
            with open("/proc/self/net/" + table) as listing:
                lines = listing.readlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, _, _, _, uid, _, inode = line.split()[:10]
            if state == _LISTENING and int(local.rpartition(":")[2], 16) == port and int(uid) != os.geteuid():
                return {
                    "uid": int(uid),
                    "port": port,
                    "user": _name_of(uid),
                    "program": _program_with(inode, int(uid)),
                }
    return None


def _name_of(uid: str) -> Optional[str]:
    """Return the user's name by /etc/passwd."""
    # Not by the pwd module: a directory service that does not answer would hold up the agent.
    try:
        with open("/etc/passwd", "rb") as users:
            lines = users.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    fields = (line.split(":") for line in lines)
    return next((user[0] for user in fields if user[2:3] == [uid]), None)


def _program_with(inode: str, uid: int) -> Optional[str]:
    """Return name and pid of the user's process with this socket; None if the kernel hides it."""
    for pid in filter(str.isdigit, os.listdir("/proc") if has_own_proc() else ()):
        folder = "/proc/" + pid
        try:
            if os.stat(folder).st_uid != uid:
                continue
            links = [os.readlink(folder + "/fd/" + fd) for fd in os.listdir(folder + "/fd")]
            if "socket:[" + inode + "]" in links:
                with open(folder + "/comm", errors="replace") as comm:
                    return comm.read().strip() + ", pid " + pid
        except OSError:
            continue  # it has ended, or only root may look
    return None


_LIBRARIES = {
    "torch": "torch",
    "transformers": "torch",
    "accelerate": "torch",
    "lightning": "torch",
    "pytorch_lightning": "torch",
    "tensorflow": "tensorflow",
    "keras": "tensorflow",
    "mpi4py": "mpi4py",
}
"""Library for parallel jobs, by imported package."""
_OTHER_WAYS = ("init_method", "TF_CONFIG")
"""Words in programs whose workers may meet without MASTER_PORT."""
_LONGEST_PROGRAM = 1 << 16
_PATIENCE = 1.0


def library_of(argv: Sequence[str]) -> Optional[str]:
    """Return the library for parallel jobs that the Python program of this command imports.

    None for a program without such a library, with another way for workers to meet, or without a readable text.
    """
    # From the text, because the memory of an ended worker is gone. The file may lie on a file system that hangs.
    text = in_time(lambda: _program(argv), _PATIENCE, "")
    if any(word in text for word in _OTHER_WAYS):
        return None
    libraries = {_LIBRARIES[name] for name in _imports(text) if name in _LIBRARIES}
    return next((library for library in ("torch", "tensorflow", "mpi4py") if library in libraries), None)


def _program(argv: Sequence[str]) -> str:
    """Return the text behind `-c`, or the start of the module of `-m`, or of the first argument with the suffix .py."""
    for number, word in enumerate(argv):
        operand = argv[number + 1] if number + 1 < len(argv) else ""
        if word == "-c":
            return operand[:_LONGEST_PROGRAM]
        if word == "-m":
            path = operand.replace(".", "/")
            return start_of(path + ".py", _LONGEST_PROGRAM) or start_of(
                path + "/__main__.py", _LONGEST_PROGRAM
            )
        if word.endswith(".py"):
            return start_of(word, _LONGEST_PROGRAM)
    return ""


def _imports(text: str) -> Iterator[str]:
    """Yield the top-level packages in the text's import statements."""
    # By lines and not by ast, whose import takes longer than a worker's end should.
    for statement in text.replace(";", "\n").splitlines():
        keyword, _, names = statement.strip().partition(" ")
        if keyword == "import":
            for name in names.split(","):
                yield name.strip().partition(" ")[0].partition(".")[0]
        elif keyword == "from":
            yield names.strip().partition(" ")[0].partition(".")[0]


def was_used(port: int) -> bool:
    """True if this host has, or had a moment ago, a connection to or from the port, or a listener on it."""
    # The kernel lists a closed connection for another minute (TIME_WAIT), at the end that was closed first.
    end = ":%04X" % port
    return any(here.endswith(end) or peer.endswith(end) for here, peer in _tcp())


def _tcp() -> List[Tuple[str, str]]:
    """Return local and peer address of each TCP socket of this host."""
    sockets: List[Tuple[str, str]] = []
    for table in ("tcp", "tcp6"):
        try:
            with open("/proc/self/net/" + table) as listing:
                rows = [line.split() for line in listing.readlines()[1:]]
                sockets.extend((row[1], row[2]) for row in rows)
        except OSError:  # noqa: PERF203 (two turns)
            continue  # a kernel without IPv6
    return sockets


_SPAWNED = b"from multiprocessing."
"""Start of the code that Python's multiprocessing gives to `python -c`."""


def programs_of(group: int) -> List[int]:
    """Return the group's leader, and members that run a program of their own; empty if /proc can't show them in time.

    Processes that a program forked without exec, or spawned by Python's multiprocessing, are left out.
    """
    # Such processes, a data loader's for example, are their parent's to end: it may still need them to save its state,
    # and would take their end for an error.
    return in_time(lambda: _programs_of(group), _PATIENCE, [])


def _programs_of(group: int) -> List[int]:
    parents = _members(group)
    commands = {pid: _command_of(pid) for pid in parents}
    return [
        pid
        for pid, parent in parents.items()
        if pid == group or not (_is_spawned(commands[pid]) or commands[pid] == commands.get(parent))
    ]


def _members(group: int) -> Dict[int, int]:
    """Return the processes of the group, each with its parent."""
    parents = {}
    for name in os.listdir("/proc") if has_own_proc() else ():
        if name.isdigit():
            parent, its_group = _parent_and_group(name)
            if its_group == group:
                parents[int(name)] = parent
    return parents


def _parent_and_group(pid: str) -> Tuple[int, int]:
    """Return parent and group; zeros if the process is gone."""
    try:
        with open("/proc/%s/stat" % pid, "rb") as stat:
            _, parent, group = stat.read().rpartition(b")")[2].split()[:3]
    except (OSError, ValueError):
        return 0, 0
    return int(parent), int(group)


def _command_of(pid: int) -> bytes:
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as words:
            return words.read()
    except OSError:
        return b""


def _is_spawned(command: bytes) -> bool:
    return any(word.startswith(_SPAWNED) for word in command.split(b"\0"))
