"""Which of our keys gets in, from files and from the ssh agent, and what is said where none does."""

import os
import shutil
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest

from hvlaunch.errors import (
    HostError,
    PermissionDenied,
)
from hvlaunch.ssh.keyring import Keyring
from tests.testhosts.places import wait_until

from .conftest import agent_answers, answer, connect, keygen, read_all, refusal, user


def test_a_wrong_key(sshd, tmp_path):
    key = keygen(tmp_path / "wrong")
    sshd.key.rename(tmp_path / "aside")
    try:
        error = refusal(PermissionDenied, sshd, identity=key)
    finally:
        (tmp_path / "aside").rename(sshd.key)
    assert error.tried == (str(key),)
    message = str(error)
    assert f"permission denied (publickey) for user {user()}; tried 1 key: {key}" in message
    assert error.hint.startswith("`ssh-copy-id ")
    assert f"-p {sshd.port} -i {key} {user()}@127.0.0.1`" in error.hint


def test_no_key(unused, make_sshd):
    sshd = make_sshd()
    sshd.key.unlink()
    error = refusal(PermissionDenied, sshd)
    assert "there is no key to try" in str(error)
    assert error.tried == ()
    assert error.hint.startswith("`ssh-keygen -t ed25519`, then `ssh-copy-id ")


def test_an_encrypted_key_without_an_agent(make_sshd, tmp_path):
    sshd = make_sshd()
    sshd.key.unlink()
    keygen(sshd.key, passphrase="secret")
    error = refusal(PermissionDenied, sshd)
    assert f"{sshd.key}: it is encrypted and no ssh agent has it" in str(error)
    assert "secret" not in str(error)
    assert "ssh-add" in error.hint


def test_an_encrypted_key_that_was_asked_for_leaves_the_others(sshd, tmp_path):
    assert answer(sshd, identity=keygen(tmp_path / "k", passphrase="secret")) == "hello"


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "there is no such file"), ("nonsense", "it is not an RSA, ECDSA or Ed25519 private key")],
)
def test_a_key_that_was_asked_for_and_can_not_be_used(sshd, tmp_path, content, problem):
    key = tmp_path / "k"
    if content is not None:
        key.write_text(content)
    error = refusal(HostError, sshd, identity=key)
    assert f"the private key {key} can't be used: {problem}" in str(error)
    error = refusal(HostError, sshd, host={"identity": str(key)})
    assert str(key) in str(error)


def test_the_public_half_in_place_of_the_private_one(sshd, tmp_path):
    key = keygen(tmp_path / "k")
    error = refusal(HostError, sshd, identity=Path(f"{key}.pub"))
    assert error.hint == f"-i {key}"


def test_too_many_wrong_keys(make_sshd, tmp_path):
    sshd = make_sshd(words=("MaxAuthTries 2",))
    wrong = [keygen(tmp_path / f"k{i}") for i in range(3)]
    sshd.config += [f"IdentityFile {key}" for key in wrong]
    error = refusal(PermissionDenied, sshd)
    assert "Too many authentication failures" in str(error)
    assert "`IdentitiesOnly yes`" in str(error)
    assert error.tried == tuple(map(str, wrong[:2]))


def test_a_host_that_wants_more_than_a_key(make_sshd):
    sshd = make_sshd(words=("PasswordAuthentication yes", "AuthenticationMethods publickey,password"))
    message = str(refusal(PermissionDenied, sshd))
    assert f"the key {sshd.key} was accepted, but the host also requires password" in message


def test_a_host_that_takes_no_keys(make_sshd):
    sshd = make_sshd(words=("PubkeyAuthentication no", "PasswordAuthentication yes"))
    sshd.config.append(f"IdentityFile {keygen(sshd.folder / 'another')}")
    error = refusal(PermissionDenied, sshd)
    assert "permission denied (password)" in str(error)
    assert len(error.tried) == 1


# The ssh agent


@pytest.fixture
def agent(tmp_path):
    """The socket of a real ssh-agent, and a way to give it keys."""
    if shutil.which("ssh-agent") is None:
        pytest.skip("needs ssh-agent (Debian: openssh-client)")
    path = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)

    def add(key: Path) -> None:
        asker = tmp_path / "asker"
        asker.write_text("#!/bin/sh\necho secret\n")
        asker.chmod(0o700)
        words = {
            "SSH_AUTH_SOCK": str(path),
            "SSH_ASKPASS": str(asker),
            "SSH_ASKPASS_REQUIRE": "force",
            "DISPLAY": "x",
        }
        subprocess.run(["ssh-add", "-q", key], env={**os.environ, **words}, check=True)

    wait_until(lambda: agent_answers(path), "ssh-agent")
    yield path, add
    process.terminate()
    process.wait()


@pytest.fixture
def locked(make_sshd, tmp_path):
    """An sshd that only takes a key which lies encrypted in the user's configuration."""
    sshd = make_sshd()
    (sshd.folder / "authorized").write_text("")
    sshd.key.unlink()
    sshd.authorize(keygen(sshd.key, passphrase="secret"))
    return sshd


def test_an_agent_holds_the_encrypted_key(locked, agent):
    path, add = agent
    add(locked.key)
    locked.config.append(f"IdentityAgent {path}")
    assert answer(locked) == "hello"


def test_the_keys_of_an_agent_that_no_configuration_names(sshd, agent, tmp_path):
    path, add = agent
    key = keygen(tmp_path / "k")
    sshd.authorize(key)
    add(key)
    sshd.config = [f"IdentityAgent {path}"]
    with closing(Keyring()) as keyring:
        sshd.key.rename(tmp_path / "aside")
        try:
            assert answer(sshd, keyring=keyring) == "hello"
            sshd.config.append("IdentitiesOnly yes")
            with pytest.raises(PermissionDenied) as caught:
                answer(sshd, keyring=keyring)
        finally:
            (tmp_path / "aside").rename(sshd.key)
            sshd.config = []
    assert caught.value.tried == ()


def test_keys_of_the_configuration_come_before_the_agents_others(locked, agent, tmp_path):
    """As sshd gives up after a few, an agent full of keys would otherwise lock us out."""
    path, add = agent
    for i in range(8):
        add(keygen(tmp_path / f"other{i}"))
    add(locked.key)
    locked.config.append(f"IdentityAgent {path}")
    assert answer(locked) == "hello"


def test_the_key_that_was_asked_for_comes_before_the_agents_others(sshd, agent, tmp_path):
    path, add = agent
    for i in range(8):
        add(keygen(tmp_path / f"other{i}"))
    key = keygen(tmp_path / "k")
    sshd.authorize(key)
    sshd.config.append(f"IdentityAgent {path}")
    try:
        assert answer(sshd, identity=key) == "hello"
    finally:
        sshd.config.clear()


def test_fifty_threads_share_one_agent(locked, agent):
    path, add = agent
    add(locked.key)
    locked.config.append(f"IdentityAgent {path}")
    options, said = locked.options(), []
    with closing(Keyring()) as keyring:

        def work() -> None:
            with closing(connect(locked.host(), options, timeout=60, keyring=keyring)) as connection:
                said.append(read_all(connection.run("echo hello")))

        threads = [threading.Thread(target=work) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert said == [b"hello\n"] * 50


def test_an_agent_that_is_gone_is_named(locked):
    locked.config.append(f"IdentityAgent {locked.folder}/gone")
    assert f"no ssh agent answers at {locked.folder}/gone" in str(refusal(PermissionDenied, locked))
