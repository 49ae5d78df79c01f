# ruff: noqa: INP001 (a script, and no package)
"""Print the part of lock.txt that some packages need, for `pip install --requirement`, which then checks every hash.

    locked.py setuptools                    # a package, and all that it needs
    locked.py dist/hvlaunch-….whl dev       # what the wheel and its extra need

torch is left out: its builds for processors and for GPUs have different hashes, and the Makefile installs one of them
before. What it needs is taken from the build that is installed.
"""

import re
import sys
from email import message_from_bytes
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from zipfile import ZipFile

LOCK = Path(__file__).parent.parent / "lock.txt"
ENTRY = re.compile(r"^(\S+?)==.*\n(?:[ #].*\n?)*", re.MULTILINE)
NEEDED_BY = re.compile(r"#(?: via)? +(\S+)")


def name_of(requirement: str) -> str:
    """Return the package's name, as in lock.txt: `paramiko` for `Paramiko<6,>=5; extra == "x"`."""
    name, *_ = re.split(r"[^\w.-]", requirement, maxsplit=1)
    return re.sub(r"[-_.]+", "-", name).lower()


def needs_of_wheel(wheel: str, extra: str) -> set[str]:
    """Return the names of packages that the wheel needs with the extra, directly."""
    with ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = message_from_bytes(archive.read(metadata))
    extras, names = {extra}, set[str]()
    for _ in headers.get_all("Provides-Extra", ()):  # extras name each other: so many turns are enough
        for requirement in headers.get_all("Requires-Dist", ()):
            of_extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
            if of_extra is not None and of_extra[1] not in extras:
                continue
            if name_of(requirement) != name_of(headers["Name"]):
                names.add(name_of(requirement))
            elif (more := re.search(r"\[([^]]*)]", requirement)) is not None:
                extras.update(re.split(r" *, *", more[1]))
    return names


def needs_of_torch() -> set[str]:
    """Return what the installed build of torch needs; a build for processors has nothing for GPUs."""
    try:
        return {name_of(need) for need in requires("torch") or () if "extra ==" not in need}
    except PackageNotFoundError:
        return set()


def main(package: str, *extra: str) -> None:
    """Print the entries."""
    entries: dict[str, list[str]] = {}
    needs: dict[str, set[str]] = {}
    for entry in ENTRY.finditer(LOCK.read_text(encoding="utf-8")):
        name = name_of(entry[1])
        entries.setdefault(name, []).append(entry[0])
        for parent in NEEDED_BY.findall(entry[0]):
            needs.setdefault(name_of(parent), set()).add(name)
    needs["torch"] = needs_of_torch()
    left = needs_of_wheel(package, *extra) if extra else {package}
    needed = set[str]()
    while left:
        needed.add(name := left.pop())
        left |= needs.get(name, set()) - needed
    # A package that the lock lacks is left to pip, which then refuses it for want of a hash.
    for name in sorted(needed - {"torch"}):
        sys.stdout.writelines(entries.get(name, [f"{name}\n"]))


main(*sys.argv[1:])
