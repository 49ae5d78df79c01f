"""Imports modules in a worker's Python before its script begins, and waits there until the agent needs the worker.

The whole file travels as text and is the first `sitecustomize` of a worker (agent/workers/preload.py): Python imports it before the
script, and runs the script itself once this import has ended. Everything about the script is therefore as in any
other start. The file runs without hvlaunch, on any Python >= 3.8.
"""

from __future__ import annotations

import marshal
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

    Import = Tuple[str, Sequence[str]]

__all__ = ["gpus_of", "imports_of", "main", "script_of"]

_NAME = "sitecustomize"
_VARIABLE = "HVL_STANDBY"
_PLACES = ("RANK", "SIZE")
"""Ends of the names of variables with a worker's place, which may differ at the next start."""
_CHANGES = ("environ", "putenv")
_GPUS = "/dev/nvidia", "/dev/kfd"
_LONGEST = 1000
_READ_SIZE = 1 << 16


def main() -> None:
    """Import, report to the agent, wait for its order, and return: Python then runs the script. Raises ImportError."""
    packed = os.environ.pop(_VARIABLE, None)
    if packed is None:
        return
    plan: Dict[str, Any] = marshal.loads(bytes.fromhex(packed))  # noqa: S302 (the agent wrote it)
    fd: int = plan["fd"]
    _leave_no_trace(plan)
    # The user's own, if there is one, runs before everything else, as without this file.
    failure: Optional[BaseException] = None
    try:
        __import__(_NAME)
    except BaseException as error:  # noqa: BLE001 (site handles it below, as without this file)
        failure = error
    if _is_own(fd, plan["socket"]):
        _stand_by(fd, plan)
    if failure is not None:
        raise failure


def _is_own(fd: int, inode: int) -> bool:
    """True for the agent's socket. Other processes may have copied the environment of this one's start."""
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False


