"""An errand's program for a host: the errand's file, and the agent's modules among its imports."""

import re
from functools import cache
from pathlib import Path
from threading import Lock

from hvlaunch import agent
from hvlaunch.agent import errands
from hvlaunch.driver.program import make_program, without_types

__all__ = ["errand_names", "errand_program"]

_PACKAGE = "hvlaunch.agent"
_IMPORT = re.compile(rf"^( *)from ({re.escape(_PACKAGE)}[\w.]*) import \(?([\w, ]+|[\w,\s]+\))", re.MULTILINE)


def errand_names() -> list[str]:
    """List the errands: the files in hvlaunch/agent/errands/, and the packages in it."""
    files = {file for folder in errands.__path__ for file in Path(folder).glob("*.py")}
    packages = {file.parent for folder in errands.__path__ for file in Path(folder).glob("*/__init__.py")}
    return sorted(file.stem for file in files | packages if file.stem != "__init__")


_MAKING = Lock()


def errand_program(name: str, *, is_near: bool) -> bytes:
    """The program, as make_program() makes it: it runs agent/errands/__init__.py. Thread-safe."""
    # The cache alone would let each host's thread make it, as they all ask at the same time.
    with _MAKING:
        return _made(name, is_near=is_near)


@cache
def _made(name: str, *, is_near: bool) -> bytes:
    files: dict[str, Path] = {}
    collected: set[tuple[str, bool]] = set()
    _collect(errands.__name__, files, collected)
    _collect(f"{errands.__name__}.{name}", files, collected)
    begin = f"load(*packed)\nfrom {errands.__name__} import main\nmain({name!r})"
    return make_program(begin, files, {}, is_near=is_near)


def _collect(
    name: str, files: dict[str, Path], collected: set[tuple[str, bool]], *, is_called: bool = True
) -> None:
    """Add the module, its packages, and its imports from the agent; imports within functions if these are called."""
    if not collected.isdisjoint({(name, True), (name, is_called)}):
        return
    collected.add((name, is_called))
    file = _file_of(name)
    # Modules for annotations alone need not travel.
    text = without_types(file.read_text(encoding="ascii"))
    files[f"{name}.__init__" if file.name == "__init__.py" else name] = file
    if (package := name.rpartition(".")[0]) != "hvlaunch":
        # The observer's package imports ten modules in its functions, and others borrow a module of it.
        _collect(package, files, collected, is_called=False)
    for indent, module, names in _IMPORT.findall(text):
        if indent and not is_called:
            continue
        _collect(module, files, collected)
        if _file_of(module).name == "__init__.py":
            for part in re.findall(r"\w+", names):
                # A name of a package is a module, or is defined in the package itself.
                if _candidates(f"{module}.{part}"):
                    _collect(f"{module}.{part}", files, collected)


def _file_of(name: str) -> Path:
    return _candidates(name)[0]


def _candidates(name: str) -> list[Path]:
    """The files of a module of the agent. Errands of tests are in folders of their own."""
    package, folders = _PACKAGE, [str(Path(agent.__file__).parent)]
    if name.startswith(f"{errands.__name__}."):
        package, folders = errands.__name__, list(errands.__path__)
    path = name.removeprefix(package).strip(".").replace(".", "/")
    bases = [Path(folder) / path for folder in folders]
    # Not by is_dir(): a folder that was a package once may still have compiled files.
    candidates = (file for base in bases for file in (base / "__init__.py", base.with_suffix(".py")))
    return [file for file in candidates if file.is_file()]
