"""SSH as sites have it, beyond getting in: what is shared, what is refused and why, and that nothing stays."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs import Job, agents, without_progress
from tests.cluster.ssh_sites import Site, Typist, keygen, sign
from tests.testhosts.hosts import wait_until

BOTH = pytest.mark.parametrize("client", ["paramiko", "openssh"])


@pytest.fixture
def site(whole_site: Site) -> Iterator[Site]:
    yield whole_site
    hosts = whole_site.hosts

    def running() -> list[str]:
        listed = [
            *hosts.driver.processes(),
            *(process for host in hosts for process in host.user_processes()),
        ]
        return [str(process) for process in listed if process.comm != "ssh-agent"]

    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not running(), "nothing runs", 60.0)
    left = running()
    whole_site.close()
    assert left == []


def complaint(job: Job) -> str:
    """The cause that it gave, on one line; what to try, and that no worker was started, follow."""
    assert job.code() == 69, job.stdout + job.stderr
    line, *more, end = without_progress(job.stderr)
    assert [text[:7] for text in more] in ([], ["  Try: "])
    assert end == "  The job ends: no worker was started."
    return line + "".join(text.replace("  Try: ", "; try: ") for text in more)


# What hosts share


def test_one_connection_to_a_jump_host_serves_all(site: Site) -> None:
    site.config("Host n*", "  ProxyJump gate")
    site.sshd("gate", "LogLevel VERBOSE")
    assert site.run("-H", "n1,n2,n3,n4", "true").code() == 0
    assert site.hosts["gate"].sshd_log().count("Accepted publickey") == 1


@BOTH
def test_connections_refused_by_a_full_sshd_are_retried(site: Site, client: str) -> None:
    """MaxStartups drops all but three at a time."""
    site.sshd("gate", "MaxStartups 3:100:4", "LogLevel VERBOSE")
    site.config("Host m*", "  HostName gate", "  HostKeyAlias gate")
    job = site.run("--ssh-client", client, "--connect-limit", 12, "-H", "m[1-12]:1", "true")
    assert job.code() == 0, job.stderr
    assert "MaxStartups" in site.hosts["gate"].sshd_log()


def test_a_jump_host_with_a_banner_hides_nothing_from_the_ssh_binary(site: Site) -> None:
    """Its ssh prints the banner, which is neither why a busy host turns some away nor a reason to give up."""
    (site.hosts["inner"].sshd / "banner").write_text("*** inner ***\nAuthorized use only.\n")
    site.sshd("inner", "Banner /run/sshd/banner")
    site.sshd("gate", "MaxStartups 2:100:2", "LogLevel VERBOSE")
    site.config("Host m*", "  ProxyJump inner", "  HostName gate", "  HostKeyAlias gate")
    job = site.run(
        "--ssh-client", "openssh", "--connect-limit", 6, "--start-timeout", 100, "-H", "m[1-6]:1", "true"
    )
    assert job.code(timeout=110) == 0, job.stderr
    assert "MaxStartups" in site.hosts["gate"].sshd_log()


def test_no_more_than_the_limit_at_once(site: Site) -> None:
    site.sshd("gate", "MaxStartups 3:100:4", "LogLevel VERBOSE")
    site.config("Host m*", "  HostName gate", "  HostKeyAlias gate")
    job = site.run("--connect-limit", 1, "-H", "m[1-8]:1", "true")
    assert job.code() == 0, job.stderr
    assert "drop" not in site.hosts["gate"].sshd_log()


def test_two_names_of_one_machine_are_told_once(site: Site) -> None:
    site.config("Host twin", "  HostName n1", "  HostKeyAlias n1")
    job = site.run("-H", "n1:1,twin:1,n2:1", "true")
    assert job.code() == 0
    line, *_ = without_progress(job.stderr)
    assert "hosts n1 and twin are the same machine" in line


def test_a_connection_that_is_open_already_is_used(site: Site) -> None:
    """By the ssh binary alone, and where a new connection would be refused."""
    path = site.ssh / "open"
    site.config("Host n1", f"  ControlPath {path}")
    site.hosts.driver.run(["ssh", "-M", "-f", "-N", "n1"], check=True, stdout=None, stderr=None)
    site.only("n1", site.key())
    try:
        assert site.run("--ssh-client", "openssh", "-H", "n1:2", "true").code() == 0
        assert "permission denied" in complaint(site.run("-H", "n1", "true"))
    finally:
        site.hosts.driver.run(["ssh", "-O", "exit", "n1"], check=True)


# Passphrases


@pytest.fixture
def locked(site: Site) -> Path:
    key = site.key("locked", passphrase="open sesame")
    for host in ("n1", "n2"):
        site.only(host, key)
    site.config("Host n*", f"  IdentityFile {key}")
    return key


def test_a_passphrase_is_asked_for_once(site: Site, locked: Path) -> None:
    typist = Typist(site, ["-H", "n1,n2", "sh", "-c", "echo rank $RANK"])
    typist.sees(f"Enter passphrase for key '{locked}': ").types("open\n")
    typist.sees("Wrong passphrase.").types("open sesame\n")
    assert typist.code() == 0, typist.shown
    assert "rank 0" in typist.shown
    assert "rank 1" in typist.shown
    assert typist.shown.count("Enter passphrase") == 2
    assert "sesame" not in typist.shown


def test_three_wrong_passphrases_are_enough(site: Site, locked: Path) -> None:
    typist = Typist(site, ["-H", "n1,n2", "true"])
    for times in range(1, 4):
        typist.sees("Enter passphrase", times).types("no idea\n")
    assert typist.code() == 69
    assert f"{locked}: it is encrypted with another passphrase" in typist.shown
    assert typist.shown.count("Enter passphrase") == 3


def test_an_interrupt_leaves_the_terminal_as_it_was(site: Site, locked: Path) -> None:
    typist = Typist(site, ["-H", "n1", "true"])
    typist.sees("Enter passphrase")
    wait_until(lambda: not typist.echoes(), "what is typed is hidden")
    typist.presses_ctrl_c()
    wait_until(typist.echoes, "what is typed is shown")
    assert typist.code() == 130


def test_without_a_terminal_nobody_is_asked(site: Site, locked: Path) -> None:
    line = complaint(site.run("-H", "n1", "true"))
    assert f"{locked}: it is encrypted and no ssh agent has it, and there is no terminal" in line


# Host certificates


CERTIFICATES = [
    ("expired", ("-h", "-n", "n1", "-V", "-2h:-1h"), "it has expired"),
    ("not valid yet", ("-h", "-n", "n1", "-V", "+1h:+2h"), "it is not valid yet"),
    ("for another host", ("-h", "-n", "n2,n3"), "it is for n2, n3, not for n1"),
]


def certify(site: Site, *words: str) -> str:
    """Gives n1 a host certificate; the authority's line in known_hosts, which is all that is there."""
    authority = site.key("host_ca")
    sign(authority, site.hosts["n1"].sshd / "host_key", *words)
    site.sshd("n1", "HostCertificate /run/sshd/host_key-cert.pub")
    line = f"@cert-authority * {authority.with_suffix('.pub').read_text()}"
    (site.ssh / "known_hosts").write_text(line)
    return line


