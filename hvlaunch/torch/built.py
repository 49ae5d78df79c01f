"""What Horovod's scripts ask about how it was built, answered for torch's backends; and its timeline, which is not here."""

import torch
from torch import distributed as dist

from hvlaunch.torch.group_errors import NotOffered

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
    "start_timeline",
    "stop_timeline",
]


def mpi_enabled() -> bool:
    """Whether collectives go by MPI: never."""
    return False


def mpi_built() -> bool:
    """False, as MPI is not used."""
    return False


def mpi_threads_supported() -> bool:
    """False, as MPI is not used."""
    return False


def gloo_enabled() -> bool:
    """Whether collectives go by Gloo. Before init(): whether they would, without an argument of its own."""
    return not torch.cuda.is_available() if not dist.is_initialized() else dist.get_backend() == "gloo"


def gloo_built() -> bool:
    """Whether torch has Gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """The version of NCCL that torch has, as 22105 for 2.21.5; 0 where it has none."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def ddl_built() -> bool:
    """False, as DDL is not used."""
    return False


def ccl_built() -> bool:
    """False, as oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Whether torch is one for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch is one for ROCm."""
    return torch.version.hip is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Raises NotOffered: torch's profiler writes such files."""
    del file_path, mark_cycles
    raise NotOffered("start_timeline()", "torch.profiler.profile() and its export_chrome_trace()")


def stop_timeline() -> None:
    """Raises NotOffered, as start_timeline()."""
    raise NotOffered("stop_timeline()", "torch.profiler.profile() and its export_chrome_trace()")
