"""A server with a store file in a process of its own, which can be killed.

python -m tests.unit.rendezvous.kept_server FILE CERTIFICATE
"""

import subprocess
import sys
from pathlib import Path

from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.rendezvous.serving.certificate import Certificate
from hvlaunch.rendezvous.serving.store_record import StoreFile
from tests.unit.rendezvous.wire import TOKEN

__all__ = ["KeptServer"]


class KeptServer:
    """At one address, with one file, whichever process serves. `certificate`: its key, and then itself, in PEM."""

    def __init__(self, file: Path, certificate: Path) -> None:
        self._argv = [sys.executable, "-m", __name__, str(file), str(certificate)]
        self.port = 0
        self.begin()

    def begin(self) -> None:
        """Go on from what is in the file."""
        self._process = subprocess.Popen(
            self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
        )
        assert self._process.stdout
        port = int(self._process.stdout.readline())
        assert self.port in (0, port)
        self.port = port

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.communicate()


def main(file: Path, certificate: Path) -> None:
    """Serve until stdin ends."""
    kept = StoreFile.open(file) if file.exists() else StoreFile.create(file)
    known = Certificate(certificate.read_bytes())
    with RendezvousServer(TOKEN, certificate=known, file=kept) as server:
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
