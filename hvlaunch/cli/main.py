"""The command line: from words to an exit code, and the only place where errors become messages."""

import errno
import os
import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NoReturn, Protocol, TextIO

from hvlaunch.cli.arguments import Answered, parse
from hvlaunch.cli.environment import left_out, proxies_with_password
from hvlaunch.cli.options.settings import Options
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.process import complain, hide_values, print_answer
from hvlaunch.cli.spec import job_spec
from hvlaunch.errors import EXIT_INTERNAL, EXIT_USAGE, BadUsage, HvlaunchError
from hvlaunch.hosts.local import only_local
from hvlaunch.job import JobResult, JobSpec

__all__ = ["WORDS", "Run", "main", "script"]

# Enough for a job of one host.
_FEWEST_DESCRIPTORS = 32
_INTERRUPTED = 130  # 128 + SIGINT
_GPUS = "CUDA_VISIBLE_DEVICES"
WORDS = (
    *("presets", "jobs", "attach", "logs", "events", "top", "stacks", "metrics", "signal", "move"),
    *("stop", "wait", "pool", "queue", "rerun", "diff", "cp", "collect", "forget", "translate"),
    *("mcp", "doctor", "hosts", "check", "bisect", "sbatch", "practise"),
)
"""First words of lines that start no new job. JOB_WORDS in options/parser.py, which jobs do not load, has their usage and help."""
_QUESTIONS = {"help": "--help", "version": "--version"}


class Run(Protocol):
    """Runs a job and prints everything about it."""

    def __call__(
        self,
        spec: JobSpec,
        *,
        stdout: BinaryIO,
        stderr: BinaryIO,
        on_detached: Callable[[str], None] | None = None,
        advise: Callable[[str], str] = str,
    ) -> JobResult: ...


def main(argv: Sequence[str] | None = None, *, run: Run | None = None) -> int:
    """Run a command line and return the exit code, as in docs/reference/exit-codes.md.

    `argv` has no program name; None is this process's own. `run` replaces hvlaunch's own controller.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _do(argv, run)
    except HvlaunchError as error:
        complain(_advised(argv, str(error)))
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:  # noqa: BLE001 (ours to explain, whatever it is)
        # Any library may fail to open a file: this is a limit of the user's shell, not a defect.
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            complain(str(_too_few_descriptors()))
            return EXIT_USAGE
        _explain(error, verbose=not {"-v", "--verbose"}.isdisjoint(argv))
        return EXIT_INTERNAL


def script(run: Run | None = None) -> NoReturn:
    """Run main(), then exit without Python's own shutdown, which takes 10 to 30 ms."""
    code = main(run=run)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or its reader is gone
            if stream is not None:
                stream.flush()
    # Threads and exit handlers have done their work in main().
    os._exit(code)


def _do(argv: Sequence[str], run: Run | None) -> int:
    # Many command lines have words for these; a program of that name still runs.
    if argv and argv[0] in _QUESTIONS and shutil.which(argv[0]) is None:
        argv = [*argv[1:2], "--help"] if argv[0] == "help" and argv[1:2] else [_QUESTIONS[argv[0]]]
    if argv and argv[0] == "rerun" and {"-h", "--help"}.isdisjoint(argv):
        from hvlaunch.cli.jobs.rerun import Rerun  # noqa: PLC0415 (as below)

        rerun = Rerun(argv[1:], os.environ)
        return _start(rerun.options, rerun.line, rerun.spec, run)
    if argv and argv[0] in WORDS:
        from hvlaunch.cli.jobs import run_job_command  # noqa: PLC0415 (as below: a new job needs none of it)

        return run_job_command(argv, os.environ)
    try:
        options = parse(argv, environ=os.environ, warn=complain)
    except Answered as answer:
        return print_answer(answer.text)
    program = options.command[0] if options.command else ""
    is_path = "/" in program and " " not in program and "=" not in program
    if not options.is_marked and not is_path and shutil.which(program) is None:
        from hvlaunch.cli.line import check_program  # noqa: PLC0415 (most lines have a program)
        from hvlaunch.cli.presets import is_program_of  # noqa: PLC0415 (as above)

        # A preset's program is on the hosts, and need not be here.
        if options.preset is None or not is_program_of(options.preset, program, os.environ):
            check_program(options, argv, WORDS)
    if options.check_build:
        from hvlaunch.cli.hosts.doctor import check_build  # noqa: PLC0415 (as below: a job needs none of it)

        return print_answer(check_build() + "\n")
    if options.show_config:
        from hvlaunch.cli.pages.show_config import show_config  # noqa: PLC0415 (as above)

        return print_answer(show_config(options, GROUPS))
    return _start(options, argv, lambda: job_spec(options, os.environ), run)


