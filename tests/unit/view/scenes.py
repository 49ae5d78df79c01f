"""Jobs as a reader of the view may meet them: what their drivers tell, and the verdict on each."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from hvlaunch.view.model import Model, View

__all__ = ["JOB", "SCENES", "Scene"]

JOB = "0123456789ab"
BEGAN = 1_767_225_600.0
GIB = 1 << 30


@dataclass(frozen=True)
class Scene:
    """A job at a moment."""

    tone: str
    verdict: str
    """Its headline."""
    detail: str
    job: Mapping[str, Any]
    events: tuple[Mapping[str, Any], ...]
    samples: tuple[Mapping[str, Any], ...] = ()
    seconds: float = 600.0
    """Seconds since the job began."""
    report: Mapping[str, Any] | None = None

    def view(self) -> View:
        model = Model()
        model.add_events(self.events)
        return model.view(self.job, self.samples, BEGAN + self.seconds)


def event(kind: str, second: float, **fields: Any) -> dict[str, Any]:
    time = datetime.fromtimestamp(BEGAN + second, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {"time": time, "job": JOB, "type": kind, **fields}


def started(number: int, second: float, ranks: Mapping[str, int]) -> list[dict[str, Any]]:
    """The events of a round's start, with so many workers by host."""
    events = [event("round_starting", second, round=number, workers=sum(ranks.values()), hosts=list(ranks))]
    first = 0
    for host, count in ranks.items():
        events.append(
            event(
                "workers_starting", second, host=host, round=number, ranks=list(range(first, first + count))
            )
        )
        first += count
    return events


def job(ranks: Mapping[str, int], *, size: int | None = None, **more: Any) -> dict[str, Any]:
    """The driver's answer about a job that runs, with so many workers by host."""
    workers: list[dict[str, Any]] = []
    for host, count in ranks.items():
        for local in range(count):
            rank = len(workers)
            progress = {"step": 410 - (rank == 9), "total": 1000, "rate": 3.125, "metrics": {"loss": 0.25}}
            workers.append(
                {"rank": rank, "local_rank": local, "host": host, "state": "working", "progress": progress}
            )
    hosts = [{"host": host, "state": "ready", "is_listed": True, "is_excluded": False} for host in ranks]
    current = {"number": 0, "size": size or len(workers), "state": "running"}
    told = {
        "id": JOB,
        "name": "<b>digits</b>",
        "command": ["python", "train.py"],
        "began": BEGAN,
        "pid": 1,
        "hang": None,
    }
    return {
        **told,
        "is_elastic": True,
        "phase": "running",
        "round": current,
        "workers": workers,
        "hosts": hosts,
        **more,
    }


def sample(host: str, first: int, count: int) -> dict[str, Any]:
    """What a host with a GPU for each worker measures."""
    workers = [
        {
            "rank": first + local,
            "pid": 4000 + local,
            "cpu": 1.0,
            "memory": 3 * GIB,
            "state": "R",
            "waits_in": None,
            "last_output": 0.5,
            "gpus": [local],
        }
        for local in range(count)
    ]
    gpus = [
        {
            "index": local,
            "utilization": (0.02, 0.3, 0.6, 0.97)[local % 4],
            "memory_used": 30 * GIB,
            "memory_total": 80 * GIB,
        }
        for local in range(count)
    ]
    return {
        "host": host, "cores": 64, "cpu": 12.0, "memory_used": 90 * GIB, "memory_total": 512 * GIB, "network_in": 1e6, "network_out": 2e6,
        "disk_read": 0.0, "disk_write": 0.0, "workers": workers, "gpus": gpus, "problems": [],
    }  # fmt: skip


def changed(answer: dict[str, Any], ranks: Iterable[int], **fields: Any) -> dict[str, Any]:
    """The job, with fields of some workers changed."""
    for rank in ranks:
        answer["workers"][rank].update(fields)
    return answer


