"""hvlaunch-rendezvous: the rendezvous server alone, for programs not started by hvlaunch."""

import argparse
import re
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hvlaunch import __version__
from hvlaunch.cli.options.parser import Parser
from hvlaunch.console.lines import visible
from hvlaunch.errors import EXIT_INTERNAL, HvlaunchError

if TYPE_CHECKING:
    from hvlaunch.rendezvous.serving.certificate import Certificate

__all__ = ["main", "parser", "script"]

_NAME = "hvlaunch-rendezvous"
# torchrun's default port.
_DEFAULT_BIND = "127.0.0.1:29400"
_ADDRESS = re.compile(r"(?:(?P<host>[^\[\]:]*)|\[(?P<ipv6>[^\[\]]+)\]):(?P<port>[0-9]{1,5})")
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DESCRIPTION = "Serve hvlaunch's rendezvous until SIGINT or SIGTERM. Its values are lost then."
_EPILOG = """\
example, with the files token and token.crt copied to, or shared by, all nodes:
  hvlaunch-rendezvous --bind :29400 --token-file token
  torchrun --rdzv-backend=hvlaunch --rdzv-endpoint=HOST:29400 --rdzv-conf token_file=token ...
"""


def main(argv: Sequence[str] | None = None, *, wait: Callable[[], object]) -> int:
    """Serve until wait() returns; return the exit code, as in docs/reference/exit-codes.md."""
    try:
        options = parser().parse_args(argv)
        _serve(options.bind, options.token_file, wait)
    except HvlaunchError as error:
        _complain(str(error))
        return error.exit_code
    except Exception as error:  # noqa: BLE001 (ours to explain, whatever it is)
        description = " ".join(f"{type(error).__name__}: {error}".split())
        _complain(f"internal error: {description}; this is a defect of hvlaunch; try: report it")
        return EXIT_INTERNAL
    return 0


def script() -> NoReturn:
    """Run the program, which ends with 0 at a signal."""
    # Signals are blocked in every thread and waited for: a handler could interrupt any system call.
    # A signal that nohup ignores stays ignored.
    ending = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    sys.exit(main(wait=lambda: signal.sigwait(ending)))


def parser() -> argparse.ArgumentParser:
    """Return the parser of its command line, which raises BadUsage."""
    made = Parser(
        prog=_NAME,
        hint=f"{_NAME} --help",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "--bind",
        metavar="HOST:PORT",
        type=_address,
        default=_DEFAULT_BIND,
        help="where to listen: without HOST at every address, with port 0 at a free port; IPv6 is in brackets; other "
        "machines are served by TLS alone; default: %(default)s",
    )
    made.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        required=True,
        help="file with the token that every client must show; if there is no FILE, it is made with a new token, and with "
        "FILE.key and FILE.crt, the server's key and its certificate, by which clients on other machines know it",
    )
    made.add_argument("--version", action="version", version=f"{_NAME} {__version__}")
    return made


def _address(text: str) -> tuple[str, int]:
    match = _ADDRESS.fullmatch(text)
    # Ports have 16 bits.
    if match is None or int(match["port"]) > 65535:  # noqa: PLR2004 (of 16 bits)
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return match["host"] or match["ipv6"] or "", int(match["port"])


def _serve(bind: tuple[str, int], token_file: Path, wait: Callable[[], object]) -> None:
    from hvlaunch.rendezvous.serving import RendezvousServer  # noqa: PLC0415 (--help needs none of it)
    from hvlaunch.rendezvous.token_file import make_token_file, read_token_file  # noqa: PLC0415 (as above)

    if make_token_file(token_file):
        _say(f"{token_file} has a new token")
    token = read_token_file(token_file)
    certificate = _certificate(token_file)
    host, port = bind
    with RendezvousServer(token, certificate=certificate, host=host, port=port, say=_say) as server:
        _say(f"serving on {_shown(host)}:{server.port}")
        wait()


def _certificate(token_file: Path) -> "Certificate":
    """The one beside the token file, which outlives a restart; made where there is none. Raises BadTokenFile."""
    from hvlaunch.rendezvous.serving.certificate import Certificate  # noqa: PLC0415 (as above)
    from hvlaunch.rendezvous.token_file import (  # noqa: PLC0415 (as above)
        BadTokenFile,
        certificate_beside,
        make_private_file,
    )

    new = Certificate()
    file = token_file.with_name(f"{token_file.name}.key")
    make_private_file(file, lambda: new.key + new.pem)
    try:
        if file.stat().st_mode & 0o077:
            raise BadTokenFile(
                f"other users can read or write it (mode {file.stat().st_mode & 0o777:03o})",
                path=file,
                hint=f"chmod 600 {shlex.quote(str(file))}",
            )
        certificate = Certificate(file.read_bytes())
        public = Path(certificate_beside(str(token_file)))
        if not public.exists() or public.read_bytes() != certificate.pem:
            public.write_bytes(certificate.pem)
            public.chmod(0o644)
    except (OSError, ValueError) as error:
        cause = (
            error.strerror
            if isinstance(error, OSError) and error.strerror
            else "it has no key and certificate"
        )
        raise BadTokenFile(
            cause, path=file, hint=f"rm {shlex.quote(str(file))}: the next start makes another"
        ) from error
    _say(f"{certificate_beside(str(token_file))} has the certificate, {certificate.fingerprint}")
    return certificate


def _shown(host: str) -> str:
    """The host as others may name it in an address."""
    if not host:
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _say(text: str) -> None:
    with suppress(OSError):  # nobody reads it
        print(visible(text), flush=True)  # noqa: T201 (this is what the program prints)


def _complain(message: str) -> None:
    with suppress(OSError):
        print(f"{_NAME}: {visible(message)}", file=sys.stderr, flush=True)  # noqa: T201 (as above)
