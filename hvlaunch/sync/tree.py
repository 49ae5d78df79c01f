"""The working tree: its root, its files by git's rules, and the status of each file."""

import os
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvlaunch.errors import BadUsage
from hvlaunch.job import SyncOptions
from hvlaunch.named_tuples import NamedTuple

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

__all__ = ["Commit", "Directory", "Stat", "Tree", "tree_at"]

IGNORE_FILES = (".gitignore", ".hvlaunchignore")
"""The second file wins over the first."""
_NEVER = frozenset([".git", ".hg", ".svn", ".hvlaunch", "__pycache__"])
_LIMIT = 1_000_000_000
"""Bytes."""
_ENVIRONMENT = "pyvenv.cfg"
"""A directory with this file is a virtual environment, whose paths are this machine's."""
_COMMIT = "# branch.oid "
_GIT_SECONDS = 5.0


class Stat(NamedTuple):
    """Status of a file or link. An equal status means equal content."""

    mode: int
    size: int
    """Bytes."""
    mtime: int
    """Nanoseconds, as the next one."""
    ctime: int
    inode: int

    @classmethod
    def from_kernel(cls, status: os.stat_result) -> "Stat":
        return cls(status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


class Directory(NamedTuple):
    """The names in a directory without ignored names, valid for this time and these rules."""

    mtime: int
    rules: str
    files: Sequence[str]
    directories: Sequence[str]
    has_rules: bool
    """True for a directory with ignore files, whose content is part of the rules."""


class _Rules(NamedTuple):
    """The ignore files for a directory, the nearest last."""

    files: tuple[tuple[str, str, str], ...]
    """The directory from the root on, or the root from the directory on, and the text."""

    @property
    def key(self) -> str:
        return sha256(repr(self.files).encode("utf-8", "surrogateescape")).hexdigest()


def tree_at(cwd: str, directory: str | None = None, limit: int | None = None) -> SyncOptions:
    """Return the tree of a job in `cwd`: `directory`, or the git work tree around `cwd`, or `cwd` itself.

    Raises BadUsage for `/`, the home directory, and what is no directory.
    """
    path = Path(cwd).resolve()
    if directory is None:
        root = next((parent for parent in (path, *path.parents) if (parent / ".git").exists()), path)
    else:
        root = Path(cwd, directory).resolve()
        path = path if path.is_relative_to(root) else root
    if not root.is_dir():
        raise BadUsage(f"--sync: {root} is no directory")
    if root in (Path("/"), Path.home()):
        raise BadUsage(f"--sync: {root} is no project; all of it would be copied", hint="--sync-dir DIR")
    below = path.relative_to(root).as_posix()
    return SyncOptions(str(root), "" if below == "." else below, _LIMIT if limit is None else limit)


class Tree:
    """A tree on this machine. `directories` is an earlier result of look(), by path below the root."""

    def __init__(self, root: str, directories: Mapping[str, Directory]) -> None:
        self.root = root
        self._top = next(
            (path for path in (Path(root), *Path(root).parents) if (path / ".git").exists()), None
        )
        self._before = directories
        self.directories: dict[str, Directory] = {}
        """The directories that look() has read."""
        self._specs: dict[tuple[str, str], GitIgnoreSpec] = {}

    def look(self) -> dict[str, Stat]:
        """Return all files, links and directories, by path below the root. Raises OSError."""
        # A short path for each file: the kernel looks up every directory on the way.
        root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return self._look(root)
        finally:
            os.close(root)

    def _look(self, root: int) -> dict[str, Stat]:
        statuses: dict[str, Stat] = {}
        self.directories = {}
        pending = [("", _Rules(self._rules_of_all()))]
        while pending:
            path, rules = pending.pop()
            listed, rules = self._list(path, rules)
            prefix = f"{path}/" if path else ""
            for name in listed.files:
                file = prefix + name
                # In place: calls for each of 20,000 files would take as long as the kernel's answers.
                try:
                    status = os.stat(file, dir_fd=root, follow_symlinks=False)
                except FileNotFoundError:
                    continue  # removed meanwhile
                mode = status.st_mode
                if stat.S_ISREG(mode) or stat.S_ISLNK(mode):
                    statuses[file] = Stat(
                        mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
                    )
            for name in listed.directories:
                directory = self._status(prefix + name)
                if directory is not None and stat.S_ISDIR(directory.st_mode):
                    # Ignored files change the times of their directory, and are no change of the tree.
                    statuses[prefix + name] = Stat(stat.S_IFDIR, 0, 0, 0, 0)
                    pending.append((prefix + name, rules))
        self._add_tracked(statuses)
        return statuses

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _status(self, name: str) -> os.stat_result | None:
        try:
            return os.lstat(f"{self.root}/{name}")
        except FileNotFoundError:
            return None  # removed meanwhile

    def _rules_of_all(self) -> tuple[tuple[str, str, str], ...]:
        """Return the rules of the user, of the clone, and of the directories above in the clone, for all paths."""
        root = Path(self.root)
        top = self._top or root
        lead = _lead(root, top)
        paths = [(lead, path) for path in self._paths_of_rules]
        above = [directory for directory in reversed(root.parents) if directory.is_relative_to(top)]
        paths += [(_lead(root, directory), directory / name) for directory in above for name in IGNORE_FILES]
        rules = tuple(("", lead, text) for lead, path in paths if (text := _text(path)))
        # A directory that is ignored as a whole was named by the user, who wants its files.
        return () if lead and self._is_ignored("", _Rules(rules)) else rules

    @cached_property
    def _paths_of_rules(self) -> Sequence[Path]:
        """Git's own files with rules; asking git takes milliseconds."""
        return list(self._find_rules())

    def _find_rules(self) -> Iterator[Path]:
        config = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
        yield Path(_git(self.root, "config", "--path", "core.excludesFile") or f"{config}/git/ignore")
        if self._top is not None:
            exclude = self._top / ".git/info/exclude"
            if (self._top / ".git").is_file():  # a linked work tree
                exclude = Path(self.root, _git(self.root, "rev-parse", "--git-path", "info/exclude"))
            yield exclude

    def _list(self, path: str, rules: _Rules) -> tuple[Directory, _Rules]:
        """Return the names in a directory without ignored names, and the rules below the directory."""
        whole = f"{self.root}/{path}" if path else self.root
        mtime = Path(whole).stat().st_mtime_ns
        before = self._before.get(path)
        if before is None or before.mtime != mtime or before.has_rules:
            names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in os.scandir(whole)}
            rules, has_rules = self._with_own(path, whole, rules, names)
        else:
            names, has_rules = {}, False
        key = rules.key
        if before is None or before.mtime != mtime or before.rules != key:
            if not names:
                names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in os.scandir(whole)}
            before = self._choose(path, mtime, rules, names, has_rules=has_rules)
        self.directories[path] = before
        return before, rules

    def _with_own(self, path: str, whole: str, rules: _Rules, names: Iterable[str]) -> tuple[_Rules, bool]:
        prefix = f"{path}/" if path else ""
        rules_here = [(prefix, "", _text(Path(whole, name))) for name in IGNORE_FILES if name in names]
        return _Rules((*rules.files, *rules_here)), bool(rules_here)

    def _choose(
        self, path: str, mtime: int, rules: _Rules, names: Mapping[str, bool], *, has_rules: bool
    ) -> Directory:
        if _ENVIRONMENT in names and path:
            return Directory(mtime, rules.key, (), (), has_rules)
        prefix = f"{path}/" if path else ""
        kept = [
            name
            for name, is_directory in sorted(names.items())
            if name not in _NEVER and not self._is_ignored(prefix + name + "/" * is_directory, rules)
        ]
        files = tuple(name for name in kept if not names[name])
        directories = tuple(name for name in kept if names[name])
        return Directory(mtime, rules.key, files, directories, has_rules)

    def _is_ignored(self, name: str, rules: _Rules) -> bool:
        # As in git, the last matching line of the nearest file decides.
        for prefix, lead, text in reversed(rules.files):
            answer = self._spec(prefix, text).check_file(lead + name[len(prefix) :]).include
            if answer is not None:
                return answer
        return False

    def _spec(self, prefix: str, text: str) -> "GitIgnoreSpec":
        from pathspec import GitIgnoreSpec  # noqa: PLC0415 (only directories that have changed need it)

        spec = self._specs.get((prefix, text))
        if spec is None:
            spec = self._specs[prefix, text] = GitIgnoreSpec.from_lines(
                # Not splitlines(): a name may have other line ends, and git knows none of them.
                line.removesuffix("\r")
                for line in text.split("\n")
            )
        return spec

    def _add_tracked(self, statuses: dict[str, Stat]) -> None:
        """Add ignored files that git tracks."""
        if self._top is None:
            return
        words = ["git", "-C", self.root, "ls-files", "-z", "--cached", "--ignored", "--exclude-standard"]
        try:
            listed = subprocess.run(words, capture_output=True, check=False).stdout
        except OSError:
            return  # no git here: its rules alone count
        for name in filter(None, os.fsdecode(listed).split("\0")):
            status = self._status(name)
            if status is None or not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
                continue
            statuses[name] = Stat.from_kernel(status)
            while (name := name.rpartition("/")[0]) and name not in statuses:
                statuses[name] = Stat(stat.S_IFDIR, 0, 0, 0, 0)


