"""What the launcher starts in place of the user's command: agent/rank.py and agent/wire/caller.py, packed for its command line."""

import zlib
from binascii import b2a_base64
from collections.abc import Sequence
from pathlib import Path

from hvlaunch.agent import rank
from hvlaunch.agent.wire import caller
from hvlaunch.driver.program.agent_program import NEW_ENOUGH, python_candidates, without_words
from hvlaunch.mpi.process_ranks import ALL_NAMES, Names

__all__ = ["caller_command"]

# Of the programs, which are $0 and $1, a launcher and its shells see letters, digits, + / and = alone. They hand the
# other words on as they are, the interpreters to try, too.
# As on ssh's command line, a timer ends what is no agent, with its lease, in time.
_UNPACK = (
    "import sys,zlib,binascii,_signal;_signal.setitimer(0,{limit:g});"
    "exec(zlib.decompress(binascii.a2b_base64(sys.argv[1])))"
)
_NAME = "hvlaunch-agent"
"""For those who read the list of processes."""
_SHELL = (
    'r=$1; shift; for p; do case "$p" in /*/python3.[89]|/*/python3.[1-9][0-9]) [ -x "$p" ];; '
    f'*) case "$("$p" -V </dev/null 2>/dev/null)" in {NEW_ENOUGH}) ;; *) false;; esac;; esac && '
    f'exec "$p" -I -S -X utf8 -c "%s" "$0" "$r" {_NAME}; done; '
    'echo "hvlaunch: host $(uname -n): no Python >= 3.8 among $*" >&2; exit 127'
)


def caller_command(
    names: Sequence[Names], python: str | None = None, *, limit: float = 90.0
) -> tuple[str, ...]:
    """The words for the launcher, whose variables are `names`.

    `python` is the interpreter; None tries this one's path, python3 and python. One that is named python3.N needs
    not be asked for its version. The driver has `limit` seconds to send it the agent's program.
    """
    pairs = [(each.rank, each.local_rank) for each in names if each.local_rank]
    first = _packed(rank.__file__, f"import sys\nmain({pairs!r}, sys.argv[2])")
    second = _packed(caller.__file__, f"main({sorted(ALL_NAMES)!r}, ranks)")
    return ("/bin/sh", "-c", _SHELL % _UNPACK.format(limit=limit), first, second, *python_candidates(python))


def _packed(file: str, call: str) -> str:
    text = without_words(Path(file).read_text(encoding="ascii"))
    return b2a_base64(zlib.compress(f"{text}\n{call}\n".encode("ascii"), 9), newline=False).decode("ascii")
