"""Examines hosts over the sessions of a job or a visit: an errand on each reads its values, and hvlaunch/check compares them."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol

from hvlaunch.agent.errands.check import RESULT
from hvlaunch.agent.wire.frames import number, or_null
from hvlaunch.check import Finding, Values, findings_of, merged
from hvlaunch.check.table import CHECKS
from hvlaunch.console.lines import visible_line
from hvlaunch.driver.links.errands import Answers, Errand, ErrandFailed, Limits
from hvlaunch.driver.links.links import workers_python
from hvlaunch.errors import CheckFailed
from hvlaunch.hosts.parse import host_set
from hvlaunch.hosts.placement import needed
from hvlaunch.job import Host, JobSpec

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.engine.events import HostFacts

__all__ = ["Examination", "Gathering", "python_of"]

_LIMITS = Limits(seconds=40.0, memory=None, output=1 << 20)
_LIMITS_WITH_PAIRS = Limits(seconds=None, memory=None, output=1 << 24)
_PATIENCE = 20.0
"""Seconds for an answer of the errand: longer than its own limits for a file system that hangs."""
_SAMPLES = 5
"""Questions for the host's time; the quickest answer counts."""
_NUMBER = or_null(number(0, 1 << 40))
_GATHERING = 10.0
"""Seconds for the other hosts to come, before all open the script."""
_JOB_GATHERING = 3.0
"""The same in a job: a host may never come."""


class Gathering:
    """Hosts in step with each other, each in its own thread."""

    def __init__(self, names: Iterable[str]) -> None:
        self._changed = threading.Condition()
        self._names = {*names}
        self._arrived: dict[str, set[str]] = {}

    def leave(self, name: str) -> None:
        """Wait no more for this host."""
        with self._changed:
            self._names.discard(name)
            self._changed.notify_all()

    def meet(self, name: str, step: str, seconds: float) -> frozenset[str]:
        """Wait for the other hosts at a step, at most for some seconds; return the hosts at the step."""
        with self._changed:
            arrived = self._arrived.setdefault(step, set())
            arrived.add(name)
            self._changed.notify_all()
            self._changed.wait_for(lambda: arrived >= self._names, seconds)
            return frozenset(arrived)


class PairMeasures(Protocol):
    """Measures between hosts, by the errand that reads their values: hvlaunch/gloo/measures.py."""

    def arguments(self, name: str, facts: "HostFacts") -> Mapping[str, Any]: ...

    def measure(self, name: str, facts: "HostFacts", errand: Errand, answers: Answers) -> None: ...


class Examination:
    """Reads the values of hosts. `examine` is called for each host, in a thread of its own."""

    def __init__(
        self, spec: JobSpec, names: Iterable[str] | None = None, patience: float = _GATHERING
    ) -> None:
        """`names` are the expected hosts; by default the job's."""
        self._spec = spec
        self._patience = patience
        self._begin = time.monotonic()
        self.gathering = Gathering([host.name for host in spec.hosts] if names is None else names)
        self.values: dict[str, Values] = {}
        """Values of the examined hosts."""

    def examine(self, link: "HostLink", facts: "HostFacts", pairs: "PairMeasures | None" = None) -> None:
        """Read the values of a host, and measure its pairs. Raises ErrandFailed."""
        name = link.host.name
        start = time.monotonic() - self._begin
        of_pairs = None if pairs is None else pairs.arguments(name, facts)
        arguments = {**self._arguments(facts), "pairs": of_pairs}
        errand = link.errands.start("check", arguments, _LIMITS if pairs is None else _LIMITS_WITH_PAIRS)
        try:
            answers = Answers(errand, name, _PATIENCE)
            offset, error = _clock_of(errand, answers)
            self.gathering.meet(name, "open", self._patience)
            errand.write(b"open\n")
            opened = answers.next(_NUMBER)
            if pairs is None:
                errand.close_input()
                errand.wait(_PATIENCE)
                values = errand.result()
            else:
                errand.write(b"pairs\n")
                values = answers.next(RESULT)
            session = {
                "start": start,
                "clock": offset,
                "clock_error": error,
                "open": opened,
                "slots": link.host.slots or self._spec.slots_per_host,
            }
            self.values[name] = {**values, "session": session}
            if pairs is not None:
                # Measures take their time: hosts wait for each other.
                answers.patience = inf
                pairs.measure(name, facts, errand, answers)
        except ErrandFailed:
            self.gathering.leave(name)
            raise
        finally:
            errand.stop()

    def findings(self) -> list[Finding]:
        """Compare the examined hosts, in the user's order."""
        names = [host.name for host in self._spec.hosts if host.name in self.values]
        return findings_of(CHECKS, {name: self.values[name] for name in names})

    def _arguments(self, facts: "HostFacts") -> Mapping[str, Any]:
        spec = self._spec
        return {
            "directory": facts.directory or spec.cwd,
            "scratch": facts.scratch,
            "program": python_of(spec),
            "script": _script_of(spec),
            "address": facts.peer_address,
            "env": dict(spec.env),
            "compares_files": spec.sync is None,
        }


