"""A job as a request to a launcher: its hosts, the command that becomes an agent, and the options of ssh."""

import os
import subprocess
import zlib
from binascii import b2a_base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from hvlaunch.agent import launched
from hvlaunch.agent.wire import caller
from hvlaunch.driver.program import NEW_ENOUGH, python_candidates, without_words
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.parse import lsf_slots
from hvlaunch.hosts.placement import needed, place
from hvlaunch.job import Bind, Host, JobSpec, MPIOptions, SSHOptions
from hvlaunch.mpi import ALL_NAMES, Kind, LauncherProgram, Names
from hvlaunch.mpi.builders import LaunchRequest

__all__ = ["caller_command", "counted", "key_exchange_words", "remote_python", "request_of"]

_T = TypeVar("_T")

_OF_A_SCHEDULER = (Kind.SRUN, Kind.JSRUN)
"""Launchers that start processes only on the hosts in use."""

# Launchers and their shells get the two programs, $0 and $1, in letters, digits, + / and = only. They hand on the
# other words, the interpreters to try, as they are.
# A timer ends the process unless it becomes an agent in time, which has its lease; as on ssh's command line.
_UNPACK = (
    "import sys,zlib,binascii,_signal;_signal.setitimer(0,{limit:g});"
    "exec(zlib.decompress(binascii.a2b_base64(sys.argv[1])))"
)
_NAME = "hvlaunch-agent"
"""The name for people in lists of processes."""
_SHELL = (
    'r=$1; shift; for p; do case "$p" in /*/python3.[89]|/*/python3.[1-9][0-9]) [ -x "$p" ];; '
    f'*) case "$("$p" -V </dev/null 2>/dev/null)" in {NEW_ENOUGH}) ;; *) false;; esac;; esac && '
    f'exec "$p" -I -S -X utf8 -c "%s" "$0" "$r" {_NAME}; done; '
    'echo "hvlaunch: host $(uname -n): no Python >= 3.8 among $*" >&2; exit 127'
)

_FIRST_EXCHANGES = ("mlkem768x25519-sha256", "curve25519-sha256")
"""sntrup761x25519-sha512, which OpenSSH before 10 prefers, takes each side 60 ms of a processor, these take 2."""
_SSH_PATIENCE = 10.0
_CALL_SSH = (Kind.OPEN_MPI, Kind.SPECTRUM, Kind.MPICH, Kind.MVAPICH, Kind.INTEL)
_IN_A_SCHEDULERS_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "COBALT_JOBID")
"""In a scheduler's job, launchers may start their processes by the scheduler instead of ssh."""
_LAUNCHER_VARIABLES = ("OMPI_MCA_plm", "OMPI_MCA_orte_rsh", "PRTE_MCA_plm", "HYDRA_", "I_MPI_HYDRA_")
_LAUNCHER_FLAGS = ("plm", "launcher", "bootstrap", "rsh")
"""A variable or a flag with these words: the user has chosen how launchers reach hosts."""


_HWLOC = {"numa": "numa", "socket": "socket", "core": "core", "cache": "l3cache"}
_BINDINGS: Mapping[Kind, tuple[str, Mapping[str, str]]] = {
    Kind.OPEN_MPI: ("--bind-to", _HWLOC),
    Kind.SPECTRUM: ("--bind-to", _HWLOC),
    Kind.MPICH: ("-bind-to", _HWLOC),
    Kind.MVAPICH: ("-bind-to", _HWLOC),
    Kind.SRUN: ("--cpu-bind", {"numa": "ldoms", "socket": "sockets", "core": "cores"}),
}
"""Flags for --bind, by launcher: the flag, and its word for each value. Intel's and LSF's bind by variables and files."""


def counted(spec: JobSpec) -> tuple[tuple[str, int], ...]:
    """Return the hosts in use, each with its number of ranks.

    Raises NotEnoughSlots, and BadUsage if a host's number of slots would only be known once an agent runs there.
    """
    for host in spec.hosts:
        if host.slots is None and spec.slots_per_host is None:
            raise BadUsage(
                "a launcher needs the number of slots",
                host=host.name,
                hint=f"-H {host.name}:N, or --slots-per-host N",
            )
    counts: dict[str, int] = {}
    for placement in place(_slots(spec, spec.hosts), spec.np):
        counts[placement.host] = counts.get(placement.host, 0) + 1
    return tuple(counts.items())


def _slots(spec: JobSpec, hosts: Iterable[Host]) -> tuple[tuple[str, int], ...]:
    return tuple((host.name, host.slots or spec.slots_per_host or 1) for host in hosts)


def remote_python(spec: JobSpec) -> str | None:
    """Return the hosts' interpreter. Raises BadUsage for different choices."""
    return _common("python", (host.python or spec.remote_python for host in _in_use(spec)))


def request_of(
    spec: JobSpec, options: MPIOptions, launcher: LauncherProgram, command: Sequence[str], env: Iterable[str]
) -> LaunchRequest:
    """Return the request to run `command` in each process, with the variables that `env` names.

    Raises BadUsage for an option of a single host: a launcher calls ssh in the same way for all hosts.
    """
    hosts = _in_use(spec) if launcher.kind in _OF_A_SCHEDULER else spec.hosts
    for host in hosts:
        if host.address is not None:
            raise BadUsage(
                "a launcher finds hosts only by name, so address= can't be used",
                host=host.name,
                hint=f"Host {host.name} and HostName {host.address} in ~/.ssh/config",
            )
    identity = spec.ssh.identity
    return LaunchRequest(
        program=launcher.program,
        command=tuple(command),
        hosts=counted(spec),
        slots=_slots(spec, hosts),
        env=tuple(sorted(env)),
        port=_common("port", (host.port or spec.ssh.port for host in hosts)),
        user=_common("user", (host.user or spec.ssh.user for host in hosts)),
        identity=_common(
            "identity", (host.identity or (str(identity) if identity else None) for host in hosts)
        ),
        ssh_words=_ssh_words(spec.ssh),
        interfaces=spec.network_interfaces,
        binding=options.binding or flags_for(spec.bind, launcher),
        extra=options.args,
        root=os.geteuid() == 0,
        cores=tuple((lsf_slots(os.environ) or {}).items()) if launcher.kind is Kind.JSRUN else (),
    )


