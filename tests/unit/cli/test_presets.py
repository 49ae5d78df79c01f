"""Presets: what each makes of a command, users' own, and mistakes in their files."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.jobs import run_job_command
from hvlaunch.cli.plan import plan
from hvlaunch.cli.presets import preset_list, preset_of
from hvlaunch.cli.spec import job_spec
from hvlaunch.errors import BadUsage, NotEnoughSlots
from hvlaunch.hosts import templates
from hvlaunch.job import JobSpec
from tests.testhosts.places import wait_until

NAMES = tuple(line.split()[0] for line in preset_list({}).splitlines())


def spec_of(line: str, **environ: str) -> JobSpec:
    return job_spec(parse(shlex.split(line)), environ)[0]


def commands(line: str, **environ: str) -> list[str]:
    """What each rank runs, with its variables."""
    lines = plan(spec_of(line, **environ)).split("\n")
    return [text.strip().partition(": ")[2] for text in lines if text.startswith("  rank ")]


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_each_preset_makes_a_job(name: str) -> None:
    preset = preset_of(name, {})
    line = preset.example.removeprefix("hvlaunch ")
    assert line.startswith(f"--for {name} -")
    assert commands(line)
    assert len(preset.about) <= 112


def test_vllm_gets_its_place_and_options_that_the_user_gives_stay() -> None:
    line = "--for vllm -H a,b:4 vllm serve M --compilation-config '{\"x\": {rank}}'"
    first, second = (
        "VLLM_HOST_IP='{host_ip}' vllm serve M --compilation-config '{\"x\": {rank}}' --nnodes 2 "
        f"--node-rank {rank} --master-addr '{{master_addr}}' --master-port '{{port:vllm}}'"
        for rank in (0, 1)
    )
    assert commands(line) == [first, f"{second} --headless"]
    assert spec_of(line).end_with_rank == 0
    assert commands(f"{line} --master-port=7 --headless")[0].count("--master-port") == 1
    assert "--master-port" not in commands(f"{line} --master_port 7")[0]
    assert commands(f"{line} --headless")[1].count("--headless") == 1
    assert "serve --x=1 " in commands("--templates --for vllm -H a,b vllm serve --x={rank}")[1]


def test_data_parallel_ranks_start_behind_the_ranks_of_earlier_hosts() -> None:
    line = "--for vllm-dp -H a:2,b:4,c:2 vllm serve M --data-parallel-size 8"
    assert [text.partition("--data-parallel-size-local ")[2][0] for text in commands(line)] == ["2", "4", "2"]
    assert [text.partition("--data-parallel-start-rank ")[2] for text in commands(line)] == ["", "2", "6"]


def test_a_word_of_the_command_has_the_options_behind_it() -> None:
    assert commands("--for accelerate -H a,b accelerate launch train.py --lr 3")[1].startswith(
        "accelerate launch --num_machines 2 --machine_rank 1 --main_process_ip "
    )
    with pytest.raises(BadUsage, match="--for accelerate: the command has no word 'launch'"):
        spec_of("--for accelerate -H a,b python train.py")


def test_the_users_variables_and_options_are_stronger() -> None:
    line = "--for jax -x OMPI_VERSION=4.9 -x JAX_COORDINATOR_ADDRESS -np 1 true"
    spec_templates = spec_of(line, OMPI_VERSION="5", JAX_COORDINATOR_ADDRESS="elsewhere:1").templates
    assert spec_templates is not None
    assert "OMPI_VERSION" not in spec_templates.env
    assert spec_templates.env["JAX_COORDINATOR_ADDRESS"] == "{master_addr}:{port:jax}"
    assert spec_of("--for vllm --end-with-rank 1 -H a,b vllm serve M").end_with_rank == 1
    assert [host.slots for host in spec_of("--for dask --nproc-per-node 2 -H a,b python t.py").hosts] == [
        2,
        2,
    ]


def test_jax_gets_all_devices_of_a_host_with_one_worker() -> None:
    assert "JAX_LOCAL_DEVICE_IDS" not in commands("--for jax -H a:2 python t.py")[0]
    assert "JAX_LOCAL_DEVICE_IDS=0,1,2 " in commands("--for jax --per-host -H a:3 python t.py")[0]
    spec_templates = spec_of("--for jax --per-host -H a,b:3 python t.py").templates
    assert spec_templates is not None
    assert (spec_templates.counts_gpus, spec_templates.slots) == (True, {"b": 3})


@pytest.mark.parametrize("has_client", [True, False])
def test_rays_head_opens_a_port_for_clients_where_ray_has_any(tmp_path: Path, has_client: bool) -> None:
    """A plain `pip install ray` refuses the option."""
    for name, text in (("ray", 'echo "$@"'), ("python3", f"exit {int(not has_client)}")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    first = preset_of("ray", {}).services["first"]
    assert isinstance(first, list | tuple)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    words = subprocess.run(first, env=env, capture_output=True, text=True, check=True).stdout.split()
    assert words[0] == "start"
    assert {"--head", "--block", "--port={port:gcs}"} < set(words)
    assert ("--ray-client-server-port={port:client}" in words) is has_client


def test_tensorflow_names_a_port_of_each_host() -> None:
    assert (
        '"worker": ["{host_ip}:{port:tf}","{host_ip}:{port:tf}"]}, "task": {"type": "worker", "index": 1}}'
        in commands("--for tensorflow -H a,b python t.py")[1]
    )


def test_a_place_for_each_host_has_one_worker() -> None:
    """Two workers of a host would have the same --node-rank, and the same port."""
    for words in ("vllm", "torchrun", "tensorflow", "mlx", "sglang", "accelerate"):
        line = f"--for {words} --nproc-per-node 2 -H a,b {words} launch"
        problem = f"--nproc-per-node 2, but --for {words} starts one worker on each host; try: --per-host"
        with pytest.raises(BadUsage, match=f"^{problem}"):
            spec_of(line)
    line = "--for vllm -H a,b vllm serve M"
    with pytest.raises(BadUsage, match=r"^environment: HVLAUNCH_NPROC_PER_NODE 2, but --for vllm"):
        job_spec(parse(shlex.split(line), environ={"HVLAUNCH_NPROC_PER_NODE": "2"}), {})


@pytest.mark.parametrize(
    ("options", "option", "room"),
    [
        ("--for tensorflow -np 4", "--for tensorflow: one on each host", 2),
        ("--per-host -np 3", "--per-host", 2),
        ("--nproc-per-node 2 -np 5", "--nproc-per-node 2", 4),
    ],
)
def test_more_workers_than_a_worker_on_each_host_allows(options: str, option: str, room: int) -> None:
    """More slots, `a:4`, would be no remedy."""
    with pytest.raises(NotEnoughSlots) as caught:
        spec_of(f"{options} -H a:2,b:2 python t.py")
    assert f"only {room} slots ({option}); try: -np {room}, or more hosts" in str(caught.value)


OWN = """
about = "mine"
[options]
end-with-rank = 0
[environment]
PLACE = "{rank} of {size}"
[words]
append = ["--rank {rank}"]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    presets = tmp_path / "hvlaunch" / "presets"
    presets.mkdir(parents=True)
    (presets / "mine.toml").write_text(OWN)
    return presets


