"""An errand's program for a host: the errand's file, and the agent's modules among its imports."""

import re
import zlib
from functools import cache
from pathlib import Path

from hvlaunch import agent
from hvlaunch.agent import errands
from hvlaunch.driver.program import without_words

__all__ = ["errand_names", "errand_program"]

_PACKAGE = "hvlaunch.agent"
_RUNNER = f"{_PACKAGE}.errand_runner"
_FOR_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:(?: .*)?\n)*", re.MULTILINE)
_IMPORT = re.compile(rf"^ *from ({re.escape(_PACKAGE)}[\w.]*) import \(?([\w, ]+|[\w,\s]+\))", re.MULTILINE)


def errand_names() -> list[str]:
    """List the errands: the files in hvlaunch/agent/errands/, and the packages in it."""
    files = {file for folder in errands.__path__ for file in Path(folder).glob("*.py")}
    packages = {file.parent for folder in errands.__path__ for file in Path(folder).glob("*/__init__.py")}
    return sorted(file.stem for file in files | packages if file.stem != "__init__")


@cache
def errand_program(name: str) -> bytes:
    """The program, compressed: it imports its modules from itself and runs agent/errand_runner.py."""
    texts = {"hvlaunch.__init__": "", f"{_PACKAGE}.__init__": ""}
    _collect(_RUNNER, texts)
    _collect(f"{errands.__name__}.{name}", texts)
    boot = without_words(Path(agent.__file__).with_name("boot.py").read_text(encoding="ascii"))
    begin = f"gc.set_threshold(_OBJECTS_PER_COLLECTION)\nsys.meta_path.insert(0, _Finder({texts!r}))\nfrom {_RUNNER} import main\nmain({name!r})\n"
    return zlib.compress(f"{boot}\n{begin}".encode())


def _collect(name: str, texts: dict[str, str]) -> None:
    """Add the module, its packages, and its imports from the agent, including imports within functions."""
    file = _file_of(name)
    key = f"{name}.__init__" if file.name == "__init__.py" else name
    if key in texts:
        return
    # Modules for annotations alone need not travel.
    text = _FOR_TYPES.sub("", file.read_text(encoding="ascii"))
    texts[key] = without_words(file.read_text(encoding="ascii"))
    if (package := name.rpartition(".")[0]) != "hvlaunch":
        _collect(package, texts)
    for module, names in _IMPORT.findall(text):
        _collect(module, texts)
        if _file_of(module).name == "__init__.py":
            for part in re.findall(r"\w+", names):
                # A name of a package is a module, or is defined in the package itself.
                if _candidates(f"{module}.{part}"):
                    _collect(f"{module}.{part}", texts)


def _file_of(name: str) -> Path:
    return _candidates(name)[0]


def _candidates(name: str) -> list[Path]:
    """The files of a module of the agent. Errands of tests are in folders of their own."""
    package, folders = _PACKAGE, [str(Path(agent.__file__).parent)]
    if name.startswith(f"{errands.__name__}."):
        package, folders = errands.__name__, list(errands.__path__)
    path = name.removeprefix(package).strip(".").replace(".", "/")
    bases = [Path(folder) / path for folder in folders]
    candidates = (base / "__init__.py" if base.is_dir() else base.with_suffix(".py") for base in bases)
    return [file for file in candidates if file.is_file()]