def flags_for(bind: Bind, launcher: LauncherProgram) -> tuple[str, ...]:
    """Return the launcher's own flags for --bind, none for `none`. Raises BadUsage if it has none."""
    if bind == "none":
        return ()
    flag, words = _BINDINGS.get(launcher.kind, ("", {}))
    # Open MPI 5 calls a socket a package.
    newer = {"socket": "package"} if launcher.kind is Kind.OPEN_MPI and launcher.version[:1] >= (5,) else {}
    word = {**words, **newer}.get(bind)
    if word is None:
        raise BadUsage(
            f"--bind {bind} has no equal in {launcher.kind.value}",
            hint="--binding-args, with the launcher's own words, or without the launcher",
        )
    # Open MPI would deal ranks out to nodes or sockets in turns.
    order = ("--map-by", "slot") if flag == "--bind-to" else ()
    return flag, word, *order


def _in_use(spec: JobSpec) -> list[Host]:
    return needed(spec.hosts, spec.np, spec.slots_per_host)


def _ssh_words(ssh: SSHOptions) -> tuple[str, ...]:
    words: list[str] = []
    if ssh.config is not None:
        words += ["-F", str(ssh.config)]
    if ssh.host_keys == "accept-new":
        words += ["-o", "StrictHostKeyChecking=accept-new"]
    elif ssh.host_keys == "off":
        words += [
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            "UserKnownHostsFile=/dev/null",
            "-o",
            "LogLevel=ERROR",
        ]
    return tuple(words)


def _common(option: str, choices: Iterable[_T | None]) -> _T | None:
    """Return the hosts' common value. Raises BadUsage for different values."""
    values = set(choices)
    if len(values) > 1:
        shown = ", ".join(sorted("none" if value is None else str(value) for value in values))
        raise BadUsage(
            f"a launcher uses one {option} for all hosts, and theirs differ ({shown})",
            hint="set it for each host in ~/.ssh/config, or use --gloo",
        )
    return values.pop() if values else None


def caller_command(
    names: Sequence[Names], python: str | None = None, *, limit: float = 90.0
) -> tuple[str, ...]:
    """Return the words that the launcher runs in place of the user's command: agent/launched.py and agent/wire/caller.py, packed.

    `names` are the launcher's variables. `python` is the interpreter; None tries this process's interpreter, python3
    and python. An interpreter named python3.N is not asked for its version. The driver has `limit` seconds to send
    the agent's program.
    """
    pairs = [(family.rank, family.local_rank) for family in names if family.local_rank]
    first = _packed_program(launched.__file__, f"import sys\nmain({pairs!r}, sys.argv[2])")
    second = _packed_program(caller.__file__, f"main({sorted(ALL_NAMES)!r}, ranks)")
    return ("/bin/sh", "-c", _SHELL % _UNPACK.format(limit=limit), first, second, *python_candidates(python))


def _packed_program(file: str, call: str) -> str:
    text = without_words(Path(file).read_text(encoding="ascii"))
    return b2a_base64(zlib.compress(f"{text}\n{call}\n".encode("ascii"), 9), newline=False).decode("ascii")


def key_exchange_words(
    kind: Kind,
    hosts: Sequence[str],
    ssh_words: Sequence[str],
    flags: Iterable[str],
    environ: Mapping[str, str],
    ask: Callable[[Sequence[str], float], "subprocess.CompletedProcess[str]"] | None = None,
) -> tuple[str, ...]:
    """Return an option for the launcher's ssh that puts quick key exchanges first, as hvlaunch's own connections do.

    Empty if the launcher may not call ssh, or if the configuration of ssh differs between `hosts`. `ssh_words` are the
    words that ssh gets anyway, `flags` the user's own for the launcher.
    """
    if kind not in _CALL_SSH or not hosts or any(name in environ for name in _IN_A_SCHEDULERS_JOB):
        return ()
    if any(name.startswith(_LAUNCHER_VARIABLES) for name in environ) or any(
        word in flag for flag in flags for word in _LAUNCHER_FLAGS
    ):
        return ()
    # A launcher that stays on this machine calls no ssh.
    from hvlaunch.ssh.config import AskSSH, Questions  # noqa: PLC0415 (see above)

    with closing(AskSSH()) as ask_ssh:
        questions = Questions(ask or ask_ssh)
        try:
            lists = {_exchanges(questions([*ssh_words, "-G", host], _SSH_PATIENCE).stdout) for host in hosts}
        except (OSError, subprocess.SubprocessError):
            return ()
    # The launcher gives one option to all its ssh: it must not allow a host more than the user's configuration does.
    if len(lists) != 1:
        return ()
    (names,) = lists
    quick = [name for name in _FIRST_EXCHANGES if name in names]
    if not quick or names[0] in _FIRST_EXCHANGES:
        return ()
    others = [name for name in names if name not in quick]
    return ("-o", f"KexAlgorithms={','.join(quick + others)}")


def _exchanges(answer: str) -> tuple[str, ...]:
    """Return the key exchanges in the answer to `ssh -G`."""
    lines = (line.partition(" ") for line in answer.splitlines())
    return next((tuple(value.split(",")) for key, _, value in lines if key == "kexalgorithms"), ())
