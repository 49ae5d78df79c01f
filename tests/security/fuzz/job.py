"""The driver's side of a job whose host a is hostile: a real engine, link, relay and rendezvous, and no process, socket or thread more."""

import asyncio
import json
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from hvlaunch.agent.wire.frames import FRAME_COST, OUTPUT_CHUNK
from hvlaunch.console.files import OutputFiles
from hvlaunch.driver.links.agent_channel import AgentConnection
from hvlaunch.driver.links.host_link import HostLink, Opening
from hvlaunch.driver.links.relay import HostRelay
from hvlaunch.driver.program import AgentProgram
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.causes import HostProblem
from hvlaunch.engine.engine import Engine
from hvlaunch.engine.workers import TIME as INSPECTION
from hvlaunch.job import ElasticOptions, Host
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.rendezvous.serving.http import ClientConnection
from hvlaunch.rendezvous.serving.traffic import HttpLimits
from hvlaunch.watch.rounds import Ranks
from hvlaunch.watch.sentences import detail, sentence
from tests.security.fuzz.broken import Valid
from tests.security.fuzz.judge import OUTPUT, check_line, check_problem
from tests.unit.gloo.history import facts, spec
from tests.unit.rendezvous.wire import TOKEN

__all__ = ["Job"]

WINDOW = 1 << 16
_TURNS = 4  # of the event loop: what one call makes another do comes soon


class _Program(AgentProgram):
    """None is needed."""

    def command(self, host: Host, *, is_here: bool, is_near: bool) -> tuple[str, bytes]:
        return "agent", b""


class _Rendezvous:
    """A server whose event loop turns when it is told to, in the thread that tells it."""

    def __init__(self) -> None:
        self.server = RendezvousServer(TOKEN)
        self.loop = asyncio.SelectorEventLoop()
        self.faults: list[object] = []
        self.loop.set_exception_handler(lambda _, context: self.faults.append(context))
        self._routes = self.server._routes()
        self._limits = HttpLimits(body=self.server._store.limits.value)

    def endpoint(self) -> tuple[asyncio.AbstractEventLoop, Callable[[], asyncio.Protocol]]:
        return self.loop, lambda: ClientConnection(self._routes, self._limits, self.server._traffic)

    def expect(self, addresses: Iterable[str]) -> None:
        assert [*addresses] == ["relay:a"]

    def turn(self) -> None:
        for _ in range(_TURNS):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        assert not self.faults, self.faults

    def check_left(self) -> None:
        """After all connections were lost: nothing of them is left."""
        self.turn()
        stats = self.server._count()
        assert (stats.connections, stats.waiting, stats.faults) == (0, 0, 0), stats


@cache
def _rendezvous() -> _Rendezvous:
    return _Rendezvous()


