"""known_hosts files (what is found in them, what is refused, what is recorded), and certificates as ssh-keygen makes them, and as those who forge them would."""

import base64
import fcntl
import os
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from paramiko.pkey import UnknownKeyType
from paramiko.ssh_exception import SSHException

from hvlaunch.errors import EXIT_HOSTS, HostError, HostKeyChanged, HostKeyRevoked, HostKeyUnknown
from hvlaunch.job import Host, SSHOptions
from hvlaunch.ssh.config import resolve
from hvlaunch.ssh.identity import bare_key
from hvlaunch.ssh.known_hosts import (
    BadHostCertificate,
    HostKey,
    KnownHosts,
    preferred_algorithms,
    read_certificate,
)
from tests.testhosts.places import wait_until

from .conftest import in_thread, keygen, public

BY_HAND = "ssh -p 2222 ada@node.example"


def no_ssh(arguments, timeout):
    raise FileNotFoundError("ssh")


def key(number: int, kind: str = "ssh-ed25519") -> HostKey:
    return HostKey(kind, bytes([number]) * 32)


def text(of: HostKey) -> str:
    return f"{of.type} {base64.b64encode(of.blob).decode()}"


OURS, OTHER = key(1), key(2)


@pytest.fixture
def settings(tmp_path):
    """Settings of node.example, port 2222, with two files in tmp_path."""
    config = tmp_path / "config"
    config.write_text(
        f"UserKnownHostsFile {tmp_path}/home/.ssh/user\nGlobalKnownHostsFile {tmp_path}/global\n"
    )
    (tmp_path / "home").mkdir()
    return resolve(Host("node.example", port=2222), SSHOptions(config=config), ask=no_ssh)


def write(path: str, *lines: str) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text("".join(line + "\n" for line in lines))


def check(settings, policy="strict", shown=OURS, known_hosts=None) -> None:
    known_hosts = known_hosts or KnownHosts()
    known_hosts.check(shown, host="node", settings=settings, policy=policy, by_hand=BY_HAND)


