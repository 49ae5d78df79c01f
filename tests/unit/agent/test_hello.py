import ipaddress
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from hvlaunch.agent.facts import free_port
from hvlaunch.agent.wire.frames import PROTOCOL
from tests.unit.agent.harness import AgentProcess, Hunt

Launch = Callable[..., AgentProcess]


def test_hello_has_the_facts_of_the_host(launch: Launch) -> None:
    hello = launch().hello()
    facts = hello["facts"]
    assert hello["protocol"] == PROTOCOL
    assert hello["trouble"] is None
    assert facts["hostname"] == socket.gethostname()
    assert facts["python"] == "{}.{}.{}".format(*sys.version_info)
    assert facts["kernel"] == os.uname().release
    assert facts["cpus"] == len(os.sched_getaffinity(0))
    assert facts["memory"] == psutil.virtual_memory().total
    assert facts["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert facts["machine_id"] is None or len(facts["machine_id"]) == 32
    assert abs(facts["clock"] - time.time()) < 60
    assert "gpus" not in facts


def test_the_addresses_are_those_of_the_interfaces(launch: Launch) -> None:
    found = launch().hello()["facts"]["addresses"]
    unusable = set()
    if (table := Path("/proc/net/if_inet6")).exists():
        for address, _, _, _, flags, _ in map(str.split, table.read_text().splitlines()):
            if int(flags, 16) & 0x60:  # tentative or deprecated
                unusable.add(str(ipaddress.IPv6Address(int(address, 16))))
    families = (socket.AF_INET, socket.AF_INET6)
    for name, entries in psutil.net_if_addrs().items():
        expected = {entry.address.partition("%")[0] for entry in entries if entry.family in families}
        assert set(found[name]) == expected - unusable


def driver(directory: Path, init: str) -> dict[str, str]:
    """Variables of a host with two GPUs, whose library's nvmlInit_v2() has the body `init`."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    (directory / "nvidia-smi").touch(mode=0o755)
    code = f"""
        #include <unistd.h>
        static int is_ready;
        int nvmlInit_v2(void) {{ {init} }}
        int nvmlDeviceGetCount_v2(unsigned int *count) {{ if (!is_ready) return 1; *count = 2; return 0; }}
    """
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(directory / "libnvidia-ml.so.1")]
    subprocess.run(command, input=code.encode(), check=True)
    return {"PATH": f"{directory}:/usr/bin:/bin", "LD_LIBRARY_PATH": str(directory)}


def test_gpus_are_counted_on_request(launch: Launch, tmp_path: Path) -> None:
    agent = launch(env=driver(tmp_path, "is_ready = 1; return 0;"))
    assert agent.hello(gpus=True)["facts"]["gpus"] == 2


@pytest.mark.parametrize("init", ["return 9;", "_exit(0);", "__builtin_trap();"])
def test_a_driver_that_fails_or_crashes_has_no_gpus(launch: Launch, tmp_path: Path, init: str) -> None:
    agent = launch(env=driver(tmp_path, init))
    assert agent.hello(gpus=True)["facts"]["gpus"] == 0


def test_a_host_without_a_driver_or_its_library_has_no_gpus(launch: Launch, tmp_path: Path) -> None:
    assert launch(env={"PATH": str(tmp_path)}).hello(gpus=True)["facts"]["gpus"] == 0
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    assert launch(env={"PATH": str(tmp_path)}).hello(gpus=True)["facts"]["gpus"] == 0


def test_a_gpu_count_that_hangs_ends_with_the_agent(launch: Launch, tmp_path: Path, hunt: Hunt) -> None:
    hang = f'return execlp("sleep", "sleep", "{hunt.mark}", (char *) 0);'
    agent = launch(env=driver(tmp_path, hang))
    agent.send(
        "hello",
        protocol=1,
        name="a",
        key="x",
        known_as=None,
        cwd="/",
        gpus=True,
        ports=None,
        elastic=None,
        processes=1,
        rendezvous=None,
        session=None,
    )
    hunt.wait_for("sleep")
    began = time.monotonic()
    assert agent.bye() == ({"type": "bye", "left": 0, "pids": []}, 0)
    assert time.monotonic() - began < 15
    assert hunt.pids() == []


@pytest.mark.parametrize(
    ("path", "error"), [("/no/such", "No such file or directory"), ("/etc/passwd", "Not a directory")]
)
def test_directory_that_can_not_be_entered_is_reported(launch: Launch, path: str, error: str) -> None:
    assert launch().hello(cwd=path)["cwd_error"] == error


def test_the_workers_run_in_the_directory(launch: Launch, tmp_path: Path) -> None:
    agent = launch(cwd="/")
    assert agent.hello(cwd=str(tmp_path))["cwd_error"] is None
    _, out, _ = agent.run(["/bin/pwd", "-P"])
    assert out.decode().strip() == str(tmp_path.resolve())
    _, out, _ = agent.run(["/usr/bin/env"])
    assert f"PWD={tmp_path}" in out.decode().splitlines()


def test_ports_are_free_and_master_port_is_kept_for_torch(launch: Launch) -> None:
    agent = launch()
    hello = agent.hello()
    master = hello["master_port"]
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert master < low or master > high
    assert master != hello["beacon_port"]
    with socket.socket() as taken, pytest.raises(OSError, match="in use"):
        taken.bind(("", master))
    agent.run(["true"])
    with socket.socket() as taken, pytest.raises(OSError, match="in use"):
        taken.bind(("", master))
    socket.create_server(("", master)).close()  # with SO_REUSEADDR


def test_ports_are_in_the_range_of_the_driver(launch: Launch) -> None:
    with closing(free_port((10_000, 19_000))) as reserved:  # neither an agent nor the kernel chooses there
        low = reserved.getsockname()[1]
    for _ in range(3):
        hello = launch().hello(ports=[low, low + 20])
        assert {low <= hello[name] <= low + 20 for name in ("beacon_port", "master_port")} == {True}
        assert hello["beacon_port"] != hello["master_port"]


def test_range_without_a_free_port_is_reported(launch: Launch) -> None:
    with closing(free_port()) as taken:
        port = taken.getsockname()[1]
        hello = launch().hello(ports=[port, port])
    assert (hello["beacon_port"], hello["master_port"]) == (None, None)


def test_scratch_directory_is_private_and_removed(launch: Launch, tmp_path: Path) -> None:
    agent = launch(env={"TMPDIR": str(tmp_path)})
    scratch = Path(agent.hello()["scratch"])
    assert scratch.parent == tmp_path
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
    (scratch / "deep" / "er").mkdir(parents=True)
    (scratch / "deep" / "file").write_text("x")
    agent.bye()
    assert not scratch.exists()


def test_missing_temporary_directory_is_replaced(launch: Launch, tmp_path: Path) -> None:
    agent = launch(env={"TMPDIR": str(tmp_path / "gone")})
    assert Path(agent.hello()["scratch"]).is_dir()


def test_pings_are_answered_with_the_hosts_clock(agent: AgentProcess) -> None:
    for _ in range(3):
        before = time.monotonic()
        agent.send("ping")
        header, _ = agent.expect("pong")
        assert before <= header["at"] <= time.monotonic()


def test_driver_with_another_protocol_gets_a_fault(launch: Launch) -> None:
    agent = launch()
    agent.hello()
    agent.write(b"SSH-2.0-OpenSSH_9.2\r\n")
    header, _ = agent.expect("fault")
    assert "the driver sent a frame of" in header["cause"]
    assert agent.status() == 0


def test_a_fault_of_the_agent_itself_reaches_the_driver_with_its_traceback(launch: Launch) -> None:
    agent = launch(window="none")
    header, traceback = agent.expect("fault")
    assert header["cause"].startswith("ValueError: ")
    assert b"Traceback (most recent call last)" in traceback
    assert agent.status() == 1
    assert agent.stderr() == "hvlaunch agent: ended with code 1\n"


def test_relay_without_its_module_is_a_fault_of_the_driver(launch: Launch) -> None:
    agent = launch()
    agent.greet(rendezvous={"candidates": [["10.0.0.100", 4711]], "key": "k", "relay": "always"})
    agent.send("modules")
    assert "the driver sent modules, but none for a relay" in agent.expect("fault")[0]["cause"]
    assert agent.status() == 0
