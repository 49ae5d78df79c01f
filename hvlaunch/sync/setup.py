"""Runs the commands of --setup on a job's hosts, as an errand on each, after the host's files have come and before workers start."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvlaunch.agent.quick import loads
from hvlaunch.console.lines import visible_line
from hvlaunch.console.merge import Merger
from hvlaunch.driver.links.errands import Errand, ErrandFailed, Limits, lines_of
from hvlaunch.driver.links.host_link import worker_packages
from hvlaunch.driver.links.links import workers_python
from hvlaunch.errors import HostError, SetupFailed
from hvlaunch.hosts.parse import host_set
from hvlaunch.job import JobSpec, SetupOptions

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.engine.events import HostFacts

__all__ = ["Setup"]

_NO_LIMITS = Limits(seconds=None, memory=None, output=None)
_LOOK = 0.1
"""Seconds between looks at lines that wait for other hosts."""
_PATIENCE = 0.3
"""Seconds for which a host that is ready waits for its last lines to be shown."""
_LONGEST_LINE = 1 << 16
_TAIL = 5
"""Last lines of a failed setup that its message has."""


class Setup:
    """Runs the commands on hosts, and shows their output by `say`: equal lines of several hosts once."""

    def __init__(self, spec: JobSpec, options: SetupOptions, say: Callable[[str], None]) -> None:
        self._spec = spec
        self._options = options
        self._say = (lambda _: None) if spec.console.quiet else say
        self._lock = threading.Lock()
        self._merger = Merger()
        # Some host may always print a line later: each line waits for its time.
        self._merger.expect([-1])
        self._hosts: list[str] = []
        """The hosts by the numbers that the merger has for them."""

    def set_up(self, link: "HostLink", facts: "HostFacts", ready: "Callable[[HostFacts], None]") -> None:
        """Run the setup of a host, and call `ready` with its facts and the environment there. Raises SetupFailed."""
        name = link.host.name
        try:
            ready(self._set_up(link, facts))
        except SetupFailed:
            raise
        except HostError as error:
            raise SetupFailed(getattr(error, "detail", error.cause), host=name) from error
        except (KeyError, TypeError, ValueError) as error:
            raise SetupFailed(f"its answer makes no sense: {error}", host=name) from error

    def _set_up(self, link: "HostLink", facts: "HostFacts") -> "HostFacts":
        """Raises ErrandFailed, SetupFailed, KeyError, TypeError, ValueError."""
        errand = link.errands.start("setup", self._arguments(facts), _NO_LIMITS)
        tail: deque[str] = deque(maxlen=_TAIL)
        try:
            self._follow(link, errand, tail)
            result = errand.result()
        except ErrandFailed as error:
            raise SetupFailed(error.detail, host=link.host.name) from error
        finally:
            errand.stop()
        if result["code"] != 0:
            last = f": {' | '.join(tail)}" if tail else ""
            raise SetupFailed(f"the setup ended with exit code {result['code']}{last}", host=link.host.name)
        return self._with_environment(facts, result)

    def _with_environment(self, facts: "HostFacts", result: dict[str, Any]) -> "HostFacts":
        if result["environment"] is None:
            return facts
        facts = facts._replace(environment=result["environment"])
        # A command with the path of its Python does not use the environment's.
        program = workers_python(self._spec)
        if program is not None and "/" not in program:
            facts = facts._replace(packages=worker_packages(result["packages"]))
        return facts

    def _arguments(self, facts: "HostFacts") -> dict[str, Any]:
        directory = root = project = facts.directory or self._spec.cwd
        if self._spec.sync is not None:
            root = directory.removesuffix(f"/{self._spec.sync.below}") if self._spec.sync.below else directory
            # The copies of a project share an environment: `.../trees/PROJECT/0/tree`.
            project = root if self._spec.sync.to is not None else "/".join(root.split("/")[:-2])
        # The host's cache is in every container, and an environment works only with the image that has built it.
        if (container := self._spec.container) is not None:
            project = f"{project} in {container.image or container.name}"
        return {
            "commands": list(self._options.commands),
            "patterns": list(self._options.patterns),
            "files": list(self._options.files),
            "directory": directory,
            "root": root,
            "project": project,
            "env": dict(self._spec.env),
        }

    def _follow(self, link: "HostLink", errand: Errand, tail: deque[str]) -> None:
        """Show the lines of the errand until its end; `tail` keeps the last. Raises ErrandFailed, ValueError."""
        with self._lock:
            number = len(self._hosts)
            self._hosts.append(link.host.name)
        for lines in lines_of(errand, _LOOK, _LONGEST_LINE):
            for line in lines:
                word, _, words = line.partition(" ")
                if word == "line":
                    text = visible_line(str(loads(words)))
                    tail.append(text)
                    self._show(number, text)
                else:
                    link.tell_preparing("setup by another job" if word == "wait" else "setup")
            self._print()
        while not errand.wait(_LOOK):
            self._print()
        # The last lines may still wait for other hosts.
        end = time.monotonic() + _PATIENCE
        while self._merger.deadline is not None and time.monotonic() < end:
            time.sleep(_LOOK)
            self._print()

    def _show(self, number: int, line: str) -> None:
        with self._lock:
            self._merger.add(number, "stdout", f"{line}\n".encode(), time.monotonic())

    def _print(self) -> None:
        # Printed with the lock: another thread's later lines must not come first.
        with self._lock:
            for numbers, _, lines in self._merger.take_lines(time.monotonic()):
                hosts = host_set(self._hosts[number] for number in numbers)
                for line in lines.decode().splitlines():
                    self._say(f"setup on {hosts}: {line}")
