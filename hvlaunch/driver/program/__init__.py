"""The beginning of every agent: its program, and the job's keys.

The program is a shell command for any login shell, and the bytes for its stdin. The keys and the job's id are the driver's only
random values, drawn before the job begins.
"""

import json
import marshal
import os
import re
import sys
import zlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER
from itertools import takewhile
from pathlib import Path
from threading import Lock, Thread
from types import CodeType
from typing import Any

from hvlaunch import agent
from hvlaunch.agent.quick import mac
from hvlaunch.errors import BadUsage, HostError
from hvlaunch.job import Host
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.rendezvous.serving.certificate import Certificate

__all__ = [
    "NEW_ENOUGH",
    "NO_PYTHON",
    "AgentProgram",
    "Keys",
    "agent_command",
    "bundle",
    "carrier",
    "local_agent_command",
    "make_program",
    "python_candidates",
    "rare_modules",
    "standby_program",
    "warm_bundle",
    "without_docstrings",
    "without_types",
    "without_words",
]


def _random_word(size: int) -> str:
    """Return `size` random bytes in hexadecimal."""
    # As secrets.token_hex(), without the imports of that module (10 ms).
    return os.urandom(size).hex()


class Keys(NamedTuple):
    """The keys of a job.

    `token` opens the rendezvous; the rendezvous proves its identity to agents by `probe_key`, to workers by `certificate`.
    `entry` admits agents of a launcher, and nothing else. `job_id` is not secret.
    """

    token: str
    probe_key: str
    certificate: Certificate
    entry: str
    job_id: str
    beacons: str
    """The key for deriving the keys of beacons and sessions."""

    def __repr__(self) -> str:
        """Show no secret."""
        return f"Keys(job_id={self.job_id!r})"

    @classmethod
    def new(cls, job_id: str | None = None) -> "Keys":
        return cls(
            token=_random_word(32),
            probe_key=_random_word(32),
            certificate=Certificate(),
            entry=_random_word(32),
            job_id=job_id or _random_word(6),
            beacons=_random_word(32),
        )

    def save(self, path: Path, env: Mapping[str, str]) -> None:
        """Save for a successor, in a file readable by this user alone, with the certificate's private key. Raises OSError.

        `env` is the workers' environment: removing this file removes every secret of the job.
        """
        pem = (self.certificate.key + self.certificate.pem).decode("ascii")
        data = json.dumps({**self._asdict(), "certificate": pem, "env": dict(env)}).encode()
        with os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
        ) as file:
            file.write(data)

    @classmethod
    def load(cls, path: Path) -> tuple["Keys", Mapping[str, str]]:
        """Load the keys and the environment of save(). Raises OSError, ValueError."""
        words = json.loads(path.read_bytes())
        env = words.pop("env", None) if isinstance(words, dict) else None
        if not isinstance(env, dict) or words.keys() != set(cls._fields):
            raise ValueError("not the keys of a job")
        if not all(isinstance(word, str) for word in (*words.values(), *env.values())):
            raise ValueError("not the keys of a job")
        return cls(**{**words, "certificate": Certificate(words["certificate"].encode("ascii"))}), env

    def beacon(self, number: int) -> str:
        """Return the key of a beacon, derived from the number of the connection to its host."""
        return mac(self.beacons.encode("ascii"), b"beacon %d" % number).hex()

    @property
    def secret(self) -> str:
        """A word for programs of the user's that ask each other for one, such as Ray's."""
        return mac(self.beacons.encode("ascii"), b"workers").hex()

    def session(self, number: int) -> str:
        """Return the key of a session, derived from the number of its first connection."""
        # Derived by HMAC: a host that learns its key learns nothing of the others.
        return mac(self.beacons.encode("ascii"), b"session %d" % number).hex()


