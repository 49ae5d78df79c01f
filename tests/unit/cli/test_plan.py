"""What --dry-run prints, with the command for a launcher."""

import os
import re
import shlex
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvlaunch.cli.plan import launcher_plan, plan, quoted
from hvlaunch.errors import BadUsage, NotEnoughSlots
from hvlaunch.hosts.templates import templates_of
from hvlaunch.job import ConsoleOptions, Host, JobSpec, MPIOptions, SSHOptions, Templates

LATER = "(known once connected)"


def spec(*hosts, **fields):
    return JobSpec(
        **{"command": ("python", "train.py"), "hosts": hosts, "cwd": "/data", "verbose": True, **fields}
    )


def sections(spec, local=()):
    """Title to lines, without their indentation."""
    text = plan(spec, is_local=lambda host: host.name in local)
    parts = re.split(r"^(\S.*):\n", text, flags=re.MULTILINE)[1:]
    return {
        title: [line[2:] for line in body.rstrip("\n").split("\n")]
        for title, body in zip(parts[::2], parts[1::2], strict=True)
    }


def shared(found):
    return dict(line.split("=", 1) for line in found["environment of every worker, above its host's own"])


def by_rank(found):
    """Variable to its values by rank, with the blocks joined."""
    values: dict[str, list[str]] = {}
    for line in found.get("environment by rank", []):
        if line:
            name, *cells = line.split()
            values.setdefault(name, []).extend(cells)
    return values


def test_hosts_and_how_they_are_reached():
    found = sections(
        spec(
            Host("here", slots=1),
            Host("a", slots=2),
            Host("b", user="u", port=2222, address="10.0.0.1", identity="/k"),
            slots_per_host=4,
            ssh=SSHOptions(port=22, user="me"),
        ),
        local=["here"],
    )
    assert [re.split(r"  +", line) for line in found["7 workers on 3 hosts"]] == [
        ["host", "slots", "ranks", "reached by"],
        ["here", "1", "0", "this machine, without ssh"],
        ["a", "2", "1-2", "ssh, user me, port 22"],
        ["b", "4", "3-6", "ssh, user u, port 2222, address 10.0.0.1, identity /k"],
    ]


def test_ranks_fill_the_slots_in_order():
    found = sections(spec(Host("a", slots=2), Host("b", slots=1), Host("c", slots=3), np=5))
    assert [line.split() for line in found["5 workers on 3 hosts"]] == [
        ["host", "slots", "ranks", "reached", "by"],
        ["a", "2", "0-1", "ssh"],
        ["b", "1", "2", "ssh"],
        ["c", "3", "3-4", "ssh"],
    ]
    values = by_rank(found)
    assert (
        values["rank"] == values["RANK"] == values["HVLAUNCH_RANK"] == values["HOROVOD_RANK"] == list("01234")
    )
    assert values["LOCAL_RANK"] == list("01001")
    assert values["HVLAUNCH_CROSS_SIZE"] == list("32332")
    assert values["HVLAUNCH_HOST"] == list("aabcc")
    assert shared(found)["WORLD_SIZE"] == "5"


def test_hosts_that_are_not_needed_are_not_in_the_plan():
    assert "spare" not in plan(
        spec(Host("a", slots=2), Host("spare", slots=2), np=2), is_local=lambda host: False
    )


def test_too_many_processes():
    with pytest.raises(NotEnoughSlots):
        plan(spec(Host("a", slots=2), np=3), is_local=lambda host: False)