def _stand_by(fd: int, plan: Dict[str, Any]) -> None:
    os.set_inheritable(fd, False)
    started = time.monotonic()
    reads, cause = _watching_reads(lambda: _import_all(plan["modules"], plan["script"], plan["module"]))
    report = "%.3f\n%s\n%s\n" % (time.monotonic() - started, ",".join(reads), cause)
    try:
        os.write(fd, report.encode("utf-8", "replace"))
        order = _wait(fd)
    except OSError:
        if plan["waits"]:
            os._exit(0)  # the agent has started another one
        order = {}
    os.close(fd)
    for name, value in order.get("env", {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if "cwd" in order:
        # Again, because the directory may be another one of the same name.
        os.chdir(order["cwd"])


def _leave_no_trace(plan: Dict[str, Any]) -> None:
    """Remove this file from the path, the variables and the loaded modules."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]
    sys.path_importer_cache.pop(here, None)
    sys.modules.pop(_NAME, None)
    if plan["path"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = plan["path"]


def _wait(fd: int) -> Dict[str, Any]:
    """Return the order of the agent; exit if there will be none."""
    # If memory runs out, a process that waits should go first.
    before = _oom_score("1000")
    data = b""
    while True:
        part = os.read(fd, _READ_SIZE)
        if not part:
            break
        data += part
    if not data:
        os._exit(0)
    _oom_score(before)
    order: Dict[str, Any] = marshal.loads(data)  # noqa: S302 (as above)
    return order


def _oom_score(value: str) -> str:
    """Set the kernel's liking to kill this process; return the earlier value."""
    before = value
    try:
        with open("/proc/self/oom_score_adj") as file:
            before = file.read()
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(value)
    except OSError:
        pass
    return before


def _watching_reads(work: Callable[[], str]) -> Tuple[List[str], str]:
    """Return the variables with a place that `work` has read, and its result."""
    kind: Any = type(os.environ)
    reads: Set[str] = set()
    original = kind.__getitem__

    def read(self: Any, name: str) -> str:
        if isinstance(name, str) and name.endswith(_PLACES):
            reads.add(name)
        text: str = original(self, name)
        return text

    kind.__getitem__ = read
    try:
        result = work()
    finally:
        kind.__getitem__ = original
    return sorted(reads), result


def _import_all(modules: Sequence[str], script: Optional[str], module: Optional[str]) -> str:
    """Import the modules; return why this process must not wait for another start, empty if it may."""
    # Imports of the script find modules beside it first, so these must too.
    root = os.getcwd() if script is None else script
    if script is not None and not os.path.isdir(script):
        root = os.path.dirname(os.path.realpath(script))
    is_safe = getattr(sys.flags, "safe_path", False)
    if not is_safe:
        sys.path.insert(0, root)
    try:
        for name, parts in _all_imports(modules, script, module, root):
            __import__(name, fromlist=parts)
    except BaseException as error:  # noqa: BLE001 (the script's own import shows it)
        words = "%s: %s" % (type(error).__name__, error)
        return " ".join(words.split())[:_LONGEST]
    finally:
        if not is_safe and root in sys.path:
            sys.path.remove(root)
    devices = gpus_of("/proc/self/fd")
    return "its import opens %s" % devices[0] if devices else ""


def _all_imports(
    modules: Sequence[str], script: Optional[str], module: Optional[str], root: str
) -> Iterator[Import]:
    for name in modules:
        if name != "auto":
            yield name, ()
            continue
        path = script_of(script, module)
        if path is None:
            raise ImportError("auto: the script has no file to read")
        with open(path, "rb") as file:
            text = file.read()
        yield from imports_of(text, root)


def script_of(script: Optional[str], module: Optional[str]) -> Optional[str]:
    """Return the file of the script or module, without importing anything; None for other kinds."""
    if script is not None:
        path = os.path.join(script, "__main__.py") if os.path.isdir(script) else script
        return path if path.endswith(".py") and os.path.isfile(path) else None
    from importlib.machinery import PathFinder  # noqa: PLC0415 (only `auto` needs it)

    places: Any = None
    spec = None
    for part in (module or "").split("."):
        spec = PathFinder.find_spec(part, places)
        places = spec.submodule_search_locations if spec is not None else None
        if spec is None:
            return None
    if places:
        spec = PathFinder.find_spec("__main__", places)
    origin = spec.origin if spec is not None else None
    return origin if origin is not None and origin.endswith(".py") else None


def imports_of(text: bytes, root: str) -> Iterator[Import]:
    """Yield the imports at the top of a script, without modules below `root`: the user may change these."""
    import ast  # noqa: PLC0415 (as above)
    from importlib.machinery import PathFinder  # noqa: PLC0415 (as above)

    for statement in ast.parse(text).body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        names: List[Import] = []
        if isinstance(statement, ast.Import):
            names = [(alias.name, ()) for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            names = [(statement.module, [alias.name for alias in statement.names if alias.name != "*"])]
        elif any(_changes_imports(node) for node in ast.walk(statement)):
            return  # the modules below may depend on it
        for name, parts in names:
            top = name.partition(".")[0]
            spec = None if top in ("__future__", *sys.builtin_module_names) else PathFinder.find_spec(top)
            if spec is not None and not _is_below(root, spec):
                yield name, parts


def _changes_imports(node: Any) -> bool:
    """True for os.environ, os.putenv and sys.path."""
    name, owner = getattr(node, "attr", ""), getattr(getattr(node, "value", None), "id", "")
    return name in _CHANGES or (owner == "sys" and name == "path")


def _is_below(root: str, spec: Any) -> bool:
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    installed = os.path.realpath(sys.prefix) + os.sep
    paths = [os.path.realpath(place) for place in places]
    return any(
        path.startswith(os.path.realpath(root) + os.sep) and not path.startswith(installed) for path in paths
    )


def gpus_of(folder: str) -> List[str]:
    """Return the GPUs' devices among the open files: a library that holds a GPU must not wait with it."""
    devices = []
    for name in os.listdir(folder):
        try:
            path = os.readlink(os.path.join(folder, name))
        except OSError:
            continue
        kind, number = path.rstrip("0123456789"), path[-1:]
        if path == _GPUS[1] or (kind == _GPUS[0] and number.isdigit()):
            devices.append(path)
    return devices
