"""What a host, or whoever sits before it, could get of ssh: the agent, forwarded ports, weak algorithms."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.cli.main import main
from hvlaunch.errors import ConnectFailed, HostError, PermissionDenied
from hvlaunch.job import Host, SSHOptions
from hvlaunch.ssh.by_openssh import OpenSSHClient
from hvlaunch.ssh.config import Algorithms, allowed
from hvlaunch.ssh.streams import ConnectLimit
from tests.testhosts.places import wait_until
from tests.unit.ssh.conftest import PATIENCE, Sshd, agent_answers, connect, keygen, read_all, refusal


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    wait_until(lambda: agent_answers(path), "the agent")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    yield path
    process.terminate()
    process.wait()


def by_openssh(sshd: Sshd, command: str, **options) -> str:
    if shutil.which("ssh") is None:
        pytest.skip("needs the ssh binary (openssh-client)")
    client = OpenSSHClient(
        sshd.options(**options), timeout=PATIENCE, connect_limit=ConnectLimit(8, sleep=lambda _: None)
    )
    with closing(client.connect(sshd.host())) as connection:
        return read_all(connection.run(command)).decode().strip()


def test_the_ssh_binary_forwards_no_agent_though_the_configuration_does(make_sshd, agent) -> None:
    sshd = make_sshd()
    sshd.config += ["ForwardAgent yes", f"IdentityAgent {agent}"]
    assert by_openssh(sshd, 'echo "socket=$SSH_AUTH_SOCK"') == "socket="


def test_the_agent_is_forwarded_on_request(make_sshd, agent) -> None:
    sshd = make_sshd()
    sshd.config += [f"IdentityAgent {agent}"]
    assert by_openssh(sshd, "ssh-add -l 2>&1", forward_agent=True) == "The agent has no identities."


def test_paramiko_refuses_agent_forwarding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--forward-agent", "-H", "a", "true"]) == 2
    assert (
        "--forward-agent needs the ssh binary; try: --ssh-client openssh as well" in capsys.readouterr().err
    )


@pytest.mark.parametrize("keyword", ["RemoteForward", "LocalForward"])
def test_no_port_of_the_configuration_is_forwarded(make_sshd, keyword: str) -> None:
    sshd = make_sshd()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sshd.config += [f"{keyword} 127.0.0.1:{port} 127.0.0.1:{sshd.port}"]
    tried = f"if (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null; then echo open; else echo closed; fi"
    assert by_openssh(sshd, f"bash -c '{tried}'") == "closed"


@pytest.mark.parametrize(
    "word",
    ["Ciphers aes128-cbc,aes256-cbc", "Ciphers aes128-ctr\nMACs hmac-sha1"],
)
def test_a_host_with_only_weak_algorithms_is_refused(make_sshd, word: str) -> None:
    error = refusal(ConnectFailed, make_sshd(words=tuple(word.split("\n"))))
    assert "the SSH handshake with" in str(error)
    assert error.hint == "--ssh-client openssh"


def chosen(sshd: Sshd) -> tuple[str | None, ...]:
    with closing(connect(sshd.host(), sshd.options(), timeout=PATIENCE)) as connection:
        transport = connection._transport
        return transport.local_cipher, transport.local_mac, transport.host_key_type


def test_the_algorithms_of_the_configuration_are_used(make_sshd) -> None:
    sshd = make_sshd()
    assert chosen(sshd)[0] == "aes128-gcm@openssh.com"
    sshd.config += ["Ciphers aes256-ctr", "MACs hmac-sha2-512"]
    assert chosen(sshd) == ("aes256-ctr", "hmac-sha2-512", "ssh-ed25519")


def test_a_key_exchange_that_the_configuration_excludes_is_not_made(make_sshd) -> None:
    sshd = make_sshd(words=("KexAlgorithms curve25519-sha256@libssh.org",))
    sshd.config += ["KexAlgorithms ecdh-sha2-nistp521"]
    assert "the SSH handshake with" in str(refusal(ConnectFailed, sshd))


@pytest.mark.parametrize("keyword", ["Ciphers", "MACs"])
def test_a_configuration_that_allows_nothing_of_ours(make_sshd, keyword: str) -> None:
    sshd = make_sshd()
    listed = {"Ciphers": "chacha20-poly1305@openssh.com", "MACs": "umac-128@openssh.com"}[keyword]
    sshd.config += [f"{keyword} {listed}"]
    error = refusal(HostError, sshd)
    assert error.cause == f"{keyword} {listed} of the ssh configuration: hvlaunch supports none of these"


def test_a_key_of_a_kind_that_the_configuration_excludes_is_not_shown(make_sshd) -> None:
    sshd = make_sshd()
    sshd.config += ["PubkeyAcceptedAlgorithms -ssh-ed25519"]
    assert "PubkeyAcceptedAlgorithms of the ssh configuration excludes it" in str(
        refusal(PermissionDenied, sshd)
    )


def test_an_rsa_key_with_one_allowed_algorithm(make_sshd, tmp_path: Path) -> None:
    sshd, key = make_sshd(), keygen(tmp_path / "rsa", "rsa", "-b", "2048")
    sshd.authorize(key)
    sshd.config += ["PubkeyAcceptedAlgorithms rsa-sha2-256"]
    with closing(connect(sshd.host(), sshd.options(identity=key), timeout=PATIENCE)) as connection:
        transport: Any = connection._transport  # types-paramiko leaves this out
        assert transport._agreed_pubkey_algorithm == "rsa-sha2-256"


def test_a_host_key_of_a_kind_that_the_configuration_excludes_is_not_taken(make_sshd) -> None:
    sshd = make_sshd(key_types=("ed25519", "ecdsa"))
    sshd.know(f"{sshd.name} {sshd.host_key('ed25519')}", f"{sshd.name} {sshd.host_key('ecdsa')}")
    sshd.config += ["HostKeyAlgorithms ecdsa-sha2-nistp256"]
    assert chosen(sshd)[2] == "ecdsa-sha2-nistp256"


def test_a_packet_of_two_gigabytes_is_not_waited_for(serve, tmp_path: Path) -> None:
    """Before any key is checked: whatever machine is at the address could fill the driver's memory."""

    def send(client: socket.socket) -> None:
        client.sendall(b"SSH-2.0-x\r\n" + (2**31 - 4).to_bytes(4, "big") + b"A" * 1000)

    (tmp_path / "config").write_text(
        "IdentityAgent none\nUserKnownHostsFile none\nGlobalKnownHostsFile none\n"
    )
    options = SSHOptions(config=tmp_path / "config", port=serve(send), host_keys="off")
    with pytest.raises(
        ConnectFailed, match=r"the SSH handshake with .* failed: a packet of 2147483640 bytes"
    ):
        connect(Host("127.0.0.1"), options, timeout=10.0)


OURS = ("mlkem768x25519-sha256", "curve25519-sha256@libssh.org", "ecdh-sha2-nistp256")


@pytest.mark.parametrize(
    ("listed", "left"),
    [
        (None, OURS),
        ("+diffie-hellman-group1-sha1", OURS),
        ("^ecdh-sha2-nistp256", OURS),
        ("-ecdh-*", OURS[:2]),
        ("curve25519-sha256", OURS[1:2]),
        ("ecdh-sha2-nistp256,sntrup761x25519-sha512@openssh.com", (OURS[0], OURS[2])),
        ("diffie-hellman-group1-sha1", ()),
    ],
)
def test_a_list_takes_away_and_adds_nothing_weak(listed: str | None, left: tuple[str, ...]) -> None:
    assert allowed(OURS, listed) == left


def test_older_ssh_has_another_word_for_signatures() -> None:
    assert Algorithms.of({"pubkeyacceptedkeytypes": ["ssh-ed25519"]}).signatures == "ssh-ed25519"
