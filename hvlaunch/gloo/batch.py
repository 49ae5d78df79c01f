"""The allocation of `hvlaunch sbatch`: hosts that are kept from the batch script's begin to its end, and the steps in it.

A batch job visits its hosts: their agents hold the leases, and the errand `batch` runs the script on the first host. A step
(`srun` in the script) is a job of its own, which this process starts as a child: it has its own agents, report and name.
"""

import signal
import subprocess
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO

from hvlaunch.agent.errands.batch import ANSWER, READY
from hvlaunch.console.printer import Printer
from hvlaunch.driver.links.errands import Answers, Errand, ErrandFailed, Limits, write_line
from hvlaunch.engine.hosts import LOOPBACK, candidates
from hvlaunch.errors import HostError, HostFault, Problem
from hvlaunch.gloo.examination import Gathering
from hvlaunch.gloo.leasing import JobLeases
from hvlaunch.gloo.preparation import open_delivery
from hvlaunch.gloo.visit import visit_hosts
from hvlaunch.job import JobSpec
from hvlaunch.named_tuples import NamedTuple

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink, Prepare
    from hvlaunch.engine.events import HostFacts

__all__ = ["Allocated", "BatchJob", "Body", "ProgramAnswer", "ProgramRequest", "StepLine"]

_NO_LIMITS = Limits(seconds=None, memory=None, output=None)
_FOR_EVER = 1e8
_CHUNK = 1 << 16
_STDOUT, _STDERR = 1, 2


class Allocated(NamedTuple):
    """A host of the allocation."""

    host: str
    """Its name for hvlaunch."""
    node: str
    """Its name in the script: the host's name, or its address if not all hosts can resolve the names."""
    address: str
    cpus: int
    leased: tuple[str, ...] | None = None
    """Its leased GPUs or slots; None without leases."""
    project: str | None = None
    """Where the script starts in the host's copy of the working tree; None without one."""


class Body(NamedTuple):
    """The batch script, and how it runs."""

    text: str
    interpreter: tuple[str, ...]
    words: tuple[str, ...]
    """Arguments of the script."""
    cwd: str
    env: Mapping[str, str]


class ProgramRequest(NamedTuple):
    """A program of the script that asks: `srun`, `scontrol`."""

    program: str
    words: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    """Variables that the script has set or changed."""
    removed: tuple[str, ...]
    """Variables that the script has removed."""
    stdin: bytes


class ProgramAnswer(NamedTuple):
    """An answer without a step."""

    text: str
    code: int = 0


class StepLine(NamedTuple):
    """The command of this machine that carries out a step."""

    words: list[str]
    files: tuple[str | None, str | None] = (None, None)
    """Files of the script's host for stdout and stderr; None for those of `srun`."""


