"""LSF's jsrun, inside an allocation of a cluster with the Job Step Manager; where each rank goes is in a rankfile."""

from hvlaunch.errors import BadUsage
from hvlaunch.mpi.command import Command, Request, ssh_arguments

__all__ = ["jsrun", "rankfile"]


def jsrun(request: Request) -> Command:
    """Raises BadUsage for what is only for ssh, and where the rankfile says what --binding-args would."""
    if ssh_arguments(request):
        raise BadUsage("jsrun does not use ssh, so flags for ssh can't be used with it", hint="--gloo")
    if request.binding:
        raise BadUsage(
            "--binding-args can't be used with jsrun, whose rankfile binds the ranks", hint="leave it out"
        )
    argv = [request.program, "--erf_input", request.rankfile or ""]
    if request.cwd is not None:
        argv += ["--chdir", request.cwd]
    if request.tag:
        argv += ["--stdio_mode", "prepended"]
    if request.output is not None:
        argv += ["--stdio_stdout", f"{request.output}/rank.%t.stdout"]
        argv += ["--stdio_stderr", f"{request.output}/rank.%t.stderr"]
    argv += [word for name in request.env for word in ("--env", name)]
    return Command((*argv, *request.extra, *request.command), {})


def rankfile(request: Request) -> str:
    """An explicit resource file: each rank has its share of its host's processors, and sees all GPUs.

    Raises BadUsage where a host has more ranks than processors.
    """
    lines = ["cpu_index_using: logical", "overlapping_rs: allow", "skip_missing_cpu: allow", ""]
    rank = 0
    for host, count in request.hosts:
        cores = dict(request.cores).get(host, count)
        share = cores // count
        if share == 0:
            raise BadUsage(f"{count} ranks for {cores} processors", host=host, hint=f"-H {host}:{cores}")
        for slot in range(count):
            first = slot * share
            cpus = f"{{{first}-{first + share - 1}}}"
            lines.append(f"rank: {rank}: {{ hostname: {host}; cpu: {cpus} ; gpu: * ; mem: * }}")
            rank += 1
    return "\n".join(lines) + "\n"
