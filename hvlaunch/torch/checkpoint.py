"""Checkpoints in the memory of hosts, for any training loop: save() after a step, load() at the start of the script.

The commits outlive the workers. They end with the job: docs/guides/keep-state.md is the guide.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from functools import partial
from typing import Any

import torch

from hvlaunch.rendezvous import WaitTimeout
from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.messages import KEPT
from hvlaunch.rendezvous.worker import patiently
from hvlaunch.torch import current
from hvlaunch.torch.kept import (
    CommitCosts,
    KeptCommit,
    KeptState,
    Saved,
    Version,
    choose,
    kept_commits,
    load_saved,
    saved_commits,
    versions,
    warn_of_little_room,
)
from hvlaunch.torch.place import Place
from hvlaunch.torch.sharing import join, split

__all__ = ["load", "save", "to_dcp"]

_PATIENCE = 600.0
"""Seconds for all ranks to come to load()."""


class _Saver:
    """The saves of this process."""

    def __init__(self) -> None:
        self._states: dict[str, KeptState] = {}
        self._last: Version = (-1, -1)
        self._sealing: threading.Thread | None = None
        self._costs: CommitCosts | None = None

    def save(self, step: int, value: Any, name: str, round_number: int, size: int, states: int) -> bool:
        """Save the value; return False if it is not kept."""
        version = round_number, step
        if version <= self._last:
            raise ValueError(f"step {step} does not follow step {self._last[1]}")
        self._last = version
        if self._sealing is not None:
            # All ranks must have the version before this one: it is the one that a broken save leaves.
            self._sealing.join()
        else:
            _announce()
        complete = self._states.setdefault(name, KeptState(name)).write(version, size, split(value), states)
        if complete is not None:
            # No daemon: the end of the program waits for the last commit.
            self._sealing = threading.Thread(target=complete, name="hvlaunch commits")
            self._sealing.start()
        return complete is not None

    def note_cost(self, seconds: float) -> None:
        """Report the delay of training by the last save."""
        if self._costs is None:
            self._costs = CommitCosts()
        # The delay includes the wait for the checksums of the save before: commits without a pause count in full.
        self._costs.add(seconds)


def _announce() -> None:
    """Let the driver begin with copies. Only elastic jobs need them: others end with their first failure."""
    if os.environ.get("HVLAUNCH_ELASTIC") == "1":
        with Client.from_environment() as client:
            patiently(partial(client.put, KEPT, f"here.{os.environ['HVLAUNCH_HOST']}", b"1"))


_saver = _Saver()
_loads: dict[str, int] = {}


def save(step: int, value: Any, *, shared: bool = False) -> None:
    """Keep the value of a step in this host's memory: tensors, plain values, dicts and lists, such as state_dict()s.

    Each rank calls save() at the same steps, with its own value. Returns after a copy of the tensors; the checksums are computed in the
    background. `shared`: all ranks have the same value, and each host keeps one. Without an agent of hvlaunch, save() does nothing.

    Raises ValueError for a step that is not greater than the last.
    """
    place = _place()
    if place is None or (shared and place.local_rank):
        return
    name = _name(None if shared else place.rank)
    if torch.cuda.is_initialized():
        # The copies wait for the GPU anyway: unfinished steps are no cost of the commit.
        torch.cuda.current_stream().synchronize()
    begun = time.monotonic()
    size, states = (0, 1) if shared else (place.size, _local_size())
    is_kept = _saver.save(step, value, name, place.round, size, states)
    if is_kept and place.rank == 0:
        _saver.note_cost(time.monotonic() - begun)


def load() -> tuple[int, Any] | None:
    """Return step and value of the newest save() that all ranks of the round can have; None without such a step. Collective.

    Rank 0 chooses. A value with wrong checksums does not count: all ranks then take an older step. Values of ranks fit only a
    round of as many ranks; a shared value fits any. Tensors return to the kind of device from which they came.
    """
    place = _place()
    if place is None or "HVLAUNCH_RENDEZVOUS" not in os.environ:
        return None
    if place.local_rank == 0:
        warn_of_little_room(_local_size())
    # A script may call load() repeatedly: each call has its own keys.
    scope = f"commits.{_role()}.{place.round}"
    times = _loads[scope] = _loads.get(scope, 0) + 1
    with Client.from_environment() as client:
        return _Meeting(client, f"{scope}.{times}", place).load()


def to_dcp(directory: str, out: str) -> int:
    """Write the newest whole commit in a directory of --save-to for torch.distributed.checkpoint, and return its step.

    A shared dict stays as it is; any other value is under "value". Values of ranks are under "0", "1" and further numbers. Tensors
    are on the CPU. Raises FileNotFoundError without a whole commit.
    """
    from torch.distributed import checkpoint  # noqa: PLC0415 (its import takes a second)

    everything = [items for family in versions(directory).values() for items in family]
    for items in sorted(everything, key=lambda items: items[0].version, reverse=True):
        parts = {item.commit.name: load_saved(item, "cpu") for item in items}
        values = {name: join(*part) for name, part in parts.items() if part is not None}
        if len(values) < len(parts):
            continue
        if items[0].commit.size:
            value: Any = {name.rpartition(".")[2]: value for name, value in values.items()}
        else:
            (value,) = values.values()
        checkpoint.save(
            value if isinstance(value, dict) else {"value": value}, checkpoint_id=out, no_dist=True
        )
        return items[0].commit.step
    raise FileNotFoundError(f"there is no whole commit in {directory}")


def _place() -> Place | None:
    """Return this worker's place; None if another launcher gives the ranks, or no agent outlives the worker."""
    if "HVLAUNCH_SCRATCH" not in os.environ:
        return None
    place = current.world().place if current.is_initialized() else Place.from_environment()
    return place if place.launcher == "hvlaunch" else None