def test_users_have_presets_of_their_own(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    environ = {"XDG_CONFIG_HOME": str(config.parents[1])}
    (config / "vllm.toml").write_text(OWN)
    assert commands("--for mine -np 1 serve", **environ) == ["PLACE='0 of 1' serve --rank 0"]
    assert commands("--for vllm -np 1 serve", **environ) == ["PLACE='0 of 1' serve --rank 0"]
    assert run_job_command(["presets"], environ) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted({*NAMES, "mine"})
    assert "mine        mine" in lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "about is missing"),
        ("about = ['x']", "about must be a text"),
        ("about = 'x'\nrank = 1", "unknown key 'rank'; try: one of about, example, options"),
        (
            "about = 'x'\n[words]\nprepend = ['x']",
            r"\[words\] unknown key 'prepend'; try: one of after, append",
        ),
        ("about = 'x'\n[words]\nappend = 'x'", r"\[words\] append must be a list of texts"),
        (
            "about = 'x'\n[options]\nend-with-rnk = 0",
            r"\[options\] unknown key 'end-with-rnk'; try: end-with-rank",
        ),
        ("about = 'x'\n[options]\nend-with-rank = 'x'", r"\[options\] end-with-rank: "),
        ("about = 'x'\nenvironment = 1", "environment must be a table"),
        ("about = 'x'\n[environment]\nA = []", r"\[environment\] A must be a text"),
        ("about = 'x'\n[services.files]\nA = []", r"\[services.files\] A must be a text"),
        ("about = ", "invalid value"),
    ],
)
def test_a_mistake_in_a_file_is_said_by_file_and_key(config: Path, text: str, message: str) -> None:
    (config / "mine.toml").write_text(text)
    with pytest.raises(BadUsage, match=f"{config}/mine.toml:.*{message}"):
        spec_of("--for mine -np 1 true", XDG_CONFIG_HOME=str(config.parents[1]))


