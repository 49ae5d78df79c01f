"""One of each fact and of each cause, with the words for it; of causes also what a record has."""

import signal

from hvlaunch.engine import causes as why
from hvlaunch.engine import facts as tell
from hvlaunch.errors import HostLost, Problem

__all__ = ["CAUSES", "FACTS", "LOST", "STOPPED"]

LOST = HostLost("lost: silent", host="b", hint="ping b").problem
STOPPED = why.WorkerHangs(0, "a", "stopped", 30.0)
_ENDED = why.WorkerEnded(1, "b", 3, None, None)
_BETWEEN = Problem("Unreachable", "can't connect to host b (tried 10.0.0.2)", 69, "a", None, "b")
_SCRIPT = Problem("DiscoveryFailed", "./find: ended with status 1:\nno credentials", 69)
_HANGS = {"kind": "worker_hangs", "rank": 0, "host": "a"}

CAUSES: list[tuple[why.Cause, str, dict[str, object]]] = [
    (
        _ENDED,
        "rank 1 on host b ended with exit code 3",
        {
            "kind": "worker_ended",
            "rank": 1,
            "host": "b",
            "code": 3,
            "signal": None,
            "not_started": None,
            "role": "",
        },
    ),
    (
        why.WorkerEnded(1, "b", None, signal.SIGKILL, None),
        "rank 1 on host b was killed by SIGKILL",
        {
            "kind": "worker_ended",
            "rank": 1,
            "host": "b",
            "code": None,
            "signal": "SIGKILL",
            "not_started": None,
            "role": "",
        },
    ),
    (
        why.WorkerEnded(1, "b", 127, None, "train: not found"),
        "rank 1 on host b could not be started: train: not found",
        {
            "kind": "worker_ended",
            "rank": 1,
            "host": "b",
            "code": 127,
            "signal": None,
            "not_started": "train: not found",
            "role": "",
        },
    ),
    (STOPPED, "rank 0 on host a is stopped", {**_HANGS, "how": "stopped", "seconds": 30.0}),
    (
        why.WorkerHangs(0, "a", "silent", 20.0),
        "rank 0 on host a has been silent for 20 s",
        {**_HANGS, "how": "silent", "seconds": 20.0},
    ),
    (
        why.WorkerHangs(0, "a", "late", None),
        "rank 0 on host a has not left the round in time",
        {**_HANGS, "how": "late", "seconds": None},
    ),
    (
        why.WorkerLeft(1, "a", "OSError"),
        "rank 1 on host a has left the round: OSError",
        {"kind": "worker_left", "rank": 1, "host": "a", "words": "OSError"},
    ),
    (
        why.WorkerLeft(1, "a", ""),
        "rank 1 on host a has left the round",
        {"kind": "worker_left", "rank": 1, "host": "a", "words": ""},
    ),
    (
        why.JobHung(60.0, "rank 3 waits"),
        "the job is hung: no rank has made progress for 60 s; rank 3 waits",
        {"kind": "job_hung", "seconds": 60.0, "detail": "rank 3 waits"},
    ),
    (why.NoCommit(20.0), "no commit for 20 s", {"kind": "no_commit", "seconds": 20.0}),
    (
        why.NotMet((1, 3), ("a", "b"), 60.0),
        "ranks 1,3 on hosts a and b did not meet the other workers of the round within 60 s",
        {"kind": "not_met", "ranks": [1, 3], "hosts": ["a", "b"], "seconds": 60.0},
    ),
    (
        why.HostSilent("b", 1.5),
        "host b has given no sign of life for 1.5 s",
        {"kind": "host_silent", "host": "b", "seconds": 1.5},
    ),
    (
        why.WorkersMoved(),
        "its workers had moved to another host, and the job needs it again",
        {"kind": "workers_moved"},
    ),
    (
        why.HostProblem(LOST),
        "host b: lost: silent",
        {
            "kind": "host_problem",
            "host": "b",
            "error": "HostLost",
            "cause": "lost: silent",
            "hint": "ping b",
        },
    ),
    (
        why.WorkersFail(STOPPED),
        "its workers fail (rank 0 on host a is stopped)",
        {
            "kind": "workers_fail",
            "cause": "rank 0 on host a is stopped",
            "reason": {**_HANGS, "how": "stopped", "seconds": 30.0},
        },
    ),
    (
        why.RankDone(0, "a"),
        "rank 0 on host a is done (--end-with-rank)",
        {"kind": "rank_done", "rank": 0, "host": "a"},
    ),
    (why.RoleDone("train"), "role train is done (--end-with-role)", {"kind": "role_done", "role": "train"}),
    (why.TrainingDone(), "training is done", {"kind": "training_done"}),
    (why.NewTraining(), "its training is done, and another training begins", {"kind": "new_training"}),
    (
        why.SlotGone("b"),
        "host b has left the pool, or has fewer slots",
        {"kind": "slot_gone", "host": "b"},
    ),
    (
        why.WorkersToLeave(("n1", "n2")),
        "workers on hosts n1 and n2 have to leave",
        {"kind": "workers_to_leave", "hosts": ["n1", "n2"]},
    ),
    (why.MoreWorkers(1), "1 more worker", {"kind": "more_workers", "workers": 1}),
    (why.MoreWorkers(2), "2 more workers", {"kind": "more_workers", "workers": 2}),
    (
        why.RestartsUsedUp(3),
        "no restart is left (--max-restarts 3)",
        {"kind": "restarts_used_up", "limit": 3},
    ),
    (
        why.NoProgress(3, "b"),
        "the workers failed 3 times in a row without progress, mostly those on host b",
        {"kind": "no_progress", "times": 3, "suspect": "b"},
    ),
    (
        why.StartsFailed(5),
        "the worker of a slot failed 5 times in a row before it got a rank",
        {"kind": "starts_failed", "times": 5},
    ),
]

