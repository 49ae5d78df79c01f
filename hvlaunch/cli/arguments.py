"""The flags: what they are called, what they take, and where the user's command begins."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import NoReturn

from hvlaunch import __version__
from hvlaunch.cli import values
from hvlaunch.cli.controller_arguments import add_controller
from hvlaunch.cli.elastic import add_elastic
from hvlaunch.cli.options import Options
from hvlaunch.cli.output import add_output
from hvlaunch.errors import BadUsage
from hvlaunch.job import JobSpec, SSHOptions

__all__ = ["Answer", "parse"]

_USAGE = "hvlaunch [-np N] [-H HOSTS | -hostfile FILE] [flags] COMMAND [ARG ...]"
_DESCRIPTION = (
    "Start COMMAND as N workers on the hosts, over ssh, with all that torch.distributed needs to find the "
    "others. Flags come before COMMAND; whatever follows its first word belongs to it."
)
_EPILOG = """\
exit codes:
  0         all workers ended with 0
  1-125     the first failing worker's own
  126, 127  its command can't be executed; was not found
  128+n     signal n ended it; 130, 143: Ctrl-C, SIGTERM ended the job
  2         bad usage
  69        a host can't be used, or was lost
  70        a defect of hvlaunch
  74        an answer could not be printed
  75        too few workers for an elastic job

examples:
  two workers on this machine
    hvlaunch -np 2 python train.py

  eight workers on two hosts
    hvlaunch -np 8 -H gpu01:4,gpu02:4 python train.py --epochs 3

  one worker for each GPU of sixteen hosts, as user ml
    hvlaunch -H 'gpu[01-16]' --ssh-user ml python train.py

  hosts from a file, secrets from another, NCCL's log on
    hvlaunch -hostfile hosts --env-file keys -x NCCL_DEBUG=INFO \\
        python train.py

  two to eight workers on hosts that come and go
    hvlaunch -np 4 --min-np 2 --max-np 8 \\
        --host-discovery-script ./discover.sh python train.py

  what would be started where, and with which environment
    hvlaunch --dry-run -np 8 -H gpu01:4,gpu02:4 python train.py
"""

_HINT = "hvlaunch --help"
_FOUND_OUT = "nothing in its place: hvlaunch finds that out"
_TORCHRUN = {
    "--nproc-per-node": "-np N for all workers together, or slots (-H a:4,b:4)",
    "--nnodes": "-H with the hosts (-H a:4,b:4)",
    "--log-dir": "--output-filename DIR",
    "--local-ranks-filter": "--ranks",
    "--module": "python -m MODULE, behind the flags",
    "-m": "python -m MODULE, behind the flags",
    "--node-rank": _FOUND_OUT,
    "--master-addr": _FOUND_OUT,
    "--master-port": _FOUND_OUT,
    "--rdzv-backend": _FOUND_OUT,
    "--rdzv-endpoint": _FOUND_OUT,
    "--rdzv-id": _FOUND_OUT,
    "--standalone": _FOUND_OUT,
}
"""What to write for torchrun's flags, which its users type first."""
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(JobSpec)}
_SSH_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SSHOptions)}


class Answer(Exception):
    """The user asked a question instead of for a job; `text` answers it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def parse(argv: Sequence[str]) -> Options:
    """Read the command line, without the program's own name.

    Raises BadUsage, and Answer for --help and --version.
    """
    parser = _parser()
    flags, command = parser.split(argv)
    options, unknown = parser.parse_known_args(flags, namespace=Options())
    if unknown:
        raise parser.unknown_option(unknown[0])
    if not command and not options.check_build:
        raise BadUsage("no command to run", hint="hvlaunch -np 2 python train.py, or hvlaunch --help")
    options.command = tuple(command)
    return options


class _Ask(argparse.Action):
    """Raises Answer with `const`, or with the help where it is None."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        raise Answer(self.const or parser.format_help())


class _Join(argparse.Action):
    """Puts what a flag says behind what it said before, with a comma: `-H a -H b`, as with mpirun."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        _option: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, str(values) if before is None else f"{before},{values}")


class _PrintCompletion(argparse.Action):
    """Raises Answer with the completion script for a shell."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        _namespace: argparse.Namespace,
        values: object,
        _option: str | None = None,
    ) -> NoReturn:
        from hvlaunch.cli.completion import completion  # noqa: PLC0415 (no job needs it)

        raise Answer(completion(parser, str(values)))


