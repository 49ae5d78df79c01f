"""Lists of hosts: as users write them, `gpu[01-04,07]:8` or `[fe80::1]:4`, in hostfiles, and of the scheduler's job around hvlaunch.

Sets of hosts and ranks are folded into short text, too.

Hostfiles have dialects of Open MPI, Horovod, DeepSpeed and MPICH, told apart line by line, and hvlaunch's own fields. A line is a
host as in `-H`, then fields: `gpu[01-04] slots=8 port=2222  # comment`. References: Open MPI's hostfile lexer
(spellings of fields in lower case, spaces around `=`, `#` begins a comment anywhere), MPICH's Hydra (`host:4 user=name`),
DeepSpeed and horovodrun (`host slots=4`).
"""

import os
import re
import shlex
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hvlaunch.errors import BadHost, BadUsage
from hvlaunch.job import Host
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.owners import other_writer, path_hint, reason

__all__ = [
    "MAX_ALL_SLOTS",
    "MAX_HOSTS",
    "MAX_SLOTS",
    "MAX_TEXT",
    "Allocation",
    "Mention",
    "allocation",
    "fold_hosts",
    "fold_ranks",
    "host_set",
    "hostfile_line",
    "integer",
    "is_user",
    "lsf_slots",
    "merge",
    "number_set",
    "parse_host",
    "parse_hostfile",
    "parse_hosts",
    "ranges_of",
    "read_hostfile",
]

MAX_HOSTS = 65_535
MAX_ALL_SLOTS = 1 << 20
_NAMED = 3
"""Hosts that a sentence lists one by one."""


class Mention(NamedTuple):
    """A host as written by the user."""

    host: Host
    word: str
    source: str
    """`-H`, or the hostfile."""
    line: int | None = None
    """Counts from 1."""


def merge(mentions: Iterable[Mention]) -> list[Host]:
    """Return each host once, in the order of first mention, with its slots added.

    As in Open MPI, a mention without slots counts as a slot if its host is mentioned again. Other fields may be in any
    mention. Raises BadHost for contradicting mentions, or for more hosts or slots than the limits.
    """
    hosts: dict[str, Host] = {}
    slots = 0
    for mention in mentions:
        name = mention.host.name
        hosts[name] = _add(hosts[name], mention) if name in hosts else mention.host
        slots += mention.host.slots or 1
        # Checked at each mention, before a long list takes the memory.
        for count, most, noun in ((len(hosts), MAX_HOSTS, "hosts"), (slots, MAX_ALL_SLOTS, "slots")):
            if count > most:
                cause = f"more than {most} {noun}"
                raise BadHost(cause, word=mention.word, source=mention.source, line=mention.line)
    return list(hosts.values())


def _add(merged_host: Host, mention: Mention) -> Host:
    def agreed(field: str) -> Any:
        before, value = getattr(merged_host, field), getattr(mention.host, field)
        if None not in (before, value) and before != value:
            raise BadHost(
                f"{field} of host {merged_host.name} is {value} here, but {before} earlier",
                word=mention.word,
                source=mention.source,
                line=mention.line,
            )
        return before if value is None else value

    slots = (merged_host.slots or 1) + (mention.host.slots or 1)
    fields = ("user", "port", "identity", "python", "address")
    return replace(merged_host, slots=slots, **{field: agreed(field) for field in fields})


_RANKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?:/([0-9]{1,9}))?)?")


def number_set(numbers: Iterable[int]) -> str:
    """Fold numbers: `3`, `0-3,6`."""
    from ClusterShell.RangeSet import RangeSet  # noqa: PLC0415 - only a job that fails or merges needs it

    return str(RangeSet.fromlist(str(number) for number in sorted(set(numbers))))


def host_set(hosts: Iterable[str]) -> str:
    """Fold names of hosts: `b`, `gpu[01-07],login`."""
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return names[0]
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # noqa: PLC0415 - as above

    try:
        # RESOLVER_NOGROUP: `@name` must not start ClusterShell's group commands.
        return str(NodeSet.fromlist(names, resolver=RESOLVER_NOGROUP))
    except NodeSetException:  # a name with brackets or the like, which a hostfile may contain
        return ",".join(names)


def fold_ranks(ranks: Iterable[int]) -> str:
    """Fold ranks: `rank 3`, `ranks 0-3,6`."""
    numbers = set(ranks)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {number_set(numbers)}"


