"""Other Pythons than this one, for tests of what runs on hosts: those of this machine, or fetched ones.

`python -m tests.pythons 3.8 3.14` fetches those that are missing into this virtual environment, from Debian or by uv,
and says which can't be had.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["find"]

_FETCHED = Path(sys.prefix) / "pythons"
_PATIENCE = 300.0
_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"

_SUITE = "testing"
"""Of Debian: the newest Python is there before it is in a release."""
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_PACKAGES = ("python{0}-minimal", "libpython{0}-minimal", "libpython{0}-stdlib")
_LIBRARIES = ("libc6", "libexpat1", "libffi8", "libssl3t64", "libzstd1", "zlib1g")
_WRAPPER = '#!/bin/sh\nexec {loader} --argv0 "$0" --library-path {libraries} {program} "$@"\n'


class NotFetched(Exception):
    """This way does not give us that Python; why."""


def find(version: str) -> str | None:
    """A Python of this version that works, if there is one."""
    return next((path for path in _candidates(version) if _is(version, path)), None)


def _candidates(version: str) -> Iterator[str]:
    home = Path.home()
    yield str(_FETCHED / version / "usr" / "bin" / f"python{version}")
    for versions in (_FETCHED / "uv", home / ".pyenv" / "versions", home / ".local/share/uv/python"):
        for name in (f"{version}.*", f"cpython-{version}.*"):
            yield from map(str, versions.glob(f"{name}/bin/python{version}"))
    yield shutil.which(f"python{version}") or ""


def _is(version: str, path: str) -> bool:
    """Whether it runs: pyenv's shims are there without the Python."""
    try:
        done = subprocess.run([path, "-c", _VERSION], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return done.stdout.strip() == version


def _run(*words: str, cwd: Path | None = None) -> str:
    """What the command prints. Raises NotFetched."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_PATIENCE, cwd=cwd)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotFetched(str(error)) from None
    if done.returncode != 0:
        complaint = done.stderr.strip().splitlines()[-1:] or [f"code {done.returncode}"]
        raise NotFetched(f"{words[0]}: {complaint[0]}")
    return done.stdout


class Debian:
    """Its packages, unpacked and not installed: each Python runs with the C library that it was built for."""

    def __init__(self, work: Path) -> None:
        """`work` is a folder for apt's lists and settings, of which the machine's know nothing."""
        self._work = work

    def fetch(self, version: str) -> None:
        """Raises NotFetched."""
        packages = [*_LIBRARIES, *(name.format(version) for name in _PACKAGES)]
        archives, root = self._work / f"debs-{version}", self._work / f"root-{version}"
        archives.mkdir()
        _run("apt-get", *self._words, "download", *packages, cwd=archives)
        for archive in archives.glob("*.deb"):
            _run("dpkg-deb", "-x", str(archive), str(root))
        _wrap(root, _FETCHED / version, version)
        root.rename(_FETCHED / version)

    @cached_property
    def _words(self) -> tuple[str, ...]:
        """What makes apt-get use our lists, which are there then."""
        for folder in ("lists/partial", "cache/archives/partial"):
            (self._work / folder).mkdir(parents=True)
        sources = self._work / "sources.list"
        sources.write_text(f"deb [signed-by={_KEYRING}] {_mirror()} {_SUITE} main\n")
        settings = {
            "Dir::Etc::sourcelist": sources,
            "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": self._work / "lists",
            "Dir::Cache": self._work / "cache",
            "Acquire::Languages": "none",
            "APT::Sandbox::User": "root" if os.geteuid() == 0 else "",
        }
        words = tuple(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))
        _run("apt-get", *words, "update")
        return words


def _mirror() -> str:
    """Where this machine's own Debian comes from. Raises NotFetched."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    if release.get("ID") != "debian":
        raise NotFetched("this is no Debian")
    uris = _run("apt-get", "update", "--print-uris")
    found = re.search(rf"'(\S+)/dists/{release.get('VERSION_CODENAME')}/InRelease'", uris)
    if found is None:
        raise NotFetched("apt-get has no mirror of Debian's")
    return found[1]


def _wrap(root: Path, home: Path, version: str) -> None:
    """Put a script in the place of the program, which will be in `home`: that starts it with its own loader."""
    program = root / "usr" / "bin" / f"python{version}"
    real = program.with_name(f"{program.name}.real")
    program.rename(real)
    loader = next(root.glob("usr/lib/*/ld-linux*.so.*"))
    paths = {"loader": loader, "libraries": loader.parent, "program": real}
    words = {name: shlex.quote(str(home / path.relative_to(root))) for name, path in paths.items()}
    program.write_text(_WRAPPER.format_map(words))
    program.chmod(0o755)


def _by_uv(version: str) -> None:
    """Raises NotFetched."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if uv is None:
        raise NotFetched("there is no uv to fetch it with")
    _run(uv, "python", "install", "--no-bin", "--install-dir", str(_FETCHED / "uv"), version)


def main(versions: list[str]) -> None:
    """Fetch what is missing, and tell what there is."""
    _FETCHED.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=_FETCHED) as work:
        ways = (Debian(Path(work)).fetch, _by_uv)
        for version in versions:
            reasons = []
            for way in ways:
                if find(version) is None:
                    try:
                        way(version)
                    except NotFetched as reason:
                        reasons.append(str(reason))
            path = find(version)
            outcome = (
                f": {path}" if path else f" can't be had, so its tests are skipped: {'; '.join(reasons)}"
            )
            print(f"Python {version}{outcome}")  # noqa: T201 (a program)


if __name__ == "__main__":
    main(sys.argv[1:])