def expected_hosts(spec: JobSpec) -> list[str]:
    """Return the hosts for a job's first connections: a static job leaves out unneeded hosts."""
    hosts: Sequence[Host] = spec.hosts
    if spec.elastic is None and not spec.skip_bad_hosts and spec.leases is None:
        hosts = needed(spec.hosts, spec.np, spec.slots_per_host, spec.map_by)
    return [host.name for host in hosts]


class JobCheck:
    """Examines the hosts of a job before their workers start, and joining hosts against earlier ones."""

    def __init__(self, spec: JobSpec, say: Callable[[str], None]) -> None:
        self._examination = Examination(spec, expected_hosts(spec), _JOB_GATHERING)
        self._say = (lambda _: None) if spec.console.quiet else say
        self._lock = threading.Lock()
        self._said: set[tuple[str, Finding]] = set()

    def check(self, link: "HostLink", facts: "HostFacts", ready: "Callable[[HostFacts], None]") -> None:
        """Examine a host, and call `ready` with its facts. Raises CheckFailed."""
        name = link.host.name
        try:
            self._examination.examine(link, facts)
        except ErrandFailed as error:
            # The job does not depend on its check; a host that is lost fails by itself.
            self._say(f"warning: host {name} could not be checked: {error.detail}")
            ready(facts)
            return
        self._examination.gathering.meet(name, "compare", _JOB_GATHERING)
        findings = self._examination.findings()
        self._warn(findings)
        errors = [finding for finding in findings if finding.host == name and finding.level == "error"]
        if errors:
            cause = "; ".join(f"{error.subject}: {error.text}" for error in errors)
            raise CheckFailed(cause, host=name, hint=errors[0].remedy or None)
        ready(facts)

    def _warn(self, findings: Sequence[Finding]) -> None:
        """Print each warning once, for all its hosts."""
        with self._lock:
            for hosts, finding in merged(findings):
                key = (",".join(hosts), finding)
                if finding.level == "warning" and key not in self._said:
                    self._said.add(key)
                    self._say(f"warning: {host_set(hosts)}: {finding.subject}: {visible_line(finding.text)}")


def python_of(spec: JobSpec) -> str | None:
    """Return the command's Python: the command itself, or the Python of a script or of torchrun."""
    first, *_ = spec.command
    return first if "python" in PurePath(first).name else workers_python(spec)


def _script_of(spec: JobSpec) -> str | None:
    return next((word for word in spec.command if word.endswith((".py", ".sh"))), None)


def _clock_of(errand: Errand, answers: Answers) -> tuple[float, float]:
    """Return the offset of the host's clock from this machine's, and its uncertainty, in seconds. Raises ErrandFailed."""
    samples: list[tuple[float, float]] = []
    for _ in range(_SAMPLES):
        before = time.time()
        begin = time.monotonic()
        errand.write(b"clock\n")
        at = answers.next(_NUMBER) or 0.0
        taken = time.monotonic() - begin
        samples.append((taken / 2, at - before - taken / 2))
    error, offset = min(samples)
    return offset, error