def keygen_hashed(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", path], check=True, capture_output=True)


NAME = "[node.example]:2222"


@pytest.mark.parametrize(
    "names",
    [
        NAME,
        f"a,{NAME},b",
        NAME.upper(),
        "[*.example]:2222",
        "[node.?xample]:*",
        "*",
        f"!other,{NAME}",
        "node.example",
        "*.example",
        "10.0.0.1,node.example",
    ],
)
def test_found(settings, names):
    write(settings.user_known_hosts_files[0], "# comment", "", f"{names} {text(OURS)} comment here")
    check(settings)


@pytest.fixture
def by_address(settings):
    """Settings of the same host with the address 10.0.0.7 from a hostfile."""
    config = Path(settings.user_known_hosts_files[0]).parents[2] / "config"
    host = Host("node.example", port=2222, address="10.0.0.7")
    return resolve(host, SSHOptions(config=config), ask=no_ssh)


@pytest.mark.parametrize("names", ["[10.0.0.7]:2222", "10.0.0.7", NAME, "node.example"])
def test_a_host_with_an_address_is_known_by_either(by_address, names):
    write(by_address.user_known_hosts_files[0], f"{names} {text(OURS)}")
    check(by_address)


def test_another_key_of_its_name_is_a_change_also_at_another_address(by_address):
    write(by_address.user_known_hosts_files[0], f"{NAME} {text(OTHER)}")
    for policy in ("strict", "accept-new"):
        with pytest.raises(HostKeyChanged, match=r"-R '\[10.0.0.7\]:2222' && ssh-keygen .* -R '\[node"):
            check(by_address, policy)


def test_an_unknown_key_names_both_names(by_address):
    with pytest.raises(HostKeyUnknown, match=r"looked for \[10.0.0.7\]:2222 and \[node.example\]:2222 in"):
        check(by_address)


def test_a_host_key_alias_stands_for_name_and_address(settings):
    config = Path(settings.user_known_hosts_files[0]).parents[2] / "config"
    with config.open("a") as file:
        file.write("HostKeyAlias the-node\n")
    aliased = resolve(Host("node.example", address="10.0.0.7"), SSHOptions(config=config), ask=no_ssh)
    write(aliased.user_known_hosts_files[0], f"node.example {text(OURS)}")
    with pytest.raises(HostKeyUnknown, match="looked for the-node in"):
        check(aliased)
    write(aliased.user_known_hosts_files[0], f"the-node {text(OURS)}")
    check(aliased)


@pytest.mark.parametrize(
    "line",
    [
        f"[node.example]:22 {text(OURS)}",
        f"node {text(OURS)}",
        f"*.example,!node.example {text(OURS)}",
        f"[nodeXexample]:2222 {text(OURS)}",
        f"# {NAME} {text(OURS)}",
        f"{NAME} ssh-ed25519",
        f"{NAME} ssh-ed25519 not*base64",
        f"@cert-authority {NAME} {text(OURS)}",
        f"@unheard-of {NAME} {text(OURS)}",
        f"|1|broken {text(OURS)}",
        f"|1|x|y|z {text(OURS)}",
        "\ufffd\x00",
        f"node.example {text(OTHER)}",
    ],
)
def test_not_found(settings, line):
    write(settings.user_known_hosts_files[0], line)
    with pytest.raises(HostKeyUnknown) as caught:
        check(settings)
    assert type(caught.value) is HostKeyUnknown


def test_an_unknown_key_is_reported_with_advice(settings):
    with pytest.raises(HostKeyUnknown) as caught:
        check(settings)
    error = caught.value
    assert (error.host, error.key_type, error.fingerprint) == ("node", "ssh-ed25519", OURS.fingerprint)
    assert error.exit_code == EXIT_HOSTS
    message = str(error)
    assert "\n" not in message
    for part in (
        OURS.fingerprint,
        NAME,
        settings.user_known_hosts_files[0],
        "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub",
        BY_HAND,
        "--host-keys accept-new",
    ):
        assert part in message


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_the_fingerprint_is_that_of_ssh_keygen(tmp_path, kind):
    path = keygen(tmp_path / "k", kind)
    name, blob = Path(f"{path}.pub").read_text().split()[:2]
    said = subprocess.run(["ssh-keygen", "-lf", path], check=True, capture_output=True, text=True).stdout
    assert HostKey(name, base64.b64decode(blob)).fingerprint in said.split()


@pytest.mark.parametrize("policy", ["strict", "accept-new"])
@pytest.mark.parametrize("known", [OTHER, key(2, "ssh-rsa")], ids=["same type", "another type"])
def test_changed_names_the_line(settings, policy, known):
    write(settings.global_known_hosts_files[0], "# one", "two ssh-rsa AAAA", f"{NAME} {text(known)}")
    with pytest.raises(HostKeyChanged) as caught:
        check(settings, policy)
    message = str(caught.value)
    assert f"{settings.global_known_hosts_files[0]}:3" in message
    assert OURS.fingerprint in message
    assert known.fingerprint in message
    assert f"-R '{NAME}'" in message
    assert not Path(settings.user_known_hosts_files[0]).exists()


def test_a_changed_key_is_accepted_with_checks_off(settings):
    write(settings.user_known_hosts_files[0], f"{NAME} {text(OTHER)}")
    check(settings, "off")
    check(settings, "off", key(3))
    assert Path(settings.user_known_hosts_files[0]).read_text() == f"{NAME} {text(OTHER)}\n"


def test_one_of_several_known_keys_is_enough(settings):
    write(settings.user_known_hosts_files[0], f"{NAME} {text(OTHER)}", f"{NAME} {text(key(3, 'ssh-rsa'))}")
    write(settings.global_known_hosts_files[0], f"{NAME} {text(OURS)}")
    check(settings)


@pytest.mark.parametrize("policy", ["strict", "accept-new", "off"])
@pytest.mark.parametrize("names", ["*", NAME, "node.example"])
def test_revoked_is_refused_though_known(settings, policy, names):
    write(settings.user_known_hosts_files[0], f"{NAME} {text(OURS)}", f"@revoked {names} {text(OURS)}")
    with pytest.raises(HostKeyRevoked, match=":2"):
        check(settings, policy)


def test_a_revoked_key_does_not_make_another_one_changed(settings):
    write(settings.user_known_hosts_files[0], f"@revoked * {text(OTHER)}")
    check(settings, "accept-new")


@pytest.mark.parametrize("hashed", [False, True])
def test_accept_new_records_what_openssh_can_read(settings, hashed):
    path = Path(settings.user_known_hosts_files[0])
    check(settings._replace(hash_known_hosts=hashed), "accept-new")
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    check(settings, "strict")
    assert ("node" in path.read_text()) is not hashed
    with pytest.raises(HostKeyChanged, match=f"{path}:1"):
        check(settings, "accept-new", OTHER)


@pytest.mark.parametrize("hashed", [False, True])
def test_openssh_finds_what_we_record(settings, tmp_path, hashed):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "k"], check=True)
    kind, blob = (tmp_path / "k.pub").read_text().split()[:2]
    check(settings._replace(hash_known_hosts=hashed), "accept-new", HostKey(kind, base64.b64decode(blob)))
    command = ["ssh-keygen", "-F", NAME, "-f", settings.user_known_hosts_files[0]]
    assert blob in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_entries_hashed_by_openssh_are_found(settings, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "k"], check=True)
    kind, blob = (tmp_path / "k.pub").read_text().split()[:2]
    path = Path(settings.user_known_hosts_files[0])
    write(str(path), f"other {kind} {blob}", f"{NAME} {kind} {blob}")
    keygen_hashed(path)
    assert "node" not in path.read_text()
    check(settings, "strict", HostKey(kind, base64.b64decode(blob)))
    with pytest.raises(HostKeyChanged, match="user:2"):
        check(settings)


