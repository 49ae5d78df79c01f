"""--role and [role.NAME]: from words to a job, and what is refused."""

import shlex
from pathlib import Path

import pytest

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.plan import plan
from hvlaunch.cli.spec import job_spec
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.roles import place_roles
from hvlaunch.job import JobSpec, RestartLimit

TWO = "--role 'train=2x4@a,b: python train.py' --role 'gen=3x1@c: python serve.py'"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def spec_of(line: str) -> JobSpec:
    environ = {"PATH": "/bin", "HOME": "/nowhere"}
    return job_spec(parse(shlex.split(line), environ=environ), environ)[0]


def shares(line: str) -> dict[str, dict[str, int]]:
    return {role.name: dict(role.workers) for role in spec_of(line).roles}


def test_two_roles_on_three_hosts() -> None:
    spec = spec_of(
        f"{TWO} --role-policy gen=restart --max-restarts 3 --restart-window 60 --end-with-role train"
    )
    assert [(role.name, role.workers, role.gpus, role.policy) for role in spec.roles] == [
        ("train", (("a", 1), ("b", 1)), 4, "end"),
        ("gen", (("c", 3),), 1, "restart"),
    ]
    assert [(host.name, host.slots) for host in spec.hosts] == [("a", 1), ("b", 1), ("c", 3)]
    assert (spec.np, spec.elastic, spec.end_with_role) == (5, None, "train")
    assert spec.role_limit == RestartLimit(3, 60.0)
    assert spec.console.labels == ("train:0", "train:1", "gen:0", "gen:1", "gen:2")
    assert spec.command == ("train:", "python", "train.py", "gen:", "python", "serve.py")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--role 'a=2: true' --role 'b=1: true'", {"a": {"localhost": 2}, "b": {"localhost": 1}}),
        ("--role 'a=3@x,y: true'", {"a": {"x": 2, "y": 1}}),
        ("--role 'a=4@x:3,y:1: true'", {"a": {"x": 3, "y": 1}}),
        ("-H x:2,y:2 --role 'a=3@x,y: true' --role 'b=1: true'", {"a": {"x": 2, "y": 1}, "b": {"y": 1}}),
        ("-H x:9,y:1 --role 'a=5: true'", {"a": {"x": 4, "y": 1}}),
        ("--role 'a=1@u@x: true' --role 'b=2: true'", {"a": {"x": 1}, "b": {"x": 2}}),
    ],
)
def test_workers_are_spread_evenly_within_slots(line: str, expected: dict[str, dict[str, int]]) -> None:
    assert shares(line) == expected


def test_roles_of_a_host_share_no_slot() -> None:
    launches = place_roles(spec_of("--role 'a=3@x,y: true' --role 'b=2@y,x: true'").roles)
    assert [(launch.seat, launch.place.rank, launch.role and launch.role.label) for launch in launches] == [
        (("x", 0), 0, "a:0"),
        (("x", 1), 1, "a:1"),
        (("y", 0), 2, "a:2"),
        (("y", 1), 3, "b:0"),
        (("x", 2), 4, "b:1"),
    ]
    worlds = [launch.role.place for launch in launches if launch.role is not None]
    assert [(at.rank, at.size, at.local_rank, at.local_size, at.group_rank) for at in worlds] == [
        (0, 3, 0, 2, 0),
        (1, 3, 1, 2, 0),
        (2, 3, 0, 1, 1),
        (0, 2, 0, 1, 0),
        (1, 2, 0, 1, 1),
    ]


def test_a_file_says_the_same() -> None:
    Path("hvlaunch.toml").write_text(
        'end-with-role = "train"\n'
        '[role.train]\nworkers = 2\ngpus = 4\nhosts = ["a", "b"]\ncommand = ["python", "train.py"]\npolicy = "restart-all"\n'
        '[role.gen]\nworkers = 3\ngpus = 1\nhosts = "c"\ncommand = "python serve.py"\nenv = {A = "{rank}"}\n'
    )
    line = f"{TWO} --role-policy train=restart-all --role-env gen:A={{rank}} --end-with-role train"
    assert spec_of("").roles == spec_of(f"--isolated {line}").roles


def test_a_preset_counts_for_its_role_alone() -> None:
    spec = spec_of("--role 'a=1@x: vllm serve M' --role 'b=1@y: true' --role-for a=vllm")
    assert "--nnodes" in spec.roles[0].templates.words
    assert spec.roles[1].templates.words == ("true",)
    assert (spec.ready_url, spec.end_with_rank) == (None, None)


