"""The first code on a host: makes the modules in the bundle importable, and starts the guardian.

The modules stand behind this program, compressed, and in two parts: the guardian's, and the agent's, which are unpacked after
the fork. The agent would otherwise copy the pages of the guardian that have them, as it counts references.
"""

from __future__ import annotations

import gc
import marshal
import sys
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType
    from typing import Any, Dict, List, Tuple, Union

    Modules = Dict[str, Union[str, CodeType]]
    Sizes = Dict[bytes, Tuple[int, int]]

__all__ = ["boot", "load"]

_OBJECTS_PER_COLLECTION = 20000  # imports make many that stay: looking through them all takes 2 ms
_ModuleSpec: Any = type(sys.__spec__)  # that of importlib.machinery, whose import takes a millisecond


class _Finder:
    """Imports modules from texts or code objects; a name that ends in `.__init__` is a package."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._later: List[bytes] = []

    def add(self, more: bytes) -> None:
        """Add packed modules: marshalled, compressed. They are unpacked at the first import of an unknown module."""
        self._later.append(more)

    def unpack(self) -> None:
        while self._later:
            self._modules.update(marshal.loads(zlib.decompress(self._later.pop(0))))  # noqa: S302 (the driver sent it)

    def find_spec(
        self,
        name: str,
        path: Any = None,  # noqa: ARG002 (importlib calls it so)
        target: Any = None,  # noqa: ARG002 (importlib calls it so)
    ) -> Any:
        is_package = name + ".__init__" in self._modules
        if not is_package and name not in self._modules:
            if not (self._later and name.startswith("hvlaunch.")):
                return None
            self.unpack()
            return self.find_spec(name)
        return _ModuleSpec(name, self, is_package=is_package)

    def create_module(self, spec: Any) -> None:  # noqa: ARG002 (importlib calls it so)
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        code = self._modules.get(name + ".__init__", self._modules.get(name, ""))
        # An empty package: the first call of compile() makes Python's types of syntax trees, for 0.7 ms.
        if code and isinstance(code, str):
            code = compile(code, "<%s>" % name, "exec", dont_inherit=True)
        exec(code, module.__dict__)  # noqa: S102


def load(packed: bytes, sizes: Sizes) -> Modules:
    """Make packed modules importable; `sizes` has the bytes of both parts, one kind of modules behind the other.

    A kind is the magic number of a Python's compiled files; its modules are code objects. The kind b"" has the modules
    as texts, for any other Python, which then compiles for 10 ms.
    """
    from _frozen_importlib_external import MAGIC_NUMBER  # noqa: PLC0415 (as importlib.util, which takes 3 ms)

    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    # Code of another Python would crash this one, so the magic number decides.
    chosen = MAGIC_NUMBER if MAGIC_NUMBER in sizes else b""
    start = 0
    for kind, (first, size) in sizes.items():
        if kind == chosen:
            break
        start += first + size
    modules: Modules = {}
    finder = _Finder(modules)
    finder.add(packed[start : start + first])
    finder.unpack()
    finder.add(packed[start + first : start + first + size])
    # First in the path, so that no module of the host takes the place of the driver's.
    sys.meta_path.insert(0, finder)
    return modules


def boot(packed: bytes, sizes: Sizes, config: Dict[str, Any]) -> None:
    """Run the guardian with `config`, importing from the packed modules."""
    modules = load(packed, sizes)
    from hvlaunch.agent import guardian  # noqa: PLC0415 (importable only now)

    # agent/wire/caller.py leaves two objects among the globals: `sealed`, which encrypts the channel without ssh, and
    # `ranks`, the socket at which the launcher's other processes of this host meet the agent.
    ranks = globals().get("ranks")
    guardian.main(config, globals().get("sealed"), ranks and (ranks, modules))