class Commit:
    """Git's commit of a tree on this machine. Git runs while the tree is read."""

    def __init__(self, root: str) -> None:
        # A hook for changed files would run a program of the repository's.
        git = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", root]
        words = [*git, "status", "--porcelain=v2", "--branch", "-z", "--", "."]
        self._process: subprocess.Popen[bytes] | None = None
        with suppress(OSError):  # no git here
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )

    def facts(self) -> dict[str, Any]:
        """Wait for git; return `commit` and `is_dirty`, both None for a tree without git."""
        output = b""
        if self._process is not None:
            try:
                output, _ = self._process.communicate(timeout=_GIT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate()
        entries = [entry for entry in output.decode("ascii", "replace").split("\0") if entry]
        commit = next((entry[len(_COMMIT) :] for entry in entries if entry.startswith(_COMMIT)), None)
        # A work tree without a commit has `(initial)` there.
        if commit is None or not commit.isalnum():
            return {"commit": None, "is_dirty": None}
        return {"commit": commit, "is_dirty": any(not entry.startswith("#") for entry in entries)}


def _text(path: Path) -> str:
    """Return the text of a file with rules, empty without a file. Raises OSError: unread rules would let secrets leave."""
    if not path.is_file():
        return ""
    # Git skips a byte order mark.
    return path.read_text(encoding="utf-8-sig", errors="surrogateescape")


def _lead(root: Path, directory: Path) -> str:
    """Return the path of the root from a directory above on, with a slash at its end."""
    lead = root.relative_to(directory).as_posix()
    return "" if lead == "." else f"{lead}/"


def _git(root: str, *words: str) -> str:
    """Return the line that git prints; empty without git."""
    try:
        done = subprocess.run(["git", "-C", root, *words], capture_output=True, check=False)
    except OSError:
        return ""
    return os.fsdecode(done.stdout).rstrip("\n")