def _local_size() -> int:
    return (
        current.local_size() if current.is_initialized() else int(os.environ.get("HVLAUNCH_LOCAL_SIZE", "1"))
    )


def _role() -> str:
    return os.environ.get("ROLE_NAME", "default")


def _name(rank: int | None) -> str:
    return f"{_role()}.{'shared' if rank is None else rank}"


class _Meeting:
    """The ranks of a round in load(): values by key and rank at the rendezvous."""

    def __init__(self, client: Client, scope: str, place: Place) -> None:
        self._client = client
        self._scope = scope
        self._place = place

    def load(self) -> tuple[int, Any] | None:
        # One list for each host is enough.
        here = kept_commits() if self._place.local_rank == 0 else []
        self._tell("here", {"host": self._place.host, "commits": [list(commit[:-1]) for commit in here]})
        by_host: dict[str, list[KeptCommit]] = {}
        for item in self._hear("here"):
            by_host.setdefault(item["host"], []).extend(KeptCommit(*fields) for fields in item["commits"])
        if self._place.rank == 0 and self._place.round > 0:
            # Copies are on hosts without workers too.
            for host, items in json.loads(self._ask_driver("list", "all", {}) or b"{}").items():
                by_host[host] = [KeptCommit(*fields) for fields in items]
        on_disk = self._on_disk() if self._place.rank == 0 else []
        attempt = 0
        while True:
            plan = self._plan(f"plan.{attempt}", by_host, on_disk)
            if plan is None:
                return None
            version = plan["version"][0], plan["version"][1]
            name = _name(None if plan["is_shared"] else self._place.rank)
            if "files" in plan:
                generation, *fields = plan["files"][name]
                parts = load_saved(Saved(generation, KeptCommit(*fields)))
            else:
                parts = KeptState(name).load(version)
                if parts is None and self._bring(plan["hosts"][name], plan["commits"][name]):
                    parts = KeptState(name).load(version)
            self._tell(f"whole.{attempt}", parts is not None)
            verdict = f"verdict.{attempt}"
            if self._place.rank == 0:
                self._put(verdict, all(self._hear(f"whole.{attempt}")))
            if self._wait(verdict) and parts is not None:
                if "files" in plan and self._place.rank == 0:
                    words = f"training continues from step {version[1]} in the directory of --save-to"
                    sys.stderr.write(f"hvlaunch: {words}\n")
                return version[1], join(*parts)
            by_host = {
                host: [commit for commit in items if commit.version != version]
                for host, items in by_host.items()
            }
            attempt += 1

    def _on_disk(self) -> list[dict[str, Any]]:
        """Return plans for the versions in the directory of --save-to that fit this round, the best last."""
        families = saved_commits()
        candidates = [*families.get(_role(), ()), *families.get(_name(None), ())]
        fitting = [items for items in candidates if items[0].commit.size in (0, self._place.size)]
        return [
            {
                "version": items[0].commit.version,
                "is_shared": not items[0].commit.size,
                "files": {item.commit.name: [item.generation, *item.commit] for item in items},
            }
            for items in sorted(fitting, key=lambda items: items[0].version)
        ]

    def _plan(self, key: str, by_host: dict[str, list[KeptCommit]], on_disk: list[dict[str, Any]]) -> Any:
        """Return version and hosts, as rank 0 has chosen from the commits by host; None if no version is left.

        Without a version in memory, the last version on disk is taken from its list.
        """
        if self._place.rank == 0:
            size = self._place.size
            choices = [
                (choice, names[0] == _name(None))
                for names in ([_name(None)], [_name(rank) for rank in range(size)])
                if (choice := choose(by_host, names, size)) is not None
            ]
            (version, hosts), is_shared = max(
                choices, key=lambda item: item[0][0], default=((None, None), False)
            )
            commits = {
                commit.name: list(commit[:-1])
                for items in by_host.values()
                for commit in items
                if commit.version == version
            }
            plan = {"version": version, "hosts": hosts, "is_shared": is_shared, "commits": commits}
            if version is None:
                self._put(key, on_disk.pop() if on_disk else None)
            else:
                self._put(key, plan)
        return self._wait(key)

    def _bring(self, hosts: list[str], commit: list[Any]) -> bool:
        """Have a commit brought from another host; return False if no host sends a whole commit."""
        others = [host for host in hosts if host != self._place.host]
        want = {"host": self._place.host, "commit": commit, "hosts": others}
        return bool(others) and self._ask_driver("want", f"{commit[1]}.{commit[2]}", want) == b"1"

    def _ask_driver(self, verb: str, number: str, question: object) -> bytes:
        """Return the driver's answer; empty without one. Only drivers of elastic jobs answer: other jobs end with a failure."""
        if os.environ.get("HVLAUNCH_ELASTIC") != "1":
            return b""
        key = f"{self._scope}.{self._place.rank}.{number}"
        patiently(partial(self._client.put, KEPT, f"{verb}.{key}", json.dumps(question).encode()))
        try:
            return patiently(partial(self._client.wait, KEPT, f"done.{key}", _PATIENCE))
        except WaitTimeout:
            return b""

    def _tell(self, key: str, value: Any) -> None:
        self._put(f"{key}.{self._place.rank}", value)

    def _hear(self, key: str) -> list[Any]:
        """Return the values of all ranks; empty except on rank 0."""
        if self._place.rank:
            return []
        return [self._wait(f"{key}.{rank}") for rank in range(self._place.size)]

    def _put(self, key: str, value: Any) -> None:
        patiently(partial(self._client.put, self._scope, key, json.dumps(value).encode()))

    def _wait(self, key: str) -> Any:
        return json.loads(patiently(partial(self._client.wait, self._scope, key, _PATIENCE)))


def _main() -> None:
    if len(sys.argv) != 3:  # noqa: PLR2004 (two arguments)
        sys.exit("usage: python -m hvlaunch.torch.checkpoint DIR OUT")
    try:
        sys.stdout.write(f"step {to_dcp(*sys.argv[1:])}\n")
    except FileNotFoundError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main()
