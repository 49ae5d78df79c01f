"""Commands that are launchers themselves: what to write instead, since each worker would start a job of its own."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["launcher_advice"]


class _Launcher(NamedTuple):
    flag: str = ""
    """What hvlaunch has for it."""
    meant: tuple[str, ...] = ()
    """How its options begin that are for one launcher on each host."""


_TORCHRUN = _Launcher(meant=("--nnodes", "--node", "--rdzv"))
_MPIRUN = _Launcher("--mpi ")
_LAUNCHERS: Mapping[str, _Launcher] = {
    "torchrun": _TORCHRUN,
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    "accelerate": _Launcher(meant=("--num_machines", "--machine_rank")),
    "deepspeed": _Launcher(meant=("--no_ssh", "--node_rank", "--hostfile")),
    "mpirun": _MPIRUN,
    "mpiexec": _MPIRUN,
    "horovodrun": _Launcher("--horovod "),
    "srun": _Launcher("--srun "),
}


def launcher_advice(command: Sequence[str]) -> str | None:
    """What the user is told of this command; None where it is no launcher, or meant to be one on each host."""
    name = command[0].rpartition("/")[2]
    if name.startswith("python") and command[1:2] == ("-m",):
        name = "".join(command[2:3])
    launcher = _LAUNCHERS.get(name)
    if launcher is None or (name == "accelerate" and command[1:2] != ("launch",)):
        return None
    if any(word.startswith(launcher.meant) for word in command[1:] if launcher.meant):
        return None
    scripts = [number for number, word in enumerate(command) if number and word.endswith(".py")]
    rest = f"python {' '.join(command[scripts[0] :])}" if scripts else "python train.py"
    return f"{name} starts a job of its own in each worker; write: hvlaunch … {launcher.flag}{rest}"