class AgentProgram:
    """The agent with a job's `config` (grace, lease, reconnect in seconds; window, spill in bytes). Thread-safe.

    Each part is made for the first host in need of it. `python` is for hosts without a Python of their own; only
    `own_pythons`, named by the user before the job, run on this machine.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        python: str | None,
        own_pythons: Container[str] = frozenset(),
        *,
        binds: bool = False,
        leases: bool = False,
        preloads: bool = False,
        container: Mapping[str, Any] | None = None,
        also: Callable[[], None] | None = None,
    ) -> None:
        """`binds`: the agent needs the module for --bind; `leases`: that for --lease-gpus; `preloads`: that for --preload.

        `container` has the options of agent/container.py; None without one. `also` makes programs that follow each hello.
        """
        self.config = config
        self.container = container
        self._also = also
        self._python = python
        self._own_pythons = own_pythons
        self._more = (
            *(_BINDING if binds else ()),
            *(_LEASES if leases else ()),
            *(_PRELOAD if preloads else ()),
        )
        self._making = Lock()
        self._packed: dict[tuple[bool, bool], bytes] = {}
        self._rare = b""
        self._is_prepared = False

    def packed(self, *, is_near: bool, with_ranks: bool = False) -> bytes:
        """Return the program, as bundle() makes it."""
        kind = is_near, with_ranks
        with self._making:
            if kind not in self._packed:
                self._packed[kind] = bundle(self.config, is_near=is_near, with_ranks=with_ranks)
            return self._packed[kind]

    def prepare(self) -> None:
        """Make the programs for near hosts in another thread: meanwhile the first host proves its identity."""
        # Far hosts have others; for them a few milliseconds of waiting are wasted.
        if not self._is_prepared:
            self._is_prepared = True
            Thread(target=self._make_for_near, name="pack the agent", daemon=True).start()

    def _make_for_near(self) -> None:
        self.packed(is_near=True)
        if self._also is not None:
            self._also()

    def command(self, host: Host, *, is_here: bool, is_near: bool) -> tuple[str, bytes]:
        """Return the command for the host's login shell, and the program for its stdin.

        On this machine (`is_here`) the program is empty, unless another Python runs the agent. Raises BadUsage, and
        HostError for a Python of a discovered host that would run here.
        """
        # A discovery script may not choose a program that runs as the user on the driver's machine.
        if is_here and host.python is not None and host.python not in self._own_pythons:
            raise HostError(
                f"python={host.python} was found while the job runs, and may not name a program of this machine",
                host=host.name,
                hint="--remote-python, or python= in the hostfile before the job",
            )
        if self._has_files(host, is_here):
            return local_agent_command(self.config), b""
        program = self.packed(is_near=is_near)
        candidates = python_candidates(host.python or self._python)
        if self.container is None:
            return agent_command(candidates, len(program), self.config["lease"]), program
        return self._in_container(candidates, program, self.config["lease"])

    def _in_container(
        self, candidates: Sequence[str], program: bytes, limit: float, *, joins: bool = False
    ) -> tuple[str, bytes]:
        """Return command and program of a container's guardian, for `program` inside."""
        script = _agent_script(candidates, len(program), limit)
        options = {**(self.container or {}), "script": script, "joins": joins}
        begin = f"from hvlaunch.agent.container import main\nmain({dict(self.config)!r}, {options!r})"
        files = _files((*_GUARDIAN, "container"))
        guardian = make_program(f"load(*packed)\n{begin}", files, {}, is_near=False)
        return agent_command(python_candidates(None), len(guardian), limit), guardian + program

    def _has_files(self, host: Host, is_here: bool) -> bool:
        """True if the agent runs from the files of this installation."""
        return is_here and host.python is None and self._python is None and self.container is None

    def rare(self, host: Host, *, is_here: bool) -> bytes:
        """Return the rarely used modules, to be sent after the hello; empty if the agent has its files here."""
        if self._has_files(host, is_here):
            return b""
        with self._making:
            self._rare = self._rare or rare_modules(self._more)
            return self._rare

    def carrier(self, host: Host, scratch: str, limit: float) -> tuple[str, bytes]:
        """Return the command and program of a carrier to the running agent with this scratch directory."""
        program = carrier(scratch)
        if self.container is None:
            return agent_command(python_candidates(host.python or self._python), len(program), limit), program
        # A new container shares its agent's directory with the host, a running one does not.
        if self.container["name"] is None:
            return agent_command(python_candidates(None), len(program), limit), program
        candidates = python_candidates(host.python or self._python)
        return self._in_container(candidates, program, limit, joins=True)