def test_the_plan_has_each_workers_command() -> None:
    text = plan(
        spec_of(
            "--role 'train=1@a: t {role:gen:all:http} {role:gen:1:host} {{rank}}' --role 'gen=2@c: g {own_port:http}'"
        ),
        is_local=lambda _: False,
    )
    assert "train:0 on a: t 'c:{port},c:{port}' c '{rank}'" in text
    assert "gen:1 on c: g '{port}'" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--role 'a=1: true' --role 'a=1: false'", "2 roles have the name a"),
        ("--role 'a=0: true'", "0 workers: must be at least 1"),
        ("--role 'a: true'", r"is not NAME=WORKERS\[xGPUS\]\[@HOSTS\]: COMMAND; try: --role"),
        ("--role 'a=1:true'", "is not NAME=WORKERS"),
        ("--role 'A_=1: true'", "no name of a role"),
        ('--role "a=1: sh -c \'"', "a: no closing quotation in its command"),
        ("--role 'a=200000: true'", "more than 100000 workers"),
        ("-H x:2 --role 'a=3: true'", "a: 3 workers, but its hosts have 2 slots left for it"),
        ("-H x:2 --role 'a=2: true' --role 'b=1: true'", "b: 1 workers, but its hosts have 0 slots"),
        ("--role 'a=3@x:1: true'", "a: 3 workers, but its hosts have 1 slot left"),
        ("-H x:2 --role 'a=1@y: true'", "y is no host of -H or the hostfile"),
        ("--role 'a=1: t {role:b:0:p}'", "{role:b:0:p}: no role 'b'; there are a"),
        ("--role 'a=1: t {role:a:1:host}'", "a has only ranks 0-0"),
        ("--role 'a=1: t {role:a:0:p}'", r"a has no port p; try: \{own_port:p\} in the command of a"),
        ("--role 'a=1: t {role:a}'", "needs a role, a rank in it or `all`, and a port"),
        ("--role 'a=1: t {own_port:hosts}'", "a port can't have the name hosts"),
        ("--role 'a=70: t {own_port:x}'", "host localhost would keep 71 ports; 64 are the most"),
        ("--templates true {role:a:0:p}", "is for a job with roles; try: --role"),
        ("--role-policy a=restart true", "--role-policy is for a job with roles"),
        ("--role 'a=1: true' --role-policy b=restart", "--role-policy: no role 'b'; there are a"),
        ("--role 'a=1: true' --role-policy a=again", "one of end, restart, restart-all"),
        ("--role 'a=1: true' --role-policy a", "--role-policy 'a' is not NAME=VALUE"),
        ("--role 'a=1: true' --role-env a:B", "--role-env needs NAME:VARIABLE=VALUE"),
        ("--role 'a=1: true' --end-with-role b", "--end-with-role: no role 'b'"),
        ("--role 'a=1: true' false", "there is another one"),
        ("--role 'a=1: true' -np 2", "-np.* is not for a job with roles .*; try: --role NAME=N"),
        ("--role 'a=1: true' --min-np 2", "--min-np.* is not for a job with roles"),
        ("--role 'a=1: true' --host-discovery-script ./x", "is not for a job with roles"),
        ("--role 'a=1: true' --elastic-timeout 3", "is not for a job with roles"),
        ("--role 'a=1: true' --mpi", "--mpi is not for a job with roles"),
        ("--role 'a=1: true' --for vllm", "--for is not for a job with roles .*; try: --role-for"),
        ("--role 'a=1: true' --horovod", "--horovod is not for a job with roles"),
        ("--role 'a=1: true' --cycle-time-ms 3", "is not for a job with roles"),
        ("--role 'a=1: true' --end-with-rank 0", "try: --end-with-role NAME"),
    ],
)
def test_lines_without_a_meaning_are_refused(line: str, message: str) -> None:
    with pytest.raises(BadUsage, match=message):
        spec_of(line)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[role.a]\nworkers = 1", r"\[role.a\] command is missing"),
        ("[role.a]\ncommand = 't'", r"\[role.a\] workers is missing"),
        ("[role.a]\ncommand = 't'\nworker = 1", r"\[role.a\] unknown key 'worker'; try: workers"),
        ("[role.a]\ncommand = {}\nworkers = 1", r"\[role.a\] command has no such value"),
        ("[role.a]\ncommand = 't'\nworkers = 1\nenv = 'A'", r"\[role.a\] env has no such value"),
        ("[role]\na = 1", r"\[role\] a must be a table"),
        ("[role.a]\ncommand = 't'\nworkers = 1\nfor = 'vllm'", "not allowed in a file that hvlaunch found"),
    ],
)
def test_a_mistake_in_a_file_is_named(text: str, message: str) -> None:
    Path("hvlaunch.toml").write_text(text)
    with pytest.raises(BadUsage, match=message):
        spec_of("")
