"""The agent that a job's hosts get, made when the first of them needs it."""

import marshal
import re
import sys
import zlib
from binascii import b2a_base64
from collections.abc import Container, Iterable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER
from itertools import takewhile
from pathlib import Path
from threading import Lock
from types import CodeType
from typing import Any

from hvlaunch import agent
from hvlaunch.errors import BadUsage, HostError
from hvlaunch.job import Host

__all__ = [
    "NEW_ENOUGH",
    "NO_PYTHON",
    "AgentProgram",
    "agent_command",
    "bundle",
    "carrier",
    "local_agent_command",
    "python_candidates",
    "rare_modules",
    "warm_bundle",
    "without_docstrings",
    "without_words",
]


class AgentProgram:
    """The agent with one `config` (grace, lease, reconnect in seconds; window, spill in bytes), for all hosts. `python` is for those that name none. Thread-safe.

    `own_pythons` are those that the user named before the job: no other runs on this machine.
    """

    def __init__(
        self, config: Mapping[str, Any], python: str | None, own_pythons: Container[str] = frozenset()
    ) -> None:
        self.config = config
        self._python = python
        self._own_pythons = own_pythons
        self._making = Lock()
        self._packed: dict[tuple[bool, bool], bytes] = {}
        self._rare = b""

    def packed(self, *, is_near: bool, with_ranks: bool = False) -> bytes:
        """The program itself, one zlib stream; see bundle()."""
        kind = is_near, with_ranks
        with self._making:
            if kind not in self._packed:
                self._packed[kind] = bundle(self.config, is_near=is_near, with_ranks=with_ranks)
            return self._packed[kind]

    def command(self, host: Host, *, is_here: bool, is_near: bool) -> tuple[str, bytes]:
        """What a login shell of the host is to run, and the program, where it is to be sent.

        On this machine (`is_here`) there is nothing to send, unless another Python is to run it. Raises BadUsage,
        and HostError for a Python that was found while the job runs, and would run here.
        """
        if is_here and host.python is not None and host.python not in self._own_pythons:
            raise HostError(
                f"this machine runs no python={host.python} that is found while the job runs",
                host=host.name,
                hint="--remote-python, or python= in the hostfile before the job",
            )
        if self._has_files(host, is_here):
            return local_agent_command(self.config), b""
        program = self.packed(is_near=is_near)
        candidates = python_candidates(host.python or self._python)
        return agent_command(candidates, len(program), self.config["lease"]), program

    def _has_files(self, host: Host, is_here: bool) -> bool:
        """Whether it runs from the files of this installation."""
        return is_here and host.python is None and self._python is None

    def rare(self, host: Host, *, is_here: bool) -> bytes:
        """What few jobs need of it, and what comes behind its hello; empty where it has it already."""
        if self._has_files(host, is_here):
            return b""
        with self._making:
            self._rare = self._rare or rare_modules()
            return self._rare

    def carrier(self, host: Host, scratch: str, limit: float) -> tuple[str, bytes]:
        """What a login shell of the host is to run so that we reach its agent again, in `limit` seconds, and the program for it."""
        program = carrier(scratch)
        return agent_command(python_candidates(host.python or self._python), len(program), limit), program


NO_PYTHON = "hvlaunch: no Python >= 3.8 among"
"""What the command prints where it finds no interpreter."""

