"""A token in a file, shared by several programs."""

import os
import secrets
import shlex
import stat
from collections.abc import Callable
from pathlib import Path

from hvlaunch.errors import EXIT_USAGE
from hvlaunch.owners import other_writer
from hvlaunch.rendezvous import RendezvousError

__all__ = ["BadTokenFile", "certificate_beside", "make_private_file", "make_token_file", "read_token_file"]

_SHORTEST = 16
_LONGEST = 4096


class BadTokenFile(RendezvousError):
    """The token file can't be read or written, is open to other users, or has no token. `path` is the file.

    Try: `chmod 600 FILE`; or another FILE, which is made with a new token if it is missing.
    """

    exit_code = EXIT_USAGE

    def __init__(self, cause: str, *, path: Path, hint: str | None = None) -> None:
        super().__init__(f"token file {path}: {cause}", hint=hint)
        self.path = path


def make_token_file(path: Path) -> bool:
    """Write a new token to the file, readable by its owner only; False if the file exists already.

    Raises BadTokenFile.
    """
    return make_private_file(path, f"{secrets.token_urlsafe(32)}\n".encode)


def make_private_file(path: Path, content: Callable[[], bytes]) -> bool:
    """Write a file, readable by its owner only; False if the file exists already. Raises BadTokenFile."""
    # O_EXCL decides between two programs at the same moment: the loser reads the winner's token.
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    except OSError as error:
        raise BadTokenFile(error.strerror or str(error), path=path) from error
    with os.fdopen(file, "wb") as writer:
        writer.write(content())
    return True


def certificate_beside(token_file: str) -> str:
    """Return the path of the certificate beside a token file; its key has the same name with `.key`."""
    return f"{token_file}.crt"


def read_token_file(path: Path) -> str:
    """Return the token, the one word in the file.

    Raises BadTokenFile, also if any user can read the file, or another user except root can change it.
    """
    try:
        with path.open("rb") as reader:
            status = os.fstat(reader.fileno())
            content = reader.read(_LONGEST)
    except OSError as error:
        raise BadTokenFile(error.strerror or str(error), path=path) from error
    # By the descriptor and not by the path: another file may have taken the name meanwhile.
    mode = status.st_mode
    problem = other_writer(status)
    if problem is None and stat.S_ISREG(mode) and mode & stat.S_IROTH:
        problem = f"every user of this machine can read it (mode {stat.S_IMODE(mode):03o})"
    if problem is not None:
        hint = (
            f"chmod 600 {shlex.quote(str(path))}"
            if status.st_uid == os.getuid()
            else "a copy of your own, with mode 600"
        )
        raise BadTokenFile(problem, path=path, hint=hint)
    # latin-1 decodes any bytes; the checks below refuse other than ASCII.
    token = content.decode("latin-1").strip()
    if len(token) < _SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise BadTokenFile(
            f"it has no token; a token is one word of at least {_SHORTEST} ASCII characters",
            path=path,
            hint="another FILE; if there is no such file, it is made with a new token",
        )
    return token