NO_PYTHON = "hvlaunch: no Python >= 3.8 among"
"""Printed by the command if the host has no usable interpreter."""

_ROOT = Path(agent.__file__).parent
_GUARDIAN = ("__init__", "quick", "reaper", "scratch", "guardian")
_MODULES = (
    *_GUARDIAN,
    "wire/__init__",
    "wire/frames",
    "wire/channel",
    "facts",
    "wire/probe",
    "workers/__init__",
    "workers/host_workers",
    "main",
)
"""Files below agent/ that every agent needs: first its guardian's."""
_WITH_RANKS = (
    "workers/local_ranks",
    "starter",
    "workers/diagnosis",
    "workers/family",
)
"""Needed besides if a launcher has started a process for each rank."""
_WARM = ("warm", "workers/binding", "workers/preload")
_BINDING = ("workers/binding",)
"""Needed by jobs that bind their workers: sent with the rare ones."""
_LEASES = ("leases",)
"""Needed by jobs with leases, likewise."""
_PRELOAD = ("workers/preload",)
"""Needed by jobs with --preload, likewise; agent/workers/standby.py is sent with their workers."""
_RARE = ("workers/diagnosis", "errand_processes", "workers/family", "wire/relay", "wire/rejoin")
"""Needed by few jobs: sent behind the hello, as text alone, so that no start waits for these bytes."""
_TIGHT, _QUICK = 6, 1
"""Levels of zlib: 9 takes 20 ms longer than 6 for 1 KB less. 1 takes 3 ms less than 6 for 9 KB more, for near hosts."""
_DOCSTRING = re.compile(r'^( *)"""[^"]*(?:"(?!"")[^"]*)*"""$', re.MULTILINE)
_COMMENT = re.compile(r"^ *#.*|  # .*$", re.MULTILINE)
_FOR_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:(?: .*)?\n)+(?=[^ \n])(?!else:)", re.MULTILINE)
"""Imports for annotations alone, which no Python on a host runs."""
_DOCUMENTED = 0x3 | (0x4000000 if sys.version_info >= (3, 14) else 0)
"""Code flags of a function with its docstring, or None, as first constant: CO_OPTIMIZED, CO_NEWLOCALS, CO_HAS_DOCSTRING."""
_SHELL_SAFE = re.compile(r"""[^'"\\$`!\n\0]+""")
# Reads exactly its own size from stdin, since the next bytes are frames: a buffer of 1 reads nothing ahead.
# A timer ends the process until the agent's own loop takes over with the lease: the program may never arrive in full.
_BOOT = (
    "import _io,zlib,_signal;_signal.setitimer(0,{limit:g});pack=zlib.decompressobj();"
    "exec(pack.decompress(_io.BufferedReader(_io.FileIO(0,closefd=False),1).read({size})))"
)
NEW_ENOUGH = '*"Python 3."[89]*|*"Python 3."[1-9][0-9]*'
"""Output of `python -V`, four times as quick as a start, as the patterns of a shell's `case`.

An absolute path with the version in its name is not asked. The first * allows for a line that a shim of pyenv or conda prints.
"""
_VERSION_LIMIT = 10
"""Seconds for `python -V` if the host has timeout(1): an interpreter on a hanging file system is skipped."""
_SAYS_ITS_VERSION = re.compile(r"/.*/python3\.([89]|[1-9][0-9])")


def bundle(config: Mapping[str, Any], *, is_near: bool, with_ranks: bool = False) -> bytes:
    """Return the agent and `config` (see AgentProgram) as a program.

    `with_ranks`: a launcher starts the program, with a process for each of the host's ranks.
    """
    later = tuple(path for path in _MODULES if path not in _GUARDIAN) + (_WITH_RANKS if with_ranks else ())
    return make_program(f"boot(*packed, {dict(config)!r})", _files(_GUARDIAN), _files(later), is_near=is_near)