_MODULES = (
    "__init__",
    "quick",
    "wire/__init__",
    "wire/shapes",
    "wire/frames",
    "wire/orders",
    "wire/session",
    "wire/channel",
    "wire/proof",
    "reaper",
    "scratch",
    "facts",
    "probe",
    "worker",
    "output",
    "workers",
    "greeting",
    "main",
    "guardian",
)
"""Files below agent/ that every agent needs."""
_WITH_RANKS = ("local_ranks", "starter", "diagnosis", "family")
"""Needed besides if a launcher has started a process for each rank."""
_WARM = ("own_pages", "warm")
_RARE = ("diagnosis", "errand_processes", "family", "relay", "wire/rejoin")
"""Needed by few jobs: sent behind the hello, as text alone, so that no start waits for these bytes."""
_LEVEL = 6  # of zlib: 9 takes 20 ms longer for 1 KB less
_DOCSTRING = re.compile(r'^( *)"""[^"]*(?:"(?!"")[^"]*)*"""$', re.MULTILINE)
_COMMENT = re.compile(r"^ *#.*|  # .*$", re.MULTILINE)
_DOCUMENTED = 0x3 | (0x4000000 if sys.version_info >= (3, 14) else 0)
"""Flags of a function's code whose first constant is its docstring, or None: CO_OPTIMIZED, CO_NEWLOCALS, CO_HAS_DOCSTRING."""
_SHELL_SAFE = re.compile(r"""[^'"\\$`!\n\0]+""")
# Reads exactly its own size from stdin, whose next bytes are frames: buffered by 1, nothing is read ahead.
# Until the agent's own loop, which has the lease, a timer ends it: the rest may never come.
_BOOT = (
    "import io,zlib,_signal;_signal.setitimer(0,{limit:g});"
    "exec(zlib.decompress(io.BufferedReader(io.FileIO(0,closefd=False),1).read({size})))"
)
NEW_ENOUGH = '*"Python 3."[89]*|*"Python 3."[1-9][0-9]*'
"""What `python -V` prints, which is four times as quick as to start it, as the patterns of a shell's `case`.

A name may say it as well. A shim of pyenv's or conda's may print before it.
"""
_VERSION_LIMIT = 10
"""Seconds for that, where the host has timeout(1): one on a file system that hangs is passed over."""
_SAYS_ITS_VERSION = re.compile(r"/.*/python3\.([89]|[1-9][0-9])")


def bundle(config: Mapping[str, Any], *, is_near: bool, with_ranks: bool = False) -> bytes:
    """The agent and `config` (see AgentProgram) as a program, compressed: one zlib stream.

    `with_ranks`: a launcher starts it, with a process for each of the host's ranks.

    For a host that is near, its modules are there twice: as text, which any Python takes, and compiled
    for ours, which makes three times as much to send and saves such a Python 10 ms.
    """
    packed = _modules_packed(_MODULES + (_WITH_RANKS if with_ranks else ()), is_near=is_near)
    return zlib.compress(f"{_boot()}\nboot({packed!r}, {dict(config)!r})\n".encode(), 1)


def warm_bundle(lease: float) -> bytes:
    """The warm agent (agent/warm.py) with its lease in seconds as a program, as bundle(): all modules that an agent may need."""
    packed = _modules_packed((*_MODULES, *_RARE, *_WARM), is_near=True)
    config = {"lease": lease, "rare": [_name_of(path) for path in _RARE]}
    start = f"load({packed!r})\nfrom hvlaunch.agent.warm import main\nmain({config!r})\n"
    return zlib.compress(f"{_boot()}\n{start}".encode(), 1)


def _modules_packed(paths: Sequence[str], *, is_near: bool) -> dict[bytes, bytes]:
    root = Path(agent.__file__).parent
    files = {_name_of(path): root / f"{path}.py" for path in paths}
    packed = {b"": _packed({"hvlaunch.__init__": "", **{name: _text(file) for name, file in files.items()}})}
    if is_near:
        code = {name: SourceFileLoader(name, str(file)).get_code(name) for name, file in files.items()}
        shorter = {name: without_docstrings(each) for name, each in code.items() if each is not None}
        packed[MAGIC_NUMBER] = _packed({"hvlaunch.__init__": "", **shorter})
    return packed


def _name_of(path: str) -> str:
    """Return the name of the module in this file below agent/; boot.py takes a name that ends in `.__init__` for a package."""
    return "hvlaunch.agent." + path.replace("/", ".")


def _boot() -> str:
    return _text(Path(agent.__file__).with_name("boot.py"))


def rare_modules() -> bytes:
    """The agent's other modules, as agent/boot.py adds them."""
    root = Path(agent.__file__).parent
    texts = {_name_of(path): _text(root / f"{path}.py") for path in _RARE}
    return zlib.compress(marshal.dumps(texts), _LEVEL)


def carrier(scratch: str) -> bytes:
    """The program that joins its stdin and stdout to the agent with this scratch directory, compressed."""
    text = _text(Path(agent.__file__).parent / "wire" / "carrier.py")
    return zlib.compress(f"{text}\nmain({scratch!r})\n".encode())


