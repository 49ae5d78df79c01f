"""Write a page of errors: python docs/errors_page.py errors.md > docs/reference/errors.md, or make options-page.

The first paragraph of a class's docstring is the cause, and the one that begins with `Try: ` is the next step. Without the latter, the next step
is the constant hint of its constructor, or that of its base.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from posixpath import relpath
from typing import NamedTuple

from hvlaunch import errors

__all__ = ["page"]

_HEADS: Mapping[str, str] = {
    "errors.md": """\
<!-- Made of the docstrings of these classes by `make options-page`: change those, not this. -->
# Errors by name

Python programs, [`report.json`](../interfaces/report.md) (`error.kind`) and [`--events`](../interfaces/events.md) (`error`) have these names.
All are `hvlaunch.errors.HvlaunchError` with `cause`, `host`, `hint` and `exit_code`. An error's message says more about its case.
See also [errors in programs](errors-python.md), [exit codes](exit-codes.md), and [Troubleshooting](../guides/troubleshooting.md), which
starts from what you see.
""",
    "errors-python.md": """\
<!-- Made of the docstrings of these classes by `make options-page`: change those, not this. -->
# Errors in programs

[Errors by name](errors.md) has those of command lines, hosts and jobs. The exit code is the error's `exit_code`, for `sys.exit()`; a program
that does not catch an error ends with 1, as with any exception.
""",
}
_SECTIONS: Mapping[str, Mapping[str, str]] = {
    "errors.md": {
        "The command line and files": """BadUsage BadHost NotEnoughSlots SlotsUnlikely BadEnvironment WorkingDirectoryMissing NotTrusted
            BadTokenFile""",
        "Hosts": """HostError HostsFailed UnknownHost ConnectFailed SentAway StartTimeout HostKeyUnknown HostKeyChanged HostKeyRevoked
            PermissionDenied NoPython AgentFailed HostLost ChannelGarbled ProtocolBroken Unreachable NoFreePort LeasesTaken LeaseImpossible
            QueueNotWritten CopyFailed ContainerFailed SetupFailed CheckFailed ErrandFailed HostFault""",
        "While a job runs": "JobHung NotEnoughSlotsInTime DiscoveryFailed GaveUp Defect InvalidHostStep InvalidTransition",
        "Jobs that run already": """DriverGone ControlRefused DriverLives JobOver NoJournal ForeignJournal OtherVersion TornJournal
            NoJobDirectory PoolGone""",
        "Other launchers": "NoLauncher UnknownLauncher LauncherFailed EndedByLauncher",
    },
    "errors-python.md": {
        "Functions on hosts": "WorkerFailed JobFailed JobStopped CallNotPickled ResultNotPickled ResultNotRead ResultLost WrongPython",
        "Groups of workers": """GroupError NotInitialized AlreadyInitialized NotOffered BadPlace BadParameter NoMasterAddress RankZeroMissing
            RankZeroGone RanksMissing StoreUnreachable PortsTaken PlacesClash TooFewGPUs""",
        "Elastic training": "CollectiveFailed WorkersChanged Dismissed RoundOver",
        "The rendezvous": """RendezvousError NoRendezvous RendezvousUnreachable RendezvousClosed Unauthorized UnexpectedAnswer BadCertificate
            CannotListen WaitTimeout ValueTooLarge StoreFull NotANumber TooManyConnections BadStoreFile""",
    },
}
"""The errors of each section, in the order in which users meet them."""
_ABOUT: Mapping[str, str] = {
    "Groups of workers": "`import hvlaunch.torch` raises these. Each is a `GroupError`.\n\n",
    "Elastic training": "`elastic.run` catches these. Put no `except Exception:` around a step.\n\n",
}
_TREE = {"Exception", "GroupError", "HostError", "HvlaunchError", "RendezvousError"}
"""Bases that say no more than the section."""
_CLASS = re.compile(
    r'^class (\w+)\((?!NamedTuple)(.+)\):\n    """((?:.|\n)*?)"""((?:\n(?: .*)?)*)', re.MULTILINE
)
_HINT = re.compile(r'\bhint(?:: str )?= ?f?"(.+?)"')
_TO_TYPE = re.compile(r"(?<!\S)(--?[a-z][-a-z]*|[\w.]+\([^)]*\)|[A-Z_]{4,})")
_CODE = re.compile(r'exit_code = (.+)(?:\n +"""(.+)""")?')
_PAGE = re.compile(r"((?:docs|hostfiles)/[\w/-]+\.md)(#[\w-]+)?")


class _Error(NamedTuple):
    bases: list[str]
    paragraphs: list[str]
    body: str


def page(name: str) -> str:
    """Return the text of the page."""
    # Classes are read and not imported, since some of their modules need torch.
    texts = [path.read_text(encoding="utf-8") for path in Path(errors.__file__).parent.rglob("*.py")]
    found = [match for text in texts for match in _CLASS.finditer(text)]
    classes = {match[1]: _Error(match[2].split(", "), match[3].split("\n\n"), match[4]) for match in found}
    return _HEADS[name] + "".join(
        f"\n## {title}\n\n{_ABOUT.get(title, '')}| error | exit code | cause | next step |\n|---|---|---|---|\n"
        + "".join(f"| {' | '.join(_cells(name, classes))} |\n" for name in names.split())
        for title, names in _SECTIONS[name].items()
    )


def _cells(name: str, classes: Mapping[str, _Error]) -> Iterator[str]:
    yield f'<a id="{name}"></a>`{name}`'
    yield _nearest(_exit_code, name, classes)
    others = [f"`{base}`" for base in classes[name].bases if base not in _TREE]
    yield _prose(classes[name].paragraphs[0]) + (f" Also a {' and a '.join(others)}." if others else "")
    step = _prose(_nearest(_next_step, name, classes))
    yield step[:1].upper() + step[1:]


def _nearest(get: Callable[[_Error], str], name: str, classes: Mapping[str, _Error]) -> str:
    """Return what the class has, or else the nearest of its bases."""
    if name not in classes:
        return ""
    bases = (_nearest(get, base, classes) for base in classes[name].bases)
    return get(classes[name]) or next(filter(None, bases), "")


def _exit_code(error: _Error) -> str:
    """Return the number, or the docstring of a code that differs by instance."""
    found = _CODE.findall(error.body)
    if "self.exit_code =" in error.body:
        return "".join(text for _, text in found)
    return str(getattr(errors, found[0][0], found[0][0])) if found else ""


def _next_step(error: _Error) -> str:
    steps = [text.strip()[len("Try: ") :] for text in error.paragraphs if text.strip().startswith("Try: ")]
    steps += [_TO_TYPE.sub(r"`\1`", hint) + "." for hint in _HINT.findall(error.body)]
    return steps[0] if steps else ""


def _prose(text: str) -> str:
    """Return a paragraph as one line, in which the name of a page is a link to it."""

    def linked(match: re.Match[str]) -> str:
        words = (match[2] or f"#{Path(match[1]).stem}")[1:].replace("-", " ")
        return f"[{words}]({relpath(match[1], 'docs/reference')}{match[2] or ''})"

    return _PAGE.sub(linked, " ".join(text.split()).replace("|", "\\|"))


if __name__ == "__main__":
    sys.stdout.write(page(sys.argv[1]))