def test_accept_new_finishes_an_unfinished_line(settings):
    path = Path(settings.user_known_hosts_files[0])
    write(str(path))
    path.write_text(f"other {text(OTHER)}")
    known_hosts = KnownHosts()
    check(settings, "accept-new", known_hosts=known_hosts)
    assert path.read_text() == f"other {text(OTHER)}\n{NAME} {text(OURS)}\n"
    with pytest.raises(HostKeyChanged, match=f"{path}:2"):
        check(settings, shown=OTHER, known_hosts=known_hosts)


def test_accept_new_in_many_threads_records_each_host_once(settings):
    known_hosts = KnownHosts()
    hosts = [settings._replace(hostname=f"n{i % 16}.example") for i in range(64)]
    threads = [
        threading.Thread(target=check, args=(host, "accept-new"), kwargs={"known_hosts": known_hosts})
        for host in hosts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = Path(settings.user_known_hosts_files[0]).read_text().splitlines()
    assert sorted(lines) == sorted(f"[n{i}.example]:2222 {text(OURS)}" for i in range(16))


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="needs Linux")
def test_accept_new_waits_for_the_file_lock(settings):
    path = Path(settings.user_known_hosts_files[0])
    write(str(path), f"other {text(OTHER)}")
    inode = f":{path.stat().st_ino} "

    def somebody_waits() -> bool:
        return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())

    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        thread, ended = in_thread(lambda: check(settings, "accept-new"))
        wait_until(somebody_waits, "the lock to be waited for")
        file.write("a line of another process\n")
    thread.join()
    assert ended == [None]
    assert path.read_text().splitlines()[1:] == ["a line of another process", f"{NAME} {text(OURS)}"]


def test_accept_new_without_a_file_of_the_users_accepts(settings):
    check(settings._replace(user_known_hosts_files=()), "accept-new")
    assert not Path(settings.global_known_hosts_files[0]).exists()


def test_directories_that_are_made_for_the_file_are_private(settings, tmp_path):
    path = tmp_path / "home" / "new" / ".ssh" / "user"
    before = os.umask(0o002)
    try:
        check(settings._replace(user_known_hosts_files=(str(path),)), "accept-new")
    finally:
        os.umask(before)
    assert path.exists()
    assert [directory.stat().st_mode & 0o777 for directory in (path.parent, path.parent.parent)] == [
        0o700
    ] * 2


