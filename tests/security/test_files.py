"""Files that one trusts, which another user can change, read or put in the way."""

import os
import pwd
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from hvlaunch.cli.env_file import read_env_file
from hvlaunch.console.files import EventFile
from hvlaunch.errors import BadHost, BadUsage, HostError
from hvlaunch.gloo.controller import run
from hvlaunch.hosts.discovery import HostFile, HostScript
from hvlaunch.hosts.parse import read_hostfile
from hvlaunch.job import Host, JobSpec, SSHOptions
from hvlaunch.owners import other_writer
from hvlaunch.rendezvous.token_file import BadTokenFile, read_token_file
from hvlaunch.ssh.config import resolve
from hvlaunch.ssh.identity import read_identity
from hvlaunch.ssh.keyring import Keyring

Give = Callable[[Path], Path]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_a_private_key_that_others_can_use_is_not_used(key: Path, mode: int) -> None:
    key.chmod(mode)
    found = read_identity(str(key))
    assert found.key is None
    assert found.exposed
    assert found.problem == f"other users can read or change it (mode {mode:03o})"
    assert found.public is not None  # an agent that has it may still sign


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_private_key_of_mine_alone_is_used(key: Path, mode: int) -> None:
    key.chmod(mode)
    assert read_identity(str(key)).key is not None


def test_root_reads_keys_of_others_as_ssh_does(key: Path, given_to_bob: Give) -> None:
    given_to_bob(key).chmod(0o644)
    assert read_identity(str(key)).key is not None


def test_a_public_key_may_be_read_by_all(key: Path) -> None:
    found = read_identity(f"{key}.pub")
    assert found.public is not None
    assert not found.exposed


def test_the_key_that_the_user_names_is_refused_by_name(key: Path) -> None:
    key.chmod(0o644)
    settings = resolve(Host("h"), SSHOptions(identity=key, config=Path(os.devnull)), environ={})
    with closing(Keyring()) as keyring, pytest.raises(HostError) as raised:
        keyring.offers("h", settings)
    assert str(raised.value) == (
        f"host h: the private key {key} can't be used: other users can read or change it (mode 644); try: chmod 600 {key}"
    )


def test_a_key_file_without_an_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    script = "import sys; from hvlaunch.ssh.identity import read_identity; print(read_identity('/dev/zero').problem)"
    limited = ["sh", "-c", 'ulimit -v 2000000; exec "$@"', "sh", sys.executable, "-c", script]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "it is not an RSA, ECDSA or Ed25519 private key", done.stderr


@pytest.mark.parametrize("mode", [0o666, 0o602, 0o644])
def test_a_token_file_that_others_can_change_or_read(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "token", "x" * 32, mode)
    with pytest.raises(BadTokenFile, match=f"chmod 600 {path}"):
        read_token_file(path)


def test_a_token_file_that_its_group_can_change(tmp_path: Path) -> None:
    path = written(tmp_path / "token", "x" * 32, 0o660)
    if os.getuid() == 0:
        os.chown(path, 0, 4242)
    if other_writer(path.stat()) is None:
        pytest.skip("this user's group is this user's alone")
    with pytest.raises(BadTokenFile, match="group 4242 can change it"):
        read_token_file(path)


def test_a_token_file_of_another_user(tmp_path: Path, given_to_bob: Give) -> None:
    path = given_to_bob(written(tmp_path / "token", "x" * 32))
    with pytest.raises(BadTokenFile, match="it belongs to user 4242; try: a copy of your own"):
        read_token_file(path)


@pytest.mark.parametrize("mode", [0o666, 0o602])
def test_an_env_file_that_others_can_change(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "env", "LD_PRELOAD=/tmp/evil.so\n", mode)
    with pytest.raises(BadUsage, match="every user of this machine can change it"):
        read_env_file(path)


def test_an_env_file_of_another_user(tmp_path: Path, given_to_bob: Give) -> None:
    path = given_to_bob(written(tmp_path / "env", "LD_PRELOAD=/tmp/evil.so\n"))
    with pytest.raises(BadUsage, match="it belongs to user 4242"):
        read_env_file(path)


@pytest.mark.parametrize("path", [os.devnull, "/dev/fd/0"])
def test_devices_and_pipes_are_as_ever(path: str) -> None:
    script = f"from pathlib import Path; from hvlaunch.cli.env_file import read_env_file as r; print(r(Path('{path}')))"
    done = subprocess.run(
        [sys.executable, "-c", script], input="A=1\n", capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("[EnvLine(" if path.startswith("/dev/fd") else "[]")


def test_a_group_of_its_own_is_the_user(tmp_path: Path) -> None:
    path = written(tmp_path / "env", "A=1\n", 0o664)
    me = pwd.getpwuid(os.getuid())
    os.chown(path, -1, me.pw_gid)
    import grp

    entry = grp.getgrgid(me.pw_gid)
    if entry.gr_name != me.pw_name or set(entry.gr_mem) - {me.pw_name}:
        pytest.skip("this user's group is not this user's alone")
    assert read_env_file(path)


def test_a_hostfile_that_all_can_change_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "hosts", "a:4\n", 0o666)
    with pytest.raises(BadUsage, match=f"every user of this machine can change it .*try: chmod o-w {path}"):
        read_hostfile(path)
    with pytest.raises(BadUsage, match="every user"):
        HostFile(path, is_named=True).read_hosts()


