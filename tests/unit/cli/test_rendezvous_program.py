"""hvlaunch-rendezvous: what it takes, prints and leaves, and how it ends."""

import signal
import subprocess
import sys

import pytest

from hvlaunch.cli.rendezvous import main
from hvlaunch.rendezvous import RendezvousUnreachable, Unauthorized
from hvlaunch.rendezvous.client import Client
from tests.ipv6 import has_ipv6

RUN = "from hvlaunch.cli.rendezvous import script; script()"
IGNORE = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
NO_TOKEN = "it has no token; a token is one word of at least 16 ASCII characters; try: another FILE; if there is no such file, it is made with a new token"
NOT_OURS = "can't listen on 192.0.2.1 port 0: Cannot assign requested address"


@pytest.fixture
def start():
    """start(words…): the program, and the address that it says it serves on."""
    processes = []

    def start_program(*words, before=""):
        process = subprocess.Popen(
            [sys.executable, "-c", before + RUN, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        printed = ""
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            printed += line
            if "serving on " in line:
                return process, printed, line.split("serving on ")[1].strip()
        pytest.fail(f"it ended with {process.wait(60)}: {process.stderr.read()}")

    yield start_program
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_serves_until_it_is_told_to_end(start, tmp_path, number):
    file = tmp_path / "token"
    process, printed, place = start("--bind", "127.0.0.1:0", "--token-file", str(file))
    assert f"{file} has a new token\n" in printed
    assert file.stat().st_mode & 0o777 == 0o600
    token = file.read_text().strip()
    assert token not in printed
    with Client(f"http://{place}", token) as client:
        client.put("s", "k", b"v")
        assert client.get("s", "k") == b"v"
        with pytest.raises(Unauthorized):
            Client(f"http://{place}", "another-token-that-is-long").get("s", "k")
        process.send_signal(number)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
        with pytest.raises(RendezvousUnreachable):
            client.get("s", "k")


def test_the_token_stays_and_the_values_do_not(start, tmp_path):
    file = tmp_path / "token"
    file.write_text("  a-token-of-the-user\n")
    file.chmod(0o640)
    for _ in range(2):
        process, printed, place = start("--bind", "127.0.0.1:0", "--token-file", str(file))
        assert "new token" not in printed
        with Client(f"http://{place}", "a-token-of-the-user") as client:
            assert client.get("s", "k") is None
            client.put("s", "k", b"v")
        process.terminate()
        assert process.wait(60) == 0


def test_what_nohup_ignores_stays_ignored(start, tmp_path):
    file = tmp_path / "token"
    process, _, place = start("--bind", "127.0.0.1:0", "--token-file", str(file), before=IGNORE)
    process.send_signal(signal.SIGHUP)
    with Client(f"http://{place}", file.read_text().strip()) as client:
        assert client.get("s", "k") is None
    process.terminate()
    assert process.wait(60) == 0


@pytest.mark.parametrize("bind", [":0", "[::]:0", "[::1]:0"])
def test_ipv6(start, tmp_path, bind):
    if not has_ipv6():
        pytest.skip("there is no IPv6 here")
    file = tmp_path / "token"
    _, _, place = start("--bind", bind, "--token-file", str(file))
    port = place.rpartition(":")[2]
    with Client(f"http://[::1]:{port}", file.read_text().strip()) as client:
        assert client.count("s") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "hvlaunch-rendezvous needs --token-file; try: hvlaunch-rendezvous --help"),
        ("--token-file t --bind 1.2.3.4", "--bind: '1.2.3.4' is not HOST:PORT; try: hvlaunch-rendezvous --help"),
        ("--token-file t --bind ::1:80", "--bind: '::1:80' is not HOST:PORT; try: hvlaunch-rendezvous --help"),
        ("--token-file t --bind a:65536", "--bind: 'a:65536' is not HOST:PORT; try: hvlaunch-rendezvous --help"),
        ("--token-file t --frob", "unknown option '--frob'; try: hvlaunch-rendezvous --help"),
        ("--token-file none/t", "token file none/t: No such file or directory"),
        ("--token-file .", "token file .: Is a directory"),
        ("--token-file open", "token file open: every user of this machine can read it (mode 644); try: chmod 600 open"),
        ("--token-file short", f"token file short: {NO_TOKEN}"),
        ("--token-file two", f"token file two: {NO_TOKEN}"),
        ("--token-file good --bind 192.0.2.1:0", f"the rendezvous {NOT_OURS}; try: another port"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    for name, text, mode in (
        ("open", "a-token-of-the-user", 0o644),
        ("short", "short", 0o600),
        ("two", "two words that are long", 0o600),
        ("good", "a-token-of-the-user", 0o600),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    assert main(words.split(), wait=pytest.fail) == 2
    assert capsys.readouterr().err == f"hvlaunch-rendezvous: {message}\n"


def test_a_port_that_is_in_use(start, tmp_path, capsys):
    file = tmp_path / "token"
    _, _, place = start("--bind", "127.0.0.1:0", "--token-file", str(file))
    assert main(["--bind", place, "--token-file", str(file)], wait=pytest.fail) == 2
    assert "Address already in use; try: another port\n" in capsys.readouterr().err
