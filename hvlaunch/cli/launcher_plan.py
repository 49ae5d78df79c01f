"""The launcher's command line for `--dry-run`, ready to paste into a shell."""

from collections.abc import Mapping
from dataclasses import replace

from hvlaunch.cli.plan import command_line, quoted, shown_value
from hvlaunch.job import JobSpec, MPIOptions
from hvlaunch.mpi import Kind, find
from hvlaunch.mpi.builders import build, rankfile
from hvlaunch.mpi.process_ranks import shell_shim
from hvlaunch.mpi.request import counted, request_of

__all__ = ["launcher_plan"]

_RANKFILE = "hvlaunch.erf"
_MASTER_PORT = "29500"  # torch's default


def launcher_plan(
    spec: JobSpec, options: MPIOptions, environ: Mapping[str, str], *, show_secrets: bool = False
) -> str:
    """Return the section as text, without variables that a shell here has with the same value.

    Secrets are masked unless `show_secrets`. Raises HvlaunchError if the launcher is missing or can't do the job.
    """
    launcher = find(options)
    # Rank 0 is on the first host; a pasted command has no agent to look for a free port.
    first, _ = counted(spec)[0]
    master = {"MASTER_ADDR": "127.0.0.1" if first == "localhost" else first, "MASTER_PORT": _MASTER_PORT}
    env = {**master, **spec.env}
    request = request_of(spec, options, launcher, (*shell_shim(launcher.kind), *spec.command), env)
    prefix = spec.console.prefix
    command = build(
        launcher,
        replace(
            request,
            cwd=spec.cwd,
            tag=bool(prefix),
            timestamp="{time" in prefix,
            output=None if spec.output_dir is None else str(spec.output_dir),
            rankfile=_RANKFILE,
        ),
    )
    # A pasted command inherits the shell's other variables.
    missing = {name: value for name, value in {**env, **command.env}.items() if environ.get(name) != value}
    words = [
        f"{quoted(name)}={shown_value(name, value, show_secrets=show_secrets)}"
        for name, value in sorted(missing.items())
    ]
    words.append(command_line(command.argv, show_secrets=show_secrets))
    title = f"as a command of {launcher}, to paste (with it hvlaunch itself starts its agents, which start the workers):"
    plan = f"{title}\n  {' '.join(words)}"
    if launcher.kind is not Kind.JSRUN:
        return plan
    lines = [f"  {line}".rstrip() for line in rankfile(request).splitlines()]
    return "\n".join([f"its rankfile, {_RANKFILE}:", *lines, "", plan])
