"""Training in rounds: the loop below elastic.run, and the ways out of a broken round.

A communicator of NCCL that is still being made can't be ended. And Gloo forgets a thread whose message is half sent or half
received (Pair::signalException in gloo/transport/tcp/pair.cc skips `rx_.ubuf`, and `ubuf` of the entries of `tx_`), and no
call reaches such a thread any more. Therefore a process that stays stuck replaces its program by the same program (exec):
same process, same pipes, the last commit in a file in memory.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
from torch import distributed as dist
from torch.distributed import Store
from torch.torch_version import TorchVersion

from hvlaunch.rendezvous import WaitTimeout
from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.messages import Grant, worker_of
from hvlaunch.rendezvous.worker import Dismissed, Membership, patiently
from hvlaunch.torch import current
from hvlaunch.torch.backends import GroupSockets, abort_groups, has_timed_out, is_groups
from hvlaunch.torch.current import World, let_go, meet
from hvlaunch.torch.elastic.state import Snapshot, State
from hvlaunch.torch.group_errors import (
    AlreadyInitialized,
    CollectiveFailed,
    RanksMissing,
    RankZeroGone,
    RankZeroMissing,
    StoreUnreachable,
    WorkersChanged,
)
from hvlaunch.torch.kept import BackgroundKeeper
from hvlaunch.torch.place import Place

__all__ = ["Escape", "Training", "is_elastic", "placed", "settle_nccl"]

T = TypeVar("T")

_LOOK = 2.0
"""Seconds between checks for a broken round while rank 0's address is awaited."""
_TIMED_OUT = "a collective of NCCL took longer than its timeout"
_DOUBT = 1.0
"""Seconds that the driver has to say whether the round is broken, if an error does not tell."""
_NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    "TORCH_DIST_USE_NCCL2": "0",
}
"""Settings of torch's watchdog thread. By default it ends the process a minute after an NCCL peer is gone, and sleeps during that
minute, so closing the groups waits too. With these settings it does nothing and sleeps for a second, four times the given value.

The last keeps the class of groups with which elastic rounds were tried on GPUs. torch 2.15 has another class by default.
"""
_SAME_NCCL = (
    "hvlaunch: NCCL's groups are those of torch 2.14 (TORCH_DIST_USE_NCCL2=0), since elastic jobs were not tried on GPUs with the"
    " new ones yet; -x TORCH_DIST_USE_NCCL2=1 takes the new ones\n"
)
_OWN_GROUPS = (
    "before a function under elastic.run, call hvlaunch.torch.init() or nothing, but not init_process_group();"
    " and call no such function inside another one"
)
_PEERS_FAILED = (
    CollectiveFailed,
    RanksMissing,
    RankZeroMissing,
    RankZeroGone,
    StoreUnreachable,
    dist.DistError,
)


