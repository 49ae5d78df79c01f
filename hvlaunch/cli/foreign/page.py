"""docs/coming-from.md, made of the options of other launchers: `make options-page`."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence

from hvlaunch.cli.foreign.foreign_option import Becomes, ForeignOption
from hvlaunch.cli.foreign.table import PROGRAMS, key

__all__ = ["page"]

_HEAD = """\
<!-- Made of the tables in hvlaunch/cli/foreign by `make options-page`: change those, not this. -->
# Coming from another launcher

For each launcher: a job there and the same job here, the options that both have, and what becomes of all others. hvlaunch
answers the same where an option is typed that it does not have. [Its own](options.md) come before the command, and a Python
script is started with `python`."""

_LINES = {
    "horovodrun": (
        "horovodrun -np 8 -H a:4,b:4 python train.py",
        "hvlaunch --horovod -np 8 -H a:4,b:4 python train.py",
    ),
    "torchrun": (
        "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint a:29500 train.py    # on each host",
        "hvlaunch --nnodes 2 --nproc-per-node 4 -H a,b python train.py",
    ),
    "mpirun (Open MPI)": (
        "mpirun -np 8 -host a:4,b:4 -x NCCL_DEBUG=INFO python train.py",
        "hvlaunch -np 8 -H a:4,b:4 -x NCCL_DEBUG=INFO python train.py",
    ),
    "mpirun (MPICH)": (
        "mpiexec -n 8 -hosts a,b -ppn 4 -genv NCCL_DEBUG INFO python train.py",
        "hvlaunch -np 8 -H a:4,b:4 -x NCCL_DEBUG=INFO python train.py",
    ),
    "srun": (
        "srun -N 2 --ntasks-per-node 4 python train.py",
        "salloc -N 2 --ntasks-per-node 4 hvlaunch python train.py",
    ),
    "deepspeed": (
        "deepspeed --hostfile hosts --num_gpus 4 train.py",
        "hvlaunch --hostfile hosts --slots-per-host 4 python train.py",
    ),
    "accelerate launch": (
        "accelerate launch --num_processes 8 --num_machines 2 --machine_rank 0 --main_process_ip a train.py    # on each host",
        "hvlaunch -np 8 -H a:4,b:4 python train.py",
    ),
    "pdsh": ("pdsh -w 'a,b' python check.py", "hvlaunch -H a:1,b:1 python check.py"),
    "clush": ("clush -w 'gpu[01-16]' python check.py", "hvlaunch -H 'gpu[01-16]:1' python check.py"),
}
"""The same job, there and here."""

_NOTES = {
    "horovodrun": """\
An elastic script (`@hvd.elastic.run`) runs without `--horovod`, which is refused with `--min-np` and its like, and by another import: `import hvlaunch.torch as hvd`
in place of `import horovod.torch as hvd` ([which names are there](horovod.md#scripts-by-another-import)).

```sh
hvlaunch -np 8 --min-np 4 --max-np 12 --host-discovery-script ./discover.sh python train.py
```""",
    "torchrun": """\
`--nproc-per-node N` is `N` workers on each host, though it has more slots. `gpu` and `auto` are one for each GPU; `cpu`, which is one for each processor,
is for this machine alone ([more](options.md#--nproc-per-node)).""",
}
"""What the table can't say."""

_WORDS = re.compile(r"(?:(?<![A-Za-z])'[^']*'|\"[^\"]*\"|\$\(\([^)]*\)\)|\S)+")
_STARTS = re.compile(r"-{1,2}[A-Za-z].*|python|timeout|numactl|taskset|kill|nodeset|sh")
_FOLLOWS = re.compile(
    r"[A-Z_][A-Z_0-9]*(=.*)?|[A-Z]:[A-Z]|hvlaunch|all|none|openssh|paramiko|\.\.\.|[0-9]+|[a-z][:,].*|'.*'|\".*\""
)
"""What begins something to type, and what may follow in it."""

_TITLES: Mapping[Becomes, tuple[str, str]] = {
    "another word": ("Another word", "here"),
    "not needed": ("Not needed", "because"),
    "not here": ("Not there", "because"),
    "another meaning": ("The same name with another meaning", "here"),
}


def page(programs: Mapping[str, Sequence[ForeignOption]] = PROGRAMS) -> str:
    """The page, as Markdown."""
    return (
        "\n\n".join([_HEAD, *(block for name in programs for block in _program(name, programs[name]))]) + "\n"
    )


def _program(name: str, options: Sequence[ForeignOption]) -> Iterator[str]:
    yield f"## {name}"
    yield "```sh\n{}\n{}\n```".format(*_LINES[name])
    if name in _NOTES:
        yield _NOTES[name]
    same = [f"`{option.spelled}`" for option in options if option.becomes == "same"]
    yield f"The same here: {', '.join(same)}."
    for becomes, (title, column) in _TITLES.items():
        rows = [
            f"| `{option.spelled}` | {_here(option)} |" for option in options if option.becomes == becomes
        ]
        if rows:
            yield "\n".join([f"{title}:", "", f"| option | {column} |", "|---|---|", *rows])


def _here(option: ForeignOption) -> str:
    values = " ".join(option.metavars)
    names = {key(name) for name in option.names}
    typed = f"{option.names[-1]} {values}".rstrip() if len(names) == 1 else "OPTION"
    text = (
        option.here.replace("{option}", typed).replace("{=}", values.replace(" ", "=")).replace("{}", values)
    )
    return _with_code(text).replace("|", "\\|")


def _with_code(text: str) -> str:
    """The text with what is to be typed in backquotes: an option or a program, and what belongs to it."""
    parts: list[str] = []
    for word in _WORDS.findall(text):
        before = "(" if word.startswith("(") else ""
        bare = word[len(before) :].rstrip(",;:)" if before or "(" not in word else ",;:")
        after = word[len(before) + len(bare) :]
        is_in_code = bool(parts) and parts[-1].endswith("`")
        if is_in_code and (_STARTS.fullmatch(bare) or _FOLLOWS.fullmatch(bare)) and not before:
            parts[-1] = f"{parts[-1][:-1]} {bare}`{after}"
        elif _STARTS.fullmatch(bare):
            parts.append(f"{before}`{bare}`{after}")
        else:
            parts.append(word)
    return " ".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