class Job:
    """The engine of a job on hosts a, which is hostile, and b; and a's link."""

    def __init__(self, connection: AgentConnection, *, is_elastic: bool, relay: str, slots: int = 1) -> None:
        self.is_elastic = is_elastic
        self.abouts: dict[int, dict[str, int]] = {}
        """What names the newest worker of each of host a's slots."""
        self.ended: list[on.Event] = []
        options: dict[str, Any] = (
            {"elastic": ElasticOptions(min_np=1, cooldown=(1.0, 2.0))} if is_elastic else {}
        )
        self._slots = slots
        self._engine = Engine(spec(f"a:{slots},b:1", **options), 4711)
        self._ranks = Ranks()
        self._now = 100.0
        self._kept = 0
        self._to_send: list[Valid] = []
        self._is_done = False
        """Host a has said that a worker of the elastic job ended well: that is believed."""
        self._workers_of_b: list[tuple[int, int, int]] = []
        self._rendezvous = _rendezvous()
        self._files = OutputFiles(OUTPUT, slots + 1)
        self._hello: dict[str, Any] = {"type": "hello", "gpus": False, "ports": None, "session": None}
        self._hello["elastic"] = 5.0 if is_elastic else None
        self._hello["rendezvous"] = {"candidates": [["10.0.0.100", 4711]], "relay": relay}
        opening = Opening(
            connect=lambda _: connection,
            program=_Program({}, None),
            hello=lambda _: self._hello,
            relay=lambda send: HostRelay("a", self._rendezvous, send),
            window=WINDOW,
        )
        self.link = HostLink(
            Host("a"),
            opening,
            self._post,
            self,
            lambda slot, start: self._ranks.rank_of("a", slot, start),
            lambda slot, start: self._ranks.first_round_of("a", slot, start),
            lambda: self._now,
        )
        for event in (on.Began(), on.HostConnected("b"), on.HostReady("b", facts(2))):
            self._feed(event)
        self._feed(on.RendezvousReached("b", "10.0.0.100"))

    def run(self) -> None:
        """To the end of what the connection has. Raises AssertionError."""
        try:
            self.link._run()
            self._rendezvous.check_left()
        finally:
            self._files.close()
        assert isinstance(self.ended[-1], on.HostFailed | on.HostGone | on.HostClosed), self.ended

    def settle(self) -> None:
        """All that was sent to the agent is sent, and what it has relayed has been acted on."""
        if self.link._relay is not None:
            self._rendezvous.turn()
        while self._to_send:
            self.link.send(*self._to_send.pop(0))

    def wait(self, seconds: float) -> None:
        self._now += seconds
        self._feed(on.Tick())

    # What the link's printer is asked for:

    def output(
        self,
        rank: int,
        stream: Any,
        data: bytes,
        done: Callable[[int], None],
        origin: tuple[str, int],
        note: Callable[[bool], None] | None,
    ) -> None:
        """To a real file; half of it is acknowledged, so that it must stay within the window."""
        self._check_stream(rank, stream)
        self._files.write(rank, stream, data)
        self._kept += len(data) + FRAME_COST
        if self._kept % 2:
            self._kept -= len(data) + FRAME_COST
            done(len(data))
        assert self._kept <= self._slots * (WINDOW + 4 * OUTPUT_CHUNK + 4 * (1 << 20))

    def tail(self, rank: int) -> bytes:
        self._check_stream(rank, "stderr")
        return b""

    def end_stream(self, rank: int, stream: Any, done: Any, origin: tuple[str, int]) -> None:
        self._check_stream(rank, stream)

    def _check_stream(self, rank: int, stream: Any) -> None:
        assert 0 <= rank <= self._slots, rank
        assert stream in ("stdout", "stderr"), stream

    # The engine:

    def _post(self, event: Any) -> None:
        self.ended.append(event)
        self._is_done |= self.is_elastic and isinstance(event, on.WorkerExited) and event.code == 0
        if isinstance(event, on.HostFailed | on.HostGone):
            check_problem(event.problem)
        self._feed(event)

    def _feed(self, event: on.Event) -> None:
        self._now += 0.001
        actions = self._engine.handle(event, self._now)
        self._ranks.update(actions)
        if (text := detail(event, 0.0)) is not None:
            _check_text(text)
        for action in actions:
            self._carry_out(action)
            self._do_on_b(action)

    def _do_on_b(self, action: do.Action | tell.Fact) -> None:
        """As an agent and workers do that are well."""
        match action:
            case do.Probe("b", target, addresses, _, agent):
                for address in (*addresses, None):
                    self._feed(on.HostProbed("b", target, address, agent))
            case do.Start(host="b", round=number, launches=launches):
                for launch in launches:
                    self._workers_of_b.append((number, launch.slot, launch.start))
                    self._feed(on.WorkerStarted("b", number, launch.slot, 99, launch.start))
            case do.Stop(host="b", steps=steps):
                workers, self._workers_of_b = self._workers_of_b, []
                code, signal = (
                    (None, 15) if steps[0].after <= INSPECTION else (0, None)
                )  # there is time to end by itself
                for number, slot, start in workers:
                    ending = code, signal, self._now, 1
                    self._feed(on.WorkerExited("b", number, slot, *ending, False, None, None, start))
            case do.Release("b"):
                self._feed(on.HostClosed("b", 0))
            case _:
                pass

    def _carry_out(self, action: do.Action | tell.Fact) -> None:
        match action:
            case do.Probe("a", target, addresses, port, agent):
                about = {"target": target, "agent": agent, "addresses": [*addresses], "port": port}
                self._to_send.append(({"type": "probe", **about}, b""))
            case do.Start(host="a", round=number, launches=launches):
                workers = [{"slot": launch.slot, "start": launch.start} for launch in launches]
                plan = json.dumps({"workers": workers}).encode("ascii")
                self._to_send.append(({"type": "start", "round": number}, plan))
                for launch in launches:
                    self.abouts[launch.slot] = {"round": number, "slot": launch.slot, "start": launch.start}
            case do.Finish(result):
                assert 0 < result.exit_code < 256 or (self._is_done and not result.exit_code), result
                assert result.failure is None or result.failure.host == "a", result
            case tell.HostNotUsable() | tell.HostLostAtEnd() | tell.KeepingHosts():
                check_problem(action.problem)
                _check_text(sentence(action))
            case tell.HostExcluded(host, _, cause):
                # Of two that can't reach each other nobody knows whose fault it is: the words name who says so.
                assert host == "a" or (isinstance(cause, HostProblem) and cause.problem.host == "a"), action
                _check_text(sentence(action))
            case _:
                pass


def _check_text(text: str) -> None:
    for number, line in enumerate(text.split("\n")):
        assert number == 0 or line.startswith("host a: | "), text
        check_line(line)