class Training:
    """A process's way through its job. One per process: the driver counts rounds per process, over all trainings."""

    def __init__(self, client: Client, membership: Membership) -> None:
        self._client = client
        self._membership = membership
        # The object is replaced in each round: sockets of an old round must never be shut down for a new one.
        self._sockets = GroupSockets()
        self._groups: dict[str, Any] = {}
        """Options for making groups; see World.form."""
        self._stay: ExitStack | None = None
        """Exits the present round; None outside a round."""
        self._escape: Escape | None = None
        """Gets the training thread out of the present round."""
        self._late: str | None = None
        """The reason if this worker itself has broken the round."""
        self._is_wanted = False
        """True if the script has called init(): groups then stay open after training."""
        self._state: State | None = None
        self._brought: Baggage | None = None
        """State kept from before this process started over, until training takes it."""
        self._rounds = 0
        """Number of rounds of this process; one more if it has started over."""
        self._trainings = 0
        self._is_first_training = True
        """A process that starts over always reaches its first training first."""

    def join(self, **groups: Any) -> None:
        """Ask for a place and meet the round's other workers; repeat if the round breaks. `groups` has the options for making groups.

        The groups are open for the script, during and after training, until leave().

        Raises Dismissed, RendezvousError, and errors of World.form that a broken round does not explain.
        """
        self._groups, self._is_wanted = groups, True
        self._membership.start()
        try:
            cause = self._unpack()
            while self._stay is None:
                try:
                    self._enter(-1 if self._brought is None else self._brought.commits, cause)
                except CollectiveFailed as failed:  # noqa: PERF203 (a round each)
                    cause = str(failed)
        except BaseException:
            self._membership.finish()
            raise

    def leave(self) -> None:
        """Leave the round of join() together with all workers. Collective. Afterwards only join() may follow."""
        current.shutdown()
        if self._stay is not None:
            self._leave()
            self._membership.finish(is_done=True)
        self._groups, self._is_wanted = {}, False

    def run(self, state: State, train: Callable[[], T]) -> T:
        """Return the result of train() in the round that completes it. If join() was called, its round is the first.

        Raises AlreadyInitialized, Dismissed, RendezvousError, and errors of train() that a broken round does not explain.
        """
        if self._state is not None or (dist.is_initialized() and not self._is_wanted):
            raise AlreadyInitialized(_OWN_GROUPS)
        cause = None
        if self._stay is None:
            current.shutdown()  # of the training before this one
            self._membership.start()
            cause = self._unpack()
        is_done = False
        try:
            state.forget()
            self._resume(state)
            result = self._train(state, train, cause)
            is_done = True
        finally:
            self._state = None
            self._is_first_training = False
            self._leave(has_groups=is_done and self._is_wanted)
            self._membership.finish(is_done=is_done)
        return result

    def _train(self, state: State, train: Callable[[], T], cause: str | None) -> T:
        self._state = state
        # A second training of the same script has other states, and a new process comes to it by the same way.
        self._trainings += 1
        keeper = BackgroundKeeper(f"elastic-{self._trainings}")
        while True:
            try:
                if self._stay is None:
                    self._enter(state.commits, cause)
                with self._as_it_breaks():
                    # All workers have the same state: one of each host keeps it.
                    place = current.world().place
                    keeper.begin(self._membership.last_round, rank=place.rank, local_rank=place.local_rank)
                    state.attach(_TrainedRound(self._membership, self._escape), keeper)
                    # The first round has nothing to reset, and Horovod's callbacks are not called in it.
                    if self._rounds > 1:
                        state.on_reset()
                    state.sync()
                    result = train()
                    _see_whole(self._escape)
                    if not self._is_wanted:
                        current.shutdown()
            except WorkersChanged as change:  # noqa: PERF203 (a round each)
                cause = None
                _empty_frames(change)
            except CollectiveFailed as failed:
                cause = str(failed)
                _empty_frames(failed)
                state.restore()
            else:
                return result
            finally:
                state.attach(None)

    def _unpack(self) -> str | None:
        """Return why this process has started over; None if it has not."""
        self._brought = unpack() or self._brought
        if self._brought is None:
            return None
        self._rounds = 1
        self._membership.last_round = self._brought.last_round
        return self._brought.cause

    def _resume(self, state: State) -> None:
        """Give the state the values that this process kept when it started over."""
        if self._brought is not None:
            state.take_over(self._brought.commits, self._brought.saved, self._brought.last_round)
            self._brought = None

    def _start_over(self, round_number: int) -> None:
        """Replace this process's program if possible; otherwise the driver ends the process after --reset-timeout."""
        notice = self._membership.broken(round_number, 0.0)
        cause = self._late if notice is None else notice.cause
        if cause is None or not self._is_first_training or not can_start_over():
            return
        # The driver must not count the silence as a hang: loading torch again may exceed --worker-timeout.
        self._membership.finish()  # it is silent until it is back
        saved: tuple[int, Snapshot | None] = (-1, None)
        if self._state is not None:
            saved = self._state.hand_over()
        elif self._brought is not None:
            saved = self._brought.commits, self._brought.saved
        try:
            start_over(Baggage(round_number, *saved, cause))
        except Exception as error:  # noqa: BLE001 (whatever pickling the user's objects raises)
            sys.stderr.write(f"hvlaunch: can't start over: {type(error).__name__}: {error}\n")
            self._membership.start()

    def _enter(self, commits: int, cause: str | None) -> None:
        """Ask for a place and make the round's groups. Raises CollectiveFailed if the round breaks meanwhile."""
        self._membership.ask(commits, cause)
        grant = self._membership.grant()
        # Peers needed the old connections until now, to answer what had arrived.
        self._sockets.release()  # a new round is made when all have left the last one
        self._sockets = GroupSockets()
        # torch reads these when it makes the first group of NCCL's, so they must be set before World.form.
        if settle_nccl(os.environ, torch.__version__) and torch.cuda.is_available() and grant.rank == 0:
            sys.stderr.write(_SAME_NCCL)
        self._stay = ExitStack()
        self._late = None
        # The escape exists before the groups: a peer may die while they are made, and Gloo would wait for
        # ever.
        ways_out = partial(_end_collectives, self._sockets), partial(self._start_over, grant.round)
        self._escape = self._stay.enter_context(Escape(*ways_out))
        self._membership.enter(grant.round, self._escape.begin)
        with self._as_it_breaks(), self._sockets.watch():
            current.enter(World.form(self._place(grant), self._meet, **self._groups))
        # After the groups: a process without groups has no timeout to look for.
        self._stay.enter_context(self._seeing_timeouts(self._escape))
        self._membership.met()
        self._rounds += 1

    @contextmanager
    def _seeing_timeouts(self, escape: Escape) -> Iterator[None]:
        """Leave the round if an NCCL collective exceeds its timeout. Gloo's collectives fail by themselves."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(_LOOK):
                if has_timed_out():
                    self._late = _TIMED_OUT
                    escape.begin()
                    return

        threading.Thread(target=look, name="hvlaunch timeouts", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    @contextmanager
    def _as_it_breaks(self) -> Iterator[None]:
        """Leave the round if the block raises. Raises CollectiveFailed if the broken round caused the error."""
        try:
            yield
        except WorkersChanged:
            self._leave()
            raise
        except BaseException as error:
            # While our groups stand: once they are gone, the others fail because of us, and the round breaks in any case.
            cause = self._why_left(error)
            self._leave()
            if cause is None:
                raise
            raise CollectiveFailed(cause) from error

    def _leave(self, *, has_groups: bool = False) -> None:
        """Leave the round. With `has_groups`, the groups stay open for work that is not part of the job."""
        self._membership.leave()
        if not has_groups:
            current.leave()
        if self._stay is not None:
            self._stay.close()
            self._stay = None

    def _why_left(self, error: BaseException) -> str | None:
        """Return what broke the round; None if this worker's own error did."""
        text = self._late or f"{type(error).__name__}: {error}".partition("\n")[0]
        has_ended_collectives = self._escape is not None and self._escape.has_begun
        if isinstance(error, _PEERS_FAILED) or is_groups(error):
            return text
        if isinstance(error, Exception) and has_ended_collectives:
            return text  # a script looks at its loss, say, which is garbage on a GPU
        is_doubtful = isinstance(error, RuntimeError)  # torch's word for nearly all that can go wrong
        is_broken = is_doubtful and self._membership.broken(self._membership.last_round, _DOUBT)
        return text if is_broken else None

    def _place(self, grant: Grant) -> Place:
        # The interface may change with the round's hosts; all three libraries read it when a group is made.
        if grant.variables is not None:
            for word in grant.variables.split():
                name, _, value = word.partition("=")
                os.environ[name] = value
        elif grant.interface is not None:
            names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
            os.environ.update(dict.fromkeys(names, grant.interface))
        return Place(
            rank=grant.rank,
            size=grant.size,
            local_rank=grant.local_rank,
            slot=worker_of(os.environ["HVLAUNCH_WORKER"])[1],
            host=os.environ["HVLAUNCH_HOST"],
            launcher="hvlaunch",
            round=grant.round,
            master_addr=grant.master_addr,
        )

    def _meet(self, place: Place, timeout: timedelta) -> Store:
        return meet(place, timeout, _RoundPost(self._client, self._membership, place.round))