def test_unknown_places_and_presets_are_errors(config: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(config.parents[1])}
    with pytest.raises(BadUsage, match=r"no preset 'vlm'; there are .*vllm"):
        spec_of("--for vlm true", **environ)
    (config / "mine.toml").write_text("about = 'x'\n[environment]\nA = '{rnk}'")
    with pytest.raises(BadUsage, match=r"unknown place \{rnk\}"):
        spec_of("--for mine true", **environ)


def test_a_file_that_others_can_change_is_refused(config: Path) -> None:
    (config / "mine.toml").chmod(0o666)
    with pytest.raises(BadUsage, match="every user of this machine can change it"):
        spec_of("--for mine true", XDG_CONFIG_HOME=str(config.parents[1]))


CLUSTER = '''
about = "a cluster"
[options]
per-host = true
end-with-rank = 0
[environment]
HEAD = "{port:head}"
[services]
first = ["python3", "-c", "import socket, time; print('head'); s = socket.create_server(('', {port:head})); time.sleep({first:HEAD_LIFE}{others:99})"]
others = ["python3", "-c", "import time; print('node'); time.sleep(NODE_LIFE)"]
until = ["python3", "-c", """
import socket, time
while socket.socket().connect_ex(("localhost", {port:head})):
    time.sleep(0.1)
print("complete")
"""]
address = "localhost:{port:head}"
[services.files]
PLACES = '[{each:"{host}"}]'
'''


def run_cluster(
    config: Path, *command: str, head: str = "999", node: str = "999"
) -> subprocess.CompletedProcess[str]:
    text = CLUSTER.replace("HEAD_LIFE", head).replace("NODE_LIFE", node)
    (config / "cluster.toml").write_text(text)
    return run_hvlaunch(config, *command)