class BatchJob:
    """A batch job. stop() is for any thread, and for signal handlers."""

    def __init__(
        self,
        spec: JobSpec,
        about: Mapping[str, Any],
        begin: Callable[[Sequence[Allocated]], Body],
        answer: Callable[[ProgramRequest, Sequence[Allocated]], ProgramAnswer | StepLine],
        write: Callable[[int, bytes], object],
    ) -> None:
        """`begin` returns the script for an allocation, `answer` the command that carries out a step.

        `write` takes the script's output, with the number of the stream.
        """
        self._spec = spec
        self._begin = begin
        self._answer = answer
        self._write = write
        self._deliver: Prepare | None = None
        """Brings the submission's working tree to a host."""
        self._printer: Printer | None = None
        self._leases = (
            None
            if spec.leases is None
            else JobLeases(spec, spec.leases, about, self._tell, stop=self._stop_for)
        )
        self._folder = f"/tmp/hvlaunch-batch-{about['id']}"  # noqa: S108 (the errand makes it, and takes no other's)
        self._gathering = Gathering([host.name for host in spec.hosts])
        self._lock = threading.Lock()
        self._hosts: dict[str, tuple[HostLink, HostFacts]] = {}
        self._unknown: set[str] = set()
        self._lost: list[str] = []
        self._serving: set[str] = set()
        """Hosts of the allocation whose errand was started."""
        self._allocated: tuple[Allocated, ...] = ()
        self._errand: Errand | None = None
        self._steps = _Steps()
        self._is_over = threading.Event()
        self._is_stopping = False
        self._code: int | None = None

    def run(self, stderr: BinaryIO) -> tuple[int | None, Mapping[str, Problem]]:
        """Return the script's exit code, None if it has not run to its end, and the problems of hosts."""
        self._printer = printer = Printer(stderr, stderr, options=self._spec.console)
        try:
            with ExitStack() as opened:
                if self._spec.sync is not None:
                    delivery = open_delivery(self._spec, self._spec.sync, None, {}, is_successor=False)
                    self._deliver = opened.enter_context(delivery)
                problems = visit_hosts(self._spec, printer, self._work, self._drop, is_long=True)
        finally:
            self._is_over.set()
            self._steps.stop()
            printer.status(None)
            printer.close(1.0)
        return self._code, problems

    def _tell(self, text: str) -> None:
        if self._printer is not None:
            self._printer.say(text)

    def _say(self, text: str) -> None:
        """Write a message where hvlaunch's messages go, and into the script's output."""
        self._tell(text)
        self._write(_STDERR, f"hvlaunch: {text}\n".encode(errors="backslashreplace"))

    def stop(self) -> None:
        """Ask the script and its steps to end; kill what is left after the time of grace."""
        self._signal(signal.SIGTERM)
        if self._errand is None:
            raise KeyboardInterrupt
        if not self._is_stopping:
            self._is_stopping = True
            timer = threading.Timer(self._spec.grace, self._signal, [signal.SIGKILL])
            timer.daemon = True
            timer.start()

    def _signal(self, number: int) -> None:
        self._steps.stop()
        if self._errand is not None:
            write_line(self._errand, {"signal": number})

    def _drop(self, name: str) -> None:
        self._gathering.leave(name)
        if self._leases is not None:
            self._leases.drop(name)
        # With leases, a host that is lost before the choice may be one that the job never needed.
        if any(host.host == name for host in self._allocated) or self._leases is None:
            self._lost.append(name)

    def _work(self, link: "HostLink", facts: "HostFacts") -> None:
        """Serve a host from its answer to the job's end, in a thread of its own. Raises HostError."""
        try:
            self._serve(link, facts)
        except HostError:
            name = link.host.name
            self._drop(name)
            # Without the first host, or before the script runs, no host of the allocation has anything to wait for.
            if name in self._serving and (not self._allocated or name == self._allocated[0].host):
                self._is_over.set()
            raise

    def _serve(self, link: "HostLink", facts: "HostFacts") -> None:
        name = link.host.name
        if self._leases is not None:
            self._leases.lease_host(link, facts, lambda leased: self._hosts.update({name: (link, leased)}))
        else:
            self._hosts[name] = link, facts
        self._gathering.meet(name, "leased", _FOR_EVER)
        hosts = self._chosen()
        # A host without a lease is not part of the job; after a loss no host is.
        if name not in hosts or self._lost:
            self._gathering.leave(name)
            return
        if self._deliver is not None:
            facts = self._with_tree(self._deliver, link, self._hosts[name][1])
            self._hosts[name] = link, facts
        self._serving.add(name)
        address = next(iter(candidates(facts)), LOOPBACK)
        arguments = {"directory": self._folder, "names": hosts, "address": address}
        errand = link.errands.start("batch", arguments, _NO_LIMITS)
        try:
            answers = Answers(errand, name)
            with self._lock:
                self._unknown.update(answers.next(READY)["unknown"])
            self._gathering.meet(name, "names", _FOR_EVER)
            if name == hosts[0]:
                self._run_script(errand, hosts)
            reader = threading.Thread(target=self._read, args=(name, errand, answers), daemon=True)
            reader.start()
            if name == hosts[0]:
                errand.wait(None)
                reader.join(_FOR_EVER)
                self._code = errand.result()["code"]
                self._is_over.set()
                # Steps that the script has left running end with it.
                self._steps.stop()
                self._steps.wait(self._spec.grace + _CLOSING)
            else:
                self._is_over.wait()
                errand.close_input()
                errand.wait(_CLOSING)
        finally:
            errand.stop()

    @staticmethod
    def _with_tree(deliver: "Prepare", link: "HostLink", facts: "HostFacts") -> "HostFacts":
        """Return the facts with the host's copy of the working tree. Raises HostError."""
        outcomes: SimpleQueue[HostFacts | HostError] = SimpleQueue()
        deliver(link, facts, outcomes.put, outcomes.put)
        outcome = outcomes.get()
        if isinstance(outcome, HostError):
            raise outcome
        return outcome

    def _chosen(self) -> list[str]:
        """Return the hosts of the allocation, in the user's order."""
        names = [host.name for host in self._spec.hosts if host.name in self._hosts]
        return [name for name in names if self._leases is None or self._hosts[name][1].leased]

    def _run_script(self, errand: Errand, hosts: Sequence[str]) -> None:
        """Raises HostError."""
        if self._lost:
            raise HostFault(f"the job needs {len(self._spec.hosts)} hosts", host=self._lost[0])
        addresses = {name: next(iter(candidates(self._hosts[name][1])), LOOPBACK) for name in hosts}
        nodes = addresses if self._unknown else dict(zip(hosts, hosts, strict=True))
        if self._unknown and len(hosts) > 1:
            names = ", ".join(sorted(self._unknown))
            self._say(f"the script gets addresses as names of hosts: not every host can resolve {names}")
        self._allocated = tuple(
            Allocated(name, nodes[name], addresses[name], facts.cpus, facts.leased, facts.directory)
            for name in hosts
            for facts in [self._hosts[name][1]]
        )
        body = self._begin(self._allocated)
        self._errand = errand
        order = {
            "script": body.text,
            "interpreter": [*body.interpreter],
            "words": [*body.words],
            "cwd": body.cwd,
            "env": dict(body.env),
        }
        write_line(errand, {"begin": order})

    def _stop_for(self, cause: str) -> None:
        self._say(cause)
        self.stop()

    def _read(self, name: str, errand: Errand, answers: Answers) -> None:
        """Carry out the lines of a host's errand until its end."""
        # ValueError: what should be base64 is not.
        with suppress(ErrandFailed, ValueError):
            while True:
                line = answers.next(ANSWER)
                if "stream" in line:
                    self._write(line["stream"], b64decode(line["out"]))
                elif "gone" in line:
                    self._steps.stop((name, line["gone"]))
                elif "ask" in line:
                    # A step lasts for hours, and others may run beside it.
                    arguments = (name, line["ask"]), errand, line
                    threading.Thread(target=self._carry_out, args=arguments, daemon=True).start()

    def _carry_out(self, key: tuple[str, int], errand: Errand, line: Mapping[str, Any]) -> None:
        """Answer a request of `srun` or `scontrol`."""

        def tell(answer: Mapping[str, Any]) -> None:
            write_line(errand, {"ask": key[1], **answer})

        def show(stream: int, data: bytes) -> None:
            tell({"stream": stream, "out": b64encode(data).decode()})

        request = ProgramRequest(
            line["program"],
            tuple(line["words"]),
            line["cwd"],
            dict(line["set"]),
            tuple(line["unset"]),
            b64decode(line["stdin"]),
        )
        answer = self._answer(request, self._allocated)
        # The script's own host starts programs on the others, and none of the others does.
        if isinstance(answer, StepLine) and key[0] != self._allocated[0].host:
            answer = ProgramAnswer("srun: only the script itself can start steps\n", 1)
        if isinstance(answer, ProgramAnswer):
            show(_STDERR if answer.code else _STDOUT, answer.text.encode())
            tell({"code": answer.code})
            return
        if any(answer.files):
            tell({"files": answer.files})
        tell({"code": self._steps.run(key, answer.words, request.stdin, show)})


