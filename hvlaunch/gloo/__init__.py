"""hvlaunch's own controller, which Horovod names gloo too. It is not torch's Gloo, the collectives that workers may use.

`engine` decides and is pure, `driver` carries out, `watch` looks on.
"""

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from hvlaunch.hosts.local import is_local
from hvlaunch.ssh import Ways

if TYPE_CHECKING:
    from hvlaunch.job import JobResult, JobSpec

__all__ = ["begin_connections", "run"]


def run(spec: "JobSpec", **options: Any) -> "JobResult":
    """Run the job as controller.run() does. Its hosts' sshd start while the controller is imported."""
    with closing(begin_connections(spec)) as ways:
        from hvlaunch.gloo import controller  # noqa: PLC0415 (20 ms)

        return controller.run(spec, ways=partial(controller.by_ssh, shared=ways), **options)


def begin_connections(spec: "JobSpec") -> Ways:
    """Return ways to the job's hosts, and begin connections to those that the engine will ask for.

    The engine alone decides; a connection that it does not want is closed.
    """
    ways = Ways(spec.ssh, timeout=spec.start_timeout)
    if spec.pool is None and spec.ssh.remote_agent is None:
        hosts = [host for host in spec.hosts if not is_local(host)]
        # An elastic job may have more hosts than it needs.
        hosts = hosts if spec.elastic is None else hosts[:1]
        if hosts:
            ways.prepare(hosts)
    return ways
