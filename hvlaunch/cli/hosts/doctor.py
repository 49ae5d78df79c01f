"""`hvlaunch doctor` and --check-build: the state of this installation and of the hosts, and the next step for each finding.

Both are for bug reports too: without values of variables and options, and with the user's names of hosts.
"""

import itertools
import json
import os
import platform
import re
import resource
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hvlaunch import __version__
from hvlaunch.agent.quick import has_own_proc
from hvlaunch.agent.reaper import adopt_descendants
from hvlaunch.cli.arguments import Answered, options_of_word, project_file, user_file
from hvlaunch.cli.options.settings import Options
from hvlaunch.cli.options.table import SSH
from hvlaunch.cli.process import print_answer
from hvlaunch.cli.spec import job_spec
from hvlaunch.console.lines import visible
from hvlaunch.console.status import count
from hvlaunch.errors import EXIT_USAGE, BadUsage, HvlaunchError
from hvlaunch.job import JobSpec
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.outside import NoJobDirectory, jobs_directory, known_jobs
from hvlaunch.owners import other_writer

if TYPE_CHECKING:
    from hvlaunch.gloo.visit import HostAnswer

__all__ = [
    "Part",
    "ReportLine",
    "check_build",
    "exit_code_of",
    "findings",
    "launcher_version",
    "package_version",
    "parts",
    "report",
    "run_doctor_command",
    "ssh_version",
]

_USAGE = """\
usage: hvlaunch doctor [-H HOSTS | --hostfile FILE] [--json] [options of hosts and of SSH]

Check this installation, and whether hosts answer: those of -H, of a hostfile, of a file of options, or of the
scheduler's job. Add the report to a bug report; it has no secrets. The exit code is 0 if nothing stops a job.

  --json  an object for programs
"""
_TAKEN = frozenset(
    [
        *(option.name for option in SSH.options),
        *("hosts", "hostfile", "slots_per_host", "force_slots", "no_scheduler"),
        *("config_file", "profile", "isolated", "command"),
    ]
)
"""Options of a job for the doctor too."""
_FEWEST_FILES, _MANY_FILES = 32, 1024
_GIB = 1 << 30
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 (it is measured, not written)
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_CGROUPS = (Path("/sys/fs/cgroup/cgroup.controllers"), Path("/sys/fs/cgroup/memory"))
_MAYBE_ADDRESS = re.compile(r"(?<![\w.:])[0-9a-fA-F:.]*[0-9a-fA-F:](?!\w)")

Level = Literal["ok", "note", "warning", "error"]


class ReportLine(NamedTuple):
    """A line of the report."""

    section: str
    name: str
    level: Level
    """note: an optional part is missing; warning: a job works worse; error: no job starts."""
    text: str
    hint: str | None = None
    """The next step."""
    exit_code: int = 0
    """The exit code of a job with this error."""