@pytest.mark.parametrize(
    ("words", "why"), [row[1:] for row in CERTIFICATES], ids=[row[0] for row in CERTIFICATES]
)
def test_a_host_certificate_that_does_not_hold(site: Site, words: tuple[str, ...], why: str) -> None:
    certify(site, *words)
    line = complaint(site.run("-H", "n1", "true"))
    assert "its host certificate for the key ssh-ed25519 SHA256:" in line
    assert f"is not valid: {why}" in line
    assert (
        "certificate invalid: " in complaint(site.run("--ssh-client", "openssh", "-H", "n1", "true")).lower()
    )


@BOTH
def test_an_authority_that_was_revoked(site: Site, client: str) -> None:
    line = certify(site, "-h", "-n", "n1")
    (site.ssh / "known_hosts").write_text(line + line.replace("@cert-authority", "@revoked"))
    assert "revoked" in complaint(site.run("--ssh-client", client, "-H", "n1", "true"))


def test_another_authority_does_not_spoil_a_known_key(site: Site) -> None:
    known = (site.ssh / "known_hosts").read_text()
    certify(site, "-h", "-n", "n1")
    other = keygen(site.ssh / "other" / "another_ca").with_suffix(".pub").read_text()
    (site.ssh / "known_hosts").write_text(f"@cert-authority * {other}{known}")
    assert site.run("-H", "n1", "true").code() == 0
    (site.ssh / "known_hosts").write_text(f"@cert-authority * {other}")
    assert "its host key is not known" in complaint(site.run("-H", "n1", "true"))


# What goes wrong