def test_a_hostfile_of_another_user_is_told(tmp_path: Path, given_to_bob: Give) -> None:
    told: list[str] = []
    path = given_to_bob(written(tmp_path / "hosts", "a:4\n", 0o644))
    assert read_hostfile(path, told.append) == [Host("a", 4)]
    assert told == [
        f"hostfile {path}: it belongs to user 4242; anyone who can change it chooses the hosts of this job"
    ]


@pytest.mark.parametrize("word", ["python=/tmp/evil", "identity=/home/me/.ssh/other"])
def test_a_hostfile_of_another_user_names_no_file_of_this_machine(
    tmp_path: Path, given_to_bob: Give, word: str
) -> None:
    path = given_to_bob(written(tmp_path / "hosts", f"localhost:4 {word}\n", 0o644))
    with pytest.raises(
        BadHost, match="is allowed only in a hostfile that you named and that only you can change"
    ):
        read_hostfile(path)


def test_a_discovery_script_that_all_can_change_is_not_run(tmp_path: Path) -> None:
    script = written(tmp_path / "find", f"#!/bin/sh\ntouch {tmp_path}/ran\n", 0o777)
    with pytest.raises(BadUsage, match="every user of this machine can change it; try: chmod o-w"):
        HostScript(str(script), 60.0).read_hosts()
    assert not (tmp_path / "ran").exists()


def spec(**words) -> JobSpec:
    return JobSpec(command=("true",), hosts=(Host("localhost", 1),), cwd="/", **words)


def start(tmp_path: Path, output_dir: Path) -> int:
    with (tmp_path / "out").open("wb") as out:
        return run(
            spec(output_dir=output_dir), stdout=out, stderr=out, stdin=os.open(os.devnull, os.O_RDONLY)
        ).exit_code


def test_output_goes_into_no_directory_of_another_user(tmp_path: Path, given_to_bob: Give) -> None:
    directory = tmp_path / "theirs"
    directory.mkdir(mode=0o777)
    given_to_bob(directory)
    with pytest.raises(BadUsage, match="it belongs to user 4242; try: a directory of your own"):
        start(tmp_path, directory)
    assert not list(directory.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_output_goes_into_no_directory_where_all_can_make_files(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(BadUsage, match="every user of this machine can make files in it"):
        start(tmp_path, directory)
    assert not list(directory.iterdir())


def test_output_follows_no_link_of_another_user(tmp_path: Path, given_to_bob: Give) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (tmp_path / "link").symlink_to(mine)
    given_to_bob(tmp_path / "link")
    with pytest.raises(BadUsage, match="it belongs to user 4242"):
        start(tmp_path, tmp_path / "link")
    assert not list(mine.iterdir())


def test_a_new_directory_of_output_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        assert start(tmp_path, tmp_path / "new" / "out") == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new" / "out").stat().st_mode) == 0o700
    assert (tmp_path / "new" / "out" / "latest" / "rank.0" / "stdout").exists()


def no_error(text: str) -> None:
    pytest.fail(text)


def test_events_follow_no_link_of_another_user(tmp_path: Path, given_to_bob: Give) -> None:
    written(tmp_path / "profile", "mine\n")
    (tmp_path / "events").symlink_to(tmp_path / "profile")
    given_to_bob(tmp_path / "events")
    with pytest.raises(BadUsage, match="a link that another user made"):
        EventFile(tmp_path / "events", no_error)
    assert (tmp_path / "profile").read_text() == "mine\n"


def test_events_follow_only_an_own_link_in_a_protected_directory(tmp_path: Path) -> None:
    (tmp_path / "events").symlink_to(tmp_path / "target")
    EventFile(tmp_path / "events", no_error).close()
    assert (tmp_path / "target").exists()
    tmp_path.chmod(0o777)
    with pytest.raises(BadUsage, match="can replace"):
        EventFile(tmp_path / "events", no_error)


def test_events_go_to_no_file_of_another_user(tmp_path: Path, given_to_bob: Give) -> None:
    given_to_bob(written(tmp_path / "events", "", 0o666))
    with pytest.raises(BadUsage, match="it belongs to user 4242"):
        EventFile(tmp_path / "events", no_error)


def test_events_go_to_no_pipe_of_another_user(tmp_path: Path, given_to_bob: Give) -> None:
    os.mkfifo(tmp_path / "events")
    reader = os.open(tmp_path / "events", os.O_RDONLY | os.O_NONBLOCK)
    given_to_bob(tmp_path / "events")
    try:
        with pytest.raises(BadUsage, match="it belongs to user 4242"):
            EventFile(tmp_path / "events", no_error)
    finally:
        os.close(reader)


def test_events_can_be_read_by_their_owner_alone(tmp_path: Path) -> None:
    EventFile(tmp_path / "events", no_error).close()
    assert stat.S_IMODE((tmp_path / "events").stat().st_mode) == 0o600
