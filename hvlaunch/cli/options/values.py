"""Values of options: conversions of text, which raise BadValue for invalid text."""

import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from hvlaunch.cli.options import BadValue, Value
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.parse import MAX_SLOTS, is_user, ranges_of
from hvlaunch.job import BringOptions, CollectOptions, MapPolicy
from hvlaunch.owners import path_hint, reason

__all__ = [
    "COUNT",
    "DIRECTORY",
    "FILE",
    "NUMBER",
    "PORT",
    "SECONDS",
    "SIZE",
    "WORDS",
    "address",
    "bring_options",
    "bytes_of_mb",
    "collect_options",
    "count",
    "env_mode",
    "flat",
    "from_0",
    "from_0_to_1",
    "hosts_or_bounds",
    "http_url",
    "mapping",
    "module_names",
    "mount",
    "names",
    "not_empty",
    "notify_events",
    "notify_target",
    "one_or_zero",
    "or_none",
    "port",
    "port_or_any",
    "ports",
    "positive",
    "ranks",
    "readable",
    "report_path",
    "rising",
    "seconds",
    "size",
    "slots",
    "slots_or_gpus",
    "source_and_path",
    "span",
    "streams",
    "user",
    "words",
    "workers_per_host",
    "yes_or_no",
    "zero_or_one",
]

# More workers are a typing error, and would take the memory.
_MOST_WORKERS = 1 << 20
_LAST_PORT = 65535
# Seconds. poll(2) counts milliseconds in 31 bits.
_LONGEST = 1_000_000.0
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_STREAMS = {
    "0": frozenset[str](),
    "1": frozenset({"stdout"}),
    "2": frozenset({"stderr"}),
    "3": frozenset({"stdout", "stderr"}),
}
# Words of YAML, TOML and of other programs' variables.
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_Number = TypeVar("_Number", int, float)


def count(text: str) -> int:
    """Convert a whole number, 0 or more."""
    return _whole(text, most=_MOST_WORKERS, least=0)


def positive(text: str) -> int:
    return _whole(text, most=_MOST_WORKERS)


def slots(text: str) -> int:
    return _whole(text, most=MAX_SLOTS)


def port(text: str) -> int:
    return _whole(text, most=_LAST_PORT)


def port_or_any(text: str) -> int:
    """Convert a port; 0 means any."""
    return _whole(text, most=_LAST_PORT, least=0)


def address(text: str) -> str:
    """Convert an IPv4 or IPv6 address."""
    import ipaddress  # noqa: PLC0415 (few jobs name one)

    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise BadValue(f"{text!r} is not an IP address") from None


def http_url(text: str) -> str:
    """Check the URL of a service."""
    if not text.startswith(("http://", "https://")) or not text.isprintable() or " " in text:
        raise BadValue(f"{text!r} is not a URL such as http://localhost:8000/health")
    return text


def ports(text: str) -> tuple[int, int]:
    """Convert a range of ports, `29500-29599`, to its ends."""
    low, dash, high = text.partition("-")
    if not dash:
        raise BadValue(f"{text!r} is not LOW-HIGH")
    first, last = port(low), port(high)
    # A host needs a port for MASTER_PORT and another for the relay.
    if last <= first:
        raise BadValue(f"{text!r} does not have the two ports that each host needs")
    return first, last


def _whole(text: str, *, most: int, least: int = 1) -> int:
    number = _number(text, int, "whole number")
    if not least <= number <= most:
        raise BadValue(f"{text} is not between {least} and {most}")
    return number