def run_doctor_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the words behind `doctor`; return the exit code. Raises BadUsage."""
    if {"-h", "--help"} & {*argv}:
        return print_answer(_USAGE)
    from hvlaunch.cli.options.parser import Parser  # noqa: PLC0415 (--check-build has no use for it)

    parser = Parser(prog="hvlaunch doctor", add_help=False, allow_abbrev=False, hint="hvlaunch doctor --help")
    parser.add_argument("--json", action="store_true")
    doctor_options, words = parser.parse_known_args(argv)
    try:
        # Errors of the user's own words come at once; those of files are findings.
        options_of_word("doctor", words, None, _TAKEN)
    except Answered as answer:
        return print_answer(answer.text)
    listed = list(findings(words, environ))
    code = exit_code_of(listed)
    if doctor_options.json:
        objects = [finding._asdict() for finding in listed]
        text = json.dumps({"version": __version__, "exit_code": code, "findings": objects}) + "\n"
    else:
        text = report(listed)
    return print_answer(text) or code


def findings(words: Sequence[str], environ: Mapping[str, str]) -> Iterator[ReportLine]:
    """Return the findings, in the order of the report."""
    for check in (_installation, _parts, _kernel, _limits, _jobs):
        yield from _clean(check(environ), environ)
    warnings: list[str] = []
    options, problem = _options(words, environ, warnings.append)
    yield from _clean(_configuration(options, environ, warnings, problem), environ)
    yield from _clean(_hosts(options, environ), environ)


def exit_code_of(listed: Iterable[ReportLine]) -> int:
    """Return the exit code of the first error; 0 without errors."""
    return next((finding.exit_code for finding in listed if finding.level == "error"), 0)


def report(listed: Sequence[ReportLine]) -> str:
    """Return the report as plain text."""
    lines = []
    section = ""
    for finding in listed:
        if finding.section != section:
            section = finding.section
            lines += ["", f"{section}:"]
        mark = "" if finding.level == "ok" else finding.level
        lines.append(f"  {mark:<8}{finding.name:<15} {visible(finding.text)}")
        if finding.hint is not None:
            lines.append(f"{'':26}try: {visible(finding.hint)}")
    errors = sum(finding.level == "error" for finding in listed)
    warnings = sum(finding.level == "warning" for finding in listed)
    verdict = f"{count(errors, 'error')}: a job would not run" if errors else "nothing here stops a job"
    if warnings:
        verdict += f"; {count(warnings, 'warning')}"
    return "\n".join([f"hvlaunch {__version__}: {verdict}", *lines, ""])


def _clean(listed: Iterator[ReportLine], environ: Mapping[str, str]) -> Iterator[ReportLine]:
    """Shorten the user's home to ~: its path often contains the user's name."""
    home = environ.get("HOME", "").rstrip("/")

    def short(text: str) -> str:
        return text.replace(f"{home}/", "~/") if home else text

    for finding in listed:
        hint = None if finding.hint is None else short(finding.hint)
        yield finding._replace(text=short(finding.text), hint=hint)


# The checks


def _installation(_environ: Mapping[str, str]) -> Iterator[ReportLine]:
    section = "installation"
    yield ReportLine(section, "hvlaunch", "ok", f"{__version__}, {Path(__file__).parents[2]}")
    yield ReportLine(section, "Python", "ok", f"{platform.python_version()}, {sys.executable}")
    yield ReportLine(section, "system", "ok", platform.platform())
    if lacking := " ".join(_lacking()):
        hint = f"{shlex.quote(sys.executable)} -m pip install {lacking}"
        yield ReportLine(section, "requirements", "error", f"missing: {lacking}", hint, EXIT_USAGE)
    else:
        yield ReportLine(section, "requirements", "ok", "all are installed")


def _lacking() -> Iterator[str]:
    """Yield the names of required packages without an installation."""
    with suppress(metadata.PackageNotFoundError):
        for requirement in metadata.requires("hvlaunch") or ():
            name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
            # A marker means an extra, or another Python.
            if ";" not in requirement and package_version(name) is None:
                yield name


def _parts(_environ: Mapping[str, str]) -> Iterator[ReportLine]:
    for part in parts():
        if part.version:
            yield ReportLine("parts", part.name, "ok", part.version)
        else:
            yield ReportLine("parts", part.name, "note", f"not found; {part.note}", part.hint)


def _can_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


_FEATURES: tuple[tuple[str, Callable[[], bool], str, str, str], ...] = (
    (
        "subreaper",
        lambda: adopt_descendants() is None,
        "no process outlives its job",
        "prctl can't set it: processes that a worker detaches may outlive the job",
        "Linux 3.4 or newer, and a container that allows prctl",
    ),
    (
        "/proc",
        has_own_proc,
        "workers can be observed",
        "it is not of this PID namespace: workers here can't be observed",
        "unshare --mount-proc, which mounts one",
    ),
    (
        "pidfd",
        _can_pidfd,
        "connections of --ssh-client openssh are watched",
        "missing: --ssh-client openssh notices broken connections later",
        "Linux 5.6 or newer",
    ),
    (
        "memfd",
        lambda: hasattr(os, "memfd_create"),
        "elastic workers can start over",
        "missing: an elastic worker that is stuck is replaced, and can't start over",
        "Linux 3.17 or newer",
    ),
    (
        "cgroup",
        lambda: any(path.exists() for path in _CGROUPS),
        "the out-of-memory killer is noticed, by control group",
        "no memory controller: the out-of-memory killer is noticed for the whole machine alone",
        "mount /sys/fs/cgroup",
    ),
    (
        "ptrace",
        lambda: _read(_YAMA) in ("", "0", "1"),
        "stacks of workers can be read",
        "kernel.yama.ptrace_scope forbids to read stacks: hvlaunch stacks shows less",
        "sysctl kernel.yama.ptrace_scope=1",
    ),
)
"""Features of the kernel: name, test, effect, effect of the lack, next step."""


def _kernel(_environ: Mapping[str, str]) -> Iterator[ReportLine]:
    for name, is_there, good, bad, hint in _FEATURES:
        works = is_there()
        yield ReportLine(
            "kernel", name, "ok" if works else "warning", good if works else bad, None if works else hint
        )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _limits(_environ: Mapping[str, str]) -> Iterator[ReportLine]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    level: Level = "ok"
    if soft != resource.RLIM_INFINITY and soft < _MANY_FILES:
        level = "error" if soft < _FEWEST_FILES else "warning"
    hint = None if level == "ok" else f"ulimit -n {_MANY_FILES}"
    text = f"{_number(soft)} at a time, {_number(hard)} at most"
    yield ReportLine("limits", "open files", level, text, hint, EXIT_USAGE if level == "error" else 0)
    for name, limit, unit in (
        ("processes", "RLIMIT_NPROC", ""),
        ("locked memory", "RLIMIT_MEMLOCK", " bytes"),
    ):
        if hasattr(resource, limit):
            soft, _ = resource.getrlimit(getattr(resource, limit))
            yield ReportLine("limits", name, "ok", _number(soft, unit))
    with suppress(OSError):
        space = os.statvfs(_SHARED_MEMORY)
        free = space.f_bavail * space.f_frsize / _GIB
        yield ReportLine("limits", _SHARED_MEMORY, "ok", f"{free:.1f} GiB free")


def _number(limit: int, unit: str = "") -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit}{unit}"


def _jobs(environ: Mapping[str, str]) -> Iterator[ReportLine]:
    try:
        root = jobs_directory(environ)
        jobs = known_jobs(root)
    except NoJobDirectory as error:
        text = f"{error.cause}: jobs run, but --detach, attach and top do not work"
        yield ReportLine("jobs", "directory", "warning", text, error.hint)
        return
    yield _directory(root)
    running = sum(job.has_driver for job in jobs)
    lost = sum(job.result is None and not job.has_driver for job in jobs)
    text = f"{count(running, 'job')} running, {len(jobs) - running - lost} ended"
    if lost:
        text += f", {lost} without a driver"
    yield ReportLine("jobs", "jobs", "ok", text, "hvlaunch jobs" if lost else None)


def _directory(root: Path) -> ReportLine:
    nearest = next(path for path in (root, *root.parents) if path.exists())
    status = nearest.stat()
    text = f"{root}, mode {stat.S_IMODE(status.st_mode):03o}" if nearest == root else f"{root}, not made yet"
    writer = other_writer(status) if nearest == root else None
    if writer is None and os.access(nearest, os.W_OK | os.X_OK):
        return ReportLine("jobs", "directory", "ok", text)
    cause = writer or f"{nearest} can't be written to"
    hint = f"chmod go-w {shlex.quote(str(nearest))}" if writer else "XDG_STATE_HOME=DIRECTORY"
    return ReportLine(
        "jobs", "directory", "warning", f"{text}: {cause}; jobs run, but --detach does not", hint
    )


def _options(
    words: Sequence[str], environ: Mapping[str, str], warn: Callable[[str], object]
) -> tuple[Options, HvlaunchError | None]:
    """Return the options, and the error of a file or a variable. With an error, only typed options count."""
    try:
        return options_of_word("doctor", words, environ, _TAKEN, warn=warn), None
    except BadUsage as error:
        return options_of_word("doctor", words, None, _TAKEN), error


def _configuration(
    options: Options, environ: Mapping[str, str], warnings: Sequence[str], problem: HvlaunchError | None
) -> Iterator[ReportLine]:
    section = "configuration"
    names: dict[str, list[str]] = {}
    for settings in options.settings.values():
        for setting in settings:
            if setting.origin:
                names.setdefault(setting.origin, []).append(setting.called)
    for origin, called in names.items():
        yield ReportLine(section, "read", "ok", f"{origin}: {', '.join(dict.fromkeys(called))}")
    if problem is not None:
        yield ReportLine(section, "options", "error", problem.cause, problem.hint, problem.exit_code)
    elif not names:
        files = [user_file(environ)]
        with suppress(OSError):
            # The current directory may be gone.
            files.append(project_file(str(Path.cwd()), environ.get("HOME", "")))
        names_of_files = ", ".join(filter(None, files))
        text = (
            f"{names_of_files} set nothing for the doctor" if names_of_files else "no files and no variables"
        )
        yield ReportLine(section, "options", "ok", text)
    for warning in warnings:
        yield ReportLine(section, "options", "warning", warning.removeprefix("warning: "))
    ssh_files = [path for path in ("~/.ssh/config", "~/.ssh/known_hosts") if Path(path).expanduser().exists()]
    has_agent = "an ssh agent" if environ.get("SSH_AUTH_SOCK") else "no ssh agent"
    yield ReportLine(section, "ssh", "ok", ", ".join([*ssh_files, has_agent]))


def _hosts(options: Options, environ: Mapping[str, str]) -> Iterator[ReportLine]:
    section = "hosts"
    try:
        spec, _ = job_spec(options, environ)
    except HvlaunchError as error:
        yield ReportLine(section, "hosts", "error", error.cause, error.hint, error.exit_code)
        return
    if spec.allocation is None and not options.given.keys() & {"hosts", "hostfile"}:
        yield ReportLine(section, "hosts", "ok", "none are configured", "hvlaunch doctor -H HOSTS")
        return
    from hvlaunch.gloo.visit import ask_hosts  # noqa: PLC0415 (where there are hosts)

    for answer in ask_hosts(spec):
        yield _of_host(answer, spec)


def _of_host(answer: "HostAnswer", spec: JobSpec) -> ReportLine:
    name, problem = answer.host.name, answer.problem
    if problem is not None:
        names = {name for host in spec.hosts for name in (host.name, host.address)}
        hint = None if problem.hint is None else _without_addresses(problem.hint, names)
        cause = _without_addresses(problem.cause, names)
        return ReportLine("hosts", name, "error", cause, hint, problem.exit_code)
    if answer.is_here:
        return ReportLine("hosts", name, "ok", f"this machine; Python {answer.python}")
    key = {"strict": "its key is known", "accept-new": "its key is stored"}.get(spec.ssh.host_keys)
    level: Level = "ok" if key else "warning"
    text = f"answers after {answer.seconds:.2f} s; Python {answer.python}; {key or 'its key is not checked'}"
    return ReportLine("hosts", name, level, text, None if key else "--host-keys accept-new")


def _without_addresses(text: str, names: Container[str | None]) -> str:
    """Hide addresses except the user's own words: the report may be public."""

    def shown(match: re.Match[str]) -> str:
        try:
            ip_address(match[0])
        except ValueError:
            return match[0]
        return match[0] if match[0] in names else "ADDRESS"

    return _MAYBE_ADDRESS.sub(shown, text)