_ALONE = (
    "none of the 2 workers contacted another, at MASTER_PORT or at the rendezvous. They may have been 2"
    " single jobs: MPI's processes meet only if mpirun starts them (--mpi)"
)

FACTS: list[tuple[tell.Fact, str]] = [
    (
        tell.HostNotUsable(LOST, 5.0, goes_on=False),
        "host b: lost: silent; try: ping b; the other hosts have too few slots; trying again in 5 s",
    ),
    (
        tell.HostNotUsable(LOST, None, goes_on=True),
        "host b: lost: silent; try: ping b; the job continues without it",
    ),
    (
        tell.SlotsAssumed(("a", "b"), 8),
        "no number of workers was given, and hosts a and b have no GPU: each gets 1 worker; try: --slots-per-host 8, for a worker on each processor",
    ),
    (
        tell.SlotsAssumed(("localhost",), 4),
        "no number of workers was given, and host localhost has no GPU: it gets 1 worker; try: -np 4, for a worker on each processor",
    ),
    (
        tell.SlotsAssumed(("a",)),
        "no number of workers was given, and host a has no GPU: it gets 1 worker",
    ),
    (tell.HostSkipped(LOST), "host b is skipped: lost: silent; try: ping b"),
    (
        tell.JobHanging(60.0, (3,), "rank 3 waits"),
        "the job is hung: no rank has made progress for 60 s; rank 3 waits",
    ),
    (tell.JobGoingOn(), "the job is no longer hung, and continues"),
    (tell.JobEnding(why.RankDone(0, "a")), "the job ends: rank 0 on host a is done (--end-with-rank)"),
    (tell.HostExcluded("b", 4.0, why.HostProblem(LOST)), "host b is excluded for 4 s: lost: silent"),
    (
        tell.HostExcluded("b", None, why.HostProblem(_BETWEEN)),
        "host b is excluded for the rest of the job: host a: can't connect to host b (tried 10.0.0.2)",
    ),
    (
        tell.HostExcluded("b", 0.5, why.WorkersFail(_ENDED)),
        "host b is excluded for 0.5 s: its workers fail (rank 1 on host b ended with exit code 3)",
    ),
    (
        tell.HostSlow("a", 1.6, "clock", "GPU 1 runs at 800 MHz, those of the others at 1700 MHz"),
        "host a is slow (clock, 1.6 times as long as the others): GPU 1 runs at 800 MHz, those of the others at 1700 MHz",
    ),
    (tell.HostSlow("a", None, "network", "it loses 4 %"), "host a is slow (network): it loses 4 %"),
    (
        tell.MoveBeginning("a", None, ""),
        "host a is to move to another host (hvlaunch move): workers start there first",
    ),
    (
        tell.MoveBeginning("a", "d", "rank 0 works while the others wait"),
        "host a is to move to host d (rank 0 works while the others wait): workers start there first",
    ),
    (tell.HostMoving("a", ("d", "e")), "host a: its workers leave at their next commit, for hosts d and e"),
    (tell.HostMoved("a", 3, 2.04), "host a is free after 2.0 s: round 3 runs without it"),
    (tell.HostStays("a", "no worker runs there"), "host a is not moved: no worker runs there"),
    (
        tell.HostSetAside("b", 1.5),
        "host b: no sign of life for 1.5 s; the others go on without it, and it may return",
    ),
    (tell.HostTakenIn("b"), "host b: answers again; its workers may take part in the next round"),
    (tell.HostLostAtEnd(LOST), "host b: lost: silent; try: ping b"),
    (
        tell.HostNotClosing("a"),
        "host a: does not answer; its agent still stops the processes that are left there",
    ),
    (
        tell.HostLeftOver("a", 2),
        "host a: 2 processes of the job can't be killed (they belong to another user, are frozen, or are stuck in the kernel)",
    ),
    (
        tell.HostLeftOver("a", 1, (4711,)),
        "host a: 1 process of the job can't be killed (it belongs to another user, is frozen, or is stuck in the kernel): 4711",
    ),
    (
        tell.KernelLacks("a", "no subreaper: detached processes stay"),
        "host a: no subreaper: detached processes stay",
    ),
    (
        tell.RendezvousUnreachable("a", ("10.9.9.9", "10.9.9.8"), 4711),
        (
            "host a: can't reach the driver's rendezvous (tried 10.9.9.9:4711, 10.9.9.8:4711); "
            "HVLAUNCH_RENDEZVOUS is not set on it"
        ),
    ),
    (
        tell.SharedMachine(("n1", "n3")),
        "hosts n1 and n3 are the same machine, and each uses all of its slots",
    ),
    (
        tell.NetworkChosen(
            0, ("sockets use 10.0.0.0/24, as usual", "no host has an RDMA adapter"), is_split=False
        ),
        "--nccl auto: sockets use 10.0.0.0/24, as usual; no host has an RDMA adapter",
    ),
    (tell.PoolEmpty(keeps_hosts=True), "the pool is empty now: keeping the current hosts"),
    (tell.PoolEmpty(keeps_hosts=False), "no hosts in the pool yet: waiting for the first"),
    (
        tell.KeepingHosts(_SCRIPT),
        "./find: ended with status 1; keeping the current hosts:\nno credentials",
    ),
    (tell.SlotsLacking(2, 1, 600.0), "waiting for 2 slots (--min-np), for 600 s at most: there is 1"),
    (tell.SlotsLacking(1, 0, 60.0), "waiting for 1 slot (--min-np), for 60 s at most: there are 0"),
    (
        tell.RoundStarting(0, 4, ("a", "b"), "10.0.0.1", 20001),
        "4 workers on 2 hosts",
    ),
    (
        tell.RoundStarting(2, 1, ("a",), "10.0.0.1", 20001),
        "round 2: 1 worker on host a",
    ),
    (tell.RoundFormed(0, 4, ("a", "b"), None), "round 0: 4 workers on 2 hosts"),
    (tell.RoundFormed(1, 1, ("a",), why.MoreWorkers(1)), "round 1: 1 worker on 1 host (1 more worker)"),
    (tell.RoundEnding(1, why.NoCommit(20.0)), "round 1 ends: no commit for 20 s"),
    (
        tell.WorkerEndedEarly(1, "a"),
        "rank 1 on host a ended with exit code 0 before its training was done, which ends the job",
    ),
    (tell.WorkerKilled(STOPPED), "rank 0 on host a is stopped: it is killed"),
    (
        tell.WorkerStartFailed(_ENDED, 2, 4.0),
        "rank 1 on host b ended with exit code 3 before it got a rank; another worker starts in its slot in 4 s",
    ),
    (
        tell.WorkerRestarting(why.WorkerEnded(4, "c", 3, None, None, "gen:1"), 1, 0.0),
        "gen:1 (rank 4) on host c ended with exit code 3: it starts again",
    ),
    (
        tell.WorkerRestarting(why.WorkerEnded(1, "b", None, signal.SIGKILL, None, "train:1"), 2, 1.0),
        "train:1 (rank 1) on host b was killed by SIGKILL: all 2 workers of train start again in 1 s",
    ),
    (
        tell.Interrupting(signal.SIGTERM, 10.0),
        "got SIGTERM: workers have 10 s to end; a second one kills them at once",
    ),
    (
        tell.Interrupting(signal.SIGPIPE, 10.0),
        "the reader of the output is gone: workers have 10 s to end",
    ),
    (
        tell.WorkersAlone(2, ("mpi4py",)),
        _ALONE,
    ),
    (tell.JobEnding(why.RestartsUsedUp(0)), "the job ends: no restart is left (--max-restarts 0)"),
]
