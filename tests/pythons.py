"""Other Pythons than this one, for tests of what runs on hosts: those of this machine, or fetched ones.

`python -m tests.pythons 3.8 3.14` fetches those that are missing into this virtual environment, from Debian or by uv,
and says which can't be had.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
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
_LIBRARIES = ("libc6", "libexpat1", "libffi8", "zlib1g")
_WRAPPER = '#!/bin/sh\nexec {loader} --argv0 "$0" --library-path {libraries} {program} "$@"\n'


class NotFetched(Exception):
    """This way does not give us that Python; why."""


def find(version: str) -> str | None:
    """A Python of this version that works, if there is one."""
    return next((path for path in _candidates(version) if _is(version, path)), None)


def fetch(version: str) -> None:
    """Raises NotFetched."""
    reasons = []
    for way in (_from_debian, _by_uv):
        try:
            way(version, _FETCHED)
        except NotFetched as reason:
            reasons.append(str(reason))
        else:
            return
    raise NotFetched("; ".join(reasons))


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


def _run(*words: str) -> str:
    """What the command prints. Raises NotFetched."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotFetched(str(error)) from None
    if done.returncode != 0:
        complaint = done.stderr.strip().splitlines()[-1:] or [f"code {done.returncode}"]
        raise NotFetched(f"{words[0]}: {complaint[0]}")
    return done.stdout


def _from_debian(version: str, into: Path) -> None:
    """Unpack Debian's packages, without installing them; the Python runs with the C library that it was built for."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None or not _KEYRING.exists():
        raise NotFetched("this is no Debian")
    sites = _run("apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)", "Created-By: Packages")
    mirror = next((line.split()[1] for line in sites.splitlines() if line.startswith("Debian ")), None)
    if mirror is None:
        raise NotFetched("no package list of Debian's is here (apt-get update)")
    into.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=into) as name:
        work = Path(name)
        own = _own_apt(work, f"deb [signed-by={_KEYRING}] {mirror} {_SUITE} main\n")
        _run("apt-get", *own, "update")
        root = work / "root"
        for package in (*_LIBRARIES, *(name.format(version) for name in _PACKAGES)):
            target = work / package
            target.mkdir()
            _run("sh", "-c", f'cd "$0" && apt-get "$@" download {package}', str(target), *own)
            (archive,) = target.glob("*.deb")
            _run("dpkg-deb", "-x", str(archive), str(root))
        _wrap(root, into / version, version)
        root.rename(into / version)


def _own_apt(work: Path, sources: str) -> tuple[str, ...]:
    """apt's words for lists and settings of its own, of which the machine's know nothing."""
    for folder in ("lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    (work / "sources.list").write_text(sources)
    settings = {
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": work / "lists",
        "Dir::Cache": work / "cache",
        "Acquire::Languages": "none",
        "APT::Sandbox::User": "root" if os.geteuid() == 0 else "",
    }
    return tuple(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))


def _wrap(root: Path, home: Path, version: str) -> None:
    """Put a script in the place of the program, which will be in `home`: that starts it with its own loader."""
    program = root / "usr" / "bin" / f"python{version}"
    real = program.with_name(f"{program.name}.real")
    program.rename(real)
    loader = next(root.glob("usr/lib/*/ld-linux*.so.*"))
    paths = {"loader": loader, "libraries": loader.parent, "program": real}
    program.write_text(
        _WRAPPER.format_map(
            {name: shlex.quote(str(home / path.relative_to(root))) for name, path in paths.items()}
        )
    )
    program.chmod(0o755)


def _by_uv(version: str, into: Path) -> None:
    """Raises NotFetched."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if uv is None:
        raise NotFetched("there is no uv to fetch it with")
    _run(uv, "python", "install", "--no-bin", "--install-dir", str(into / "uv"), version)


def main(versions: list[str]) -> None:
    """Fetch what is missing, and tell what there is."""
    for version in versions:
        reason = ""
        if find(version) is None:
            try:
                fetch(version)
            except NotFetched as error:
                reason = str(error)
        path = find(version)
        if path is not None:
            print(f"Python {version}: {path}")  # noqa: T201 (a program)
        else:
            print(f"Python {version} can't be had, so its tests are skipped: {reason}")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
