"""Files of output are written below their directory, and nowhere else."""

import errno
from pathlib import Path

import pytest

from hvlaunch.console.files import OutputFiles


@pytest.mark.parametrize("place", ["rank.0/stdout", "rank.0"])
def test_a_link_leads_nowhere(tmp_path: Path, place: str) -> None:
    """A worker on the driver's machine, or another user of a shared directory, may put one there at any time."""
    files = OutputFiles(tmp_path / "out", 1)
    theirs = tmp_path / "theirs"
    (theirs / "rank.0").mkdir(parents=True)
    (theirs / "rank.0" / "stdout").write_text("precious")
    link = tmp_path / "out" / place
    link.rename(tmp_path / "away")
    link.symlink_to(theirs / place)
    with pytest.raises(OSError, match=str(tmp_path / "out" / "rank.0" / "stdout")) as raised:
        files.write(0, "stdout", b"x")
    assert raised.value.errno in (errno.ELOOP, errno.ENOTDIR)
    assert (theirs / "rank.0" / "stdout").read_text() == "precious"
    files.close()


def test_a_directory_that_is_moved_away_takes_its_files_along(tmp_path: Path) -> None:
    files = OutputFiles(tmp_path / "out", 1)
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "theirs")
    files.write(0, "stdout", b"x")
    files.close()
    assert (tmp_path / "moved" / "rank.0" / "stdout").read_bytes() == b"x"
    assert not any((tmp_path / "theirs").iterdir())


def test_a_stream_has_no_name_but_two(tmp_path: Path) -> None:
    files = OutputFiles(tmp_path / "out", 1)
    for stream in ("../../.bashrc", "/etc/passwd", "stdin"):
        with pytest.raises(ValueError, match="no stream"):
            files.write(0, stream, b"x")  # type: ignore[arg-type]
    files.close()
    assert not (tmp_path / ".bashrc").exists()
