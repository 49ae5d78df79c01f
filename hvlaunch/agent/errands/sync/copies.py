"""A copy of the user's working tree on this host: its content, its users, and its change to another version.

A copy has

- `tree`, the directory of the workers. Files of workers stay, as in any working directory;
- `index.json`, a list of the files from the user's tree, with the status of each file after its installation;
- `paths.json` and `statuses`, the same in a form that takes a fourth of the time to compare;
- `changing.json`, the paths that a change adds or replaces, until it is complete;
- `theirs.json`, the listed paths with files from before at a fixed place: they are never removed or replaced;
- `complete`, with the hash of the tree. The file is missing during a change, so a copy counts whole or not at all;
- `size`, the bytes of the tree;
- `users`, with a file for each agent with a job in this copy.
"""

from __future__ import annotations

import marshal
import os
import stat

from hvlaunch.agent.cache import own_use
from hvlaunch.agent.errands.sync.content import copy_content, fields_of, has_content, status_of
from hvlaunch.agent.quick import dumps, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Set, Union

    from hvlaunch.agent.errands.sync.content import Manifest, TreeFile

__all__ = ["Copy", "copies_of"]


def copies_of(project: str) -> List[str]:
    """Return the directories of a project's copies."""
    names = sorted((name for name in os.listdir(project) if name.isdigit()), key=int)
    return [os.path.join(project, name) for name in names]