def _text(file: Path) -> str:
    return without_words(file.read_text(encoding="ascii"))


def without_words(text: str) -> str:
    """The module less its docstrings and comments, a quarter of what is sent. Its lines keep their numbers."""
    return _COMMENT.sub("", _DOCSTRING.sub(lambda found: f'{found[1]}""' + "\n" * found[0].count("\n"), text))


def without_docstrings(code: CodeType) -> CodeType:
    """The code less the docstrings of its functions and its own, an eighth of what is sent. Nothing may use its own docstring's text."""
    constants = [without_docstrings(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    is_function = code.co_flags & _DOCUMENTED == _DOCUMENTED and not code.co_name.startswith("<")
    is_module = "__doc__" in code.co_names[:2]
    if (is_function or is_module) and constants and isinstance(constants[0], str):
        constants[0] = ""
    elif "__qualname__" in code.co_names[:3] and "__doc__" in code.co_names:
        # The body of a class stores its qualified name, then (since Python 3.13) a number, then its docstring.
        texts = (number for number, value in enumerate(constants) if number and isinstance(value, str))
        constants[next(texts)] = ""
    return code.replace(co_consts=tuple(constants))


def _packed(modules: Mapping[str, CodeType | str | None]) -> bytes:
    """In base64, as Python's own literals for bytes are slow to read."""
    return b2a_base64(zlib.compress(marshal.dumps(dict(modules)), _LEVEL), newline=False)


def python_candidates(chosen: str | None) -> list[str]:
    """Interpreters to try on a host, in order; the user's own choice stands alone."""
    if chosen is None:
        ours = Path(sys.executable)
        named = ours.with_name(f"python3.{sys.version_info.minor}")
        return [*([str(named)] if named.exists() and named != ours else []), str(ours), "python3", "python"]
    if not _SHELL_SAFE.fullmatch(chosen):
        raise BadUsage(f"--remote-python {chosen!r}: must not have a quote, $, ! or backslash")
    return [chosen]


def agent_command(candidates: Sequence[str], size: int, limit: float) -> str:
    """Start the first candidate that is a Python >= 3.8 with a bundle of `size` bytes on its stdin.

    The bundle has to come within `limit` seconds: a process whose driver is gone, and that has no lease yet, ends so.

    Written so that bash, zsh, dash, fish, csh and tcsh read it alike: one exec, one pair of single
    quotes. Nothing secret is in it.
    """
    usable = [path for path in candidates if _SHELL_SAFE.fullmatch(path)]
    named = list(takewhile(_SAYS_ITS_VERSION.fullmatch, usable))
    others = usable[len(named) :]
    script = (
        f'set -- -I -S -X utf8 -c "{_BOOT.format(size=size, limit=limit)}"; '
        f'for p in {_words(named)}; do [ -f "$p" ] && [ -x "$p" ] && exec "$p" "$@"; done; '
        f'l="timeout {_VERSION_LIMIT}"; command -v timeout >/dev/null && $l true || l=; '
        f"for p in {_words(others)}; do "
        f'case "$($l "$p" -V </dev/null 2>/dev/null)" in {NEW_ENOUGH}) exec "$p" "$@";; esac; '
        f'done; echo "{NO_PYTHON} {", ".join(usable)}" >&2; exit 127'
    )
    return f"exec /bin/sh -c '{script}'"


def local_agent_command(config: Mapping[str, Any]) -> str:
    """Start the agent on this machine itself, from the files of this installation: nothing needs to travel."""
    import shlex  # noqa: PLC0415 (only for this machine)

    root = str(Path(agent.__file__).parents[2])
    program = f"import sys;sys.path.append({root!r});from hvlaunch.agent.guardian import main;main({dict(config)!r})"
    return "exec " + shlex.join([sys.executable, "-I", "-S", "-X", "utf8", "-c", program])


def _words(paths: Iterable[str]) -> str:
    return " ".join(f'"{_home(path)}"' for path in paths)


def _home(path: str) -> str:
    return "$HOME" + path[1:] if path.startswith("~/") else path
