"""Notices: made once, delivered once to each target, by a process that outlives the driver."""

import json
import os
import signal
import socket
import ssl
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from hvlaunch.cli.options import BadValue
from hvlaunch.cli.options.values import notify_events, notify_target
from hvlaunch.console.masking import masked_words
from hvlaunch.console.printer import Printer
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.gloo.notifier import Notifier
from hvlaunch.gloo.reporting import Reporting
from hvlaunch.job import JobSpec
from hvlaunch.outside import known_jobs, notices
from hvlaunch.outside.notices import NotDelivered, Notices, deliver, deliver_file, shown, target_error
from hvlaunch.rendezvous.serving.certificate import new_peer
from tests.testhosts.hosts import wait_until
from tests.unit.cli.job_site import Site

NOTICE = {
    "event": "failed",
    "title": "train failed {text}",
    "text": "rank 3: {title} é",
    "report": {"exit_code": 1},
}
QUICK = (0.01,) * 5


class Posted(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes


class Server:
    """A real server that keeps what was posted. `answers` has the next status codes; then it answers 200."""

    def __init__(self) -> None:
        self.posted: list[Posted] = []
        self.answers: list[int] = []
        self.before_answer: Callable[[], object] = lambda: None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.posted.append(Posted(self.path, dict(self.headers), body))
                outer.before_answer()
                code = outer.answers.pop(0) if outer.answers else 200
                self.send_response(code)
                if 300 <= code < 400:
                    self.send_header("Location", f"{outer.url}/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def ids(self) -> list[str]:
        return [json.loads(posted.body)["id"] for posted in self.posted]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


class Warnings(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


def file_of(tmp_path: Path, *targets: str) -> Path:
    path = tmp_path / "job.failed"
    path.write_text(json.dumps({"targets": targets, "notice": NOTICE}))
    return path


def test_targets_are_addresses_mailboxes_and_commands() -> None:
    for good in (
        "https://ntfy.sh/x",
        "slack+https://chat.example/hook",
        "mail:me@example.org",
        "tee -a log",
        "curl -d @- https://example.org/x",
    ):
        assert target_error(good) is None, good
        assert notify_target(good) == good
    for bad in (
        "",
        " ",
        "mail:",
        "mail:me",
        "mail:a b@c",
        "ftp://x/y",
        "teams+https://x/y",
        "https://",
        "http://[x/",
        "https://x:99999/",
        "https://x:y/",
    ):
        assert target_error(bad), bad
        with pytest.raises(BadValue):
            notify_target(bad)
    assert notify_events("failed, done") == ("failed", "done")
    with pytest.raises(BadValue, match="failed, hung, recovered, done"):
        notify_events("ended")


def test_a_web_address_gets_the_whole_notice(server: Server) -> None:
    deliver(f"{server.url}/hook?key=1", NOTICE)
    ((path, headers, body),) = server.posted
    assert path == "/hook?key=1"
    assert "Authorization" not in headers
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body) == NOTICE


def test_an_address_may_have_a_user_and_any_signs(server: Server) -> None:
    deliver(server.url.replace("://", "://me:a%40b@") + "/ü b?key=%20ä", NOTICE)
    ((path, headers, _),) = server.posted
    assert path == "/%C3%BC%20b?key=%20%C3%A4"
    assert headers["Authorization"] == "Basic bWU6YUBi"
    assert headers["Host"] == server.url.partition("://")[2]


def test_slack_discord_and_ntfy_get_their_forms(server: Server) -> None:
    for form in ("slack", "discord", "ntfy"):
        deliver(server.url.replace("http", f"{form}+http", 1), NOTICE)
    slack, discord, ntfy = server.posted
    assert json.loads(slack.body) == {"text": "*train failed {text}*\n```rank 3: {title} é```"}
    assert json.loads(discord.body) == {"content": "**train failed {text}**\n```rank 3: {title} é```"}
    assert ntfy.body.decode() == "rank 3: {title} é"
    assert (ntfy.headers["Title"], ntfy.headers["Tags"]) == ("train failed {text}", "hvlaunch,failed")


def test_a_command_reads_the_notice_and_its_failure_has_its_last_line(tmp_path: Path) -> None:
    deliver(f"cat > {tmp_path}/got", NOTICE)
    assert json.loads((tmp_path / "got").read_text()) == NOTICE
    with pytest.raises(NotDelivered, match="exit code 7: no such channel"):
        deliver("echo no such channel >&2; exit 7", NOTICE)


def test_a_mailbox_gets_a_letter_by_sendmail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sendmail"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words; cat > {tmp_path}/letter\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    deliver("mail:me@example.org", {**NOTICE, "title": "a\r\nBcc: all@example.org"})
    letter = (tmp_path / "letter").read_text()
    assert (tmp_path / "words").read_text() == "-i -t\n"
    assert "To: me@example.org\n" in letter
    assert "Subject: a Bcc: all@example.org\n" in letter, "a title makes no header of its own"


def test_a_busy_server_is_tried_again_and_one_that_refuses_is_not(tmp_path: Path, server: Server) -> None:
    server.answers = [503, 429, 200]
    path = file_of(tmp_path, server.url)
    deliver_file(path, QUICK)
    assert len(server.posted) == 3
    assert path.read_bytes() == b"", "the address is not kept"
    server.answers = [404]
    path = file_of(tmp_path, f"{server.url}/secret")
    deliver_file(path, QUICK)
    assert len(server.posted) == 4
    assert json.loads(path.read_bytes()) == {
        "failures": [["http://127.0.0.1/...", "the server answered 404"]]
    }


def test_no_redirection_is_followed(tmp_path: Path, server: Server) -> None:
    server.answers = [307]
    deliver_file(file_of(tmp_path, f"{server.url}/hook"), QUICK)
    assert [posted.path for posted in server.posted] == ["/hook"]


class Peer(NamedTuple):
    """A server of any kind: sends `parts` after a request, the last part for ever if `goes_on`."""

    parts: tuple[bytes, ...]
    cause: str | None
    """None: the notice is delivered."""
    goes_on: bool = False
    resets: bool = False

    def answer(self, connection: socket.socket, over: threading.Event) -> None:
        with connection, suppress(OSError):
            connection.settimeout(60.0)
            request = b""
            # The whole request: a connection that is closed with unread bytes is reset.
            while not request.endswith(b"}}"):
                request += connection.recv(1 << 16)
            for part in self.parts:
                connection.sendall(part)
            while self.goes_on and not over.is_set():
                # A peer with nothing to send waits until the other side is gone.
                if self.parts[-1]:
                    connection.sendall(self.parts[-1])
                elif not connection.recv(1):
                    break
            if self.resets:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


OK = b"HTTP/1.1 200 OK\r\n"
PEERS = {
    "hangs": Peer((b"",), "no answer within 0.5 s", goes_on=True),
    "closes": Peer((), "the server closed the connection without an answer"),
    "resets": Peer((), "connection reset by peer", resets=True),
    "no HTTP": Peer((b"hello\r\n\r\n",), "its answer is not HTTP"),
    "endless header": Peer((OK, b"a: b\r\n"), "its answer is not HTTP", goes_on=True),
    "endless prelude": Peer((b"HTTP/1.1 100 Continue\r\n\r\n",), "no answer within 1 s", goes_on=True),
    "endless answer": Peer((OK, b"\r\n", b"x" * 4096), None, goes_on=True),
    "endless refusal": Peer((b"HTTP/1.1 500 No\r\n\r\n", b"x"), "the server answered 500", goes_on=True),
    "answer breaks off": Peer((OK, b"Content-Length: 5\r\n\r\n"), None),
    "content hangs": Peer((OK, b"Content-Length: 5\r\n\r\n", b""), None, goes_on=True),
}


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_a_hostile_server_costs_a_moment(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_ANSWER", 0.5)
    monkeypatch.setattr(notices, "_EXCHANGE", 1.0 if "100" in str(peer.parts) else 60.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()
        thread = threading.Thread(target=lambda: peer.answer(listener.accept()[0], over))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        if peer.cause is None:
            deliver(url, NOTICE)
        else:
            with pytest.raises(NotDelivered) as caught:
                deliver(url, NOTICE)
            assert (str(caught.value), caught.value.is_final) == (peer.cause, False)
        over.set()
        thread.join(60.0)


def test_a_server_with_a_wrong_certificate_gets_nothing(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (tmp_path / "pem").write_text(new_peer()["pem"])
    context.load_cert_chain(tmp_path / "pem")
    got: list[bytes] = []

    def serve() -> None:
        with suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True) as connection:
            got.append(connection.recv(1))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(NotDelivered, match=r"^its certificate is not valid: self-signed certificate"):
            deliver(f"https://127.0.0.1:{listener.getsockname()[1]}/secret", NOTICE)
        thread.join(60.0)
    assert not got


def test_one_bad_target_does_not_keep_another_from_its_notice_or_repeat_it(
    tmp_path: Path, server: Server
) -> None:
    server.answers = [200, 503, 503]
    path = file_of(tmp_path, "exit 1", f"{server.url}/a", f"{server.url}/b")
    deliver_file(path, QUICK)
    assert [posted.path for posted in server.posted] == ["/a", "/b", "/b", "/b"]
    assert json.loads(path.read_bytes()) == {"failures": [["exit 1", "exit code 1"]]}


DELIVERY = (sys.executable, "-c", "from hvlaunch.outside.notices import run_delivery; run_delivery()")


def test_a_killed_delivery_continues_with_its_other_targets(tmp_path: Path, server: Server) -> None:
    # The command outlives the killed process: the test ends it.
    slow = f"echo $$ > {tmp_path}/pid; exec sleep 60"
    path = file_of(tmp_path, f"{server.url}/a", slow)
    words = [*DELIVERY, str(path)]
    with subprocess.Popen(words) as process:
        wait_until(
            lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the second is next", 60.0
        )
        process.kill()
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    content = json.loads(path.read_bytes())
    assert content["targets"] == [slow]
    path.write_text(json.dumps({**content, "targets": ["true"]}))
    deliver_file(path, QUICK)
    assert path.read_bytes() == b""
    assert len(server.posted) == 1


def test_a_delivery_killed_before_the_answer_is_repeated_with_the_same_id(
    tmp_path: Path, server: Server
) -> None:
    """Only the receiver can know if a notice arrived twice."""
    maker = Notices(tmp_path / "notices", "0123", [server.url], print)
    server.before_answer = lambda: os.kill(process.pid, signal.SIGKILL)
    path = tmp_path / "notices" / "0123.failed"
    maker.begin()
    path.write_text(json.dumps({"targets": [server.url], "notice": {**NOTICE, "id": path.name}}))
    with subprocess.Popen([*DELIVERY, str(path)]) as process:
        assert process.wait(60.0) == -signal.SIGKILL
    server.before_answer = lambda: None
    maker.begin()
    wait_until(lambda: not path.stat().st_size, "the successor's process delivers it", 60.0)
    assert server.ids == ["0123.failed"] * 2


def test_a_delivery_waits_for_earlier_notices_of_the_job_but_not_for_long(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, begun = tmp_path / "notices", []
    monkeypatch.setattr(notices, "start_process", lambda _, _function, path: begun.append(path))
    maker = Notices(directory, "0123", [server.url], print)
    maker.begin()
    for key in ("recovered-1", "recovered-2", "done"):
        maker.post(key, lambda: NOTICE)
    first, second, third = begun
    threads = [threading.Thread(target=deliver_file, args=(path, QUICK)) for path in (third, second)]
    for thread, path in zip(threads, (third, second), strict=True):
        thread.start()
        wait_until(partial(_is_locked, path), "the file is locked", 60.0)
    assert not server.posted
    deliver_file(first, QUICK)
    for thread in threads:
        thread.join(60.0)
    assert server.ids == ["0123.recovered-1", "0123.recovered-2", "0123.done"]
    monkeypatch.setattr(notices, "_ORDER", 0.1)
    server.answers = [500] * 3
    for key in ("hung-1", "hung-2"):
        maker.post(key, lambda: NOTICE)
    deliver_file(begun[-1], ())
    assert server.ids[3:] == ["0123.hung-2"], "an earlier notice without a process holds nothing up for long"


@pytest.mark.parametrize("jobs", [5, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_each_notice_reaches_a_server_once_and_in_order_whenever_drivers_are_killed(
    tmp_path: Path, server: Server, jobs: int
) -> None:
    site = Site(tmp_path / "state")
    line = [sys.executable, "-m", "hvlaunch", "--detach", "-np", "1", "--min-np", "1", "--lease", "60"]
    expected, killed = [], 0
    for number in range(jobs):
        # Each job recovers twice, and fails or is done.
        tries = tmp_path / f"tries-{number}"
        script = f"sleep 0.3; echo >> {tries}; [ $(wc -l < {tries}) -gt 2 ]"
        limit = ("--max-restarts", "2" if number % 2 else "9")
        if number % 2:
            script = f"sleep 0.3; exit 7; : {tries}"
        done = subprocess.run(
            [*line, *limit, "--notify", server.url, "sh", "-c", script],
            env=site.environ,
            capture_output=True,
            text=True,
            check=True,
        )
        job = done.stdout.strip()
        # The moments are random: any are right.
        for _ in range(2):
            time.sleep(Random(number).random() * 0.9)
            with suppress(ProcessLookupError):
                known = next(known for known in known_jobs(site.root) if known.id == job)
                if known.has_driver:
                    os.kill(known.about["pid"], signal.SIGKILL)
                    killed += 1
        site.do("wait", job)
        end = f"{job}.{'failed' if number % 2 else 'done'}"
        wait_until(partial(lambda end: end in server.ids, end), "the end is known", 60.0)
        expected += [f"{job}.recovered-1", f"{job}.recovered-2", end]
    directory = site.root.with_name("notices")
    # A killed driver may leave a part of a file, which its successor makes anew.
    wait_until(
        lambda: not any(file.stat().st_size for file in directory.glob("[!.]*")), "all are recorded", 60.0
    )
    assert killed
    assert server.ids == expected


def test_two_processes_deliver_a_notice_once(tmp_path: Path, server: Server) -> None:
    path = file_of(tmp_path, f"cat /dev/null; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done", server.url)
    first = threading.Thread(target=deliver_file, args=(path, QUICK))
    first.start()
    # The second one ends at once: the file is locked as soon as the first one has read it.
    wait_until(lambda: _is_locked(path), "the first one has the file", 60.0)
    deliver_file(path, QUICK)
    assert not server.posted
    (tmp_path / "go").touch()
    first.join(60.0)
    assert len(server.posted) == 1


def _is_locked(path: Path) -> bool:
    import fcntl

    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_drivers_of_a_job_make_a_notice_once(tmp_path: Path, server: Server) -> None:
    directory, warnings, made = tmp_path / "notices", Warnings(), []

    def make() -> dict[str, Any]:
        made.append(1)
        return dict(NOTICE)

    for _driver in range(3):
        maker = Notices(directory, "0123", [server.url], warnings)
        maker.begin()
        maker.post("failed", make)
        maker.post("failed", make)
    wait_until(
        lambda: server.posted and not (directory / "0123.failed").stat().st_size, "it is delivered", 60.0
    )
    assert len(made) == len(server.posted) == 1
    assert stat.S_IMODE((directory / "0123.failed").stat().st_mode) == 0o600
    assert [file.name for file in directory.iterdir()] == ["0123.failed"]
    assert not warnings


def test_a_successor_delivers_what_a_killed_driver_has_left(tmp_path: Path, server: Server) -> None:
    directory = tmp_path / "notices"
    directory.mkdir(mode=0o700)
    body = json.dumps({"targets": [server.url], "notice": NOTICE})
    (directory / "0123.hung-1").write_text(body)
    (directory / "other.hung-1").write_text(body)
    Notices(directory, "0123", [server.url], print).begin()
    wait_until(lambda: not (directory / "0123.hung-1").stat().st_size, "it is delivered", 60.0)
    assert len(server.posted) == 1
    assert (directory / "other.hung-1").stat().st_size, "another job's is its own driver's"
    # After a restart of the machine, no driver of that job comes any more.
    (directory / ".hvlaunch-00.part").write_text(body)
    for file in directory.iterdir():
        os.utime(file, (0, time.time() - 2 * 3600))
    Notices(directory, "4567", [server.url], print).begin()
    wait_until(lambda: not (directory / "other.hung-1").stat().st_size, "it is delivered", 60.0)
    assert len(server.posted) == 2
    assert not (directory / ".hvlaunch-00.part").exists(), "half made by a killed driver, and made anew"


def test_a_record_of_a_delivery_is_whole_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may be killed, and the disk be full."""
    path = file_of(tmp_path, "true", "exit 1", "true")
    sizes, seen = [path.stat().st_size], []
    truncate = os.ftruncate

    def look(descriptor: int, length: int) -> None:
        assert path.stat().st_size == sizes[-1], "a record takes no more room"
        seen.append(json.loads(path.read_bytes()))
        truncate(descriptor, length)
        sizes.append(length)

    monkeypatch.setattr(os, "ftruncate", look)
    deliver_file(path, QUICK)
    assert [len(content.get("targets", ())) for content in seen] == [2, 1, 0, 0]
    assert seen[-1] == {"failures": [["exit 1", "exit code 1"]]}


def test_the_next_job_tells_of_a_notice_that_was_given_up_and_old_files_go(tmp_path: Path) -> None:
    directory, warnings = tmp_path / "notices", Warnings()
    directory.mkdir(mode=0o700)
    (directory / "0123.done").write_text(json.dumps({"failures": [["ntfy.sh", "the server answered 403"]]}))
    (directory / "torn.done").write_text("{")
    (directory / "old.done").touch()
    os.utime(directory / "old.done", (0, time.time() - 8 * 86400))
    for _ in range(2):
        Notices(directory, "4567", [], warnings).begin()
    assert warnings == ["a notice of job 0123 did not reach ntfy.sh: the server answered 403"]
    assert sorted(file.name for file in directory.iterdir()) == ["0123.done", "torn.done"]


def test_a_directory_of_others_or_a_full_disk_costs_the_notice_alone(tmp_path: Path) -> None:
    warnings = Warnings()
    (tmp_path / "notices").write_text("a file")
    maker = Notices(tmp_path / "notices", "0123", ["true"], warnings)
    maker.begin()
    maker.post("failed", lambda: NOTICE)
    assert len(warnings) == 2
    assert all(text.startswith("--notify: ") for text in warnings)


def test_paths_of_addresses_are_shown_nowhere() -> None:
    secret = "https://hooks.slack.com/services/T0/B0/wordwordword"
    assert shown(secret) == "https://hooks.slack.com/..."
    assert shown("mail:me@x.org") == "mail:me@x.org"
    assert [*masked_words(["--notify", secret])] == ["--notify", "https://hooks.slack.com/****"]


@pytest.mark.parametrize(("words", "event"), [(["false"], "failed"), (["true"], "done")])
def test_a_job_sends_word_of_its_end(tmp_path: Path, server: Server, words: list[str], event: str) -> None:
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    line = [sys.executable, "-m", "hvlaunch", "-np", "2", "--job-name", "try", "--notify", server.url, *words]
    subprocess.run(line, env=env, capture_output=True, check=False)
    notices_of_job = tmp_path / "hvlaunch" / "notices"
    wait_until(
        lambda: [file.stat().st_size for file in notices_of_job.iterdir()] == [0], "it is delivered", 60.0
    )
    (posted,) = server.posted
    notice = json.loads(posted.body)
    assert (notice["event"], notice["name"], notice["report"]["exit_code"]) == (
        event,
        "try",
        int(event == "failed"),
    )
    assert server.url not in posted.body.decode()


def test_a_job_that_its_user_ends_from_the_keyboard_sends_no_word(tmp_path: Path, server: Server) -> None:
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    line = [
        sys.executable,
        "-m",
        "hvlaunch",
        "-np",
        "1",
        "--notify",
        server.url,
        "sh",
        "-c",
        "echo up; exec sleep 60",
    ]
    with subprocess.Popen(
        line, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert "up" in process.stdout.readline()
        cmdline = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert server.url.encode() not in cmdline, "other users see the command line"
        process.send_signal(signal.SIGINT)
        process.wait(60.0)
    assert [*(tmp_path / "hvlaunch" / "notices").iterdir()] == []


def test_the_pauses_leave_a_server_minutes_to_come_back() -> None:
    assert 120 < sum(notices._PAUSES) < 600


def test_hangs_and_recoveries_are_named_by_their_number(tmp_path: Path) -> None:
    spec = JobSpec(
        command=("train",),
        hosts=(),
        cwd="/",
        notify=(f"f=$(mktemp {tmp_path}/XXXXXX); cat > $f; mv $f $f.got",),
    )
    about = {"id": "0123", "name": None, "command": ["train"], "machine": "m"}
    report = Reporting(spec, Printer(None, None), about, None)
    for _driver in range(2):
        notifier = Notifier(spec, about, tmp_path / "notices", report, print)
        notifier.watch(on.JobHangs(60.0, (1,), "rank 1 waits"), [], 1.0)
        notifier.watch(on.Tick(), [tell.RoundFormed(0, 4, ("a",), None)], 2.0)
        notifier.watch(on.Tick(), [tell.RoundFormed(2, 3, ("a", "b"), None)], 3.0)
        notifier.watch(on.JobHangs(60.0, (2,), "rank 2 waits"), [], 4.0)
    assert sorted(file.name for file in (tmp_path / "notices").iterdir()) == [
        "0123.hung-1",
        "0123.hung-2",
        "0123.recovered-2",
    ]
    wait_until(lambda: len([*tmp_path.glob("*.got")]) == 3, "all are delivered", 60.0)
    titles = sorted(json.loads(file.read_text())["title"] for file in tmp_path.glob("*.got"))
    assert titles == ["train goes on with 3 workers", "train hangs", "train hangs"]
