"""A warm pool whose hosts are this machine, each by its own pipes: agents are forked, and their ends are told."""

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvlaunch import pool as pool_module
from hvlaunch.console.status import AskStatus, Status
from hvlaunch.driver.links.agent_channel import AgentChannel, AgentConnection
from hvlaunch.driver.links.warm_way import WarmWay
from hvlaunch.driver.program import AgentProgram, Keys
from hvlaunch.errors import BadUsage, ConnectFailed, HostError
from hvlaunch.job import Host, JobSpec
from hvlaunch.outside import JobDirectory
from hvlaunch.outside.pools import KnownPool, PoolGone, ask, find_pool, open_stream
from hvlaunch.pool import WarmPool
from hvlaunch.pool.host import WarmHost
from hvlaunch.rendezvous.serving.certificate import tls_context
from hvlaunch.ssh import PipeConnection
from tests.testhosts.places import wait_until
from tests.unit.gloo.fakes import FakeListener

CONFIG = {"grace": 1.0, "lease": 60.0, "window": 1 << 20, "reconnect": 1.0, "spill": 0}
HELLO = {
    "type": "hello",
    "protocol": 4,
    "name": "a",
    "key": "key",
    "known_as": None,
    "cwd": "/",
    "gpus": False,
    "ports": None,
    "elastic": None,
    "processes": 1,
    "rendezvous": None,
    "session": None,
}
NO_WORKERS = "import time\ntime.sleep(86400)"


class Agent:
    """A job's end of a lane."""

    def __init__(self, connection: AgentConnection, config: dict[str, Any] = CONFIG) -> None:
        self.connection = connection
        self.channel: AgentChannel = connection.start_agent(
            AgentProgram(config, None), Host("a"), FakeListener()
        )
        self.frames = self.channel.frames()

    def greet(self) -> dict[str, Any]:
        self.channel.send((HELLO, b""), ({"type": "modules"}, b""))
        return self.expect("hello")

    def expect(self, kind: str) -> dict[str, Any]:
        return next(header for header, _ in self.frames if header["type"] == kind)

    def start(self, code: str) -> int:
        """A worker; its pid."""
        worker = {"slot": 0, "start": 0, "env": {}, "stdin": False}
        command = [sys.executable, "-c", code]
        body: dict[str, Any] = {
            "argv": command,
            "cwd": None,
            "defaults": {},
            "env": {},
            "result": False,
            "workers": [worker],
        }
        self.channel.send(({"type": "start", "round": 0}, json.dumps(body).encode()))
        return int(self.expect("started")["pid"])

    def end(self) -> int | None:
        self.channel.send(({"type": "bye"}, b""))
        assert [header["type"] for header, _ in self.frames][-1] == "bye"
        return self.channel.exit_status(0.0)


class Site:
    """A pool of the hosts a and b, served in a thread. `broken` are hosts that can't be reached."""

    def __init__(self, root: Path, shell: Sequence[str] = ("/bin/sh", "-c"), **options: Any) -> None:
        self.shell = shell
        self.is_closed = False
        self.broken: set[str] = set()
        self.go_on = threading.Event()
        """Host b is not connected before."""
        self.go_on.set()
        on_status = options.pop("on_status", lambda _site, _ask: None)
        options.pop("before", lambda _site: None)(self)
        about = {"name": "p", "version": "0"}
        self.directory = JobDirectory(root, "p", about)
        self.listener = self.directory.listen()
        spec = JobSpec(command=("true",), hosts=(), cwd="/")
        self.pool = WarmPool(
            "p", spec, [Host("a"), Host("b")], self.connect, **{"idle_timeout": 1000.0, **options}
        )
        self.problems = self.pool.start(lambda ask: on_status(self, ask))
        self.thread = threading.Thread(target=self.pool.serve, args=(self.listener,))
        self.thread.start()
        self.known = KnownPool("p", self.directory.path, about, is_up=True)
        self.keys = Keys.new()._replace(job_id="job1")
        self.way = WarmWay(self.known, self.keys, self.otherwise, lambda _: self.connect)  # type: ignore[arg-type,return-value]

    def another_way(self) -> WarmWay:
        """That of another job, which has other keys."""
        self.keys = Keys.new()._replace(job_id="job2")
        return WarmWay(self.known, self.keys, self.otherwise, lambda _: self.connect)  # type: ignore[arg-type,return-value]

    def connect(self, host: Host) -> PipeConnection:
        if host.name == "b":
            self.go_on.wait()
        if host.name in self.broken:
            raise ConnectFailed("no route", host=host.name)
        return PipeConnection(self.shell, host.name, "")

    def otherwise(self, host: Host) -> AgentConnection:
        raise HostError("by ssh", host=host.name)

    def agent(self, host: str = "a", **config: Any) -> Agent:
        return Agent(self.way.connect(Host(host)), {**CONFIG, **config})

    def facts(self, host: str = "a") -> dict[str, Any]:
        found: dict[str, Any] = ask(self.known, {"what": "hosts"})["hosts"][host]
        return found

    def close(self) -> None:
        """May be repeated."""
        if self.is_closed:
            return
        self.is_closed = True
        self.pool.stop()
        self.thread.join()
        self.pool.close()
        self.listener.close()
        self.directory.close()


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(closing(Site(tmp_path / "pools", **options)))
    wait_until(lambda: not warm_agents(), "no warm agent is left")


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    one = make_site()
    assert one.problems == []
    return one