FOUR = {"gpu1": 8, "gpu2": 8, "gpu3": 8, "gpu4": 8}
THREE = {"gpu1": 8, "gpu3": 8, "gpu4": 8}
SAMPLES = tuple(sample(host, 8 * number, 8) for number, host in enumerate(FOUR))
FIRST = started(0, 2, FOUR)
LOST = {
    "kind": "host_problem",
    "host": "gpu2",
    "error": "HostLost",
    "cause": "lost: silent for 15 s (--lease)",
    "hint": "ping gpu2",
}
KILLED = {
    "kind": "worker_ended",
    "rank": 9,
    "host": "gpu2",
    "code": None,
    "signal": "SIGKILL",
    "not_started": None,
}
LOSS = [
    event("host_lost", 300, host="gpu2", error="HostLost", cause=LOST["cause"], hint=LOST["hint"]),
    event("host_excluded", 300, host="gpu2", seconds=None, cause="host gpu2: lost", reason=LOST, text="host gpu2 is excluded for the rest of the job: lost: silent for 15 s (--lease)"),
    event("round_ending", 300, round=0, cause="host gpu2: lost: silent for 15 s (--lease)", reason=LOST, text="round 0 ends"),
]  # fmt: skip
KILL = [
    event("worker_exited", 500, host="gpu2", rank=9, round=0, code=None, signal="SIGKILL"),
    event("round_ending", 500, round=0, cause="rank 9 on host gpu2 was killed by SIGKILL", reason=KILLED, text="round 0 ends"),
]  # fmt: skip
GONE = {"host": "gpu2", "state": "none", "is_listed": True, "is_excluded": True}
ONE = {"number": 1, "size": 24, "state": "running"}
EXIT = event("worker_exited", 590, host="gpu2", rank=9, round=0, code=1, signal=None)
VICTIM = event("worker_exited", 591, host="gpu1", rank=0, round=0, code=None, signal="SIGTERM")
CAUSE = {
    "rank": 9, "host": "gpu2", "end": "exit code 1", "kind": "missing file", "exception": "FileNotFoundError: /data/<b>shard-9</b>.npy", "when": 590.0,
    "memory": [], "missing": None, "output": "hvlaunch logs --rank 9", "hint": "check the path",
    "evidence": {"kind": "last lines of stderr", "lines": ["Traceback (most recent call last):", "FileNotFoundError: /data/<b>shard-9</b>.npy"]},
}  # fmt: skip
STACKS = {
    "places": [{"ranks": "0-8,10-31", "place": "all_reduce (train.py:88)"}],
    "notes": [],
    "tree": ["all_reduce"],
}
REPORT = {
    "text": "hvlaunch: rank 9 of 32 on host gpu2 failed first, after 590 s: exit code 1\n",
    "cause": CAUSE,
    "stacks": STACKS,
}


def ended(code: int, **fields: Any) -> dict[str, Any]:
    nothing = {"rank": None, "host": None, "interrupted": None, "error": None}
    return event("job_ended", 600, exit_code=code, **{**nothing, **fields})


def scene(
    tone: str, verdict: str, detail: str, answer: Mapping[str, Any], *events: Mapping[str, Any], **more: Any
) -> Scene:
    return Scene(tone, verdict, detail, answer, events, **more)


READY = job(FOUR)["hosts"]
MANY = {f"gpu{number:03}": 8 for number in range(128)}
CONNECTING = [*READY[:2], *({**host, "state": "connecting"} for host in READY[2:])]

