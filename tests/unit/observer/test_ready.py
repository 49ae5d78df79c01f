"""A job's service is ready when its port takes a connection, or its URL answers without an error."""

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import hvlaunch
from hvlaunch.agent.errands.observer.ready import answer
from hvlaunch.errors import BadUsage
from hvlaunch.outside.control import DriverGone

SERVICE = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response({"/health": 200}.get(self.path, 503))
        self.end_headers()
    def log_message(self, *words):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_port_is_ready_when_it_takes_a_connection(port: int) -> None:
    assert answer({"port": port, "url": None}) == {"is_ready": True, "problem": None}
    free = free_port()
    assert answer({"port": free, "url": None}) == {
        "is_ready": False,
        "problem": f"nothing listens on port {free}",
    }


def test_a_url_is_ready_when_it_answers_without_an_error(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # No proxy stands between a host and its own service.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    url = f"http://127.0.0.1:{port}"
    assert answer({"port": None, "url": f"{url}/health"}) == {"is_ready": True, "problem": None}
    assert answer({"port": None, "url": f"{url}/other"})["problem"] == f"{url}/other answers 503"
    refused = answer({"port": None, "url": f"http://127.0.0.1:{free_port()}/"})
    assert not refused["is_ready"]
    assert "refused" in refused["problem"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].sendall(b"no HTTP\n"), daemon=True).start()
        silent = answer({"port": None, "url": f"http://127.0.0.1:{listener.getsockname()[1]}/"})
    assert not silent["is_ready"]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return dict(os.environ)


def run(state: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hvlaunch", *words],
        env=state,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_wait_ready_waits_for_the_service_of_a_job(state: dict[str, str], tmp_path: Path) -> None:
    number, go = free_port(), tmp_path / "go"
    service = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)\n{SERVICE}"
    words = (
        "--detach",
        "--quiet",
        "--ready-url",
        f"http://127.0.0.1:{number}/health",
        "--job-name",
        "served",
    )
    started = run(state, *words, "-np", "1", sys.executable, "-c", service, str(number))
    assert started.returncode == 0, started.stderr
    try:
        job = hvlaunch.attach("served")
        with pytest.raises(TimeoutError, match=r"is not ready within 0 s: .*refused|has not answered"):
            job.wait_ready(0)
        go.touch()
        waited = run(state, "wait", "--ready", "served")
        assert waited.returncode == 0, waited.stderr
        job.wait_ready(30)
    finally:
        run(state, "stop", "served")


def test_wait_ready_ends_with_a_job_that_never_is(state: dict[str, str]) -> None:
    words = ("--detach", "--quiet", "--ready-port", str(free_port()), "--job-name", "ending")
    run(state, *words, "-np", "1", "sh", "-c", "sleep 0.4; exit 3")
    assert run(state, "wait", "--ready", "ending").returncode == 3
    with pytest.raises(DriverGone, match="ended before its service was ready"):
        hvlaunch.attach("ending").wait_ready(30)
    run(state, "--detach", "--quiet", "--job-name", "plain", "-np", "1", "sleep", "60")
    try:
        with pytest.raises(BadUsage, match="has no --ready-port or --ready-url"):
            hvlaunch.attach("plain").wait_ready(30)
        assert run(state, "wait", "--ready", "plain").returncode == 2
    finally:
        run(state, "stop", "plain")