class _TrainedRound:
    """See the protocol TrainedRound."""

    def __init__(self, membership: Membership, escape: Escape | None) -> None:
        self._membership = membership
        self._escape = escape
        self.number = membership.last_round

    def committed(self, commits: int) -> None:
        self._membership.committed(commits)

    def see_whole(self) -> None:
        _see_whole(self._escape)

    def check(self) -> None:
        changing = torch.tensor([int(self._membership.is_changing)], device=current.world().carrier)
        dist.all_reduce(changing, dist.ReduceOp.MAX)
        is_changing = bool(changing.item())
        self.see_whole()
        if is_changing:
            raise WorkersChanged("workers come or go")


def _see_whole(escape: Escape | None) -> None:
    """See State's TrainedRound. Synchronizing first means that each earlier collective has ended, or its abort is recorded."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        torch.cuda.synchronize()
        if escape is not None and escape.has_begun:
            raise CollectiveFailed("collectives of this round were ended")


class _RoundPost:
    """The rendezvous for meet(): waiting ends if the round breaks."""

    def __init__(self, client: Client, membership: Membership, round_number: int) -> None:
        self._client = client
        self._membership = membership
        self._round = round_number

    def put(self, scope: str, key: str, value: bytes) -> None:
        patiently(lambda: self._client.put(scope, key, value))

    def wait(self, scope: str, key: str, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        while self._membership.broken(self._round, 0.0) is None:
            left = min(_LOOK, max(deadline - time.monotonic(), 0.0))
            with suppress(WaitTimeout):
                return patiently(partial(self._client.wait, scope, key, left))
            if time.monotonic() >= deadline:
                raise RankZeroMissing(timeout)
        raise CollectiveFailed("the round broke before rank 0 published its address")


def _empty_frames(error: BaseException) -> None:
    """Release the local variables of the round that this error has ended.

    From Python 3.12 on contextlib keeps a handled error in a circle until the garbage collector runs. The round's
    DistributedDataParallel would live on: its hooks stay on the model's parameters, and fail the next round's backward pass.
    """
    for link in (error, error.__cause__):
        if link is not None:
            traceback.clear_frames(link.__traceback__)


def _end_collectives(sockets: GroupSockets) -> None:
    """End every running collective of this process now."""
    abort_groups()
    sockets.shut_down()


def settle_nccl(environ: MutableMapping[str, str], version: TorchVersion) -> bool:
    """Set how NCCL's groups behave in elastic jobs, unless the user did. Return True if this changes the class of torch's groups.

    A repeated call returns False.
    """
    is_changed = version >= "2.15" and "TORCH_DIST_USE_NCCL2" not in environ
    for name, value in _NCCL_SETTINGS.items():
        environ.setdefault(name, value)
    return is_changed


_BEATS_PER_TIMEOUT = 10
_BEAT_RANGE = (0.2, 5.0)


def is_elastic() -> bool:
    """Return True if hvlaunch gives this process a place in each round."""
    return os.environ.get("HVLAUNCH_ELASTIC") == "1"


@contextmanager
def placed() -> Iterator[Training]:
    """Yield this process's training. Raises SystemExit(0) if the job does not need this worker any more."""
    try:
        yield _training()
    except Dismissed:
        let_go()
        raise SystemExit(0) from None