def factor(text: str) -> float:
    """Convert a factor above 1. Raises BadValue."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1.0 < value <= 1000.0:  # noqa: PLR2004 (as the message says)
        raise BadValue(f"{text!r} is not a number above 1, and at most 1000")
    return value


def seconds(text: str) -> float:
    number = _number(text, float, "number of seconds")
    # float() also reads nan and inf.
    if math.isnan(number) or number <= 0:
        raise BadValue(f"{text} is not more than 0 seconds")
    if number > _LONGEST:
        raise BadValue(f"{text} is more than {_LONGEST:.0f} seconds")
    return number


_SPAN = re.compile(r"([0-9]{1,9})([smhd]?)")
_SECONDS_OF = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def span(text: str) -> float:
    """Convert `90s`, `10m`, `8h` or `2d` to seconds."""
    match = _SPAN.fullmatch(text)
    if match is None or not int(match[1]):
        raise BadValue(f"{text!r} is not a time such as 90s, 10m, 8h or 2d")
    return float(int(match[1]) * _SECONDS_OF[match[2]])


def from_0(text: str) -> float:
    number = _number(text, float, "number")
    if not 0 <= number < math.inf:
        raise BadValue(f"{text} is less than 0, or no number")
    return number


def from_0_to_1(text: str) -> float:
    number = _number(text, float, "number")
    if not 0 <= number <= 1:
        raise BadValue(f"{text} is not between 0 and 1")
    return number


def size(text: str) -> int:
    """Convert a size in bytes, or with K, M or G in KiB, MiB, GiB."""
    # The pattern limits digits: int() of a very long text takes quadratic time.
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "")
    if not re.fullmatch("[0-9]{1,12}", number):
        raise BadValue(f"{text!r} is not a size, such as 64M or 1G")
    return int(number) * _UNITS.get(unit, 1)


def _number(text: str, kind: Callable[[str], _Number], noun: str) -> _Number:
    try:
        return kind(text)
    except ValueError:
        raise BadValue(f"{text!r} is not a {noun}") from None


def not_empty(text: str) -> str:
    if not text:
        raise BadValue("must not be empty")
    return text


def printable(text: str) -> str:
    """Refuse control characters: other programs print the text within a line or a table."""
    if not text.isprintable():
        raise BadValue(f"{text!r} has a character that can't be printed")
    return text


def words(text: str) -> tuple[str, ...]:
    """Split text into words as a shell does."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise BadValue(f"{text!r}: {str(error).lower()}") from None


def user(text: str) -> str:
    if not is_user(text):
        raise BadValue(f"{text!r} is not a user name")
    return text


def ranks(text: str) -> tuple[range, ...]:
    """Convert numbers, inclusive ranges and steps: `0,8-15`, `0-62/2`."""
    try:
        return ranges_of(text)
    except ValueError as error:
        raise BadValue(str(error)) from None


def env_mode(text: str) -> str:
    """Return the text; a variable instead of `all` is an error with its own advice."""
    name, equals, _ = text.partition("=")
    if equals:
        raise BadValue("a single variable has an option of its own", hint=f"-x {name}=VALUE")
    return text


def readable(name: str) -> Path:
    """Return the path of a readable file; `~` is the home directory."""
    try:
        path = Path(name).expanduser()
        # A key that can't be read is an error now, not after hosts are connected.
        path.open("rb").close()
    except OSError as error:
        raise BadValue(f"{name}: {reason(error)}", hint=path_hint(name)) from None
    except (RuntimeError, ValueError) as error:  # no home directory for the ~; a NUL in the path
        raise BadValue(f"{name!r}: {error}") from None
    return path


def names(lists: Iterable[str]) -> tuple[str, ...]:
    """Return the names in lists with commas: `ib0, eth0`."""
    return tuple(name.strip() for text in lists for name in text.split(",") if name.strip())


def module_names(text: str) -> tuple[str, ...]:
    """Convert a list of modules: `torch, mypackage.data`."""
    modules = names([text])
    if not modules or not all(part.isidentifier() for name in modules for part in name.split(".")):
        raise BadValue("not names of modules with commas, such as torch", hint="torch, or auto")
    return modules


def notify_target(text: str) -> str:
    """Check a target of --notify."""
    from hvlaunch.outside.notices import target_error  # noqa: PLC0415 (few lines have one)

    if (error := target_error(text)) is not None:
        raise BadValue(error)
    return text


def notify_events(text: str) -> tuple[str, ...]:
    """Convert a list of events of --notify-on."""
    from hvlaunch.outside.notices import EVENTS  # noqa: PLC0415 (as above)

    events = names([text])
    if not events or not set(events) <= set(EVENTS):
        raise BadValue(f"not of {', '.join(EVENTS)}")
    return events


def hosts_or_bounds(text: str) -> tuple[int, int]:
    """Convert a number of hosts, or torchrun's bounds: `2`, `1:4`."""
    low, _, high = text.partition(":")
    bounds = positive(low), positive(high or low)
    if bounds[0] > bounds[1]:
        raise BadValue(f"{text}: {bounds[0]} is more than {bounds[1]}")
    return bounds


def streams(text: str) -> frozenset[str]:
    """Convert torchrun's numbers for stdout and stderr."""
    if text not in _STREAMS:
        raise BadValue(f"{text!r} is none of 0, 1, 2 and 3, which hold for all workers")
    return _STREAMS[text]


def mapping(text: str) -> tuple[MapPolicy, int | None]:
    """Convert Open MPI's words: the policy, and the workers per host if given."""
    match = re.fullmatch("ppr:([0-9]{1,5}):(?:node|host)", text)
    if match is not None:
        return "slot", slots(match[1])
    # core, socket and others need mpirun: hvlaunch binds no worker.
    if text not in ("slot", "node"):
        raise BadValue(
            f"{text!r} is none of slot, node and ppr:N:node; for mpirun's own: --mpi --binding-args"
        )
    return ("slot" if text == "slot" else "node"), None


