"""A job on a warm pool: its driver is forked, and this process is there for its user's terminal, signals and exit code.

It loads next to nothing: what takes the time of a start has been done in the fork server (hvlaunch/forked/).
"""

from __future__ import annotations

import os

from hvlaunch.agent.quick import signal
from hvlaunch.outside.forked import ForkedDriver, begin_driver
from hvlaunch.outside.state import POOL_VARIABLE, pool_path

TYPE_CHECKING = False  # see forked.py
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import NoReturn

__all__ = ["run_by_fork"]

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_OPTION = "--pool"
_STREAMS = (0, 1, 2)


def run_by_fork(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Where this line seems to name a pool that can fork its driver, wait for the end of that, and end as it has ended.

    Returns where there is none: then nothing has been begun.
    """
    name = _pool(argv[1:], environ)
    pool = pool_path(environ, name)
    if not pool:
        return
    driver = begin_driver(pool, "command line", _STREAMS, argv=argv, environ=environ)
    if driver is not None:
        _stand_in_for(driver, argv)


def _pool(words: Sequence[str], environ: Mapping[str, str]) -> str:
    """What is likely to be the pool's name; the fork server reads the line as it should be read."""
    name = environ.get(POOL_VARIABLE, "")
    for index, word in enumerate(words):
        if word == _OPTION:
            return "".join(words[index + 1 : index + 2])
        if word.startswith(f"{_OPTION}="):
            return word[len(_OPTION) + 1 :]
    return name


def _stand_in_for(driver: ForkedDriver, argv: Sequence[str]) -> NoReturn:
    for number in _PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: driver.send_signal(number))
    if signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN:
        signal.signal(signal.SIGTSTP, lambda *_: _stop_both(driver))
    _let_go_of_streams()
    if assignments := [*_assignments(argv)]:
        from hvlaunch.cli.own_argv import hide_values  # noqa: PLC0415 (loads much, while the driver works)

        hide_values(assignments)
    _end_as(driver.wait())


def _assignments(argv: Sequence[str]) -> Iterator[str]:
    """The NAME=VALUE of each -x, which the command may have too: nobody else needs to see that either."""
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word == "-x":
            yield following
        elif word.startswith("-x"):
            yield word[2:]


def _stop_both(driver: ForkedDriver) -> None:
    """Ctrl-Z; here we go on after SIGCONT."""
    driver.send_signal(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    driver.send_signal(signal.SIGCONT)


def _let_go_of_streams() -> None:
    """Nobody at the other end is to wait for us, or to take us for a reader."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in _STREAMS:
        os.dup2(null, number)
    os.close(null)


def _end_as(code: int) -> NoReturn:
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)