def warm_agents() -> list[psutil.Process]:
    """Those of this process: its children, since the shells exec."""
    found: list[psutil.Process] = []
    for each in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            found += [each] if each.name() == "hvl-warm" else []
    return found


def agents() -> list[int]:
    """The pids of those that the warm agents have forked; a guardian has the name of an agent for a moment."""
    found: list[int] = []
    for warm in warm_agents():
        with suppress(psutil.NoSuchProcess):
            guardians = [each for each in warm.children() if each.name() == "hvl-guardian"]
            found += [
                each.pid
                for guardian in guardians
                for each in guardian.children()
                if each.name() == "hvl-agent"
            ]
    return found


def test_status_names_the_hosts_that_are_awaited(make_site: Callable[..., Site]) -> None:
    told: list[Any] = []

    def on_status(site: Site, ask: AskStatus | None) -> None:
        if ask is None:
            told.append(None)
            return
        wait_until(lambda: ask().done == 1, "a is there")
        told.append(ask())
        site.go_on.set()

    def later(site: Site) -> None:
        site.go_on.clear()

    site = make_site(on_status=on_status, before=later, clock=lambda: 5.0)
    assert site.problems == []
    assert told == [Status("connecting 1/2, 0 s\nwaiting for b", 1, 2), None]


def test_agents_are_forked_and_report_their_ends(site: Site) -> None:
    scratches = set()
    for _ in range(3):
        agent = site.agent()
        hello = agent.greet()
        scratches.add(hello["scratch"])
        assert Path(hello["scratch"]).is_dir()
        agent.start("print('x' * 100_000)")
        assert agent.expect("exited")["code"] == 0
        assert agent.end() == 0
        assert not Path(hello["scratch"]).exists()
    assert len(scratches) == 3
    wait_until(lambda: site.facts()["jobs"] == [], "no job has the pool")


def test_unused_spare_agent_ends(site: Site) -> None:
    assert site.agent(lease=4.0).end() == 0
    wait_until(agents, "there is a spare")
    wait_until(lambda: not agents(), "it has gone")
    assert site.agent(lease=4.0).end() == 0


def test_spare_agent_is_used_by_an_equal_job_only(site: Site) -> None:
    assert site.agent().end() == 0
    [spare] = wait_until(agents, "there is a spare")
    first = site.agent()
    first.greet()
    assert agents() == [spare]
    assert first.end() == 0
    wait_until(lambda: agents() not in ([], [spare]), "there is another")
    [spare] = agents()
    other = site.agent(grace=2.0)
    other.greet()
    wait_until(lambda: spare not in agents(), "the spare has gone")
    assert other.end() == 0


def test_two_jobs_at_once_do_not_meet(site: Site) -> None:
    first, second = site.agent(grace=0.1), site.agent()
    assert first.greet()["scratch"] != second.greet()["scratch"]
    pid = second.start(NO_WORKERS)
    assert first.end() == 0
    assert psutil.pid_exists(pid)
    assert site.facts()["jobs"] == ["job1"]
    second.connection.close()  # nobody comes back: the agent ends its worker when its time is over
    wait_until(lambda: not psutil.pid_exists(pid), "the worker has ended")