def test_a_file_that_can_not_be_written(settings):
    with pytest.raises(HostError, match=r"can't be written to /proc/nowhere/kh: No such file") as caught:
        check(settings._replace(user_known_hosts_files=("/proc/nowhere/kh",)), "accept-new")
    assert caught.value.host == "node"


def test_an_unreadable_file_counts_as_empty_as_in_openssh(settings, tmp_path):
    settings = settings._replace(global_known_hosts_files=(str(tmp_path),))
    with pytest.raises(HostKeyUnknown, match=f"{tmp_path}, which can't be read"):
        check(settings)
    write(settings.user_known_hosts_files[0], f"{NAME} {text(OURS)}")
    check(settings)


@pytest.mark.parametrize("policy", ["strict", "accept-new", "off"])
def test_revoked_by_a_file_of_keys(settings, tmp_path, policy):
    """RevokedHostKeys of the ssh configuration."""
    write(settings.user_known_hosts_files[0], f"{NAME} {text(OURS)}")
    listed = str(tmp_path / "revoked")
    settings = settings._replace(revoked_host_keys=listed)
    write(listed, "# those of the old rack", "", "junk", text(OTHER))
    check(settings, policy)
    write(listed, text(OTHER), f"{text(OURS)} rack 7")
    with pytest.raises(HostKeyRevoked, match=f"is in {listed}"):
        check(settings, policy)


def test_an_unreadable_revocation_file_refuses_all_keys(settings, tmp_path):
    write(settings.user_known_hosts_files[0], f"{NAME} {text(OURS)}")
    listed = tmp_path / "revoked"
    settings = settings._replace(revoked_host_keys=str(listed))
    with pytest.raises(HostError, match=f"its RevokedHostKeys file {listed} can't be read: No such file"):
        check(settings)
    subprocess.run(["ssh-keygen", "-q", "-k", "-f", listed, "/dev/null"], check=True)
    with pytest.raises(
        HostError, match="a binary list, which only OpenSSH can read; try: --ssh-client openssh"
    ):
        check(settings)


def test_a_source_of_keys_only_for_openssh(settings):
    settings = settings._replace(beyond=("KnownHostsCommand /usr/bin/lookup %H",))
    with pytest.raises(
        HostKeyUnknown, match="try: --ssh-client openssh, which supports KnownHostsCommand /usr"
    ):
        check(settings)


def test_a_file_is_read_once(settings):
    write(settings.user_known_hosts_files[0], f"{NAME} {text(OURS)}")
    known_hosts = KnownHosts()
    check(settings, known_hosts=known_hosts)
    os.unlink(settings.user_known_hosts_files[0])  # noqa: PTH108
    check(settings, known_hosts=known_hosts)


def test_an_alias_is_looked_up_without_the_port(settings):
    write(settings.user_known_hosts_files[0], f"cluster {text(OURS)}")
    check(settings._replace(host_key_alias="Cluster"))


def test_known_types_come_first(settings):
    write(
        settings.user_known_hosts_files[0],
        f"{NAME} {text(key(1, 'ssh-rsa'))}",
        f"@revoked {NAME} {text(key(4))}",
        f"node.example {text(key(3))}",
    )
    known = KnownHosts().key_types(settings)
    assert known == ("ssh-rsa",)
    offered = ("ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512", "rsa-sha2-256")
    assert preferred_algorithms(known, offered) == (
        "rsa-sha2-512",
        "rsa-sha2-256",
        "ssh-ed25519",
        "ecdsa-sha2-nistp256",
    )
    assert preferred_algorithms((), offered) == offered


# Certificates


AUTHORITY = "@cert-authority *.example"


@pytest.fixture
def shown(tmp_path):
    """Makes the key that a host shows with a certificate, and its authority's public key."""

    def make(*words: str) -> tuple[HostKey, str]:
        authority, own = keygen(tmp_path / "ca"), keygen(tmp_path / "host")
        subprocess.run(
            ["ssh-keygen", "-q", "-s", authority, "-I", "x", "-h", *words, f"{own}.pub"], check=True
        )
        kind, blob = public(own).split()
        certificate = Path(f"{own}-cert.pub").read_text().split()[1]
        return HostKey(kind, base64.b64decode(blob), base64.b64decode(certificate)), public(authority)

    return make