# Seconds: the binary may be on a slow network disk.
_SSH_PATIENCE = 10.0
_EXTRA = "pip install 'hvlaunch[{}]'"


def package_version(name: str) -> str | None:
    """Return a package's version without importing it; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def ssh_version(program: str = "ssh") -> str | None:
    """Return the ssh binary's name for itself, such as OpenSSH_9.2p1; None without an answer."""
    try:
        answer = subprocess.run(
            [program, "-V"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SSH_PATIENCE,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # OpenSSH prints its version to stderr, other programs to stdout.
    match = re.match(r"[^\s,]+", answer.stderr or answer.stdout)
    return match[0] if match else None


def launcher_version(name: str) -> str | None:
    """Return the MPI behind mpirun, or another launcher's path; None if it is missing or unknown."""
    if name != "mpirun":
        return shutil.which(name)
    from hvlaunch.mpi import detect  # noqa: PLC0415 (no other question needs it)

    try:
        return str(detect(None))
    except HvlaunchError:
        return None


class Part(NamedTuple):
    """A part of an installation."""

    group: str
    name: str
    version: str | None
    """Version, or path; None if it is missing."""
    note: str
    hint: str | None = None
    """The next step without this part, unless few users need the part."""


def parts(
    # Arguments, so that tests decide what is installed.
    version_of: Callable[[str], str | None] = package_version,
    ssh: Callable[[], str | None] = ssh_version,
    launcher: Callable[[str], str | None] = launcher_version,
) -> list[Part]:
    """Return the parts, by group."""
    return [
        Part("controllers", "gloo", __version__, "hvlaunch itself starts the workers"),
        Part("controllers", "mpirun", launcher("mpirun"), "for --mpi"),
        Part("controllers", "srun", launcher("srun"), "for --srun, in a job of Slurm"),
        Part("controllers", "jsrun", launcher("jsrun"), "for --jsrun, in a job of LSF"),
        Part("ssh", "paramiko", version_of("paramiko"), "the client in use"),
        Part("ssh", "ssh", ssh(), "reads ~/.ssh/config for paramiko", "install OpenSSH's client"),
        Part("rendezvous", "httptools", version_of("httptools"), "reads requests"),
        Part("rendezvous", "uvloop", version_of("uvloop"), "a faster event loop", _EXTRA.format("uvloop")),
        Part("rendezvous", "prometheus", version_of("prometheus-client"), "the rendezvous' metrics"),
        Part("files of options", "PyYAML", version_of("PyYAML"), "reads YAML", _EXTRA.format("yaml")),
        Part("watching", "textual", version_of("textual"), "hvlaunch top, full screen", _EXTRA.format("top")),
        Part(
            "watching",
            "py-spy",
            version_of("py-spy"),
            "stacks with frames of C and C++",
            _EXTRA.format("stacks"),
        ),
        Part("training", "torch", version_of("torch"), "on this machine; the hosts use their own"),
    ]


def check_build(
    version_of: Callable[[str], str | None] = package_version,
    ssh: Callable[[], str | None] = ssh_version,
    launcher: Callable[[str], str | None] = launcher_version,
) -> str:
    """Return the report, with [X] before each installed part. The arguments are as in parts()."""
    lines = [
        f"hvlaunch {__version__}, Python {platform.python_version()} ({sys.executable}), {platform.platform()}"
    ]
    for group, members in itertools.groupby(parts(version_of, ssh, launcher), lambda part: part.group):
        lines += ["", f"{group}:", *map(_line, members)]
    return "\n".join(lines)


def _line(part: Part) -> str:
    note = part.note if part.version or part.hint is None else f"{part.note}; {part.hint}"
    return f"  [{'X' if part.version else ' '}] {part.name:<10} {part.version or 'not found':<18} {note}"