def test_killed_agent_leaves_nothing_and_is_reported(site: Site) -> None:
    agent = site.agent()
    agent.greet()
    pid = agent.start(NO_WORKERS)
    psutil.Process(psutil.Process(pid).ppid()).kill()
    assert list(agent.frames) == []
    assert agent.channel.exit_status(0.0) == 128 + signal.SIGKILL
    assert b"killed by SIGKILL" in agent.channel.stderr()
    assert not psutil.pid_exists(pid)


def test_workers_end_if_guardian_and_agent_are_killed_together(site: Site) -> None:
    """Without the warm agent above them, nothing would be there that notices."""
    agent = site.agent()
    agent.greet()
    pid = agent.start(NO_WORKERS)
    family = psutil.Process(pid).parents()[1::-1]
    assert [process.name() for process in family] == ["hvl-guardian", "hvl-agent"]
    for process in family:
        process.suspend()
    # The agent may have ended with its guardian.
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    wait_until(lambda: not psutil.pid_exists(pid), "the worker has ended")


def test_lack_of_descriptors_fails_one_job_only(make_site: Callable[..., Site]) -> None:
    site = make_site(shell=("/bin/sh", "-c", 'ulimit -n 9; exec /bin/sh -c "$0"'))
    for _ in range(3):
        agent = site.agent()
        agent.channel.send((HELLO, b""))
        assert list(agent.frames) == []
        assert agent.channel.exit_status(0.0) == 1
        assert b"can't start a process: Too many open files" in agent.channel.stderr()
    assert site.facts()["state"] == "ready"


def test_killed_warm_agent_breaks_its_streams_and_is_replaced(
    site: Site,
) -> None:
    agent = site.agent()
    scratch = Path(agent.greet()["scratch"])
    [its] = [each for each in warm_agents() if each.children()]
    its.kill()
    with pytest.raises(ConnectionResetError):
        list(agent.frames)
    assert agent.channel.exit_status(0.0) is None  # it has not ended: another connection may lead to it
    wait_until(lambda: not scratch.exists(), "the agent has waited for another connection in vain")
    wait_until(lambda: site.facts()["state"] == "ready", "there is another warm agent")
    assert site.agent().greet()["scratch"] != str(scratch)


def test_unreachable_host_is_reported_and_retried(site: Site) -> None:
    site.broken = {"b"}
    for each in warm_agents():
        each.kill()
    wait_until(
        lambda: site.facts("a")["state"] == "ready" and site.facts("b")["state"] == "away", "b is away"
    )
    wait_until(lambda: site.facts("b")["problem"] == "no route", "why is known")
    with pytest.raises(ConnectFailed, match=r"pool p has no connection to it now: no route"):
        site.way.connect(Host("b"))
    site.broken = set()
    wait_until(lambda: site.facts("b")["state"] == "ready", "b is there again")


def test_other_hosts_and_all_hosts_of_a_lost_pool_are_reached_by_ssh(site: Site) -> None:
    with pytest.raises(HostError, match="by ssh"):
        site.way.connect(Host("c"))
    site.close()
    way = WarmWay(site.known, site.keys, site.otherwise, lambda _: site.connect)  # type: ignore[arg-type,return-value]
    with pytest.raises(HostError, match="by ssh"):
        way.connect(Host("a"))


def test_blocked_driver_does_not_delay_other_jobs(site: Site) -> None:
    slow, other = site.agent(window=32 << 20), site.agent()
    for each in (slow, other):
        each.greet()
    slow.start("print('x' * (8 << 20))")  # more than sockets hold
    for _ in range(3):
        other.channel.send(({"type": "ping"}, b""))
        assert other.expect("pong")
    assert other.end() == 0
    size = 0
    for header, body in slow.frames:
        size += len(body) if header["type"] == "output" else 0
        if header["type"] == "exited":
            slow.channel.send(({"type": "bye"}, b""))
    assert size == (8 << 20) + 1