@pytest.mark.parametrize("names", ["*.example", "[node.example]:2222", "node.example", "*"])
def test_an_authority_vouches_for_a_host(settings, shown, names):
    key, authority = shown("-n", "node.example")
    write(settings.global_known_hosts_files[0], f"@cert-authority {names} {authority}")
    known = KnownHosts()
    check(settings, shown=key, known_hosts=known)
    assert known.has_authority(settings)
    assert known.key_types(settings) == ()


def test_an_authority_for_other_hosts_does_not_count(settings, shown):
    key, authority = shown()
    write(settings.user_known_hosts_files[0], f"@cert-authority *.org,!node.example {authority}")
    known = KnownHosts()
    assert not known.has_authority(settings)
    with pytest.raises(HostKeyUnknown, match="its host key is not known"):
        check(settings, shown=key, known_hosts=known)


@pytest.mark.parametrize("policy", ["strict", "accept-new"])
def test_an_invalid_certificate_is_refused(settings, shown, policy):
    key, authority = shown("-n", "other.example")
    write(settings.user_known_hosts_files[0], f"{AUTHORITY} {authority}")
    with pytest.raises(HostKeyUnknown, match=r"it is for other\.example, not for node\.example") as caught:
        check(settings, policy=policy, shown=key)
    assert caught.value.fingerprint == key.fingerprint
    check(settings, policy="off", shown=key)


def test_time_is_this_machines(settings, shown):
    key, authority = shown("-V", "20200101:20210101")
    write(settings.user_known_hosts_files[0], f"{AUTHORITY} {authority}")
    check(settings, shown=key, known_hosts=KnownHosts(now=lambda: 1.6e9))
    with pytest.raises(HostKeyUnknown, match="it has expired"):
        check(settings, shown=key)


def test_a_forged_certificate_is_refused_even_with_accept_new(settings, shown):
    key, authority = shown()
    write(settings.user_known_hosts_files[0], f"{AUTHORITY} {authority}")
    assert key.certificate is not None
    forged = replace(key, certificate=key.certificate[:-1] + bytes([key.certificate[-1] ^ 1]))
    with pytest.raises(HostKeyUnknown, match="its authority's signature is wrong"):
        check(settings, policy="accept-new", shown=forged)


@pytest.mark.parametrize("whose", ["authority", "host"])
@pytest.mark.parametrize("policy", ["strict", "off"])
def test_a_revoked_key_is_refused_with_its_certificate(settings, shown, whose, policy):
    key, authority = shown()
    revoked = authority if whose == "authority" else text(key)
    write(settings.user_known_hosts_files[0], f"{AUTHORITY} {authority}", f"@revoked * {revoked}")
    with pytest.raises(HostKeyRevoked):
        check(settings, policy=policy, shown=key)


def test_an_authoritys_own_key_is_no_host_key(settings, shown):
    _, authority = shown()
    kind, blob = authority.split()
    write(settings.user_known_hosts_files[0], f"{AUTHORITY} {authority}")
    with pytest.raises(HostKeyUnknown, match="its host key is not known"):
        check(settings, shown=HostKey(kind, base64.b64decode(blob)))


def test_the_key_itself_may_be_known_as_well(settings, shown):
    key, _ = shown("-n", "other.example")
    write(settings.user_known_hosts_files[0], f"node.example {text(key)}")
    check(settings, shown=key)


def test_certificates_come_first_with_a_known_authority():
    offered = ("ssh-ed25519", "rsa-sha2-512")
    assert preferred_algorithms(("ssh-rsa",), offered, certificates=True) == (
        "ssh-ed25519-cert-v01@openssh.com",
        "rsa-sha2-512-cert-v01@openssh.com",
        "rsa-sha2-512",
        "ssh-ed25519",
    )
    assert preferred_algorithms((), offered) == offered


HOST_NAME = "node.example"


def blob(path: Path) -> bytes:
    return base64.b64decode(path.read_text().split()[1])


