"""The first code that runs on a host: makes the agent's modules importable from the text that came with it."""

import gc
import sys
from types import ModuleType
from typing import Any, Dict

__all__ = ["boot"]

_OBJECTS_PER_COLLECTION = 20000  # imports make many that stay: looking through them all takes 2 ms
_ModuleSpec: Any = type(sys.__spec__)  # that of importlib.machinery, whose import takes a millisecond


class _Finder:
    """Imports modules from their source texts; a name that ends in `.__init__` is a package."""

    def __init__(self, sources: Dict[str, str]) -> None:
        self._sources = sources

    def find_spec(
        self,
        name: str,
        path: Any = None,  # noqa: ARG002 (importlib calls it so)
        target: Any = None,  # noqa: ARG002 (importlib calls it so)
    ) -> Any:
        is_package = name + ".__init__" in self._sources
        if not is_package and name not in self._sources:
            return None
        return _ModuleSpec(name, self, is_package=is_package)

    def create_module(self, spec: Any) -> None:  # noqa: ARG002 (importlib calls it so)
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        source = self._sources.get(name + ".__init__", self._sources.get(name, ""))
        exec(compile(source, "<%s>" % name, "exec", dont_inherit=True), module.__dict__)  # noqa: S102


def boot(sources: Dict[str, str], config: Dict[str, Any]) -> None:
    """Run the guardian with `config`, importing from `sources` (module name to text)."""
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    sys.meta_path.insert(0, _Finder(sources))
    from hvlaunch.agent import guardian  # noqa: PLC0415 (importable only now)

    guardian.main(config)