def test_pool_in_use_is_not_ended(site: Site) -> None:
    agent = site.agent()
    agent.greet()
    with pytest.raises(BadUsage, match="pool p is used by 1 jobs"):
        ask(site.known, {"what": "down"})
    assert agent.end() == 0
    agent.connection.close()
    wait_until(lambda: site.facts()["jobs"] == [], "no job has the pool")
    ask(site.known, {"what": "down"})
    site.thread.join(60)
    assert not site.thread.is_alive()


def test_pool_ends_at_once_on_request(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_LOOK", 86_400.0)
    site = make_site()
    assert site.facts()["state"] == "ready"  # and it waits for whoever comes next
    site.pool.stop()
    site.thread.join(60)
    assert not site.thread.is_alive()


def test_a_request_does_not_check_all_hosts(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    monkeypatch.setattr(WarmHost, "check_lease", lambda host: looked.append(host.host.name))
    site = make_site(clock=lambda: 5.0)
    for _ in range(5):
        site.facts()
    assert looked == ["a", "b"]


def test_idle_pool_ends(make_site: Callable[..., Site]) -> None:
    times = [0.0]
    site = make_site(idle_timeout=50.0, clock=lambda: times[0])
    assert site.facts()["state"] == "ready"
    times[0] = 49.0
    agent = site.agent()
    agent.greet()
    times[0] = 200.0
    assert site.facts()["jobs"] == ["job1"]
    wait_until(lambda: ask(site.known, {"what": "hosts"})["idle"] == 0.0, "it has seen that it is used")
    agent.end()
    agent.connection.close()
    wait_until(lambda: site.facts()["jobs"] == [], "no job has the pool")
    times[0] = 400.0
    site.thread.join(60)
    assert not site.thread.is_alive()


NO_REQUESTS = [
    b"\n",
    b"[]\n",
    b"{}\n",
    b'{"what": 1}\n',
    b'{"what": "nonsense"}\n',
    b"\xff\n",
    b"x" * (1 << 23),
]
NO_LANES: list[dict[str, Any]] = [
    {"what": "lane"},
    {"what": "lane", "host": "nobody", "job": "j", "config": CONFIG},
    {"what": "lane", "host": "a", "job": 1, "config": CONFIG},
    {"what": "lane", "host": "a", "job": "j", "config": {"lease": "x"}},
]


def test_malformed_requests_are_refused_without_harm(site: Site) -> None:
    agent = site.agent()
    agent.greet()
    for line in NO_REQUESTS:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(60)
            link.connect(str(site.directory.path / "control"))
            try:
                link.sendall(line)
                assert b"refused" in link.recv(1000)
            except (BrokenPipeError, ConnectionResetError):
                assert len(line) > 1 << 22
    for request in NO_LANES:
        with open_stream(site.known) as link:
            link.settimeout(60)
            link.sendall(json.dumps(request).encode() + b"\n")
            assert link.recv(1000) == b""
    assert agent.end() == 0


def test_each_job_gets_a_certificate_of_its_own(site: Site) -> None:
    found = []
    for _ in range(3):
        wait_until(lambda: site.pool.has_certificate, "there is one")
        way = site.another_way()
        way.connect(Host("a"))
        way.connect(Host("b"))
        assert tls_context(site.keys.certificate)
        found.append(site.keys.certificate.fingerprint)
    assert len({*found}) == 3


def test_threads_of_a_job_share_one_request(site: Site) -> None:
    asked: list[Any] = []
    answer = site.pool._answer
    site.pool._answer = lambda request: asked.append(request) or answer(request)  # type: ignore[func-returns-value,method-assign]
    threads = [
        threading.Thread(target=site.way.connect, args=(Host("ab"[number % 2]),)) for number in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == [{"what": "begin"}]


def test_a_pool_without_a_process_is_said(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path / "pools", "p", {"name": "p"})
    known = KnownPool("p", directory.path, {}, is_up=True)
    with pytest.raises(PoolGone, match="pool p: its process does not answer"):
        ask(known, {"what": "hosts"})
    os.close(directory._lock)
    with pytest.raises(BadUsage, match="the process of pool p was killed; up: none"):
        find_pool(tmp_path / "pools", "p")
    with pytest.raises(BadUsage, match="there is no pool q; up: none"):
        find_pool(tmp_path / "pools", "q")