def warm_bundle(lease: float) -> bytes:
    """Return the warm agent (agent/warm.py) with its lease in seconds as a program, with every module of an agent."""
    config = {"lease": lease, "rare": list(_files(_RARE))}
    begin = f"load(*packed)\nfrom hvlaunch.agent.warm import main\nmain({config!r})"
    return make_program(begin, _files((*_MODULES, *_RARE, *_WARM)), {}, is_near=True)


def make_program(begin: str, first: Mapping[str, Path], later: Mapping[str, Path], *, is_near: bool) -> bytes:
    """Return a program: a zlib stream with its text, then the packed modules of both parts, by name.

    The text finds its decompressor as `pack`. It runs agent/boot.py, and then `begin`, in which `packed` are the arguments
    of load(). A near host gets the modules twice: as text for any Python, and compiled for the driver's own version. That
    triples the bytes to send, and saves a Python of the same version 10 ms for the agent.
    """
    packed, sizes = _modules_packed(first, later, is_near=is_near)
    boot = _text(_ROOT / "boot.py")
    if is_near:
        compiled = marshal.dumps(_code({"boot": _ROOT / "boot.py"})["boot"])
        boot = (
            "import marshal\nfrom _frozen_importlib_external import MAGIC_NUMBER\n"
            f"exec(marshal.loads({compiled!r}) if MAGIC_NUMBER == {MAGIC_NUMBER!r} else {boot!r})"
        )
    text = f"{boot}\npacked = pack.unused_data, {sizes!r}\n{begin}\n"
    return zlib.compress(text.encode(), _TIGHT) + packed


def _modules_packed(
    first: Mapping[str, Path], later: Mapping[str, Path], *, is_near: bool
) -> tuple[bytes, dict[bytes, tuple[int, int]]]:
    """Return the modules of both parts, and the sizes of the parts, as agent/boot.py says."""
    level = _QUICK if is_near else _TIGHT
    parts = [_packed({"hvlaunch.__init__": "", **_texts(first)}, level), _packed(_texts(later), level)]
    sizes = {b"": (len(parts[0]), len(parts[1]))}
    if is_near:
        compiled = [_packed({"hvlaunch.__init__": "", **_code(first)}, level), _packed(_code(later), level)]
        sizes[MAGIC_NUMBER] = (len(compiled[0]), len(compiled[1]))
        parts += compiled
    return b"".join(parts), sizes


def _texts(files: Mapping[str, Path]) -> dict[str, str]:
    return {name: _text(file) for name, file in files.items()}


def _code(files: Mapping[str, Path]) -> dict[str, CodeType]:
    """Return the modules as this Python compiles them, without docstrings."""
    code = {name: SourceFileLoader(name, str(file)).get_code(name) for name, file in files.items()}
    return {name: without_docstrings(module) for name, module in code.items() if module is not None}


def _files(paths: Iterable[str]) -> dict[str, Path]:
    """Return files below agent/ by the names of their modules; boot.py takes a name that ends in `.__init__` for a package."""
    return {"hvlaunch.agent." + path.replace("/", "."): _ROOT / f"{path}.py" for path in paths}


def rare_modules(more: Sequence[str] = ()) -> bytes:
    """Return the agent's rarely used modules and `more`, in the form for agent/boot.py."""
    return _packed(_texts(_files((*_RARE, *more))), _TIGHT)


def standby_program() -> str:
    """Return agent/workers/standby.py as a worker's `sitecustomize`."""
    return _text(_ROOT / "workers" / "standby.py") + "\nmain()\n"


def carrier(scratch: str) -> bytes:
    """Return the compressed program that joins its stdin and stdout to the agent with this scratch directory."""
    text = _text(_ROOT / "wire" / "carrier.py")
    return zlib.compress(f"{text}\nmain({scratch!r})\n".encode())


def _text(file: Path) -> str:
    return without_types(without_words(file.read_text(encoding="ascii")))


def without_types(text: str) -> str:
    """Return the module's text without its imports for annotations. Lines keep their numbers."""
    return _FOR_TYPES.sub(lambda match: "\n" * match[0].count("\n"), text)


