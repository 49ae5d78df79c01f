"""The narrator of a job for its user: messages, details with --verbose, and the status line while hosts get ready."""

import time
from collections.abc import Callable, Sequence
from signal import SIGINT

from hvlaunch.console.status import OnStatus, Status, counted
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.hosts.parse import host_set
from hvlaunch.job import JobSpec
from hvlaunch.watch import starting

__all__ = ["Narrator"]


_ERRORS = (tell.HostLostAtEnd, tell.HostNotClosing, tell.HostLeftOver)
"""Facts that are errors, and are said even with --quiet."""
_LAUNCHERS = ("run", "exec", "accelerate", "deepspeed")
"""Endings of commands that may be launchers themselves."""


_STAGES = ("start", "resolve", "connect", "passphrase", "log in", "agent")
"""The stages of a connecting host, in order."""


class Narrator:
    """Tells the user about the events and actions of a job. A watcher.

    `say` prints a message. `status` shows a text until the next call; None removes the text.
    """

    def __init__(
        self,
        spec: JobSpec,
        say: Callable[[str], None],
        status: OnStatus,
        clock: Callable[[], float] = time.monotonic,
        hide_tracebacks: Callable[[], object] = bool,
    ) -> None:
        self._verbose = spec.verbose
        self._quiet = spec.console.quiet
        self._shown = spec.console.ranks
        self._command = spec.command
        # With places, a launcher on each host is meant: --for torchrun.
        self._has_places = spec.templates is not None
        self._most_hosts = len(spec.hosts)
        self._ends_if_it_hangs = spec.on_hang == "stop" or (
            spec.on_hang == "restart" and spec.elastic is None
        )
        self._say = say
        self._hide_tracebacks = hide_tracebacks
        self._status = status
        self._began = 0.0
        self._hosts = 0
        self._clock = clock
        self._waiting: dict[str, str] = {}
        """The stage of each host that is not ready, by name."""
        self._failed = 0
        self._connecting = True
        self._ranks: dict[str, list[int]] = {}
        self._pids: dict[str, list[int]] = {}

    def watch(self, event: on.Event, actions: Sequence[do.Action], now: float) -> None:
        """Tell the user about an event at `now` and its actions."""
        if isinstance(event, on.Began):
            self._began = now
        if isinstance(event, on.HostNoise) and not self._quiet:
            self._say(
                f"host {event.host}: its shell start-up files left a program running, which prints; "
                f"its further output is ignored: {event.text}"
            )
        if isinstance(event, on.HostAway) and not self._quiet:
            self._say(f"host {event.host}: the connection is lost ({event.cause}); connecting again")
        if isinstance(event, on.HostBack) and not self._quiet:
            self._say(f"host {event.host}: connected again after {event.seconds:.1f} s")
        if self._verbose:
            self._details(event, now)
        for action in actions:
            if isinstance(action, do.Start):
                self._start(action)
            elif isinstance(action, tell.Fact):
                self._fact(action)
        # Behind the messages: the status line stands below them.
        if self._connecting and not self._quiet:
            self._wait(event, actions)

    def _start(self, start: do.Start) -> None:
        size = start.launches[0].place.size
        if not self._ranks and not self._quiet:
            self._warn(size)
        ranks = [launch.place.rank for launch in start.launches]
        # With roles a host has an order for each.
        before = self._ranks.get(start.host, []) if start.job_hosts and not self._pids.get(start.host) else []
        self._ranks[start.host] = [*before, *ranks]
        if self._verbose:
            from hvlaunch.watch.sentences import start_detail  # noqa: PLC0415 (as above)

            self._say(start_detail(start))

    def _warn(self, size: int) -> None:
        """Warn of probable mistakes once the number of workers is known."""
        if self._shown is not None and min(part.start for part in self._shown) >= size:
            self._say(f"--ranks: the job has only ranks 0-{size - 1}, so no output is shown")
        # The table of launchers is not loaded for commands that can't be in it.
        if (
            size > 1
            and (not self._has_places or size > self._most_hosts)
            and (self._command[0].endswith(_LAUNCHERS) or self._command[1:2] == ("-m",))
        ):
            from hvlaunch.watch.sentences import launcher_advice  # noqa: PLC0415 (few commands are launchers)

            advice = launcher_advice(self._command)
            if advice is not None:
                self._say(advice)

    def _fact(self, fact: tell.Fact) -> None:
        # Every rank prints one for its KeyboardInterrupt, and another for the ranks that left before it.
        if isinstance(fact, tell.Interrupting) and fact.signal == SIGINT and not self._verbose:
            self._hide_tracebacks()
        if self._quiet and not isinstance(fact, _ERRORS):
            return
        # A choice that costs speed is worth a word.
        if isinstance(fact, tell.NetworkChosen) and not (self._verbose or fact.is_split):
            return
        if isinstance(fact, tell.RoundStarting):
            self._say(starting(fact))
        elif isinstance(fact, tell.JobHanging) and self._ends_if_it_hangs:
            self._say("the job is hung, and is stopped (--on-hang stop); the cause follows")
        else:
            from hvlaunch.watch.sentences import sentence  # noqa: PLC0415 (most jobs have nothing to tell)

            self._say(sentence(fact))

    def _wait(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        """Show the hosts that are not ready, until workers are started or the job ends."""
        for action in actions:
            match action:
                case do.Connect(host):
                    self._waiting[host.name] = "start"
                case do.Start() | do.Stop() | do.Finish():
                    self._connecting = False
                    self._status(None)
                    return
        # Elastic jobs find further hosts: the total grows, and never shrinks while the status is shown.
        self._hosts = max(self._hosts, len(self._waiting))
        match event:
            case on.HostStage() if event.host in self._waiting:
                self._waiting[event.host] = event.stage
            case on.HostConnected() if event.host in self._waiting:
                self._waiting[event.host] = "agent"
            case on.HostReady():
                self._waiting.pop(event.host, None)
            case on.HostFailed() | on.HostGone() | on.HostParting() if event.host in self._waiting:
                del self._waiting[event.host]
                self._failed += 1
            case on.Began():
                pass
            case _:
                return
        self._status(self._progress)

    def _progress(self) -> Status:
        """Return the status: a line for all hosts, and a line for each stage. Called in the printer's thread."""
        stages: dict[str, list[str]] = {}
        # A copy: the loop's thread changes the table meanwhile.
        for host, stage in list(self._waiting.items()):
            stages.setdefault(stage, []).append(host)
        missing = sum(map(len, stages.values()))
        ready = self._hosts - missing - self._failed
        so_far = counted(ready, self._hosts, self._failed, self._clock() - self._began)
        if not self._hosts:
            return Status("waiting for the first hosts of the pool")
        if not stages:
            rows = [f"connected {so_far}: finding addresses by which the hosts reach each other"]
        else:
            # Stages of files have a percentage, and come last.
            in_order = [*(stage for stage in _STAGES if stage in stages), *sorted(stages.keys() - {*_STAGES})]
            by_stage = (f"{stage}: {host_set(stages[stage])}" for stage in in_order)
            # Hosts with other stages have answered, and get files or an environment.
            is_preparing = not any(stage in _STAGES for stage in stages)
            rows = [f"{'preparing' if is_preparing else 'connecting'} {so_far}", *by_stage]
        return Status("\n".join(rows), ready, self._hosts)

    def _details(self, event: on.Event, now: float) -> None:
        from hvlaunch.watch.sentences import detail, span  # noqa: PLC0415 (as above)

        if isinstance(event, on.WorkerStarted):
            host, pids = event.host, self._pids.setdefault(event.host, [])
            pids.append(event.pid)
            ranks = self._ranks.get(host, [])
            # One message for a host, however many workers it has.
            if len(pids) == len(ranks):
                self._say(f"host {host}: started {span('rank', ranks)}, {span('pid', pids)}")
                self._pids[host] = []
        elif (text := detail(event, now - self._began)) is not None:
            self._say(text)