SCENES = {
    "connecting": scene(
        "wait", "Forming: 2 of 4 hosts are ready", "hvlaunch connects to hosts gpu3 and gpu4",
        job({}, phase="connecting", round=None, hosts=CONNECTING), event("host_ready", 1, host="gpu1"),
    ),
    "starting": scene("wait", "Forming: 30 of 32 ranks work", "", changed(job(FOUR), (0, 31), state="starting"), *FIRST),
    "training": scene(
        "good", "Training: 32 of 32 ranks", "step 409 of 1000, 3.12 steps/s, loss 0.25", job(FOUR), *FIRST, samples=SAMPLES
    ),
    "running": scene("good", "Running: 32 of 32 ranks", "", changed(job(FOUR), range(32), progress=None), *FIRST),
    "slow": scene(
        "good", "Training: 32 of 32 ranks", "step 300 of 1000, 1 steps/s, loss 0.25, rank 9 on host gpu2 is the slowest",
        changed(job(FOUR), [9], progress={"step": 300, "total": 1000, "rate": 1.0, "metrics": {"loss": 0.25}}), *FIRST, samples=SAMPLES,
    ),
    "hung": scene(
        "bad", "Hung for 1 min 15 s: ranks 3,7", "ranks 3,7 wait in <module> (train.py:3); the others wait for them in all_reduce",
        job(FOUR, hang={"seconds": 60.1, "ranks": [3, 7], "text": "ranks 3,7 wait in <module> (train.py:3); the others wait for them in all_reduce"}),
        *FIRST, event("job_hanging", 585.1, seconds=60.1, ranks=[3, 7], detail="", text="the job is hung: no rank has made progress for 60 s"), samples=SAMPLES,
    ),
    "many": scene(
        "bad",
        "Hung for 1 min 0 s: rank 999",
        "rank 999 waits in read",
        job(MANY, hang={"seconds": 60.0, "ranks": [999], "text": "rank 999 waits in read"}),
        *started(0, 2, MANY),
    ),
    "stopped": scene(
        "bad", "Stopped by a signal: rank 2", "on host gpu1", job(FOUR), *FIRST,
        samples=({**SAMPLES[0], "workers": [{**SAMPLES[0]["workers"][2], "state": "T"}]},),
    ),
    "away": scene(
        "wait", "Connection is lost: host gpu3", "hvlaunch connects again; the workers go on", job(FOUR), *FIRST,
        event("host_away", 598, host="gpu3", cause="no answer for 5 s"), samples=SAMPLES,
    ),
    "back": scene(
        "good", "Training: 32 of 32 ranks", "step 409 of 1000, 3.12 steps/s, loss 0.25", job(FOUR), *FIRST,
        event("host_away", 590, host="gpu3", cause="no answer for 5 s"), event("host_back", 595, host="gpu3", seconds=5.0),
    ),
    "host lost": scene(
        "bad", "Host gpu2 is lost; the next round forms", "host gpu2: lost: silent for 15 s (--lease)",
        job(THREE, size=32, round={"number": 0, "size": 32, "state": "broken"}, hosts=[*job(THREE)["hosts"], GONE]), *FIRST, *LOSS, seconds=301,
    ),
    "smaller": scene(
        "wait", "Host gpu2 is lost; round 1 formed with 24", "host gpu2: lost: silent for 15 s (--lease)",
        job(THREE, round=ONE, hosts=[*job(THREE)["hosts"], GONE]), *FIRST, *LOSS, *started(1, 302, THREE), samples=SAMPLES,
    ),
    "worker failed": scene(
        "bad", "Rank 9 failed; the next round forms", "rank 9 on host gpu2 was killed by SIGKILL",
        changed(job(FOUR, round={"number": 0, "size": 32, "state": "broken"}), range(32), state="stopping"), *FIRST, *KILL, seconds=501,
    ),
    "recovered": scene(
        "wait", "Rank 9 failed; round 1 formed with 32", "rank 9 on host gpu2 was killed by SIGKILL",
        job(FOUR, round={**ONE, "size": 32}), *FIRST, *KILL, *started(1, 502, FOUR), seconds=520,
    ),
    "long recovered": scene(
        "good", "Training: 32 of 32 ranks", "step 409 of 1000, 3.12 steps/s, loss 0.25",
        job(FOUR, round={**ONE, "size": 32}), *FIRST, *KILL, *started(1, 502, FOUR), seconds=600,
    ),
    "grows": scene(
        "wait", "Workers come or go; the next round forms", "more workers",
        job(THREE, round={"number": 0, "size": 24, "state": "changing"}), *started(0, 2, THREE),
        event("round_changing", 599, round=0, cause="more workers", reason={"kind": "more_workers", "workers": 8}),
    ),
    "stopping after a failure": scene(
        "bad", "Rank 9 on gpu2 ended with exit code 1", "30 of 32 ranks still run",
        {**job(FOUR, phase="stopping", is_elastic=False), "workers": job(FOUR)["workers"][:30]}, *FIRST, EXIT, VICTIM,
    ),
    "stopping": scene(
        "wait", "Stopping", "32 of 32 ranks still run", job(FOUR, phase="stopping"), *FIRST, *KILL, *started(1, 502, FOUR),
        event("interrupting", 599, signal="SIGINT", grace=10.0, text="got SIGINT: workers have 10 s to end"),
    ),
    "finishing": scene(
        "good", "Finishing: 2 of 32 ranks are done", "step 409 of 1000, 3.12 steps/s, loss 0.25",
        {**job(FOUR, phase="finishing"), "workers": job(FOUR)["workers"][:30]}, *FIRST,
    ),
    "finished": scene("good", "Finished after 10 min 0 s", "exit code 0", job({}, hosts=READY), *FIRST, ended(0)),
    "failed": scene(
        "bad", "Failed: rank 9 on host gpu2", "rank 9 on gpu2 ended with exit code 1; exit code 1 after 10 min 0 s",
        job({}, hosts=READY), *FIRST, EXIT, VICTIM, ended(1, rank=9, host="gpu2"), report=REPORT,
    ),
    "failed without a rank": scene(
        "bad", "Failed: no host is left", "exit code 1 after 10 min 0 s", job({}, hosts=READY), *FIRST, ended(1, error="X", cause="no host is left", hint=None)
    ),
    "interrupted": scene("wait", "Stopped by SIGINT", "exit code 130 after 10 min 0 s", job({}, hosts=READY), *FIRST, ended(130, interrupted="SIGINT")),
}  # fmt: skip