class _Parser(argparse.ArgumentParser):
    """argparse, but: errors are ours, rich is loaded for help only, and the command is split off first.

    argparse's own REMAINDER lets words of the command that look like abbreviated flags be ambiguous.
    """

    def error(self, message: str) -> NoReturn:
        raise BadUsage(message.removeprefix("argument "), hint=_HINT)

    def format_help(self) -> str:
        from rich.text import Text  # noqa: PLC0415 (only help needs rich, and it loads slowly)
        from rich_argparse import RichHelpFormatter  # noqa: PLC0415

        class Formatter(RichHelpFormatter):
            help_markup = text_markup = False
            group_name_formatter = str

        self.formatter_class = Formatter
        self.epilog = Text(_EPILOG)  # type: ignore[assignment]  # rich_argparse prints it as it stands
        return super().format_help()

    def split(self, argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
        """Our flags and the user's command: it begins at the first word that is no flag and no flag's value."""
        index = 0
        while index < len(argv):
            word = argv[index]
            if word == "--":
                return argv[:index], argv[index + 1 :]
            if not word.startswith("-") or word == "-":
                return argv[:index], argv[index:]
            index += 1 + self._words_after(word)
        return argv, ()

    def _words_after(self, word: str) -> int:
        """How many of the words after a flag are its values."""
        options = {name: action for action in self._actions for name in action.option_strings}
        names = [word] if word in options else [name for name in options if name.startswith(word)]
        if len({id(options[name]) for name in names}) != 1:
            return 0
        count = options[names[0]].nargs
        return count if isinstance(count, int) else 1

    def unknown_option(self, word: str) -> BadUsage:
        """The error for a flag that we do not have, with the one that was perhaps meant."""
        from difflib import get_close_matches  # noqa: PLC0415 (1 ms, and most lines are right)

        flag = word.partition("=")[0]
        names = [name for action in self._actions for name in action.option_strings]
        close = get_close_matches(flag, names, n=1, cutoff=0.75)
        meant = _TORCHRUN.get(flag.replace("_", "-")) or next(iter(close), None)
        return BadUsage(f"unknown option {word!r}", hint=f"{meant}, or {_HINT}" if meant else _HINT)


def _parser() -> _Parser:
    parser = _Parser(
        prog="hvlaunch",
        usage=_USAGE,
        description=_DESCRIPTION,
        add_help=False,
    )
    _add_hosts(parser)
    _add_workers(parser)
    _add_environment(parser)
    add_output(parser)
    _add_ssh(parser)
    _add_ending(parser)
    add_elastic(parser)
    add_controller(parser)
    _add_general(parser)
    return parser


def _add_hosts(parser: _Parser) -> None:
    hosts = parser.add_argument_group("hosts")
    which = hosts.add_mutually_exclusive_group()
    which.add_argument(
        "-H",
        "--hosts",
        metavar="HOST,...",
        action=_Join,
        help="host, host:slots, user@host:slots, ranges such as gpu[01-04]:8, [fe80::1]:4; "
        "default: those of the scheduler's job that we are in, else localhost with N slots",
    )
    which.add_argument("-hostfile", "--hostfile", metavar="FILE", help="hosts from a file, one on each line")
    hosts.add_argument(
        "--slots-per-host",
        metavar="N",
        type=values.slots,
        help="slots of hosts that name none; default: as many as the host has GPUs, else 1",
    )
    hosts.add_argument(
        "--no-scheduler",
        action="store_true",
        help="without -H, don't take the hosts of the job of Slurm, LSF, PBS, Grid Engine or the MPI operator that we"
        " are in",
    )
    hosts.add_argument(
        "--network-interfaces",
        "--network-interface",
        dest="network_interfaces",
        metavar="NAME,NAME",
        action="append",
        default=[],
        help="interfaces for the workers, by name; on each host the first that has an address is taken as it is."
        " Default: the hosts try each other's addresses",
    )
    hosts.add_argument(
        "--rendezvous-relay",
        choices=("auto", "always", "never"),
        default="auto",
        help="how workers reach hvlaunch's rendezvous: over the ssh connection where a host can't connect to this "
        "machine (auto, the default), always so, or never",
    )
    hosts.add_argument(
        "--rendezvous-port",
        metavar="PORT",
        type=values.port_or_any,
        default=_DEFAULTS["rendezvous_port"],
        help="where hvlaunch's rendezvous listens on this machine, for a firewall to let through; default: a free port",
    )
    hosts.add_argument(
        "--worker-port-range",
        metavar="LOW-HIGH",
        type=values.ports,
        help="ports on the hosts, for a firewall to let through: MASTER_PORT is one of them; default: any",
    )


def _add_workers(parser: _Parser) -> None:
    workers = parser.add_argument_group("workers")
    workers.add_argument(
        "-np",
        "--num-proc",
        dest="np",
        metavar="N",
        type=values.workers,
        help="how many workers, filling the slots in the order of the hosts; default: one in every slot",
    )
    workers.add_argument(
        "--cwd", metavar="DIR", type=values.some, help="their directory, on every host; default: this one"
    )
    workers.add_argument(
        "--stdin",
        choices=("0", "all", "none"),
        default="0",
        help="who reads what is typed or piped into hvlaunch: rank 0 (default), all workers, or none",
    )
    workers.add_argument(
        "--horovod",
        action="store_true",
        help="COMMAND uses Horovod (hvd.init): serve its workers too, which know no token, from the job's hosts only; "
        "pass on HOROVOD_*",
    )


def _add_environment(parser: _Parser) -> None:
    environment = parser.add_argument_group("environment")
    environment.add_argument(
        "-x",
        metavar="NAME[=VALUE]",
        action="append",
        default=[],
        help="pass a variable on, give it a value, or pass on all that match a quoted pattern such as "
        "'WANDB_*'; may be repeated",
    )
    environment.add_argument(
        "--env-file",
        metavar="FILE",
        action="append",
        type=values.some,
        default=[],
        help="variables from a file with a line NAME=VALUE for each; may be repeated",
    )
    environment.add_argument(
        "--env",
        choices=("all",),
        help="pass on everything that makes sense on another host, not just PATH, PYTHONPATH, NCCL_* and the like",
    )


def _add_ssh(parser: _Parser) -> None:
    ssh = parser.add_argument_group("ssh")
    ssh.add_argument("-p", "--ssh-port", metavar="PORT", type=values.port, help="for hosts that name none")
    ssh.add_argument(
        "-i", "--ssh-identity-file", metavar="FILE", type=values.some, help="private key to log in with"
    )
    ssh.add_argument("--ssh-user", metavar="NAME", type=values.user, help="for hosts that name none")
    ssh.add_argument("--ssh-config", metavar="FILE", type=values.some, help="read in place of ~/.ssh/config")
    ssh.add_argument(
        "--host-keys",
        choices=("strict", "accept-new", "off"),
        default="strict",
        help="hosts whose key is not in known_hosts: refuse them (strict, the default), learn the key "
        "(accept-new), or check no key at all (off)",
    )
    ssh.add_argument(
        "--ssh-client",
        choices=("paramiko", "openssh"),
        default="paramiko",
        help="who speaks ssh: hvlaunch itself, by paramiko (the default), or the ssh binary, for GSSAPI, FIDO keys, "
        "PKCS#11 and connections that are open already (ControlPath)",
    )
    ssh.add_argument(
        "--connect-limit",
        metavar="N",
        type=values.positive,
        default=_SSH_DEFAULTS["connect_limit"],
        help="at most N connections to one host or jump host are made at the same time; default: %(default)s",
    )
    ssh.add_argument(
        "--remote-python",
        metavar="PATH",
        type=values.some,
        help="Python >= 3.8 for hvlaunch's own process on the hosts; default: this one's path, python3, python",
    )
    ssh.add_argument(
        "--start-timeout",
        metavar="SECONDS",
        type=values.seconds,
        default=_DEFAULTS["start_timeout"],
        help="for all hosts to be reached; default: %(default)g",
    )


def _add_ending(parser: _Parser) -> None:
    ending = parser.add_argument_group("ending")
    ending.add_argument(
        "--grace",
        metavar="SECONDS",
        type=values.seconds,
        default=_DEFAULTS["grace"],
        help="between asking a worker to stop and killing it; default: %(default)g",
    )
    ending.add_argument(
        "--lease",
        metavar="SECONDS",
        type=values.seconds,
        default=_DEFAULTS["lease"],
        help="of silence between here and a host, after which both give up and stop the workers; default: %(default)g",
    )


def _add_general(parser: _Parser) -> None:
    general = parser.add_argument_group("general")
    general.add_argument(
        "--dry-run", action="store_true", help="print hosts, ranks, command and environment; connect nowhere"
    )
    general.add_argument(
        "-cb",
        "--check-build",
        action="store_true",
        help="print what this installation has, for bug reports too",
    )
    general.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print a script that completes flags and values in this shell",
    )
    general.add_argument("-h", "--help", action=_Ask, nargs=0, help="print this")
    general.add_argument(
        "-v", "--version", action=_Ask, nargs=0, const=f"hvlaunch {__version__}\n", help="print it"
    )
