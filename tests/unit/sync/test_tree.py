"""Which files of a working tree count: git's rules, in git's own order."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hvlaunch.errors import BadUsage
from hvlaunch.sync.tree import Tree, tree_at


@pytest.fixture(autouse=True)
def own_home(monkeypatch, tmp_path):
    """No rules of the user who runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "project"
    path.mkdir()
    return path


def make(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(root: Path) -> set[str]:
    return set(Tree(str(root), {}).look())


IGNORED = {
    ".gitignore": "*.log\n/data\nbuild/\n!keep.log\ndocs/*.txt\n**/cache/*\n# a comment\n\\#odd\ntrailing \n",
    "a.log": "",
    "keep.log": "",
    "data/x": "",
    "sub/data/x": "",
    "build/x": "",
    "sub/build/x": "",
    "builder/x": "",
    "docs/a.txt": "",
    "docs/b/a.txt": "",
    "x/cache/y": "",
    "#odd": "",
    "trailing": "",
    "sub/.gitignore": "!a.log\nsecret*\n",
    "sub/a.log": "",
    "sub/secret.txt": "",
    "sub/deep/secret.txt": "",
    "sub/deep/.gitignore": "!secret.txt\n",
    "name with spaces and ü": "",
}


def test_what_is_ignored_is_what_git_ignores(root):
    make(root, **IGNORED)
    subprocess.run(["git", "init", "-q", root], check=True)
    files = git_files(root)
    assert {name for name in names(root) if not (root / name).is_dir()} == files
    assert "keep.log" in files
    assert "a.log" not in files


def git_files(root: Path) -> set[str]:
    words = ["git", "-C", str(root), "ls-files", "-z", "--others", "--exclude-standard"]
    listed = subprocess.run(words, check=True, capture_output=True).stdout
    return {os.fsdecode(name) for name in listed.split(b"\0") if name}


@pytest.mark.parametrize(
    "rules",
    [
        b"\xef\xbb\xbf*.env\n",
        b"x\r\n*.env\r\n",
        b"x\x0b\n*.env",
        "x\u2028\n*.env".encode(),
        b"\xff\n*.env\n",
    ],
)
def test_rules_of_any_form_keep_secrets_here(root, rules):
    """Editors write a byte order mark, or lines that end with CR and LF."""
    (root / ".gitignore").write_bytes(rules)
    make(root, **{"my.env": "", "y": ""})
    subprocess.run(["git", "init", "-q", root], check=True)
    assert names(root) == git_files(root) == {".gitignore", "y"}


def test_the_users_own_file_of_rules_counts(root, tmp_path):
    """Many have ~/.gitignore_global; git's own place for the file does not count then."""
    make(
        tmp_path,
        **{
            "home/.gitconfig": "[core]\n  excludesFile = ~/.gitignore_global\n",
            "home/.gitignore_global": ".env\n",
            "home/.config/git/ignore": "y\n",
        },
    )
    make(root, **{".env": "", "y": ""})
    subprocess.run(["git", "init", "-q", root], check=True)
    assert names(root) == git_files(root) == {"y"}


def test_rules_of_a_linked_work_tree_count(root, tmp_path):
    """Its .git is a file, and the rules are in the clone."""
    make(tmp_path, **{"clone/a": ""})
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", tmp_path / "clone"]
    for words in (
        ["init", "-q"],
        ["add", "a"],
        ["commit", "-q", "-m", "a"],
        ["worktree", "add", "-q", root / "w"],
    ):
        subprocess.run([*git, *words], check=True)
    make(tmp_path, **{"clone/.git/info/exclude": "*.env\n"})
    make(root, **{"w/my.env": "", "w/y": ""})
    assert names(root / "w") == {"a", "y"}


def test_rules_above_a_part_of_a_clone_count(root):
    make(
        root,
        **{
            ".gitignore": "*.env\n/sub/data\nbuild/\n",
            "sub/my.env": "",
            "sub/data/x": "",
            "sub/deep/data/x": "",
            "sub/y": "",
            "sub/w.env": "",
            "build/out/x": "",
        },
    )
    subprocess.run(["git", "init", "-q", root], check=True)
    subprocess.run(["git", "-C", root, "add", "-f", "sub/w.env"], check=True)
    assert names(root / "sub") == {"deep", "deep/data", "deep/data/x", "y", "w.env"}
    assert names(root / "sub/deep") == {"data", "data/x"}
    assert names(root / "build") == {"out", "out/x"}, "the user has named it"


def test_rules_that_can_not_be_read_are_an_error(root):
    make(root, **{".gitignore": "*.env\n", "my.env": ""})
    (root / ".gitignore").chmod(0)
    if os.access(root / ".gitignore", os.R_OK):
        pytest.skip("root reads everything")
    with pytest.raises(PermissionError):
        names(root)


def test_a_file_that_git_tracks_counts_although_a_rule_ignores_it(root):
    make(root, **{".gitignore": "weights/\n", "weights/small.pt": "", "weights/large.pt": ""})
    subprocess.run(["git", "init", "-q", root], check=True)
    subprocess.run(["git", "-C", root, "add", "-f", "weights/small.pt"], check=True)
    assert names(root) == {".gitignore", "weights", "weights/small.pt"}


def test_rules_of_the_clone_and_the_user_count_too(root, tmp_path):
    make(root, **{"a.out": "", "b.tmp": "", ".git/info/exclude": "*.out\n"})
    make(tmp_path, **{"home/.config/git/ignore": "*.tmp\n"})
    assert names(root) == set()


def test_hvlaunchs_own_rules_come_after_gits(root):
    make(
        root,
        **{
            ".gitignore": "*.bin\n",
            ".hvlaunchignore": "!model.bin\nnotes\n",
            "model.bin": "",
            "x.bin": "",
            "notes": "",
        },
    )
    assert names(root) == {".gitignore", ".hvlaunchignore", "model.bin"}


def test_some_directories_never_travel(root):
    make(
        root,
        **{
            ".git/HEAD": "",
            "m/__pycache__/m.pyc": "",
            ".hg/x": "",
            ".hvlaunch/index.json": "",
            "env/pyvenv.cfg": "",
            "env/bin/python": "",
        },
    )
    assert names(root) == {"m", "env"}


def test_empty_directories_odd_names_and_links_count_and_sockets_do_not(root):
    (root / "empty").mkdir()
    os.mkfifo(root / "fifo")
    (root / "link").symlink_to("empty")
    (root / "dangling").symlink_to("nothing")
    (root / os.fsdecode(b"\xff\n")).touch()
    assert names(root) == {"empty", "link", "dangling", "\udcff\n"}


def test_a_later_look_sees_each_change(root):
    make(root, **{"a/x": "1", "b/x": "1"})
    tree = Tree(str(root), {})
    first = tree.look()
    assert Tree(str(root), tree.directories).look() == first
    make(root, **{"a/new": ""})
    assert Tree(str(root), tree.directories).look().keys() - first.keys() == {"a/new"}
    (root / "a/new").unlink()
    make(root, **{"b/x": "22"})
    assert Tree(str(root), tree.directories).look()["b/x"] != first["b/x"]
    # New rules in a file whose directory has the same time: what was listed before does not count any more.
    make(root, **{".gitignore": "a\n"})
    before = Tree(str(root), tree.directories)
    assert "a" not in before.look()
    make(root, **{".gitignore": "b\n"})
    assert Tree(str(root), before.directories).look().keys() == {".gitignore", "a", "a/x"}
    shutil.rmtree(root / "a")
    assert Tree(str(root), before.directories).look().keys() == {".gitignore"}


def test_the_tree_is_the_work_tree_around_the_directory(root, tmp_path):
    make(root, **{"sub/deep/x": "", ".git/HEAD": ""})
    assert tree_at(str(root / "sub/deep"))[:2] == (str(root), "sub/deep")
    assert tree_at(str(root))[:2] == (str(root), "")
    assert tree_at(str(root / "sub"), "deep")[:2] == (str(root / "sub/deep"), "")
    assert tree_at(str(root / "sub/deep"), "..", 7)[:3] == (str(root / "sub"), "deep", 7)
    assert tree_at(str(tmp_path))[:2] == (str(tmp_path), "")


@pytest.mark.parametrize("directory", ["/", "~", "nowhere"])
def test_the_root_and_the_home_directory_are_refused(root, directory, tmp_path):
    (tmp_path / "home").mkdir()
    with pytest.raises(BadUsage, match=r"--sync: .* is no "):
        tree_at(str(root), directory.replace("~", str(tmp_path / "home")))
