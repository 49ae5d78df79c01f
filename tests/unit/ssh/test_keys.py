"""Which keys are offered, in which order, and when the user is asked."""

import os
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest

from hvlaunch.job import Host, SSHOptions
from hvlaunch.ssh.config import HostSettings, resolve
from hvlaunch.ssh.keyring import Keyring, Locked
from tests.testhosts.places import wait_until

from .conftest import agent_answers, in_thread, keygen


class Asker:
    """Someone who gives these answers, one after the other."""

    def __init__(self, *answers: bytes, there: bool = True) -> None:
        self.answers = list(answers)
        self.there = there
        self.questions: list[str] = []
        self.closed = False

    def is_there(self) -> bool:
        return self.there

    def ask(self, question: str, deadline: float | None = None) -> bytes | None:
        self.questions.append(question)
        return self.answers.pop(0) if self.answers else None

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def settings(tmp_path):
    def make(*lines: str, **words) -> HostSettings:
        config = tmp_path / "config"
        config.write_text("".join(f"{line}\n" for line in (*lines, "IdentityAgent none")))
        return resolve(Host("a", **words), SSHOptions(config=config))

    return make


def labels(offers) -> list[str]:
    return [Path(offer.label).name for offer in offers.keys]


def test_requested_keys_come_first_and_encrypted_keys_last(settings, tmp_path):
    plain, locked, asked = (
        keygen(tmp_path / "plain"),
        keygen(tmp_path / "locked", passphrase="secret"),
        keygen(tmp_path / "asked"),
    )
    found = settings(f"IdentityFile {locked}", f"IdentityFile {plain}", identity=str(asked))
    asker = Asker()
    with closing(Keyring(asker)) as keyring:
        assert labels(keyring.offers("a", found)) == ["asked", "locked", "plain"]
    assert asker.questions == []
    assert asker.closed


def test_a_certificate_comes_before_its_key(settings, tmp_path):
    authority, key = keygen(tmp_path / "ca"), keygen(tmp_path / "k", passphrase="secret")
    subprocess.run(["ssh-keygen", "-q", "-s", authority, "-I", "me", "-n", "x", f"{key}.pub"], check=True)
    other = (tmp_path / "k-cert.pub").rename(tmp_path / "signed")
    for certificate in (f"CertificateFile {other}", f"CertificateFile {tmp_path}/nowhere"):
        with closing(Keyring(Asker(b"secret"))) as keyring:
            offers = keyring.offers("a", settings(f"IdentityFile {key}", certificate))
            expected = ["signed", "k"] if "signed" in certificate else ["k"]
            assert labels(offers) == expected
            blobs = [offer.load().public_blob for offer in offers.keys]
            assert [blob is not None for blob in blobs] == [name == "signed" for name in expected]


def test_a_passphrase_is_asked_for_once_though_many_need_it(settings, tmp_path):
    key = keygen(tmp_path / "k", passphrase="secret")
    go = threading.Event()

    class Slow(Asker):
        def ask(self, question: str, deadline: float | None = None) -> bytes | None:
            go.wait(10.0)
            return super().ask(question, deadline)

    asker, loaded = Slow(b"guess", b"secret"), []
    with closing(Keyring(asker)) as keyring:
        found = settings(f"IdentityFile {key}")
        threads = [
            in_thread(lambda: loaded.append(keyring.offers("a", found).keys[0].load()))[0] for _ in range(6)
        ]
        go.set()
        for thread in threads:
            thread.join()
    assert len(loaded) == 6
    assert len({id(one) for one in loaded}) == 1
    assert asker.questions == [
        f"Enter passphrase for key '{key}': ",
        f"Wrong passphrase. Enter passphrase for key '{key}': ",
    ]


@pytest.mark.parametrize(
    ("answers", "asked", "said"),
    [
        ((b"a", b"b", b"c", b"secret"), 3, "it is encrypted with another passphrase"),
        ((b"",), 1, "it is encrypted and no ssh agent has it"),
        ((), 1, "it is encrypted and no ssh agent has it"),
    ],
)
def test_no_answer_means_no_second_question(settings, tmp_path, answers, asked, said):
    key = keygen(tmp_path / "k", passphrase="secret")
    asker = Asker(*answers)
    with closing(Keyring(asker)) as keyring:
        for _ in range(2):
            (offer,) = keyring.offers("a", settings(f"IdentityFile {key}")).keys
            with pytest.raises(Locked, match=said):
                offer.load()
    assert len(asker.questions) == asked


def test_a_passphrase_that_does_not_come_in_time(settings, tmp_path):
    key = keygen(tmp_path / "k", passphrase="secret")
    deadlines = []

    class Late(Asker):
        def ask(self, question: str, deadline: float | None = None) -> bytes | None:
            deadlines.append(deadline)
            raise TimeoutError

    with closing(Keyring(Late())) as keyring:
        for _ in range(2):
            (offer,) = keyring.offers("a", settings(f"IdentityFile {key}"), 17.0).keys
            with pytest.raises(Locked, match="it is encrypted, and no passphrase was entered in time"):
                offer.load()
    assert deadlines == [17.0]


def test_no_user_to_ask(settings, tmp_path):
    key = keygen(tmp_path / "k", passphrase="secret")
    with closing(Keyring(Asker(there=False))) as keyring:
        offers = keyring.offers("a", settings(f"IdentityFile {key}"))
    assert offers.keys == ()
    assert offers.skipped == (
        f"{key}: it is encrypted and no ssh agent has it, and there is no terminal to ask for its passphrase",
    )


@pytest.fixture
def agent(tmp_path):
    process = subprocess.Popen(["ssh-agent", "-D", "-a", tmp_path / "agent"], stdout=subprocess.DEVNULL)
    wait_until(lambda: agent_answers(tmp_path / "agent"), "ssh-agent")

    def add(key: Path) -> None:
        env = {**os.environ, "SSH_AUTH_SOCK": str(tmp_path / "agent")}
        subprocess.run(["ssh-add", "-q", key], env=env, check=True)

    yield tmp_path / "agent", add
    process.terminate()
    process.wait()


def test_a_certificate_for_a_key_that_an_agent_holds(settings, tmp_path, agent):
    path, add = agent
    authority, key = keygen(tmp_path / "ca"), keygen(tmp_path / "k")
    add(key)
    subprocess.run(["ssh-keygen", "-q", "-s", authority, "-I", "me", "-n", "x", f"{key}.pub"], check=True)
    key.write_text(Path(f"{key}.pub").read_text())
    found = settings(f"IdentityAgent {path}", f"IdentityFile {key}")
    with closing(Keyring(Asker())) as keyring:
        offers = keyring.offers("a", found)
        shown = [offer.load() for offer in offers.keys]
        assert labels(offers) == ["k-cert.pub", "k (agent)"]
        assert [bool(one.public_blob) for one in shown] == [True, False]
        assert all(one.sign_ssh_data(b"x", "ssh-ed25519") for one in shown)
