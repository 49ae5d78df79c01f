"""The forms of what commands print with `--json`, as a table: docs/reference/json.md and the JSON Schema are made of it.

`python -m hvlaunch.cli.pages.json_forms` prints the schema.
"""

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from hvlaunch.named_tuples import NamedTuple

__all__ = ["FORMS", "KIND", "JsonForm", "json_schema"]


class JsonForm(NamedTuple):
    """An object."""

    command: str
    """Command that prints the object; empty for a part of other objects."""
    about: str
    fields: Mapping[str, str]
    """For each name a kind and the meaning. `?` behind the name: the field may be missing; behind the kind: it may be null.
    `[]` is a list, `{}` an object by names, `@` another form."""


_EACH = ", on its own line"
FORMS: Mapping[str, JsonForm] = {
    "job": JsonForm(
        "hvlaunch jobs --json",
        f"A job{_EACH}",
        {
            "id": "string id",
            "name": "string? of `--job-name`",
            "command": "string[] its words",
            "np": "integer? of `-np`",
            "detach": "string `never`, `at start` or `on hangup`",
            "is_elastic": "boolean whether it may have several rounds",
            "launcher": "string? `mpirun`, `srun`, … if it started the agents",
            "began": "number seconds since 1970",
            "cwd": "string the workers' directory",
            "machine": "string where its driver was started",
            "pid": "integer of its driver",
            "version": "string of hvlaunch",
            "lease": "number seconds of `--lease`",
            "ready_port?": "integer of `--ready-port`",
            "ready_url?": "string of `--ready-url`",
            "code?": "any{} hash and commit of its tree, with `--sync`",
            "has_driver": "boolean whether a driver lives",
            "state": "any{}? the driver's answer to [`GET /job`](../interfaces/control.md#the-job); null without one",
            "result": "@result? its end; null before",
        },
    ),
    "result": JsonForm(
        "",
        "The end of a job",
        {
            "exit_code": "integer of the job",
            "has_run": "boolean whether a worker was started",
            "elapsed": "number seconds since the workers were started",
            "rank": "integer? that failed first",
            "host": "string? of this rank",
            "first_victim": "integer? rank that ended before it",
            "interrupted": "string? signal by which the user ended the job",
            "error": "string? kind of an error besides workers",
            "cause?": "string its cause",
            "hint?": "string? its next step",
            "bill?": "@bill what the job took",
        },
    ),
    "bill": JsonForm(
        "",
        "What a job [took](jobs.md#the-bill)",
        {
            "wall_seconds": "number sum of the seven below",
            "start_seconds": "number until the workers ran, or made their first step",
            "training_seconds": "number while all workers ran",
            "lost_seconds": "number behind the newest commit, at failures",
            "recovery_seconds": "number without all workers",
            "hung_seconds": "number without progress",
            "end_seconds": "number since the last worker ran",
            "has_steps": "boolean whether workers report steps or commits",
            "recoveries": "integer number of recoveries",
            "gpu_hours": "number? of the workers' GPUs; null if unknown",
            "idle_gpu_hours": "number? of these, outside of the training",
            "energy_joules": "number? as far as NVML's counter was read",
            "energy_gpu_hours": "number for which it was read",
            "failures": "integer rounds that ended by a failure",
            "commits": "integer of rank 0",
            "commit_seconds": "number? by which a commit delayed training, on average",
            "commit_every": "number? seconds between commits that would cost least (Young/Daly)",
            "save_seconds": "number? of a write to the directory of `--save-to`, on average",
            "save_every": "number? the best `--save-every`",
            "save_trouble": "string? why commits were not saved at the end, if the ranks are the cause",
        },
    ),
    "report": JsonForm(
        "hvlaunch --report FILE.json",
        "The failure report, also `report.json` of an ended job; [its page](../interfaces/report.md) explains the fields",
        {
            "version": "integer of this form",
            "hvlaunch": "string version of hvlaunch",
            "job": "any{} what was started",
            "outcome": "string `well`, `failed`, `not started`, `error`, `interrupted`, `running`",
            "exit_code": "integer? of the job",
            "elapsed": "number seconds since the workers were started",
            "ended": "number? seconds since 1970",
            "size": "integer workers of the last round",
            "interrupted": "string? signal by which the user ended the job",
            "error": "@problem? what ended the job besides workers",
            "cause": "any{}? the worker that failed first, and the evidence",
            "first_to_end": "@worker? the worker that ended before the cause",
            "workers": "@worker[] of the last round",
            "stacks": "any{} of the workers that were stopped",
            "bill": "@bill? what the job took",
            "slow_hosts": "string{} cause of the slowness by host",
            "rounds": "any{}[] rounds that ended early",
            "text": "string the report as the terminal has it",
        },
    ),
    "problem": JsonForm(
        "",
        "An error",
        {
            "kind": "string its name",
            "cause": "string in a sentence",
            "host": "string? where",
            "hint": "string? the next step",
            "errors": "@problem[] of several hosts",
        },
    ),
    "worker": JsonForm(
        "",
        "A worker's end",
        {
            "rank": "integer its rank",
            "role": "string `cause`, `failed`, `consequence`, `stopped`, `finished`, …",
            "worker?": "string its role and rank there, such as `gen:1`",
            "host?": "string its host",
            "end?": "string in words",
            "code?": "integer? exit code",
            "signal?": "string? that ended it",
            "when?": "number seconds since the start",
            "max_rss?": "integer bytes",
            "oom_killed?": "boolean by the kernel, for want of memory",
        },
    ),
    "output": JsonForm(
        "hvlaunch logs --json",
        f"A piece of output{_EACH}",
        {
            "time": "number seconds since 1970",
            "rank": "integer? that printed it",
            "stream": "string `stdout` or `stderr`",
            "text": "string as printed",
        },
    ),
    "view": JsonForm(
        "hvlaunch top --json",
        "A job at this moment, as the page of `hvlaunch top --web` has it",
        {
            "verdict": "@verdict what is wrong with it, or how far it is",
            "id": "string of the job",
            "name": "string? of `--job-name`",
            "command": "string[] its words",
            "time": "number seconds since 1970",
            "began": "number seconds since 1970",
            "phase": "string `connecting`, `running`, …",
            "round": "integer? of an elastic job",
            "round_state": "string? `running`, `changing` or `broken`",
            "size": "integer workers of the round",
            "is_sampled": "boolean whether there are figures of hosts",
            "hosts": "@host[] the worst first",
            "moments": "any{}[] the newest events: `time`, `kind`, `text`, `host`, `rank`, `round`",
            "rounds": "any{}[] `number`, `begin`, `end`, `hosts`, `cause`, `failure`",
            "hang": "any{}? `seconds`, `ranks`, `text`",
            "ending": "any{}? `exit_code`, `rank`, `host`, `cause`, `hint`, `interrupted`, `lines`",
        },
    ),
    "verdict": JsonForm(
        "",
        "The verdict",
        {
            "tone": "string `good`, `wait` or `bad`",
            "text": "string a headline",
            "detail": "string a line; empty for none",
        },
    ),
    "host": JsonForm(
        "",
        "A host of a view; null for what is unknown",
        {
            "host": "string its name",
            "state": "string `ready`, `connecting`, `away`, `excluded`, …",
            "cores": "integer? processors",
            "cpu": "number? processors in use",
            "memory_used": "integer? bytes",
            "memory_total": "integer? bytes",
            "gpus": "integer number of GPUs",
            "gpu": "number? their use, from 0 to 1",
            "gpu_memory_used": "integer? bytes",
            "gpu_memory_total": "integer? bytes",
            "network_in": "number? bytes per second",
            "network_out": "number? bytes per second",
            "disk_read": "number? bytes per second",
            "disk_write": "number? bytes per second",
            "problems": "string[] reasons for missing figures",
            "ranks": "@rank[] the worst first",
            "slow": "string cause of its slowness; empty without",
            "commits": "integer? bytes of commits in memory",
        },
    ),
    "rank": JsonForm(
        "",
        "A rank of a view; null for what is unknown",
        {
            "rank": "integer its number",
            "role": "string its role and rank there; empty without roles",
            "host": "string its host",
            "state": "string `working`, `hanging`, `waiting`, …",
            "pid": "integer? of its process",
            "step": "integer? that it reports",
            "total": "integer? number of steps",
            "rate": "number? steps per second",
            "loss": "number? that it reports",
            "cpu": "number? processors in use, with its children",
            "memory": "integer? resident bytes",
            "gpu": "number? use of its GPUs, from 0 to 1",
            "gpu_memory": "integer? bytes",
            "silent": "number? seconds since it printed",
            "activity": "string? of its busiest process, unless that runs",
            "printed": "integer bytes of output",
            "line": "string its last line",
            "is_slowest": "boolean whether it is slower than the others",
        },
    ),
    "process": JsonForm(
        "hvlaunch stacks --json",
        f"A process of a worker{_EACH}",
        {
            "host": "string its host",
            "rank": "integer of the worker",
            "pid": "integer its pid",
            "command": "string its command",
            "is_child": "boolean whether it is below the worker's own process",
            "source": "string `py-spy`, `faulthandler` or `kernel`",
            "problem": "string? why there is nothing better",
            "threads": "@thread[] the main one first",
        },
    ),
    "thread": JsonForm(
        "",
        "A thread",
        {
            "name": "string its name",
            "is_python": "boolean whether it runs Python",
            "frames": "@frame[] the outermost first",
        },
    ),
    "frame": JsonForm(
        "",
        "A frame",
        {"function": "string its name", "file": "string its path", "line": "integer? its line"},
    ),
    "differences": JsonForm(
        "hvlaunch diff JOB JOB --json",
        "The differences between two jobs",
        {
            "a": "string id of a job",
            "b": "string id of the other",
            "differences": "@difference[] by part",
            "not_compared": "string[] what could not be compared",
        },
    ),
    "difference": JsonForm(
        "",
        "A difference",
        {
            "part": "string `code`, `file`, `lock`, `job`, `option`, `environment`, `seed`, `host`, …",
            "name": "string what differs",
            "a": "any null if only the other job has it",
            "b": "any the same",
        },
    ),
    "copies": JsonForm(
        "hvlaunch cp --json",
        "What was copied",
        {
            "path": "string on the hosts",
            "files": "integer? number of files; null if there was nothing to send",
            "bytes": "integer? of all files",
            "hash": "string? of all files",
            "hosts": "@copy{} by host",
        },
    ),
    "copy": JsonForm(
        "",
        "A host's copy",
        {
            "received": "integer? new bytes; null if it is not complete",
            "error": "string? why it is not",
        },
    ),
    "collection": JsonForm(
        "hvlaunch collect --json", "What was brought back", {"hosts": "@collected{} by host"}
    ),
    "collected": JsonForm(
        "",
        "A host's files",
        {
            "host": "string its name",
            "files": "integer of it that are here",
            "received": "integer new bytes",
            "skipped": "any[] pairs of a path that stayed there and the reason",
            "problem": "string? why files are missing",
        },
    ),
    "doctor": JsonForm(
        "hvlaunch doctor --json",
        "The findings",
        {
            "version": "string of hvlaunch",
            "exit_code": "integer of the command",
            "findings": "@line[] in the order of the report",
        },
    ),
    "line": JsonForm(
        "",
        "A line of the report",
        {
            "section": "string its heading",
            "name": "string what was looked at",
            "level": "string `good`, `note`, `warning` or `error`",
            "text": "string what was found",
            "hint": "string? the next step",
            "exit_code": "integer of a job with this error",
        },
    ),
    "record": JsonForm(
        "hvlaunch hosts --json",
        f"The record of a machine{_EACH}, the worst first",
        {
            "hosts": "string[] its names",
            "score": "number 0.5 or more makes a suspect",
            "weight": "number of all verdicts",
            "is_suspect": "boolean whether `--avoid-suspects` avoids it",
            "verdicts": "@entry[] the oldest first",
        },
    ),
    "entry": JsonForm(
        "",
        "A verdict",
        {
            "when": "number seconds since 1970",
            "host": "string its name in the job",
            "machine": "string id of the machine; empty if unknown",
            "verdict": "string such as `gpu fault` or `lost`",
            "job": "string id of the job",
            "detail": "string more; empty for none",
        },
    ),
    "units": JsonForm(
        "hvlaunch hosts -H HOSTS --json",
        f"A host's GPUs or slots{_EACH}",
        {
            "host": "string its name",
            "units": "@unit[] by index",
            "tickets": "@ticket[] of jobs that wait, in order",
            "cause": "string? why there are none",
            "at": "number seconds since 1970, by its clock",
        },
    ),
    "unit": JsonForm(
        "",
        "A GPU or a slot",
        {
            "name": "string of its lock",
            "index": "integer its number",
            "model": "string of the GPU",
            "is_free": "boolean whether a job can have it",
            "holder": "any{}? `user`, `pid`, `job`, `since`, `busy_at`",
            "processes": "any{}[] on the GPU: `pid`, `user`, `command`",
            "memory_used": "integer bytes",
            "memory_total": "integer bytes; 0 for a slot",
            "utilization": "number from 0 to 1",
        },
    ),
    "ticket": JsonForm(
        "",
        "A job that waits",
        {
            "user": "string its user",
            "job": "string its id",
            "since": "number seconds since 1970",
            "is_mine": "boolean whether it is yours",
        },
    ),
    "comparison": JsonForm(
        "hvlaunch check --json",
        "The hosts compared; [check.md](../interfaces/check.md) names the values",
        {
            "errors": "integer findings of this level",
            "warnings": "integer findings of this level",
            "findings": "@finding[] by check",
            "hosts": "@compared{} by host",
        },
    ),
    "finding": JsonForm(
        "",
        "A finding",
        {
            "host": "string where",
            "level": "string `error`, `warning` or `note`",
            "subject": "string name of the check",
            "text": "string what is wrong",
            "remedy": "string the next step; empty for none",
        },
    ),
    "compared": JsonForm(
        "",
        "A host",
        {
            "level": "string the worst of its findings, else `good`",
            "values": "any{} by name",
            "details": "any{}? all that was read; not stable",
        },
    ),
    "conclusion": JsonForm(
        "hvlaunch bisect -H HOSTS --json -- COMMAND",
        "The cause",
        {
            "cause": "string `nothing`, `everything`, `host`, `network`, `link` or `unclear`",
            "hosts": "string[] the bad hosts, or the ends of the bad link",
            "confidence": "number from 0 to 1",
            "rounds": "integer runs of sets",
            "text": "string in a sentence",
        },
    ),
    "queued": JsonForm(
        "hvlaunch queue ls [--all] --json",
        f"A job of the queue{_EACH}, in the order of their starts",
        {
            "id": "string its number, as `12` or `12_3`",
            "name": "string? of `--job-name`",
            "state": "string `waiting`, `starting`, `running` or `ended`",
            "text": "string the state in words",
            "since": "number begin of the state, in seconds since 1970",
            "added": "number seconds since 1970",
            "hosts": "string[] its hosts; before the start, those from which it gets some",
            "workers": "integer number of workers",
            "gpus_per_worker": "integer GPUs or slots of each",
            "time_limit": "number? seconds",
            "after": "string[] jobs to end first",
            "is_held": "boolean whether it waits for `hvlaunch queue release JOB`",
            "starts_by": "number? latest start, in seconds since 1970; null if unknown",
            "job": "string? id for other commands, from its start on",
            "exit_code": "integer? at its end",
            "command": "string its command",
        },
    ),
    "pool": JsonForm(
        "hvlaunch pool status --json",
        f"A warm pool{_EACH}",
        {
            "name": "string its name",
            "state": "string `up`, `killed` or `no answer`",
            "hosts": "any{} by name: `state`, `problem`, `jobs`",
            "idle": "number? seconds without a job",
            "machine": "string? of its process",
            "pid": "integer? of its process",
            "version": "string? of hvlaunch",
            "began": "number? seconds since 1970",
        },
    ),
    "preset": JsonForm(
        "hvlaunch presets --json",
        f"A preset of `--for`{_EACH}",
        {
            "name": "string its name",
            "about": "string what it starts",
            "example": "string a line to type",
            "origin": "string its file",
        },
    ),
}
"""Forms by name."""