def without_words(text: str) -> str:
    """Return the module's text without docstrings and comments. Lines keep their numbers."""
    # A quarter of the bytes to send.
    return _COMMENT.sub("", _DOCSTRING.sub(lambda match: f'{match[1]}""' + "\n" * match[0].count("\n"), text))


def without_docstrings(code: CodeType) -> CodeType:
    """Return the code without docstrings. No module may use the text of its own docstring."""
    # An eighth of the bytes to send.
    constants = [
        without_docstrings(constant) if isinstance(constant, CodeType) else constant
        for constant in code.co_consts
    ]
    is_function = code.co_flags & _DOCUMENTED == _DOCUMENTED and not code.co_name.startswith("<")
    is_module = "__doc__" in code.co_names[:2]
    if (is_function or is_module) and constants and isinstance(constants[0], str):
        constants[0] = ""
    elif "__qualname__" in code.co_names[:3] and "__doc__" in code.co_names:
        # The body of a class stores its qualified name, then (since Python 3.13) a number, then its docstring.
        texts = (number for number, value in enumerate(constants) if number and isinstance(value, str))
        constants[next(texts)] = ""
    return code.replace(co_consts=tuple(constants))


def _packed(modules: Mapping[str, CodeType | str], level: int) -> bytes:
    return zlib.compress(marshal.dumps(dict(modules)), level)


def python_candidates(chosen: str | None) -> list[str]:
    """Return the interpreters to try on a host, in order; only the user's choice if there is one."""
    if chosen is None:
        ours = Path(sys.executable)
        named = ours.with_name(f"python3.{sys.version_info.minor}")
        return [*([str(named)] if named.exists() and named != ours else []), str(ours), "python3", "python"]
    if not _SHELL_SAFE.fullmatch(chosen):
        raise BadUsage(f"--remote-python {chosen!r}: must not have a quote, $, ! or backslash")
    return [chosen]


def agent_command(candidates: Sequence[str], size: int, limit: float) -> str:
    """Return the command that starts the first candidate with Python >= 3.8, with a bundle of `size` bytes on its stdin.

    The bundle must arrive within `limit` seconds; otherwise the process ends.
    """
    # One exec and one pair of single quotes: bash, zsh, dash, fish, csh and tcsh read this alike. A command line is visible
    # to every user of the host, and therefore holds no secret.
    return f"exec /bin/sh -c '{_agent_script(candidates, size, limit)}'"


def _agent_script(candidates: Sequence[str], size: int, limit: float) -> str:
    """Return the words of agent_command() for sh, without single quotes."""
    usable = [path for path in candidates if _SHELL_SAFE.fullmatch(path)]
    named = list(takewhile(_SAYS_ITS_VERSION.fullmatch, usable))
    others = usable[len(named) :]
    return (
        f'set -- -I -S -X utf8 -c "{_BOOT.format(size=size, limit=limit)}"; '
        f'for p in {_words(named)}; do [ -f "$p" ] && [ -x "$p" ] && exec "$p" "$@"; done; '
        f'l="timeout {_VERSION_LIMIT}"; command -v timeout >/dev/null && $l true || l=; '
        f"for p in {_words(others)}; do "
        f'case "$($l "$p" -V </dev/null 2>/dev/null)" in {NEW_ENOUGH}) exec "$p" "$@";; esac; '
        f'done; echo "{NO_PYTHON} {", ".join(usable)}" >&2; exit 127'
    )


def local_agent_command(config: Mapping[str, Any]) -> str:
    """Return the command that starts the agent on this machine, from the files of this installation."""
    import shlex  # noqa: PLC0415 (only for this machine)

    root = str(Path(agent.__file__).parents[2])
    program = f"import sys;sys.path.append({root!r});from hvlaunch.agent.guardian import main;main({dict(config)!r})"
    return "exec " + shlex.join([sys.executable, "-I", "-S", "-X", "utf8", "-c", program])


def _words(paths: Iterable[str]) -> str:
    return " ".join(f'"{_home(path)}"' for path in paths)


def _home(path: str) -> str:
    return "$HOME" + path[1:] if path.startswith("~/") else path