def fold_hosts(hosts: Iterable[str]) -> str:
    """Return hosts for a sentence: `host b`, `hosts a, b and c`, `8 hosts (gpu[01-07],login)`."""
    names = list(dict.fromkeys(hosts))
    *first, last = names
    if not first:
        return f"host {last}"
    if len(names) <= _NAMED:
        return f"hosts {', '.join(first)} and {last}"
    return f"{len(names)} hosts ({host_set(names)})"


def ranges_of(text: str) -> tuple[range, ...]:
    """Convert numbers, inclusive ranges and steps: `0,8-15`, `0-62/2`. Raises ValueError."""
    return tuple(_range_of(part.strip()) for part in text.split(","))


def _range_of(part: str) -> range:
    match = _RANKS.fullmatch(part)
    if match is None:
        raise ValueError(f"{part!r} is neither a rank nor a range such as 8-15")
    first = int(match[1])
    last, step = int(match[2] or first), int(match[3] or 1)
    if last < first or step == 0:
        raise ValueError(f"{part!r} has no rank in it")
    return range(first, last + 1, step)


MAX_SLOTS = 65_535
"""Most slots of a host, and most hosts of a range: more is a typing error, and would take the memory."""

_USER = re.compile(r"\w[\w.+@\\-]*")
_NAME = re.compile(r"\w[\w.-]*")
_PIECE = r"[0-9]{1,18}(?:-[0-9]{1,18}(?:/[0-9]{1,18})?)?"
_RANGE = re.compile(rf"(?![.-])(?:[\w.-]*\[{_PIECE}(?:,{_PIECE})*\])+[\w.-]*")
_BRACKETED = re.compile(r"\[(?P<address>[^\[\]]*)\](?::(?P<slots>.*))?", re.DOTALL)

_Bad = Callable[[str], BadHost]


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts of `-H`: items between commas, each host once, in the order of first mention.

    Raises BadHost, with the item as its `word`.
    """
    words = [word.strip() for word in _split(text)]
    return merge(Mention(host, word, "-H") for word in words for host in parse_host(word, source="-H"))


def parse_host(word: str, *, source: str, line: int | None = None) -> list[Host]:
    """Return the hosts of an item: one, or a range's in the order of ClusterShell's NodeSet.

    `source` and `line` are the item's place, for errors. Raises BadHost.
    """
    bad = partial(BadHost, word=word, source=source, line=line)
    if not word:
        raise bad("a host is missing here, or there is one comma too many")
    user, at, name_and_slots = word.rpartition("@")
    if at and not is_user(user):
        raise bad("the part before the @ is not a user name")
    names, slots = _names_and_slots(name_and_slots, bad)
    count = None if slots is None else integer(slots, MAX_SLOTS)
    if slots is not None and count is None:
        raise bad(f"slots must be a whole number from 1 to {MAX_SLOTS}")
    return [Host(name, slots=count, user=user or None) for name in names]


def integer(text: str, most: int) -> int | None:
    """Return the number from 1 to `most` that `text` spells in ASCII digits, else None."""
    # int() would also accept signs, underscores and other scripts' digits.
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most))):
        return None
    number = int(text)
    return number if 1 <= number <= most else None


def is_user(text: str) -> bool:
    r"""Return whether `text` can be a login name (`DOMAIN\user` and `user@domain` too) and not an option of ssh."""
    return _USER.fullmatch(text) is not None


def _is_address(text: str) -> bool:
    """Return whether `text` can be a host's name, an IPv4 address or a bare IPv6 address, and not an option of ssh."""
    return _NAME.fullmatch(text) is not None or _is_ipv6(text)


def _split(text: str) -> Iterator[str]:
    """Yield the items of `text`. Commas within brackets do not separate."""
    start = depth = 0
    for index, char in enumerate(text):
        if char == "," and not depth:
            yield text[start:index]
            start = index + 1
        elif char in "[]":
            depth = int(char == "[")
    yield text[start:]


