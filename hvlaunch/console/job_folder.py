"""A job's own folder in the directory of --output-filename, and `latest`, which leads to the newest one."""

import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hvlaunch.console.files import NO_LINK, OutputFiles, not_written
from hvlaunch.errors import BadUsage

if TYPE_CHECKING:
    from hvlaunch.console.notes import FileSizes

__all__ = ["JobFolder"]

_LATEST = "latest"


class JobFolder:
    """DIR/JOB: JOB begins with the time, in UTC, so that folders sort by it.

    All that is made is made beside the open directory, and no link is followed.
    """

    def __init__(
        self, directory: Path, job_id: str, wall: Callable[[], float] = time.time, *, goes_on: bool = False
    ) -> None:
        """Make the folder; it must be a new one. Who `goes_on` takes the one that the job has. Raises BadUsage."""
        now = wall()
        name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}.{int(now * 1000) % 1000:03}Z-{job_id}"
        try:
            root = os.open(directory, NO_LINK & ~os.O_NOFOLLOW)
            try:
                name = _found(job_id, root) or name if goes_on else name
                self.path = directory / name
                self._descriptor = _made(name, root, goes_on=goes_on)
                if not goes_on:
                    _lead(name, root, directory)
            finally:
                os.close(root)
        except OSError as error:
            raise not_written(directory, error) from None

    def files(
        self, size: int, below: str = "", *, sizes: "FileSizes | None" = None, goes_on: bool = False
    ) -> OutputFiles:
        """The files of so many ranks, in the folder or in one below it; the others are as OutputFiles has them. Raises BadUsage."""
        try:
            root = _made(below, self._descriptor, goes_on=goes_on) if below else os.dup(self._descriptor)
        except OSError as error:
            raise not_written(self.path, error) from None
        return OutputFiles(self.path / below, size, root=root, sizes=sizes, goes_on=goes_on)

    def close(self) -> None:
        os.close(self._descriptor)


def _found(job_id: str, root: int) -> str | None:
    """The name of the folder that the job has."""
    return next((name for name in os.listdir(root) if name.endswith(f"Z-{job_id}")), None)


def _made(name: str, root: int, *, goes_on: bool) -> int:
    """A new directory, open; or one that is there."""
    with suppress(*[FileExistsError] * goes_on):
        os.mkdir(name, dir_fd=root)
    return os.open(name, NO_LINK, dir_fd=root)


def _lead(name: str, root: int, directory: Path) -> None:
    """Let DIR/latest lead to the folder, at once: nobody finds it missing. What is no link is not replaced."""
    with suppress(FileNotFoundError):
        if not stat.S_ISLNK(os.stat(_LATEST, dir_fd=root, follow_symlinks=False).st_mode):
            raise BadUsage(
                f"--output-filename {directory}: {directory / _LATEST} is not the link that hvlaunch makes",
                hint="another directory",
            )
    link = f".{_LATEST}-{name}"
    os.symlink(name, link, dir_fd=root)
    try:
        os.replace(link, _LATEST, src_dir_fd=root, dst_dir_fd=root)
    except OSError:
        os.unlink(link, dir_fd=root)
        raise