KIND = re.compile(r"(@?)(\w+)(\[\]|\{\})?(\[\])?(\?)?")
"""Form of a kind: `@`, its name, list or object, list of these, null."""
_TYPES = {"string", "integer", "number", "boolean"}


def json_schema(*, is_closed: bool = False) -> dict[str, Any]:
    """Return the forms as JSON Schema, draft 2020-12; with `is_closed`, no form may have further fields."""
    forms = {name: _object(form, is_closed) for name, form in FORMS.items()}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": forms}


def _object(form: JsonForm, is_closed: bool) -> dict[str, Any]:
    return {
        "type": "object",
        "description": form.about,
        "properties": {name.rstrip("?"): _property(text) for name, text in form.fields.items()},
        "required": [name for name in form.fields if not name.endswith("?")],
        **({"additionalProperties": False} if is_closed else {}),
    }


def _property(text: str) -> dict[str, Any]:
    kind, _, about = text.partition(" ")
    match = KIND.fullmatch(kind)
    if match is None:
        raise ValueError(f"{kind!r} is no kind")
    schema: dict[str, Any] = {}
    if match[1]:
        schema = {"$ref": f"#/$defs/{match[2]}"}
    elif match[2] in _TYPES:
        schema = {"type": match[2]}
    for sign in filter(None, match.groups()[2:4]):
        schema = (
            {"type": "array", "items": schema}
            if sign == "[]"
            else {"type": "object", "additionalProperties": schema}
        )
    return {**({"anyOf": [schema, {"type": "null"}]} if match[5] else schema), "description": about}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(json_schema(), indent=1) + "\n")