def slots_or_gpus(text: str) -> int | None:
    """Convert a number of slots; None for torchrun's words `auto` and `gpu`."""
    return None if text in ("auto", "gpu") else slots(text)


def workers_per_host(text: str) -> int | str:
    """Convert a number, or keep one of torchrun's words."""
    # A mistyped word gets its own message, not the one about numbers.
    if text.isalpha() and text not in ("auto", "cpu", "gpu"):
        raise BadValue(f"{text!r} is neither a whole number nor one of gpu, auto and cpu")
    return text if text.isalpha() else slots(text)


def or_none(text: str) -> str | None:
    """Convert text; empty text takes back an earlier source's value."""
    return text or None


def flat(groups: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(word for group in groups for word in group)


def yes_or_no(text: str) -> bool:
    word = text.lower()
    if word not in _YES and word not in _NO:
        raise BadValue(f"{text!r} is neither true nor false")
    return word in _YES


def one_or_zero(is_on: bool) -> str:
    """Convert a switch to the text of a variable."""
    return "1" if is_on else "0"


def zero_or_one(is_on: bool) -> str:
    """Convert a switch to the text of a variable with the opposite meaning."""
    return one_or_zero(not is_on)


def bytes_of_mb(number: int) -> str:
    return str(number << 20)


def report_path(text: str) -> Path:
    """Return the absolute path of the failure report."""
    if Path(text).suffix not in (".json", ".html"):
        raise BadValue(f"{text!r} ends neither with .json nor with .html")
    return Path(text).absolute()


def mount(text: str) -> tuple[str, str, bool]:
    """Read `SRC[:DST][:ro]`; return source, target (empty for the same path), and whether read-only."""
    source, *others = text.split(":")
    is_readonly = bool(others) and others[-1] == "ro"
    target, *more = others[: len(others) - is_readonly] or [""]
    if more or not source.startswith(("/", "~/")) or not (target or "/").startswith("/"):
        raise BadValue(f"{text!r} is not SRC[:DST][:ro] with absolute paths, such as /data:/data:ro")
    return source, target, is_readonly


def rising(pair: Sequence[float]) -> tuple[float, float]:
    """Check that the second number is not smaller than the first."""
    low, high = pair
    if high < low:
        raise BadValue(f"{low:g} {high:g}: the first number is larger than the second")
    return low, high


NUMBER = Value(("N",), positive)
COUNT = Value(("N",), count)
PORT = Value(("PORT",), port)
SECONDS = Value(("SECONDS",), seconds, unit="s")
SIZE = Value(("SIZE",), size)
WORDS = Value(("OPTIONS",), words, has_options=True)
FILE = Value(("FILE",), not_empty, completion="file", path="here")
DIRECTORY = Value(("DIR",), not_empty, completion="directory", path="here")


def bring_options(text: str, directory: str) -> BringOptions:
    """Read `SRC:DST`; relative paths of this machine are below `directory`. Raises BadUsage."""
    source, colon, path = text.rpartition(":")
    if not colon or not source or not path:
        raise BadUsage(f"{text!r} is not SRC:DST", hint="--bring ./model:/data/model")
    return source_and_path(source, path, directory)


def source_and_path(source: str, path: str, directory: str) -> BringOptions:
    """Return the options for `PATH` or `HOST:PATH` as the source. Raises BadUsage."""
    host, colon, inner = source.rpartition(":")
    # As for scp: a colon behind a slash belongs to a name.
    if colon and host and "/" not in host:
        if not inner:
            raise BadUsage(
                f"{source!r} names no path on {host}", hint="hvlaunch cp -H a,b ./model /data/model"
            )
        return BringOptions(host, inner, path)
    return BringOptions(None, source if source.startswith("/") else f"{directory}/{source}", path)


def collect_options(texts: Sequence[str], directory: str) -> tuple[CollectOptions, ...]:
    """Read `GLOB[:DIR]`; DIR counts from `directory`. Raises BadUsage."""
    options = []
    for text in texts:
        glob, colon, target = text.rpartition(":")
        if not colon:
            glob, target = text, "results"
        words = glob.split("/")
        if not glob or not target or glob.startswith("/") or ".." in words:
            raise BadUsage(
                f"{text!r}: GLOB[:DIR] names files below the workers' directory",
                hint="'checkpoints/*.pt:out'",
            )
        options.append(CollectOptions(glob, os.path.normpath(Path(directory) / target)))
    return tuple(options)