@cache
def _training() -> Training:
    client = Client.from_environment()
    least, most = _BEAT_RANGE
    beat = min(most, max(least, float(os.environ["HVLAUNCH_WORKER_TIMEOUT"]) / _BEATS_PER_TIMEOUT))
    return Training(client, Membership(client, os.environ["HVLAUNCH_WORKER"], beat=beat))


_ESCAPE_LOOK = 1.0
_VARIABLE = "HVLAUNCH_BAGGAGE"
# Compared with the file names of stack frames, so the paths must be those that the interpreter recorded at
# import.
_TORCH = Path(torch.__file__).parent
_WAITING = (
    *(f"{_TORCH / part}" for part in ("distributed/", "autograd/", "nn/parallel/", "_ops.py")),
    *(f"{Path(__file__).parents[1] / part}" for part in ("collectives.py", "sharing.py")),
)
"""Files of torch and of hvlaunch in which a thread waits for a collective."""
# Threads in these files read or write checkpoints: slow, but not stuck.
_FILES = str(_TORCH / "distributed" / "checkpoint"), str(_TORCH / "serialization.py")
_GPU_LOOKS = 5
_SPINS = 0.25
"""Share of the time that a spinning thread computes on a busy machine."""
_CWD = Path.cwd()
_STDERR = 2


@dataclass(frozen=True)
class Baggage:
    """State that a process keeps when it starts over."""

    last_round: int
    """The round that the process could leave only by starting over."""
    commits: int
    saved: Snapshot | None
    cause: str


@dataclass(frozen=True)
class _Standing:
    """Position and CPU time of a thread."""

    place: tuple[tuple[int, int], ...]
    """Frame and instruction of each call, innermost first."""
    cpu: float
    waits: bool
    """True if the line's file is one where threads wait for collectives."""
    may_spin: bool
    """True if the thread may be waiting for a GPU, which spins."""

    def has_spun_since(self, before: _Standing, seconds: float) -> bool:
        """Return True if the thread computed in one place since `before`: waiting for a GPU looks like this."""
        return self.may_spin and self.place == before.place and self.cpu - before.cpu > _SPINS * seconds


