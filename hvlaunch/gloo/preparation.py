"""The steps on a host before it is ready: leases, files, the network's choice, setup, the check, hvlaunch's own modules."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvlaunch import __version__
from hvlaunch.engine import events as on
from hvlaunch.errors import HostError
from hvlaunch.hosts.local import only_local
from hvlaunch.job import JobSpec, SyncOptions

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink, Prepare
    from hvlaunch.gloo.leasing import JobLeases
    from hvlaunch.outside import JobDirectory

__all__ = ["open_delivery", "open_preparation"]


@contextmanager
def open_preparation(
    spec: JobSpec,
    directory: "JobDirectory | None",
    about: dict[str, Any],
    leases: "JobLeases | None",
    say: Callable[[str], None],
    *,
    is_successor: bool,
) -> "Iterator[Prepare | None]":
    """Open the steps of a job for as long as hosts may join; yields None without a step.

    `about` describes the job for other programs and gets the snapshot's hash. Raises BadUsage.
    """
    from hvlaunch.driver.links.host_link import in_thread  # noqa: PLC0415 (the loop loads it, while hosts answer)

    with ExitStack() as opened:
        steps: list[Prepare] = []
        if leases is not None:
            steps.append(in_thread(leases.lease_host, "leases"))
        if spec.sync is not None:
            steps.append(opened.enter_context(open_delivery(spec, spec.sync, directory, about, is_successor)))
        for number, options in enumerate(spec.bring):
            from hvlaunch.sync.bringing import Bringing  # noqa: PLC0415 (few jobs bring files)

            record = None if directory is None else directory.path / f"bring-{number}"
            bringing = Bringing(options, has_peers=_has_peers(spec), record=record)
            steps.append(in_thread(bringing.bring, "files"))
        if (spec.nccl, spec.rank_order) != ("off", "given") and _has_peers(spec):
            from hvlaunch.gloo.survey import Survey  # noqa: PLC0415 (few jobs choose)

            steps.append(in_thread(Survey(spec).look, "network"))
        if spec.setup is not None:
            from hvlaunch.sync.setup import Setup  # noqa: PLC0415 (few jobs have one)

            steps.append(in_thread(Setup(spec, spec.setup, say).set_up, "setup"))
        if spec.check:
            from hvlaunch.gloo.examination import JobCheck  # noqa: PLC0415 (few jobs have one)

            steps.append(in_thread(JobCheck(spec, say).check, "check"))
        if steps or spec.container is not None or not only_local(spec):
            steps.append(partial(_prepare_imports, spec, say))
        yield _in_turn(steps) if steps else None


def _prepare_imports(
    spec: JobSpec,
    say: Callable[[str], None],
    link: "HostLink",
    facts: on.HostFacts,
    ready: Callable[[on.HostFacts], None],
    failed: Callable[[HostError], None],
) -> None:
    """Bring hvlaunch's modules to a host whose Python lacks them."""
    packages = facts.packages
    if packages is None or (packages.hvlaunch == __version__ and spec.sync is None):
        ready(facts)
        return
    from hvlaunch.sync.library import WorkerImports  # noqa: PLC0415 (few hosts lack them)

    WorkerImports(spec, say).prepare(link, facts, ready, failed)


def _in_turn(steps: "Sequence[Prepare]") -> "Prepare":
    """Join the steps: each step gets the facts from the step before."""
    first, *others = steps
    if not others:
        return first
    following = _in_turn(others)
    # A host without leases gets no workers.
    return lambda link, facts, ready, failed: first(
        link,
        facts,
        lambda facts: ready(facts) if facts.leased == () else following(link, facts, ready, failed),
        failed,
    )


@contextmanager
def open_delivery(
    spec: JobSpec,
    sync: SyncOptions,
    directory: "JobDirectory | None",
    about: dict[str, Any],
    is_successor: bool,
) -> "Iterator[Prepare]":
    """Take the snapshot of a job's tree. Raises BadUsage."""
    from hvlaunch.driver.links.host_link import in_thread  # noqa: PLC0415 (as above)
    from hvlaunch.rendezvous.serving.certificate import new_peer  # noqa: PLC0415 (as above)
    from hvlaunch.sync.delivery import Delivery  # noqa: PLC0415 (few jobs copy their tree)
    from hvlaunch.sync.snapshot import cache_directory, load_snapshot, take_snapshot  # noqa: PLC0415 (as above)
    from hvlaunch.sync.tree import Commit  # noqa: PLC0415 (as above)

    earlier = sync.job if not is_successor or directory is None else directory.path
    # A successor's hosts get the files of the job's start, not the tree as it is now.
    if earlier is not None:
        snapshot = load_snapshot(sync.root, earlier)
    else:
        commit = Commit(sync.root)
        snapshot = take_snapshot(sync.root, cache_directory(os.environ), sync.limit)
    with closing(snapshot):
        if not is_successor and directory is not None:
            snapshot.save(directory.path)
        if not is_successor:
            code = commit.facts() if earlier is None else _code_of(earlier)
            about["code"] = {**code, "hash": snapshot.hash}
            if directory is not None:
                directory.update()
        place = None if directory is None else directory.path
        if place is None and spec.queued is not None:
            # A batch job: the job around it has the directory.
            place = spec.queued.queue.with_name("jobs") / spec.queued.job_id
        peer = new_peer() if _has_peers(spec) else None
        arguments = {
            "project": snapshot.name,
            "to": sync.to,
            "job": "" if place is None else place.name,
            # For each host anew: jobs begin while an elastic job runs.
            "jobs": lambda: None if place is None else _running_jobs(place.parent),
        }
        meanwhile = None if directory is None else load_end_of_job
        delivery = Delivery(snapshot, sync.below, peer=peer, arguments=arguments, meanwhile=meanwhile)
        yield in_thread(delivery.deliver, "files")


def load_end_of_job() -> None:
    """Import the modules that keep an ended job's directory: 25 ms, which no user waits for while hosts compare files."""
    from hvlaunch.driver import job_record  # noqa: F401, PLC0415 (as above)
    from hvlaunch.gloo import run_record  # noqa: F401, PLC0415 (as above)
    from hvlaunch.report import forms  # noqa: F401, PLC0415 (as above)
    from hvlaunch.sync import collection  # noqa: F401, PLC0415 (as above)
    from hvlaunch.watch import recorder  # noqa: F401, PLC0415 (as above)


def _running_jobs(root: Path) -> list[str]:
    """Return the ids of running jobs."""
    from hvlaunch.outside import has_driver, has_minder  # noqa: PLC0415 (as above)

    return [path.name for path in root.iterdir() if has_driver(path) or has_minder(path)]


def _code_of(directory: Path) -> dict[str, Any]:
    """Return the code of an earlier job."""
    from hvlaunch.outside import known_job  # noqa: PLC0415 (as above)

    job = known_job(directory)
    return {} if job is None else dict(job.about.get("code") or {})


def _has_peers(spec: JobSpec) -> bool:
    """True if hosts may pass files on to each other."""
    return spec.elastic is not None or len(spec.hosts) > 1