def run_hvlaunch(config: Path, *command: str) -> subprocess.CompletedProcess[str]:
    words = ["--for", "cluster", "-H", "localhost,127.0.0.1", "--quiet", "--grace", "5", *command]
    return subprocess.run(
        [sys.executable, "-m", "hvlaunch", *words],
        env={**os.environ, "XDG_CONFIG_HOME": str(config.parents[1])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_services_run_beside_the_command_of_rank_0(config: Path) -> None:
    job = run_cluster(config, "sh", "-c", 'cat "$PLACES"; echo; exit 5')
    assert job.returncode == 5, job.stderr
    assert job.stdout == '[0]<stdout>: ["localhost","127.0.0.1"]\n'
    assert job.stderr.index("[0]<stderr>: head\n") < job.stderr.index("[0]<stderr>: complete\n")
    assert run_cluster(config, "true").returncode == 0


def test_a_service_that_ends_ends_the_job(config: Path) -> None:
    head = run_cluster(config, "sleep", "1000", head="1")
    assert head.returncode == 1
    assert "rank 0 of 2 on host localhost failed first" in head.stderr
    assert "hvlaunch: python3 -c " in head.stderr
    assert "has ended before the command" in head.stderr
    node = run_cluster(config, "sleep", "1000", node="1")
    assert node.returncode == 1
    assert "rank 1 of 2 on host 127.0.0.1 failed first" in node.stderr


RPC = Path(__file__).parents[2] / "cluster" / "programs" / "rpc_server.py"
LLAMA = shlex.split("--for llama-cpp -x PATH --grace 5 --hang-timeout 0 -H")
SERVING = re.compile(r"\[1\]<stderr>: serving as (\d+) of (\d+)")


@pytest.fixture
def llama(tmp_path: Path) -> dict[str, str]:
    """An environment with a stand-in for llama.cpp's server."""
    (tmp_path / "bin").mkdir()
    server = tmp_path / "bin" / "ggml-rpc-server"
    server.write_text(f'#!/bin/sh\nexec {sys.executable} {RPC} "$@"\n')
    server.chmod(0o755)
    return {**os.environ, "PATH": f"{server.parent}:{os.environ['PATH']}"}


def llama_line(hosts: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "hvlaunch", *LLAMA, hosts, sys.executable, str(RPC), *more]


@pytest.mark.parametrize(
    ("hosts", "answers"), [("localhost,127.0.0.1,127.0.0.2", "2"), ("localhost,127.0.0.1", "1")]
)
def test_llama_cpp_reaches_its_servers_by_the_tunnel(llama: dict[str, str], hosts: str, answers: str) -> None:
    job = subprocess.run(
        llama_line(hosts), env=llama, capture_output=True, text=True, timeout=100, check=False
    )
    assert job.returncode == 0, job.stderr
    # The keys of the tunnel are not the command's, nor on a command line.
    assert job.stdout == f"[0]<stdout>: right answers: {answers} secrets: False\n"
    assert "HVLAUNCH_TUNNEL_KEY=****" in plan(spec_of("--for llama-cpp --verbose -H a,b llama-cli"))


@pytest.mark.parametrize("victim", ["server", "tunnel"])
def test_the_end_of_llama_cpps_server_or_tunnel_ends_the_job(llama: dict[str, str], victim: str) -> None:
    line = llama_line("localhost,127.0.0.1", "--stay")
    with subprocess.Popen(
        line, env=llama, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        assert job.stdout is not None
        lines: list[str] = []
        while not any("right answers: 1" in text for text in lines):
            lines.append(job.stdout.readline())
            assert lines[-1], lines
        [(server, tunnel)] = SERVING.findall("".join(lines))
        os.kill(int(server if victim == "server" else tunnel), signal.SIGKILL)
        output = job.stdout.read()
    assert job.returncode == 137
    assert "rank 1 of 2 on host 127.0.0.1 failed first" in output
    assert ("--port" in output and "has ended before the command" in output) is (victim == "server")
    for pid in (server, tunnel):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_the_report_names_the_signal_that_ended_the_command(config: Path) -> None:
    job = run_cluster(config, "sh", "-c", "kill -SEGV $$")
    assert job.returncode == 128 + 11
    assert "SIGSEGV" in job.stderr


def test_ctrl_c_lets_the_command_end_by_itself(config: Path) -> None:
    text = CLUSTER.replace("HEAD_LIFE", "999").replace("NODE_LIFE", "999")
    (config / "cluster.toml").write_text(text)
    script = "trap 'echo bye; exit 7' INT; echo ready; while :; do sleep 0.1; done"
    with subprocess.Popen(
        [*f"{sys.executable} -m hvlaunch --for cluster -H localhost,127.0.0.1 --quiet sh -c".split(), script],
        env={**os.environ, "XDG_CONFIG_HOME": str(config.parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "[0]<stdout>: ready\n"
        job.send_signal(signal.SIGINT)
        assert job.stdout.read() == "[0]<stdout>: bye\n"
    assert job.returncode == 130


def test_a_missing_service_is_an_error(config: Path) -> None:
    (config / "none.toml").write_text("about = 'x'\n[services]\nall = ['no-such-program']")
    job = subprocess.run(
        [sys.executable, "-m", "hvlaunch", "--for", "none", "-np", "1", "true"],
        env={**os.environ, "XDG_CONFIG_HOME": str(config.parents[1])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert job.returncode == 127
    assert "hvlaunch: no-such-program: No such file or directory" in job.stderr


@pytest.mark.parametrize("first", [["no-such-service"], ["sh", "-c", 'exec "$0"', "no-such-service"]])
def test_a_service_that_one_host_lacks_is_named_with_its_host(config: Path, first: list[str]) -> None:
    text = CLUSTER.replace("NODE_LIFE", "999")
    head = next(line for line in text.splitlines() if line.startswith("first = "))
    (config / "cluster.toml").write_text(text.replace(head, f"first = {json.dumps(first)}"))
    job = run_hvlaunch(config, "sleep", "1000")
    assert job.returncode == 127
    assert "rank 0 of 2 on host localhost failed first" in job.stderr
    assert "Try: install no-such-service on localhost, or a PATH that has it (-x PATH=…)" in job.stderr


def test_a_program_of_a_preset_with_files_is_missing() -> None:
    job = subprocess.run(
        [sys.executable, "-m", "hvlaunch", "--for", "mlx", "-np", "1", "no-such-program"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert job.returncode == 127
    assert "Try: install no-such-program on localhost, or a PATH that has it (-x PATH=…)" in job.stderr


PLAN = {"rank": "1", "address": "", "files": {}, "first": [], "others": [], "all": [], "until": []}


def start_services(plan: dict[str, object], before: str = "") -> subprocess.Popen[bytes]:
    """Start another rank's services with the plan; `before` changes the program that starts them."""
    code = f"import os, signal, subprocess; from hvlaunch.agent import services; {before}\nservices.main()"
    plan = {**PLAN, "tunnel": None, **plan}
    return subprocess.Popen([sys.executable, "-c", code, json.dumps(plan), "true"], start_new_session=True)


def test_no_service_starts_once_its_job_is_stopped(tmp_path: Path) -> None:
    """It waits for the first host's service, which never listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with start_services({"others": ["touch", str(tmp_path / "started")], "address": address}) as waiting:
            wait_until(lambda: _catches(waiting.pid, signal.SIGTERM), "it is ready for signals")
            waiting.terminate()
            assert waiting.wait(30) == -signal.SIGTERM
    assert not (tmp_path / "started").exists()


def test_a_signal_during_the_start_of_a_service_reaches_it() -> None:
    stopped_at_once = """
def popen(*words, start=subprocess.Popen, **streams):
    process = start(*words, **streams)
    os.kill(os.getpid(), signal.SIGTERM)
    return process
subprocess.Popen = popen"""
    with start_services({"others": ["sleep", "1000"]}, stopped_at_once) as services:
        try:
            assert services.wait(30) == -signal.SIGTERM
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(services.pid, signal.SIGKILL)


def _catches(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) & 1 << (number - 1))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("ggml-rpc-server", "rpc-server"), "ggml-rpc-server --port 1 --host 127.0.0.1"),
        (("rpc-server",), "rpc-server --port 1 --host 127.0.0.1"),
        ((), "ggml-rpc-server: not found"),
    ],
)
def test_llama_cpps_server_has_two_names(tmp_path: Path, names: tuple[str, ...], expected: str) -> None:
    for name in names:
        (tmp_path / name).write_text('#!/bin/sh\necho "${0##*/}" "$@"\n')
        (tmp_path / name).chmod(0o755)
    others = preset_of("llama-cpp", {}).services["others"]
    assert isinstance(others, list | tuple)
    words = [word.replace("{own_port:rpc}", "1") for word in others]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert (done.stdout + done.stderr).strip().endswith(expected)
    assert done.returncode == (0 if names else 127)


def test_the_page_has_each_preset_and_one_of_the_users_own(config: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/guides/programs.md").read_text()
    for name in NAMES:
        assert f"`{preset_of(name, {}).example}`" in page
    (config / "mine.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    assert commands("--for mine -H a,b serve", XDG_CONFIG_HOME=str(config.parents[1])) == [
        "SERVER_IP='{host_ip}' serve --node 0",
        "SERVER_IP='{host_ip}' serve --node 1 --join '{master_addr}:{port:head}'",
    ]
    for place in (name.partition(":")[0].strip("{}") for name in templates.NAMES):
        assert f"`{{{place}}}`" in page or f"`{{{place}:" in page


def test_a_service_of_another_port_is_ready_where_the_user_says() -> None:
    vllm = spec_of("--for vllm -H a,b vllm serve M")
    assert (vllm.ready_url, vllm.ready_port) == ("http://localhost:8000/health", None)
    other = spec_of("--for vllm --ready-port 9000 -H a,b vllm serve M --port 9000")
    assert (other.ready_url, other.ready_port) == (None, 9000)


def test_the_plan_has_services_without_their_program() -> None:
    first = commands("--for dask -H a,b python work.py")[0]
    assert " python3 -c '(" in first
    assert first.endswith("python work.py")
    assert "dask worker" not in first.partition("python3 -c")[0]
    assert '"dask", "worker", "tcp://{master_addr}:{port:dask}"' in first