def _names_and_slots(text: str, bad: _Bad) -> tuple[list[str], str | None]:
    bracketed = _BRACKETED.fullmatch(text)
    # Brackets without a colon are a range of hosts.
    if bracketed and ":" in bracketed["address"]:
        if not _is_ipv6(bracketed["address"]):
            raise bad("the part in brackets is not an IPv6 address")
        return [bracketed["address"]], bracketed["slots"]
    if text.count(":") > 1:
        if _is_ipv6(text):
            raise bad(f"an IPv6 address needs brackets: [{text}]")
        raise bad("more than one colon; a host is NAME, NAME:SLOTS or [IPV6]:SLOTS")
    name, colon, slots = text.partition(":")
    return _expand(name, bad) if "[" in name else [_single(name, bad)], slots if colon else None


def _single(name: str, bad: _Bad) -> str:
    if not _NAME.fullmatch(name):
        raise bad("not a host name" if name else "the host's name is missing")
    return name


def _expand(name: str, bad: _Bad) -> list[str]:
    if not _RANGE.fullmatch(name):
        raise bad("not a range of hosts; a range looks like gpu[01-04,07] or gpu[0-8/2]")
    # Counted before ClusterShell expands the range: `a[0-999999999]` would take the memory.
    if _how_many(name) > MAX_SLOTS:
        raise bad(f"the range has more than {MAX_SLOTS} hosts")
    from ClusterShell.NodeSet import (  # noqa: PLC0415 - slow to import, and few jobs have ranges
        RESOLVER_NOGROUP,
        NodeSet,
        NodeSetException,
    )

    try:
        return list(NodeSet(name, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise bad(str(error).replace('"', "")) from None


def _how_many(name: str) -> int:
    """Return an upper bound of the hosts in a range."""
    total = 1
    for brackets in re.findall(r"\[(.*?)\]", name):
        count = 0
        for piece in brackets.split(","):
            first, _, last_and_step = piece.partition("-")
            last, _, step = last_and_step.partition("/")
            count += 1 + max(0, int(last or first) - int(first)) // max(1, int(step or 1))
        total *= count
    return total


def _is_ipv6(text: str) -> bool:
    address, percent, zone = text.partition("%")
    # inet_pton() does not know zones: `fe80::1%eth0`.
    if percent and not _NAME.fullmatch(zone):
        return False
    try:
        socket.inet_pton(socket.AF_INET6, address)
    except (OSError, ValueError):
        return False
    return True


_SPELLINGS = {
    "slots": ("slots", "count", "cpu"),
    "max_slots": ("max_slots", "max-slots", "slots_max", "slots-max"),
    "user": ("user", "username", "user_name", "user-name"),
    "port": ("port",),
    "identity": ("identity",),
    "python": ("python",),
    "address": ("address",),
}
_FIELDS = {spelling: field for field, spellings in _SPELLINGS.items() for spelling in spellings}
# These name files of this machine, and programs to run: only the user's own hostfile may have them.
_OWN_FIELDS = ("identity", "python")
_MAX_PORT = 65_535

_MAX_LINE = 1 << 14

MAX_TEXT = 4 << 20
"""Bytes of a hostfile, or of a script's output: enough for the most hosts of a job."""


def read_hostfile(path: Path, warn: Callable[[str], object] = str, *, is_named: bool = True) -> list[Host]:
    """Return a file's hosts, each once, in the order of first mention.

    A file that another user can change may choose hosts, whose keys are checked, and `warn` gets a line; it may not choose
    programs or keys to log in with, nor may a file that the user did not name. A file that every user can change is refused.

    Raises BadHost for a wrong line, BadUsage if the file is unreadable or has no host.
    """
    try:
        with path.open("rb") as file:
            # fstat of the open file: the path could be replaced between check and reading.
            status = os.fstat(file.fileno())
            data = file.read(MAX_TEXT + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        cause = reason(error) if isinstance(error, OSError) else error
        raise BadUsage(f"hostfile {path}: {cause}", hint=path_hint(path)) from None
    writer = other_writer(status)
    if writer is not None:
        if stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IWOTH:
            raise BadUsage(f"hostfile {path}: {writer}", hint=f"chmod o-w {shlex.quote(str(path))}")
        warn(f"hostfile {path}: {writer}; anyone who can change it chooses the hosts of this job")
    if len(data) > MAX_TEXT:
        raise BadUsage(f"hostfile {path}: it is longer than {MAX_TEXT >> 20} MiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadUsage(f"hostfile {path}: line {line} is not UTF-8 text") from None
    hosts = parse_hostfile(text, str(path), is_own=writer is None and is_named)
    if not hosts:
        raise BadUsage(f"hostfile {path}: it has no hosts", hint="a line such as: host slots=4")
    return hosts


def parse_hostfile(text: str, source: str, *, is_own: bool = True) -> list[Host]:
    """Return the hosts of a text, possibly none. `source` names it in errors.

    `is_own`: the text is the user's, and may have python= and identity=. Raises BadHost.
    """
    lines = enumerate(text.split("\n"), 1)
    return merge(
        mention for number, line in lines for mention in _mentions(line, source, number, is_own=is_own)
    )


def hostfile_line(host: Host, **others: object) -> str:
    """Return the line of a hostfile that gives this host; `others` are values in place of the host's."""
    values = {name: others.get(name, getattr(host, name)) for name in _SPELLINGS if hasattr(host, name)}
    words = [f"{name}={_quoted(str(value))}" for name, value in values.items() if value is not None]
    return " ".join([f"[{host.name}]" if ":" in host.name else host.name, *words])


def _quoted(text: str) -> str:
    quote = "'" if '"' in text else '"'
    return f"{quote}{text}{quote}" if any(char in text for char in " #='\"") else text


def _mentions(line: str, source: str, number: int, *, is_own: bool) -> Iterator[Mention]:
    # Splitting a line takes quadratic time.
    if len(line) > _MAX_LINE:
        raise BadHost(f"a line of more than {_MAX_LINE} characters", word=line, source=source, line=number)
    try:
        tokens = _tokens(line)
    except ValueError:
        raise BadHost("a quote is not closed", word=line.strip(), source=source, line=number) from None
    if not tokens:
        return
    word, *field_words = tokens
    if field_words and field_words[0].startswith("="):
        raise BadHost("a line must begin with a host", word=word, source=source, line=number)
    hosts = parse_host(word, source=source, line=number)
    fields = _read_words(field_words, source, number)
    for field in fields.keys() & _OWN_FIELDS:
        if not is_own:
            cause = f"{field}= is allowed only in a hostfile that you named and that only you can change"
            raise BadHost(cause, word=word, source=source, line=number)
    slots, most = fields.get("slots", hosts[0].slots), fields.pop("max_slots", None)
    for field in ("slots", "user"):
        if field in fields and getattr(hosts[0], field) is not None:
            raise BadHost(
                f"{field} given twice, here and later in the line", word=word, source=source, line=number
            )
    if most is not None and slots is not None and most < slots:
        raise BadHost(f"slots={slots} is more than max_slots={most}", word=word, source=source, line=number)
    # A range with one address would start all of its workers on one machine.
    if "address" in fields and len(hosts) > 1:
        raise BadHost(
            f"one address can't be used for {len(hosts)} hosts", word=word, source=source, line=number
        )
    for host in hosts:
        yield Mention(replace(host, **fields), word, source, number)


def _tokens(line: str) -> list[str]:
    """Split a line into words, values, and the `=` between them. Raises ValueError for an unclosed quote."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="=")
    lexer.whitespace_split = True
    # A backslash is part of a name: DOMAIN\user.
    lexer.escape = ""
    return list(lexer)


def _read_words(tokens: list[str], source: str, number: int) -> dict[str, Any]:
    """Return the fields of Host, and max_slots, in `word = value` triples."""
    fields: dict[str, Any] = {}
    for start in range(0, len(tokens), 3):
        word, equals, value = (*tokens[start : start + 3], "", "")[:3]
        bad = partial(
            BadHost, word=f"{word}{equals}{value}" if equals == "=" else word, source=source, line=number
        )
        field = _FIELDS.get(word)
        if field is None:
            raise bad(
                f"unknown field; after the host a line may have {', '.join(f'{name}=' for name in _SPELLINGS)}"
            )
        if equals != "=" or not value:
            raise bad(f"no value; write {word}=VALUE")
        if field in fields:
            raise bad(f"{field} given twice")
        try:
            fields[field] = _read_value(field, value)
        except ValueError as error:
            raise bad(str(error)) from None
    return fields


def _read_value(field: str, text: str) -> str | int:
    """Convert a field's text. Raises ValueError with the cause."""
    if not text.isprintable():
        raise ValueError("it has a character that can't be printed")
    if field in ("slots", "max_slots", "port"):
        most = _MAX_PORT if field == "port" else MAX_SLOTS
        number = integer(text, most)
        if number is None:
            raise ValueError(f"{field} must be a whole number from 1 to {most}")
        return number
    if field == "user" and not is_user(text):
        raise ValueError("not a user name")
    if field == "address":
        bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        if not _is_address(bare):
            raise ValueError("not an address or a host name")
        return bare
    if field == "identity":
        try:
            return str(Path(text).expanduser())
        except RuntimeError:
            raise ValueError("no home directory for the ~") from None
    return text


_HINT = "--no-scheduler, or -H"
_SHOWN = 100
"""Characters of a value in a message."""
_MOST_DIGITS = 9
_RUN = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_GPUS = re.compile(r"(?:[^,:]+:)?(\d+)(?:\([^)]*\))?")

_Read = Callable[[str], str]


class Allocation(NamedTuple):
    """Hosts that a scheduler allocated."""

    origin: str
    """Name in messages: `Slurm job 123`."""
    hosts: tuple[Host, ...]
    remote_agent: str | None = None
    """Program that runs a command on a host in place of ssh: `PROGRAM HOST COMMAND`."""


def allocation(environ: Mapping[str, str], read: _Read | None = None) -> Allocation | None:
    """Return the allocation in the environment; None outside of a scheduler's job. `read` reads a file.

    Raises BadUsage if the scheduler's variables or files are malformed.
    """
    # An argument, so that tests need no files.
    read = read or _read
    for look in (_slurm, _lsf, _pbs, _sge, _mpi_operator):
        allocated = look(environ, read)
        if allocated is not None:
            if not allocated.hosts:
                raise BadUsage(f"{allocated.origin} has no hosts", hint=_HINT)
            return allocated
    return None


def _slurm(environ: Mapping[str, str], _read: _Read) -> Allocation | None:
    """Read sbatch(1)'s output variables. Slots are tasks if the user asked for several, else GPUs, else tasks."""
    job, nodes = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NODELIST")
    if not job or not nodes:
        return None
    origin = f"Slurm job {job}"
    hosts = parse_hosts(nodes)
    tasks = _per_node(origin, environ.get("SLURM_TASKS_PER_NODE") or f"1(x{len(hosts)})", len(hosts))
    gpus = _gpus(origin, environ)
    # Slurm sets a task per node by default, which says nothing about the number of workers.
    asked = "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
    slots = [count if gpus == 0 or (asked and count > 1) else gpus for count in tasks]
    return Allocation(origin, _hosts(zip((host.name for host in hosts), slots, strict=True)))


def _per_node(origin: str, text: str, nodes: int) -> list[int]:
    """Expand `2(x3),1` to 2, 2, 2, 1."""
    counts: list[int] = []
    for word in text.split(","):
        match = _RUN.fullmatch(word)
        count, repeats = (None, None) if match is None else (_number(match[1]), _number(match[2] or "1"))
        if count is None or repeats is None or len(counts) > nodes:
            raise BadUsage(
                f"{origin}: SLURM_TASKS_PER_NODE={text[:_SHOWN]} can't be read; it should look like 2(x3),1",
                hint=_HINT,
            )
        # The bound keeps a malformed `1(x999999999)` from taking the memory.
        counts += [count] * min(repeats, nodes + 1)
    if len(counts) != nodes:
        raise BadUsage(
            f"{origin}: SLURM_TASKS_PER_NODE={text[:_SHOWN]} does not have {nodes} nodes, as SLURM_JOB_NODELIST has",
            hint=_HINT,
        )
    return counts


def _gpus(origin: str, environ: Mapping[str, str]) -> int:
    """Return the GPUs of a node, from `4`, `a100:4` or `a100:2,v100:2`; this node's if no number is given for every node."""
    text = environ.get("SLURM_GPUS_PER_NODE") or environ.get("SLURM_GPUS_ON_NODE") or ""
    matches = [_GPUS.fullmatch(word) for word in text.split(",")]
    counts = [_number(match[1]) for match in matches if match is not None]
    if None in counts:
        raise BadUsage(f"{origin}: {text[:_SHOWN]} GPUs on each node can't be", hint=_HINT)
    return sum(count for count in counts if count is not None)


def _lsf(environ: Mapping[str, str], read: _Read) -> Allocation | None:
    job, slots = environ.get("LSB_JOBID"), lsf_slots(environ, read)
    if not job or slots is None:
        return None
    return Allocation(f"LSF job {job}", _hosts(slots.items()))


def lsf_slots(environ: Mapping[str, str], read: _Read | None = None) -> dict[str, int] | None:
    """Return the slots of LSF's hosts in order; None outside of a job.

    Under CSM the first host is the launch node, which runs no workers. Raises BadUsage.
    """
    if path := environ.get("LSB_DJOB_HOSTFILE"):
        counts = _count((read or _read)(path).split())
    elif text := environ.get("LSB_MCPU_HOSTS"):
        words = text.split()
        if len(words) % 2 or not all(_number(word) is not None for word in words[1::2]):
            raise BadUsage(f"LSB_MCPU_HOSTS={text[:_SHOWN]!r} must be hosts and numbers in turn", hint=_HINT)
        counts = _slots_by_host(
            (name, int(count)) for name, count in zip(words[::2], words[1::2], strict=True)
        )
    else:
        return None
    if "CSM_ALLOCATION_ID" in environ and len(counts) > 1:
        del counts[next(iter(counts))]
    return counts


def _pbs(environ: Mapping[str, str], read: _Read) -> Allocation | None:
    job, path = environ.get("PBS_JOBID"), environ.get("PBS_NODEFILE")
    if not job or not path:
        return None
    return Allocation(f"PBS job {job}", _hosts(_count(read(path).split()).items()))


def _sge(environ: Mapping[str, str], read: _Read) -> Allocation | None:
    """Read lines of host, slots, queue and processors: sge_pe(5)."""
    job, path = environ.get("JOB_ID"), environ.get("PE_HOSTFILE")
    if not job or not path:
        return None
    rows = [line.split() for line in read(path).splitlines() if line.strip()]
    if not all(len(row) > 1 and _number(row[1]) is not None for row in rows):
        raise BadUsage(f"{path} of Grid Engine job {job} must have lines of a host and its slots", hint=_HINT)
    return Allocation(
        f"Grid Engine job {job}", _hosts(_slots_by_host((row[0], int(row[1])) for row in rows).items())
    )


def _mpi_operator(environ: Mapping[str, str], read: _Read) -> Allocation | None:
    """Read Kubeflow's MPI operator: variables of an MPI name its hostfile and its replacement for ssh."""
    names = (
        "OMPI_MCA_orte_default_hostfile",
        "PRTE_MCA_prte_default_hostfile",
        "HYDRA_HOST_FILE",
        "I_MPI_HYDRA_HOST_FILE",
    )
    path = next((environ[name] for name in names if environ.get(name)), None)
    # Outside Kubernetes these variables are a user's own settings for mpirun.
    if path is None or "KUBERNETES_SERVICE_HOST" not in environ:
        return None
    agent = environ.get("OMPI_MCA_plm_rsh_agent") or environ.get("HYDRA_LAUNCHER_EXEC")
    is_ssh = agent is None or Path(agent.split()[0]).name in ("ssh", "rsh")
    hosts = tuple(parse_hostfile(read(path), path))
    return Allocation("the MPI operator's job", hosts, None if is_ssh else agent)


def _count(names: Iterable[str]) -> dict[str, int]:
    return _slots_by_host((name, 1) for name in names)


def _slots_by_host(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    slots: dict[str, int] = {}
    for name, count in pairs:
        slots[name] = slots.get(name, 0) + count
    return slots


def _hosts(slots: Iterable[tuple[str, int]]) -> tuple[Host, ...]:
    return tuple(_named(slots))


def _named(slots: Iterable[tuple[str, int]]) -> Iterator[Host]:
    for name, count in slots:
        # Names end up on ssh's command line, and must not look like options.
        if not _is_address(name):
            raise BadUsage(
                f"{name[:_SHOWN]!r}, which the scheduler names, is not the name of a host", hint=_HINT
            )
        if count > MAX_SLOTS:
            raise BadUsage(f"{count} slots on host {name}: more than {MAX_SLOTS}", hint=_HINT)
        if count > 0:
            yield Host(name, slots=count)


def _number(text: str) -> int | None:
    """Return a number from 0; None for other text, or for more digits than a real value has."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadUsage(f"{path}, which the scheduler names: {cause}", hint=_HINT) from None
