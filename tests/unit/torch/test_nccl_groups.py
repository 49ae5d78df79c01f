"""How groups of NCCL's are ended; that their collectives end by that is shown on a GPU (tests/gpu)."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist
from torch.torch_version import TorchVersion

from hvlaunch.torch.backends import Aborts, abort_groups, has_timed_out
from hvlaunch.torch.elastic.training import settle_nccl
from tests.unit.torch.ranks import in_worlds

LONG = 60.0


class Abortable:
    def __init__(self, end):
        self.aborted = 0
        self._end = end

    def abort(self):
        self.aborted += 1
        self._end()


def test_groups_are_aborted_concurrently():
    both = threading.Barrier(2)
    groups = [Abortable(lambda: both.wait(LONG)), Abortable(lambda: both.wait(LONG))]
    Aborts(LONG).abort(groups)
    assert not both.broken
    assert [group.aborted for group in groups] == [1, 1]


def test_each_group_is_aborted_once_and_new_groups_too():
    hold = threading.Event()
    stuck, later = Abortable(lambda: hold.wait(LONG)), Abortable(lambda: None)
    aborts = Aborts(0.01)
    began = time.monotonic()
    aborts.abort([stuck])
    aborts.abort([stuck, later])
    assert time.monotonic() - began < LONG / 2
    assert (stuck.aborted, later.aborted) == (1, 1)
    hold.set()


def test_gloo_groups_are_not_aborted():
    def work(rank):
        import torch
        from torch import distributed as dist

        abort_groups()
        one = torch.ones(1)
        dist.all_reduce(one)
        return one.item()

    assert in_worlds(2, work) == [2.0, 2.0]


class OldNccl:
    """A backend as torch 2.6 makes it: the error is not told."""

    def __init__(self, name="nccl"):
        self.aborted = 0
        self._name = name

    def name(self):
        return self._name

    def abort(self):
        self.aborted += 1


class NewNccl(OldNccl):
    """As ProcessGroupNCCL2 and ProcessGroupNCCLLazy, which are no kind of ProcessGroupNCCL."""

    def __init__(self, name="nccl2", error="SUCCESS"):
        super().__init__(name)
        self.error = error

    def get_error(self):
        return SimpleNamespace(name=self.error)


class Mute(NewNccl):
    """As a backend that has only what the base class of all backends has."""

    def get_error(self):
        raise RuntimeError("Backend xccl does not support getError")


class Group:
    """As torch 2.6 makes it, without abort(): its backends have that."""

    def __init__(self, backends):
        self._backends = backends
        self._device_types = [torch.device(kind) for kind in backends]

    def _get_backend(self, device):
        if device.type not in self._backends:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self._backends[device.type]


@pytest.fixture
def in_groups(monkeypatch):
    """Returns a function that makes one group for each argument; an argument has a group's backends by device type."""

    def make(*groups):
        world = SimpleNamespace(pg_map={Group(backends): None for backends in groups})
        monkeypatch.setattr(dist.distributed_c10d, "_world", world)

    return make


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("cuda", OldNccl("nccl")),
        ("cuda", OldNccl("nccl-legacy")),
        ("cuda", NewNccl("nccl")),
        ("cuda", NewNccl("nccl2")),
        ("cuda", NewNccl("nccl-lazy")),
        ("xpu", Mute("xccl")),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{type(value).__name__}-{value.name()}",
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_backend_for_gpus_is_known_by_what_it_can_do(in_groups, kind, backend, is_wrapped):
    backend.aborted = 0
    shown = SimpleNamespace(wrapped_pg=backend, name=backend.name) if is_wrapped else backend
    gloo = NewNccl("gloo")
    in_groups({"cpu": gloo, kind: shown}, {"cpu": gloo, "cuda": gloo})
    assert not has_timed_out()
    abort_groups()
    assert (backend.aborted, gloo.aborted) == (1, 0)


@pytest.mark.parametrize("name", ["nccl", "nccl2", "nccl-lazy"])
def test_a_timeout_is_noticed_in_any_class(in_groups, name):
    backend = NewNccl(name)
    in_groups(
        {"cuda": OldNccl()}, {"xpu": Mute("xccl")}, {"cpu": NewNccl("gloo", "TIMEOUT")}, {"cuda": backend}
    )
    assert not has_timed_out()
    backend.error = "TIMEOUT"
    assert has_timed_out()


@pytest.mark.parametrize(
    ("version", "users", "kept", "is_told"),
    [
        ("2.13.0+cpu", None, "0", False),
        ("2.14.1+cu130", None, "0", False),
        ("2.15.0+cu132", None, "0", True),
        ("3.0.0", None, "0", True),
        ("2.15.0+cu132", "1", "1", False),
        ("2.15.0+cu132", "0", "0", False),
    ],
)
def test_elastic_jobs_keep_the_groups_that_were_tried(version, users, kept, is_told):
    environ = {} if users is None else {"TORCH_DIST_USE_NCCL2": users}
    assert settle_nccl(environ, TorchVersion(version)) is is_told
    assert environ["TORCH_DIST_USE_NCCL2"] == kept
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert not settle_nccl(environ, TorchVersion(version)), "it is said once"