def certificate(folder: Path, *words: str, authority: str = "ed25519", kind: str = "ed25519") -> bytes:
    ca, key = keygen(folder / "ca", authority), keygen(folder / "k", kind)
    subprocess.run(["ssh-keygen", "-q", "-s", ca, "-I", "id", *words, f"{key}.pub"], check=True)
    return blob(folder / "k-cert.pub")


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
@pytest.mark.parametrize("authority", ["ed25519", "ecdsa", "rsa"])
def test_every_kind_of_key_and_authority(tmp_path, kind, authority):
    data = certificate(tmp_path, "-h", "-n", f"{HOST_NAME},other", kind=kind, authority=authority)
    found = read_certificate(data)
    assert found.problem(HOST_NAME, time.time()) is None
    assert found.authority == blob(tmp_path / "ca.pub")
    assert found.principals == (HOST_NAME, "other")
    assert bare_key(data) == blob(tmp_path / "k.pub")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("-h",), None),
        (("-h", "-n", "*.example"), None),
        (("-h", "-n", "nod?.example"), None),
        (("-h", "-n", HOST_NAME, "-V", "20200101:20990101"), None),
        (("-n", HOST_NAME), "it is not a certificate for a host"),
        (("-h", "-n", "other,*.org"), "it is for other, *.org, not for node.example"),
        (("-h", "-n", "[n]ode.example"), "it is for [n]ode.example, not for node.example"),
        (("-h", "-n", "node"), "it is for node, not for node.example"),
        (("-h", "-V", "20200101:20210101"), "it has expired"),
        (("-h", "-V", "20980101:20990101"), "it is not valid yet"),
    ],
)
def test_validity_by_name_time_and_kind(tmp_path, words, problem):
    found = read_certificate(certificate(tmp_path, *words)).problem(HOST_NAME, time.time())
    assert found == problem or (problem is not None and found is not None and problem in found)


def test_the_bounds_of_its_time(tmp_path):
    found = read_certificate(certificate(tmp_path, "-h", "-V", "20200101:20210101"))
    assert found.problem(HOST_NAME, found.valid_after) is None
    assert found.problem(HOST_NAME, found.valid_after - 1) is not None
    assert found.problem(HOST_NAME, found.valid_before - 1) is None
    assert found.problem(HOST_NAME, found.valid_before) is not None


def test_critical_options_are_refused(tmp_path):
    found = read_certificate(certificate(tmp_path, "-h", "-O", "critical:unheard-of"))
    assert (
        found.problem(HOST_NAME, time.time())
        == "it has critical options, and none is defined for host certificates"
    )


def test_no_byte_can_be_changed(tmp_path):
    """Each is covered by the signature, is part of it, or is needed to read it."""
    data = certificate(tmp_path, "-h", "-n", HOST_NAME)
    for index in range(len(data)):
        forged = data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]
        with pytest.raises(BadHostCertificate):
            read_certificate(forged)


def test_no_byte_can_be_taken_or_added(tmp_path):
    data = certificate(tmp_path, "-h", "-n", HOST_NAME)
    for size in range(len(data)):
        with pytest.raises(BadHostCertificate):
            read_certificate(data[:size])
    with pytest.raises(BadHostCertificate):
        read_certificate(data + b"\0")


def test_an_authority_that_signs_by_sha1(tmp_path):
    data = certificate(tmp_path, "-h", "-t", "ssh-rsa", authority="rsa")
    with pytest.raises(BadHostCertificate, match="signed by ssh-rsa, which is too weak"):
        read_certificate(data)


def test_another_authoritys_signature(tmp_path):
    """The authority named in the certificate is exchanged for another, of the same size."""
    data = certificate(tmp_path, "-h")
    other = blob(Path(f"{keygen(tmp_path / 'other')}.pub"))
    with pytest.raises(BadHostCertificate, match="its authority's signature is wrong"):
        read_certificate(data.replace(blob(tmp_path / "ca.pub"), other))


@pytest.mark.parametrize("data", [b"", b"\0\0\0\x0bssh-ed25519", b"\xff" * 64])
def test_no_certificate(data):
    with pytest.raises(BadHostCertificate):
        read_certificate(data)
    with pytest.raises((ValueError, SSHException, UnknownKeyType)):
        bare_key(data)
