"""The job's private directory on a host, for the workers' error files."""

import os
import sys

__all__ = ["make", "remove"]


_LONGEST = 4096


def make() -> str:
    """A private directory for the workers' error files, removed at the end."""
    refusals = []
    for base in (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", "/dev/shm"):  # noqa: S108
        path = os.path.abspath(os.path.join(base or ".", "hvlaunch-" + os.urandom(8).hex()))
        try:
            if base and path.isprintable() and len(path) <= _LONGEST:
                os.mkdir(path, 0o700)
                return path
        except OSError as error:
            refusals.append("%s: %s" % (base, os.strerror(error.errno or 0).lower()))
    sys.exit("hvlaunch agent: no place for temporary files (%s)" % ", ".join(refusals))


def remove(path: str) -> None:
    """Remove the directory and what is in it, as far as it goes, if it is there."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        pass
    except OSError:
        import shutil  # noqa: PLC0415 (costs 8 ms, and is needed only where a worker left a file)

        shutil.rmtree(path, ignore_errors=True)