def test_the_plan_says_what_only_connected_hosts_know():
    env = shared(sections(spec(Host("a", slots=1))))
    later = {name for name, value in env.items() if value == LATER}
    assert later >= {
        "MASTER_ADDR",
        "MASTER_PORT",
        "HVLAUNCH_TOKEN",
        "HVLAUNCH_RENDEZVOUS",
        "GLOO_SOCKET_IFNAME",
    }
    assert later >= {"HVLAUNCH_JOB_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
    assert env["OMP_NUM_THREADS"] == env["PYTHONUNBUFFERED"] == "(set where the host has none)"
    assert env["RANK"] == "0"
    assert env["HOROVOD_CONTROLLER"] == "gloo"


def test_the_users_choice_stands():
    env = {
        "MASTER_ADDR": "m",
        "MASTER_PORT": "1",
        "NCCL_SOCKET_IFNAME": "ib0",
        "OMP_NUM_THREADS": "3",
        "MINE": "x y",
    }
    found = shared(sections(spec(Host("a", slots=1), env=env)))
    assert {name: found[name] for name in env} == env | {"MINE": "'x y'"}


@pytest.mark.parametrize("left_out", [[], ["EDITOR", "PAGER"]])
def test_the_plan_begins_with_hosts_and_has_the_environment_with_verbose(left_out):
    text = plan(
        spec(Host("a", slots=2), env={"A": "1"}, verbose=False),
        left_out=left_out,
        is_local=lambda host: False,
    )
    assert text.startswith(
        "2 workers on 1 host:\n  host  slots  ranks  reached by\n  a     2      0-1    ssh\n\n"
    )
    titles = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert titles == ["2 workers on 1 host", "command", "working directory"]
    assert "environment of" not in text
    assert "PAGER" not in text
    note = (
        "variables set here, and not passed on: 2 (-x NAME or --env all passes it on; --verbose lists them)"
    )
    assert text.endswith(note) is bool(left_out)
    verbose = plan(spec(Host("a", slots=2), env={"A": "1"}), left_out=left_out, is_local=lambda host: False)
    assert "\n  A=1\n" in verbose
    assert verbose.startswith(text.partition("\n\nvariables")[0])
    assert ("EDITOR, PAGER" in verbose) is bool(left_out)


def test_the_launchers_command_and_what_is_hidden_come_last():
    text = plan(
        spec(Host("a", slots=1), command=("train", "--token", "secret"), verbose=False),
        launcher="as a command of it:\n  mpirun",
        is_local=lambda host: False,
    )
    assert text.split("\n\n")[-2:] == [
        "as a command of it:\n  mpirun",
        "**** hides what may be a secret; --show-secrets shows it",
    ]
    assert "secret;" in text
    assert "--token secret" not in text


@pytest.mark.parametrize(("np", "size"), [(2, "2"), (None, None)])
def test_where_gpus_decide_no_rank_is_invented(np, size):
    found = sections(spec(Host("a"), Host("b"), np=np))
    title = "one worker in every slot of 2 hosts" if np is None else "2 workers on up to 2 hosts"
    assert [re.split(r"  +", line) for line in found[title][1:]] == [
        [name, "its GPUs, else 1", "known once connected", "ssh"] for name in "ab"
    ]
    assert shared(found).get("WORLD_SIZE") == size
    text = " ".join(found["environment by rank"])
    assert text.endswith("known once connected")
    assert {"RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"} <= set(re.findall(r"\w+", text))


def test_secrets_are_masked():
    env = {
        "API_KEY": "hunter2",
        "HF_TOKEN": "hunter2",
        "https_proxy": "http://me:hunter2@p:1",
        "PLAIN": "value",
    }
    text = plan(spec(Host("a", slots=1), env=env), is_local=lambda host: False)
    assert "hunter2" not in text
    assert "  API_KEY=****\n" in text
    assert "  PLAIN=value\n" in text


def test_wide_tables_are_folded():
    found = sections(spec(*(Host(f"a-rather-long-name-{n}", slots=4) for n in range(10))))
    lines = found["environment by rank"]
    assert max(map(len, lines)) <= 78
    assert by_rank(found)["RANK"] == [str(n) for n in range(40)]
    assert by_rank(found)["HVLAUNCH_HOST"] == [f"a-rather-long-name-{n // 4}" for n in range(40)]


def test_a_host_with_a_name_wider_than_the_table_gets_a_block_of_its_own():
    found = sections(spec(Host("x" * 150, slots=1), Host("b", slots=1)))
    assert by_rank(found)["HVLAUNCH_HOST"] == ["x" * 150, "b"]


def test_command_and_directory_are_quoted_lines():
    found = sections(
        spec(Host("a", slots=1), command=("sh", "-c", "echo '$X' \n\x1b[31m", "\udcff"), cwd="/a b")
    )
    assert found["command"] == [r"sh -c $'echo \'$X\' \n\033[31m' $'\377'"]
    assert found["working directory"] == ["'/a b'"]


@given(
    st.binary().map(lambda word: os.fsdecode(word.replace(b"\0", b"")))
    | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
)
def test_a_quoted_word_is_one_printable_line(word):
    assert quoted(word).isprintable()
    if word.isprintable():
        assert shlex.split(quoted(word)) == [word]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.binary(max_size=20).filter(lambda raw: b"\0" not in raw), max_size=20))
def test_bash_reads_back_what_was_quoted(raw):
    line = " ".join(quoted(part.decode("utf-8", "surrogateescape")) for part in raw)
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == (raw or [b""])


