"""Variables that belong to one machine, one login or one terminal: no other host gets them from here."""

from collections.abc import Collection, Mapping

from hvlaunch.hosts.patterns import matcher

__all__ = ["OWN_VARIABLES", "host_environ"]

OWN_VARIABLES = (
    # The driver's GPUs are not the host's.
    "*CUDA_VISIBLE_DEVICES",
    # Of this machine, this user and this shell.
    "BASH_FUNC_*",
    "OLDPWD",
    "PWD",
    "SHLVL",
    "_",
    "HOSTNAME",
    "HOST",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "MAIL",
    # Of this terminal and this session.
    "TERM",
    "TERM_*",
    "TERMCAP",
    "TERMINFO*",
    "COLORTERM",
    "COLUMNS",
    "LINES",
    "STY",
    "WINDOW",
    "WINDOWID",
    "TMUX*",
    "SSH_*",
    "XDG_*",
    "DBUS_*",
    "DISPLAY",
    "WAYLAND_DISPLAY",
    "XAUTHORITY",
    "GPG_*",
    "SUDO_*",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "LISTEN_*",
    "NOTIFY_SOCKET",
)
"""Patterns of their names."""

_PLACES = ("TMPDIR", "TMP", "TEMP")
"""Each host has such a directory; `--env all` passes them on all the same."""


def host_environ(environ: Mapping[str, str], passed_on: Collection[str]) -> dict[str, str]:
    """What workers on this machine find as their host's own environment, where the job has other hosts too.

    Those have no more from here than what is passed on, by these names; and each has such variables of its own.
    """
    is_own = matcher(*OWN_VARIABLES, *_PLACES)
    return {name: value for name, value in environ.items() if is_own(name) or name in passed_on}
