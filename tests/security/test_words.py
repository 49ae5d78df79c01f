"""Whose words are these: nobody else's look like hvlaunch's own, on stderr or in the failure report."""

import socket
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from paramiko import PKey, RSAKey, ServerInterface, Transport
from paramiko.common import AUTH_FAILED, cMSG_DISCONNECT
from paramiko.message import Message

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.jobs import job_table, metrics, output
from hvlaunch.cli.jobs.web import WebServer
from hvlaunch.console.lines import visible, visible_line
from hvlaunch.errors import BadUsage, HostError
from hvlaunch.gloo.controller import run
from hvlaunch.job import ConsoleOptions, Host, JobSpec, SSHOptions
from hvlaunch.outside import JobDirectory, known_job
from hvlaunch.telemetry.metrics import metrics_text
from hvlaunch.view.model import Model
from hvlaunch.view.text import plain
from tests.unit.ssh.conftest import connect, keygen

FORGED = "hvlaunch: rank 0 of 1 ended well"
SPOOFS = {
    "escape": "\x1b[2J",
    "return": "\r",
    "backspace": "\b",
    "C1": "\x9b2J",
    "bidi override": "\u202e",
    "bidi isolate": "\u2066",
    "zero width": "\u200b",
    "line separator": "\u2028",
    "NUL": "\0",
    "lone surrogate": "\udc80",
    "tag": "\U000e0041",
}


@pytest.mark.parametrize("name", SPOOFS)
def test_control_sequences_are_escaped(name: str) -> None:
    shown = visible(f"host a{SPOOFS[name]}b")
    assert shown.isprintable()
    assert shown.startswith("host a\\")


def test_the_cause_of_a_hosts_error_is_one_line() -> None:
    error = HostError(f"it said: x\n{FORGED}", host="a")
    assert "\n" not in str(error)


class LeavingServer(ServerInterface):
    """Refuses every key, and takes its leave in several lines."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: PKey) -> int:
        message = Message()
        message.add_byte(cMSG_DISCONNECT)
        message.add_int(2)
        message.add_string(f"go\n{FORGED}\r\x1b[2J" + "x" * 20_000)
        message.add_string("")
        send: Any = self.transport
        send._send_message(message)
        return AUTH_FAILED


def test_an_sshd_that_takes_its_leave_in_several_lines(tmp_path: Path) -> None:
    """Before anybody is authenticated: any machine at the address can do it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            transport = Transport(client)
            transport.add_server_key(RSAKey.generate(2048))
            transport.start_server(event=threading.Event(), server=LeavingServer(transport))
            transport.join(30)
            transport.close()

        thread = threading.Thread(target=serve)
        thread.start()
        (tmp_path / "config").write_text(
            "IdentityAgent none\nUserKnownHostsFile none\nGlobalKnownHostsFile none\n"
        )
        port, key = listener.getsockname()[1], keygen(tmp_path / "id")
        options = SSHOptions(config=tmp_path / "config", port=port, host_keys="off", identity=key)
        with pytest.raises(HostError) as raised:
            connect(Host("127.0.0.1"), options, timeout=30.0)
        thread.join()
    assert "go hvlaunch" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000


PROGRAM = f"""
import json, os, sys
said = "x\\n{FORGED}\\n\\x1b[2J\\u202e"
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump({{"message": {{"message": said, "extraInfo": {{"py_callstack": said, "timestamp": said}}}}}}, file)
for stream in (sys.stdout, sys.stderr):
    stream.write("{FORGED}\\n\\r{FORGED}\\nTraceback (most recent call last):\\n{FORGED}\\nValueError: x\\n{FORGED}\\n")
sys.exit(3)
"""


def test_a_worker_can_not_speak_as_hvlaunch(tmp_path: Path) -> None:
    with (
        (tmp_path / "out").open("wb") as out,
        (tmp_path / "err").open("wb") as err,
        Path("/dev/null").open() as nothing,
    ):
        spec = JobSpec(
            command=(sys.executable, "-c", PROGRAM),
            hosts=(Host("localhost", 1),),
            cwd="/",
            console=ConsoleOptions(),
        )
        result = run(spec, stdout=out, stderr=err, stdin=nothing.fileno())
    assert result.exit_code == 3
    own = [line for line in (tmp_path / "err").read_text().split("\n") if line.startswith("hvlaunch:")]
    assert len(own) == 2
    assert "1 worker on host localhost" in own[0]
    assert "failed" in own[1]
    report = (tmp_path / "err").read_text().partition(own[1])[2]
    assert "\x1b" not in report
    assert "\u202e" not in report
    assert "hvlaunch:" not in [line[:9] for line in (tmp_path / "out").read_text().split("\n")]


NAMES = ["a\x1b[2Jb", f"a\n{FORGED}", "a\tb", "a\u202eb", "a\x9bb"]


@pytest.mark.parametrize("name", NAMES)
def test_job_names_with_control_characters_are_refused(name: str) -> None:
    with pytest.raises(BadUsage, match="can't be printed"):
        parse(["--job-name", name, "true"], environ={}, warn=print)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_jobs_from_elsewhere_are_one_printable_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that another version of hvlaunch has begun."""
    with closing(JobDirectory(tmp_path, "0123456789ab", {"name": name, "began": 1.0})) as directory:
        job = known_job(directory.path)
    assert job is not None
    state = {
        "id": job.id,
        "name": name,
        "began": 1.0,
        "phase": "running",
        "round": None,
        "workers": [],
        "hosts": [],
    }
    monkeypatch.setattr(
        "hvlaunch.cli.jobs.metrics.ControlClient.get", lambda _, path: state if path == "/job" else None
    )
    now = metrics._now(job)
    assert now is not None
    shown = {
        "jobs": job_table([(job, state)]),
        "top": plain(Model().view(state, None, 2.0), 200),
        "metrics": metrics_text([now]).decode(),
        "attach": output.described(job),
    }
    for word, text in shown.items():
        assert visible_line(name) in text.replace("\\\\", "\\"), word
        assert all(line.isprintable() for line in text.split("\n")), word
        assert not any(line.startswith(FORGED) for line in text.split("\n")), word


@pytest.mark.parametrize("address", ["127.0.0.1\x1b[2J", "evil.example", "fe80::1%lo\x1b[2J", "127.0.0.1/\n"])
def test_the_page_has_no_address_but_this_machines(address: str) -> None:
    """The command serves the page itself: its address comes from nobody else, and has no control characters."""
    with pytest.raises(BadUsage):
        WebServer(address)
    with WebServer(None) as server:
        assert server.url == f"http://127.0.0.1:{server.port}"