def test_each_workers_command_is_there_if_its_words_have_places():
    templates = Templates(
        ("serve", "{rank}", "{first:--port {port:x}}", "--head={master_addr}"),
        {"IP": "{host_ip}"},
        ("x",),
        {},
    )
    assert sections(spec(Host("a", 1), Host("b", 1), templates=templates))["command"] == [
        "rank 0 on a: IP='{host_ip}' serve 0 --port '{port:x}' '--head={master_addr}'",
        "rank 1 on b: IP='{host_ip}' serve 1 '--head={master_addr}'",
    ]
    unknown = sections(spec(Host("a"), templates=templates))["command"]
    assert unknown == ["serve '{rank}' '{first:--port {port:x}}' '--head={master_addr}'"]


def test_bindings_of_this_machine_are_shown_and_others_are_known_later(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    job = spec(Host("a", slots=2), Host("b", slots=2), bind="core", gpus_per_worker=1)
    lines = sections(job, local=("a",))["bindings"]
    assert lines[0].split() == ["host", "worker", "processors", "memory", "threads", "GPUs"]
    assert [line.split()[-1] for line in lines[1:3]] == ["5", "3"]
    assert lines[3] == "b: known once connected"
    assert by_rank(sections(job, local=("a",)))["HVLAUNCH_LOCAL_RANK"] == ["0", "1", "0", "1"]
    assert "bindings" not in sections(spec(Host("a", slots=2)), local=("a",))


@pytest.fixture
def options(tmp_path):
    program = tmp_path / "mpirun"
    program.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo "mpirun (Open MPI) 4.1.4"; else env; fi\n'
    )
    program.chmod(0o755)
    return MPIOptions(program=str(program))


def mpi_spec(*hosts, **more):
    return JobSpec(command=("train", "x y"), hosts=hosts, cwd="/w", **more)


def command(plan):
    return shlex.split(plan.splitlines()[-1])


def test_it_is_the_launchers_command_with_a_shell_for_each_rank(options):
    plan = launcher_plan(
        mpi_spec(Host("a", slots=2), Host("b", slots=1), env={"A": "1"}), options, {"A": "1"}
    )
    assert plan.startswith("as a command of Open MPI 4.1.4, to paste (")
    words = command(plan)
    assert words[:3] == ["MASTER_ADDR=a", "MASTER_PORT=29500", options.program]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    assert words[3:-6] == [
        *root,
        *[
            "-np",
            "3",
            "-H",
            "a:2,b:1",
            "--tag-output",
            "--bind-to",
            "none",
            "--map-by",
            "slot",
            "--wdir",
            "/w",
        ],
        *["-x", "A", "-x", "MASTER_ADDR", "-x", "MASTER_PORT"],
    ]
    assert words[-6:-4] == ["sh", "-c"]
    assert words[-3:] == ["sh", "train", "x y"]


def test_a_command_with_places_is_nothing_to_paste(options):
    """mpirun alone would give all workers the same words."""
    places = templates_of(["train", "{rank}"], {}, {}, is_per_host=False)
    assert launcher_plan(mpi_spec(Host("a", slots=2), templates=places), options, {}) == ""


def test_variables_missing_in_this_shell_are_shown_and_secrets_masked(options):
    env = {"A": "1", "B": "b c", "API_KEY": "secret", "MASTER_ADDR": "mine"}
    plan = launcher_plan(
        mpi_spec(Host("localhost", slots=1), env=env), options, {"A": "1", "API_KEY": "other"}
    )
    assert command(plan)[:4] == ["API_KEY=****", "B=b c", "MASTER_ADDR=mine", "MASTER_PORT=29500"]
    assert "secret" not in plan


def test_it_can_be_pasted(options):
    plan = launcher_plan(mpi_spec(Host("localhost", slots=1), env={"B": "it's $HOME"}), options, {})
    printed = subprocess.run(
        ["sh", "-c", plan.splitlines()[-1]], capture_output=True, text=True, check=True
    ).stdout
    assert "B=it's $HOME\n" in printed
    assert "MASTER_ADDR=127.0.0.1\n" in printed


def test_prefix_and_files(options, tmp_path):
    console = ConsoleOptions(prefix="{time} ")
    plan = launcher_plan(mpi_spec(Host("a", slots=1), console=console, output_dir=tmp_path), options, {})
    assert f"--tag-output --timestamp-output --output-filename {tmp_path}" in plan
    assert "-output" not in launcher_plan(
        mpi_spec(Host("a", slots=1), console=ConsoleOptions(prefix="")), options, {}
    )


def test_a_job_that_the_launcher_can_not_do_is_an_error(options):
    with pytest.raises(BadUsage, match="a launcher needs the number of slots"):
        launcher_plan(mpi_spec(Host("a")), options, {})