class _Steps:
    """The running steps, each a child process. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._has_ended = False

    def run(
        self, key: tuple[str, int], words: list[str], stdin: bytes, show: Callable[[int, bytes], None]
    ) -> int:
        """Run a step to its end; return its exit code."""
        with self._lock:
            if self._has_ended:
                return 128 + signal.SIGTERM
            # A session of its own: Ctrl-C is for the batch job, which ends its steps.
            step = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._running[key] = step
        readers = [
            threading.Thread(target=_pass_on, args=(pipe, number, show), daemon=True)
            for number, pipe in ((_STDOUT, step.stdout), (_STDERR, step.stderr))
        ]
        for reader in readers:
            reader.start()
        if step.stdin is not None:
            with suppress(OSError):
                step.stdin.write(stdin)
                step.stdin.close()
        for reader in readers:
            reader.join()
        code = step.wait()
        with self._lock:
            del self._running[key]
        return code if code >= 0 else 128 - code

    def stop(self, key: tuple[str, int] | None = None) -> None:
        """Stop a step, as Ctrl-C does, or all of them: then no other begins. A step ends its workers itself, in its time of grace."""
        with self._lock:
            self._has_ended = self._has_ended or key is None
            for other, step in self._running.items():
                if key in (None, other):
                    step.terminate()

    def wait(self, seconds: float) -> None:
        """Wait until no step runs."""
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            time.sleep(_LOOKING)


_LOOKING = 0.05
_CLOSING = 10.0


def _pass_on(pipe: Any, number: int, show: Callable[[int, bytes], None]) -> None:
    while data := pipe.read1(_CHUNK):
        show(number, data)