class Escape:
    """Context of a round: gets the calling thread out of the round if the round breaks.

    `press` ends the operations that collectives wait for. It is called when the round breaks, and repeatedly while the thread
    stays. `start_over` is called once, if the thread stays stuck in a collective. Neither is called after the context was left.
    `look` is the number of seconds between two looks; a thread that has not moved in between is stuck. A thread that waits for a
    GPU (`uses_gpu`) spins in any line, so it counts as stuck only after several looks.
    """

    def __init__(
        self,
        press: Callable[[], object],
        start_over: Callable[[], object],
        *,
        look: float = _ESCAPE_LOOK,
        uses_gpu: Callable[[], bool] = torch.cuda.is_initialized,
    ) -> None:
        self._press = press
        self._start_over = start_over
        self._look = look
        self._uses_gpu = uses_gpu
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._is_out = threading.Event()
        self._turn = threading.Lock()
        """Held while the thread's state (inside or out) is read or changed."""
        self.has_begun = False
        """True once `press` was called: results of collectives on a GPU may be garbage from then on."""

    def __enter__(self) -> Escape:  # noqa: PYI034 (typing.Self came with Python 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._is_out.set()

    def begin(self) -> None:
        """Start to get the thread out of the broken round. Callable from any thread; only the first call counts."""
        with self._turn:
            if not (self._is_out.is_set() or self.has_begun):
                self.has_begun = True
                self._press()
                # A thread of its own: the caller may be the membership's thread, which must keep listening.
                threading.Thread(target=self._see_it_out, name="hvlaunch escape", daemon=True).start()

    def _see_it_out(self) -> None:
        before: _Standing | None = None
        looks = 0
        while not self._is_out.wait(self._look):
            with self._turn:
                if self._is_out.is_set():
                    return
                now = self._standing()
                spins = before is not None and now.has_spun_since(before, self._look)
                # A long kernel also spins for a look or two, so one look proves nothing on a GPU.
                looks = looks + 1 if spins else 0
                if (now.waits and now == before) or looks == _GPU_LOOKS:
                    self._start_over()
                    return
                before = now
                self._press()

    def _standing(self) -> _Standing:
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 (documented)
        if frame is None:
            return _Standing((), 0.0, waits=False, may_spin=False)
        return _Standing(
            tuple((id(call), call.f_lasti) for call in _calls(frame)),
            time.clock_gettime(self._clock),
            waits=_waits(frame),
            may_spin=self._uses_gpu() and not frame.f_code.co_filename.startswith(_FILES),
        )


def _calls(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _waits(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_WAITING) and not file.startswith(_FILES)


def can_start_over() -> bool:
    """Return True if this process can run its own command line again. A fork of multiprocessing has its parent's."""
    is_own = len(sys.orig_argv) > 1 and multiprocessing.parent_process() is None
    return is_own and bool(sys.executable) and hasattr(os, "memfd_create")


def start_over(baggage: Baggage) -> NoReturn:
    """Run this process's program again from its beginning, in this process and in its first working directory.

    The environment is the present one. Children of multiprocessing, such as data loaders, are killed because they would wait for
    ever. Raises OSError, and errors of pickling the baggage; then nothing has changed.
    """
    # Memory instead of a file on disk: the disk may be full or slow, and nothing must be left behind.
    file = os.memfd_create("hvlaunch", 0)
    with os.fdopen(file, "wb", closefd=False) as stream:
        torch.save(baggage, stream)
    os.lseek(file, 0, os.SEEK_SET)
    sys.stderr.write(f"hvlaunch: stuck in a collective ({baggage.cause}): this worker starts over\n")
    sys.stdout.flush()
    sys.stderr.flush()
    # exec keeps children, but their queues and pipes belong to the old program.
    for child in multiprocessing.active_children():
        child.kill()
    # Sockets of the old groups must not live on in the new program: peers wait for their end.
    for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 (one of them is gone again at once)
        if descriptor > _STDERR and descriptor != file:
            with suppress(OSError):
                os.set_inheritable(descriptor, False)
    # The command line may have relative paths, and the script may have changed directory.
    os.chdir(_CWD)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, _VARIABLE: str(file)})


def unpack() -> Baggage | None:
    """Return the state that this process kept when it started over, once; None if it did not start over."""
    file = os.environ.pop(_VARIABLE, None)
    if file is None:
        return None
    with os.fdopen(int(file), "rb") as stream:
        # Unpickling is safe: this process wrote the file itself.
        baggage = torch.load(stream, weights_only=False)
    if not isinstance(baggage, Baggage):
        raise TypeError(f"{_VARIABLE} has a {type(baggage).__name__}")
    return baggage
