"""Files that are written as a whole."""

import os
import stat

import pytest

from hvlaunch.owners import write_whole


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_file_is_replaced_as_a_whole_and_has_its_mode_whatever_the_umask(tmp_path, mode):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    reader = path.open("rb")
    umask = os.umask(0o077)
    try:
        write_whole(path, b"new", mode)
    finally:
        os.umask(umask)
    with reader:
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert [*tmp_path.iterdir()] == [path]


def test_a_link_is_replaced_and_not_followed(tmp_path):
    theirs, path = tmp_path / "theirs", tmp_path / "x"
    theirs.write_bytes(b"theirs")
    path.symlink_to(theirs)
    write_whole(path, b"new", 0o600)
    assert (theirs.read_bytes(), path.is_symlink(), path.read_bytes()) == (b"theirs", False, b"new")


def test_what_can_not_take_its_name_is_removed(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path / "x", b"new", 0o600)
    assert [one.name for one in tmp_path.iterdir()] == ["x"]