@BOTH
def test_the_refusing_host_is_named(site: Site, client: str) -> None:
    words = ["--ssh-client", client, "-H", "n1", "true"]
    site.config("Host n1", "  ProxyJump gate", "Host gate", "  User nobody")
    assert "ermission denied" in complaint(site.run(*words))
    site.config("Host n1", "  ProxyJump gate")
    site.sshd("gate", "AllowTcpForwarding no")
    line = complaint(site.run(*words))
    assert "host n1: its jump host" in line
    assert "administratively prohibited" in line.lower()
    site.config("Host n1", "  ProxyJump nosuch")
    assert "nosuch" in complaint(site.run(*words))
    site.config(
        "Host n1", "  ProxyJump gate", "Host gate", "  ProxyJump inner", "Host inner", "  ProxyJump gate"
    )
    assert "its jump hosts form a loop" in complaint(site.run(*words))
    site.config("Host n1", "  ProxyCommand echo no way out >&2; exit 3")
    assert "no way out" in complaint(site.run(*words))


def test_the_jump_hosts_key_is_checked_as_well(site: Site) -> None:
    site.config("Host n1", "  ProxyJump gate")
    site.hosts["gate"].new_host_key()
    line = complaint(site.run("-H", "n1", "true"))
    assert "host n1: its jump host gate: its host key ssh-ed25519 SHA256:" in line
    assert "is not the one in" in line


@BOTH
@pytest.mark.parametrize("policy", ["strict", "accept-new", "off"])
def test_host_key_policies(site: Site, client: str, policy: str) -> None:
    words = ["--ssh-client", client, "--host-keys", policy, "-H", "n1", "true"]
    known = site.ssh / "known_hosts"
    known.write_text("")
    if policy == "strict":
        assert "host key" in complaint(site.run(*words)).lower()
    else:
        assert site.run(*words).code() == 0
    assert ("n1" in known.read_text()) == (policy == "accept-new")
    known.write_text(f"n1 {site.hosts['n2'].host_key}\n")
    if policy == "off":
        assert site.run(*words).code() == 0
    else:
        assert "reinstalled" in complaint(site.run(*words))


def test_features_that_paramiko_lacks_need_the_ssh_binary(site: Site) -> None:
    site.config("Host n1", "  GSSAPIAuthentication yes", "  IdentityFile none", "  ProxyUseFdpass no")
    site.sshd("n1", "GSSAPIAuthentication yes", "AuthorizedKeysFile none")
    line = complaint(site.run("-H", "n1", "true"))
    assert "permission denied (publickey,gssapi-" in line
    assert "there is no key to try" in line
    assert "--ssh-client openssh true  # which supports GSSAPIAuthentication yes" in line
    site.config("Host n1", "  ProxyCommand nc %h %p", "  ProxyUseFdpass yes")
    assert "ProxyUseFdpass; try: hvlaunch -H n1 --ssh-client openssh true" in complaint(
        site.run("-H", "n1", "true")
    )


# Nothing stays


WAYS = {
    "paramiko, jump": ("paramiko", "ProxyJump gate"),
    "paramiko, ProxyCommand": ("paramiko", "ProxyCommand ssh -W %h:%p gate"),
    "openssh": ("openssh", "Compression no"),
    "openssh, jump": ("openssh", "ProxyJump gate"),
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize(("client", "line"), WAYS.values(), ids=WAYS)
def test_no_process_remains_when_hvlaunch_ends(site: Site, client: str, line: str, number: int) -> None:
    """Neither on the hosts nor here: the fixture counts, after a while."""
    site.config("Host n*", f"  {line}")
    job = site.run("--ssh-client", client, "-H", "n1,n2", "--grace", 1, "sh", "-c", "echo up; exec sleep 600")
    job.saw("<stdout>: up", 2).send(number)
    assert job.code() == (130 if number == signal.SIGINT else -9)
    wait_until(lambda: not agents(site.hosts["n1"].processes()), "the agent ends")


@pytest.mark.parametrize("client", ["paramiko", "openssh"])
def test_a_jump_host_that_dies_ends_the_job(site: Site, client: str) -> None:
    """The hosts behind it are lost, and end their workers on their own."""
    site.config("Host n*", "  ProxyJump gate")
    job = site.run("--ssh-client", client, "-H", "n1,n2", "--lease", 5, "sh", "-c", "echo up; exec sleep 600")
    job.saw("<stdout>: up", 2)
    site.hosts["gate"].kill()
    assert job.code() == 69
    assert "host n1: lost" in job.stderr or "host n2: lost" in job.stderr
    wait_until(lambda: not site.hosts["n1"].user_processes(), "the workers end")