def _start(
    options: Options, argv: Sequence[str], make: Callable[[], tuple[JobSpec, list[str]]], run: Run | None
) -> int:
    """Start the job that `make` returns, with warnings, or print its plan. `argv` is the whole line, for advice."""
    # As early as possible: other users see the arguments until then.
    urls = [text for text in _typed(options, "notify") if "://" in text]
    hide_values([*_typed(options, "x"), *_typed(options, "role_env")], urls)
    for note in options.found_notes():
        complain(note)
    try:
        spec, warnings = make()
    # A conflict may be between the command line and a file that the user has forgotten.
    except BadUsage:
        if any(setting.origin for settings in options.settings.values() for setting in settings):
            complain("some options do not come from the command line: hvlaunch --show-config says which")
        raise
    # Workers on this machine inherit the whole environment.
    names = [] if only_local(spec) else left_out(os.environ, spec.env)
    warnings += [
        f"{name} has a user or password in it, so it is not passed on; try: -x {name}"
        for name in proxies_with_password(os.environ)
        if name in names
    ]
    if _GPUS in os.environ and _GPUS not in spec.env and not only_local(spec):
        line = f"{_GPUS} is set here, and counts for workers on this machine only"
        warnings.append(f"{line}; -x {_GPUS} passes it on")
    for warning in () if options.quiet else warnings:
        complain(f"warning: {warning}")
    if spec.allocation is not None and not options.quiet:
        from hvlaunch.hosts.parse import host_set  # noqa: PLC0415

        complain(f"hosts of {spec.allocation}: {host_set(host.name for host in spec.hosts)}")
    if options.dry_run:
        return print_answer(_plan(spec, names, show_secrets=options.show_secrets) + "\n")
    if spec.verbose and names:
        complain(f"set here, and not passed on to the workers: {', '.join(names)}")
    # Asked before the job starts: later, some library would fail with an obscure error.
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < _FEWEST_DESCRIPTORS:
        raise _too_few_descriptors()
    if spec.detach == "at start":
        from hvlaunch.cli.process import run_detached  # noqa: PLC0415 (as below)

        return run_detached(lambda tell: _run(spec, run, argv, tell))
    return _run(spec, run, argv)


def _typed(options: Options, name: str) -> list[str]:
    return [setting.texts[0] for setting in options.settings.get(name, ()) if not setting.origin]


def _advised(argv: Sequence[str], text: str) -> str:
    """Return a message with its advice as a line to paste."""
    # Most jobs have no advice, and need not know how.
    if "ry: " not in text:
        return text
    from hvlaunch.cli.line import with_whole_lines  # noqa: PLC0415 (as above)

    return with_whole_lines(text, argv)


def _run(
    spec: JobSpec, run: Run | None, argv: Sequence[str], on_detached: Callable[[str], None] | None = None
) -> int:
    run = run or _controller(spec)
    stdout, stderr = _binary(sys.stdout), _binary(sys.stderr)
    advise = partial(_advised, argv)
    return run(spec, stdout=stdout, stderr=stderr, on_detached=on_detached, advise=advise).exit_code


def _too_few_descriptors() -> BadUsage:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return BadUsage(f"the limit on open files is too low for hvlaunch: {limit}", hint="ulimit -n 1024")


def _plan(spec: JobSpec, names: Sequence[str], *, show_secrets: bool) -> str:
    from hvlaunch.cli.plan import launcher_plan, plan  # noqa: PLC0415 (as above)
    from hvlaunch.cli.spec import first_round  # noqa: PLC0415 (a job needs none of it)

    launcher = ""
    if spec.mpi is not None:
        launcher = launcher_plan(spec, spec.mpi, os.environ, show_secrets=show_secrets)
    return plan(first_round(spec), left_out=names, launcher=launcher, show_secrets=show_secrets)


def _controller(spec: JobSpec) -> Run:
    """Return what runs the job. Imported only now: loading is slow, and errors above come first."""
    if spec.mpi is not None:
        from hvlaunch.mpi.controller import run as mpi_run  # noqa: PLC0415 (see the docstring)

        return mpi_run
    from hvlaunch.gloo import run as gloo_run  # noqa: PLC0415 (see the docstring)

    return gloo_run


def _explain(error: Exception, *, verbose: bool) -> None:
    description = " ".join(f"{type(error).__name__}: {error}".split())
    if not verbose:
        complain(
            f"internal error: {description}; this is a defect of hvlaunch; try: the same with --verbose, and report it"
        )
        return
    import traceback  # noqa: PLC0415 (needed in this case only)

    traceback.print_exception(error)
    complain(
        f"internal error: {description}; please report it, with the above and the output of hvlaunch doctor"
    )


def _binary(stream: TextIO | None) -> BinaryIO:
    """Return the bytes below a standard stream; /dev/null for a stream that was closed before the start."""
    return Path(os.devnull).open("wb") if stream is None else stream.buffer