class Copy:
    """A copy with its files in `directory`. Its lock is held. `tree` is another place for the tree itself."""

    def __init__(self, directory: str, tree: str = "") -> None:
        self.directory = directory
        self.tree = tree or os.path.join(directory, "tree")
        self.is_fixed = bool(tree)
        """True if the tree may have files that hvlaunch has not written, and that must stay."""
        self._index: Optional[Dict[str, Any]] = None
        self._unchanged: Set[str] = set()
        self._theirs: Set[str] = set(self._load("theirs.json", []))

    def make(self) -> None:
        for path in (self.tree, os.path.join(self.directory, "users")):
            os.makedirs(path, 0o700, exist_ok=True)

    @property
    def index(self) -> Dict[str, Any]:
        """The kind of each path from the user's tree, and the content and status of files."""
        # Read when it is needed: a copy without changes does without.
        if self._index is None:
            self._index = self._load("index.json", {})
            # After a kill during a change: old and new paths.
            self._index.update({path: ["?"] for path in self._load("changing.json", [])})
        return self._index

    def is_current(self, tree_hash: str) -> bool:
        """True if the copy is complete and no path has changed since its installation."""
        if _read(os.path.join(self.directory, "complete")) != tree_hash:
            return False
        try:
            # The hash, since other versions of hvlaunch change copies, and not these files.
            of_hash, directories, links, files = self._load("paths.json", [""] * 4)
            with open(os.path.join(self.directory, "statuses"), "rb") as file:
                statuses = file.read()
            return (
                of_hash == tree_hash
                and all(os.path.isdir(self.tree + "/" + path) for path in directories)
                and all(_leads(self.tree + "/" + path, ["l", target]) for path, target in links)
                and self._statuses_of(files) == statuses
            )
        except (OSError, ValueError, TypeError):
            return False  # a path is gone, or a worker has written to these files

    def _statuses_of(self, files: List[str]) -> bytes:
        """Return what `statuses` has if these files have not changed. Raises OSError."""
        fields: List[int] = []
        look = os.stat
        with _Directory(self.tree) as tree:
            for path in files:
                # In place, as fields_of(): calls would take as long as the kernel's answers.
                status = look(path, dir_fd=tree, follow_symlinks=False)
                fields += (
                    status.st_size,
                    status.st_mtime_ns,
                    status.st_ctime_ns,
                    status.st_ino,
                    status.st_mode,
                )
        return _packed(fields)

    def _find_unchanged(self) -> Set[str]:
        """Return the files with the status of their installation."""
        unchanged = set()
        look = os.stat
        with _Directory(self.tree) as tree:
            for path, entry in self.index.items():
                if entry[0] == "f":
                    # In place, as above.
                    try:
                        status = look(path, dir_fd=tree, follow_symlinks=False)
                    except OSError:
                        continue
                    if entry[2:] == [
                        status.st_size,
                        status.st_mtime_ns,
                        status.st_ctime_ns,
                        status.st_ino,
                        status.st_mode,
                    ]:
                        unchanged.add(path)
        return unchanged

    def missing(self, manifest: Manifest) -> List[TreeFile]:
        """Return the files without their content in the tree."""
        missing = []
        unchanged = self._find_unchanged()
        for file in manifest.files:
            if file.path in unchanged:
                if self.index[file.path][1] != file.content:
                    unchanged.remove(file.path)
                    missing.append(file)
            elif not has_content(self.tree + "/" + file.path, file, None):
                missing.append(file)
        self._unchanged = unchanged
        return missing

    def use(self, job: str) -> None:
        """Note that this agent's job uses the copy."""
        with open(os.path.join(self.directory, "users", own_use()), "w") as file:
            file.write(job)

    def leave(self) -> None:
        """Note that this agent's job does not use the copy."""
        path = os.path.join(self.directory, "users", own_use())
        if os.path.exists(path):
            os.unlink(path)

    def check_conflicts(self, manifest: Manifest) -> None:
        """Raises FileExistsError if a fixed place has another file of the user's at a path of the tree."""
        if not self.is_fixed:
            return
        for path in manifest.kinds:
            whole_path = os.path.join(self.tree, path)
            if not os.path.lexists(whole_path):
                self._theirs.discard(path)
            elif path not in self.index or path in self._theirs:
                if not manifest.is_at(path, whole_path):
                    raise FileExistsError(
                        "%s is not from hvlaunch, and the project has another %s: move it away, or name another place"
                        % (whole_path, path)
                    )
                self._theirs.add(path)

    def install(self, manifest: Manifest, missing: List[TreeFile], incoming: str) -> None:
        """Change the tree to the manifest's; the content of `missing` files is in `incoming`."""
        before = self.index
        lacking = {file.path for file in missing}
        if os.path.exists(os.path.join(self.directory, "complete")):
            os.unlink(os.path.join(self.directory, "complete"))
        self._save("theirs.json", sorted(self._theirs))
        self._save(
            "changing.json", [path for path in manifest.kinds if path not in before or path in lacking]
        )
        _write(self.directory, "size", str(sum(file.size for file in manifest.files)))
        self._remove_old(before, manifest)
        for path in manifest.directories:
            directory = os.path.join(self.tree, path)
            if os.path.islink(directory) or not os.path.isdir(directory):
                _remove(directory)
                os.mkdir(directory, 0o755)
        index: Dict[str, Any] = {path: ["d"] for path in manifest.directories}
        for path, target in manifest.links.items():
            link = os.path.join(self.tree, path)
            if not os.path.islink(link) or os.readlink(link) != target:
                _remove(link)
                os.symlink(target, link)
            index[path] = ["l", target]
        last = {file.content: file for file in missing}
        for file in manifest.files:
            path = self.tree + "/" + file.path
            if file.path in lacking:
                self._install_file(path, file, incoming, is_last=last[file.content] is file)
            else:
                entry = before.get(file.path, ["?"])
                if file.path in self._unchanged and stat.S_IMODE(entry[-1]) == file.mode:
                    index[file.path] = entry
                    continue
            status = os.lstat(path)
            if file.path not in self._theirs and status.st_mode & 0o7777 != file.mode:
                os.chmod(path, file.mode)
                status = os.lstat(path)
            index[file.path] = ["f", file.content, *fields_of(status)]
        self._index = index
        self._save("theirs.json", sorted(self._theirs & index.keys()))
        self._save("index.json", index)
        files = [file.path for file in manifest.files]
        self._save("paths.json", [manifest.hash, manifest.directories, list(manifest.links.items()), files])
        fields: List[int] = []
        for name in files:
            fields += index[name][2:]
        _write(self.directory, "statuses", _packed(fields))
        _write(self.directory, "complete", manifest.hash)
        os.unlink(os.path.join(self.directory, "changing.json"))

    def _install_file(self, path: str, file: TreeFile, incoming: str, *, is_last: bool) -> None:
        content = os.path.join(incoming, file.content)
        if not is_last:
            # Not beside `path`: the tree may have a file of any name.
            content = os.path.join(incoming, "copy")
            if not copy_content(os.path.join(incoming, file.content), content, file):
                raise OSError("%s was changed while it was installed" % file.path)
        try:
            os.rename(content, path)
        except IsADirectoryError:
            os.rmdir(path)
            os.rename(content, path)

    def _remove_old(self, before: Dict[str, Any], manifest: Manifest) -> None:
        """Remove files and links that left the tree, and empty directories."""
        kinds = manifest.kinds
        left = [
            path for path, entry in before.items() if path not in kinds or entry[0] not in (kinds[path], "?")
        ]
        # Children first.
        for path in sorted(left, reverse=True):
            whole_path = os.path.join(self.tree, path)
            if self.is_fixed and (path in self._theirs or not _is_ours(whole_path, before[path])):
                continue
            try:
                _remove(whole_path)
            except OSError:
                if path in kinds:
                    raise  # a directory with a job's files, where the tree has a file now

    def _load(self, name: str, default: Any) -> Any:
        try:
            return loads(_read(os.path.join(self.directory, name)))
        except ValueError:
            return default

    def _save(self, name: str, value: Any) -> None:
        _write(self.directory, name, dumps(value))


class _Directory:
    """An open directory, for short paths of its files: the kernel looks up every directory of a path."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _write(directory: str, name: str, content: Union[str, bytes]) -> None:
    new = os.path.join(directory, name + ".new")
    with open(new, "wb") as file:
        file.write(content.encode("ascii") if isinstance(content, str) else content)
    os.rename(new, os.path.join(directory, name))


def _packed(fields: List[int]) -> bytes:
    # JSON would take six times as long. Version 2 has the same bytes for the same numbers, with any Python.
    return marshal.dumps(fields, 2)


def _is_ours(path: str, entry: List[Any]) -> bool:
    """True if a path at a fixed place has not changed since its installation."""
    if entry[0] == "f":
        return status_of(path) == entry[2:]
    if entry[0] == "l":
        return _leads(path, entry)
    return entry[0] == "?" or os.path.isdir(path)


def _is_directory(path: str, _entry: List[Any]) -> bool:
    return os.path.isdir(path)


def _leads(path: str, entry: List[Any]) -> bool:
    """True for a link with the target of its installation."""
    return os.path.islink(path) and [os.readlink(path)] == entry[1:]


def _remove(path: str) -> None:
    """Remove a file or a link, or an empty directory."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        os.rmdir(path)
