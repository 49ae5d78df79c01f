"""Real texts of ssh, and the errors made from them."""

import pytest

from hvlaunch.errors import (
    ConnectFailed,
    HostError,
    HostKeyChanged,
    HostKeyRevoked,
    HostKeyUnknown,
    PermissionDenied,
    SentAway,
    UnknownHost,
)
from hvlaunch.ssh.complaints import explain, lost, was_sent_away

CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Someone could be eavesdropping on you right now (man-in-the-middle attack)!
It is also possible that a host key has just been changed.
The fingerprint for the ED25519 key sent by the remote host is
SHA256:25QhAfd7RrarnE+EtOhrl3lzR4g3CKxAnZG3knpqRtU.
Please contact your system administrator.
Add correct host key in /root/.ssh/known_hosts to get rid of this message.
Offending ED25519 key in /root/.ssh/known_hosts:3
Host key for a has changed and you have requested strict checking.
Host key verification failed.
"""
REVOKED = CHANGED.replace("REMOTE HOST IDENTIFICATION HAS CHANGED", "REVOKED HOST KEY DETECTED")

TABLE: list[tuple[str, type[HostError], str]] = [
    (
        "ssh: Could not resolve hostname a: Name or service not known\r\n",
        UnknownHost,
        "Could not resolve hostname a: Name or service not known",
    ),
    (
        "ssh: connect to host a port 22: Connection refused\r\n",
        ConnectFailed,
        "connect to host a port 22: Connection refused",
    ),
    ("ssh: connect to host a port 22: No route to host\r\n", ConnectFailed, "No route to host"),
    ("ssh: connect to host a port 22: Connection timed out\r\n", ConnectFailed, "Connection timed out"),
    (
        "kex_exchange_identification: Connection closed by remote host\r\n",
        SentAway,
        "kex_exchange_identification",
    ),
    (
        "kex_exchange_identification: read: Connection reset by peer\r\nConnection reset by 10.0.0.1 port 22\r\n",
        SentAway,
        "Connection reset by peer",
    ),
    ("Connection closed by 10.0.0.1 port 22\r\n", SentAway, "Connection closed by 10.0.0.1 port 22"),
    ("ssh_exchange_identification: Connection closed by remote host\r\n", SentAway, "Connection closed"),
    (
        (
            "nc: no way\nkex_exchange_identification: Connection closed by remote host\n"
            "Connection closed by UNKNOWN port 65535\n"
        ),
        ConnectFailed,
        "ssh failed: nc: no way",
    ),
    (
        (
            "channel 0: open failed: administratively prohibited: open failed\nstdio forwarding failed\n"
            "Connection closed by UNKNOWN port 65535\n"
        ),
        ConnectFailed,
        "its jump host can't connect to it: channel 0: open failed: administratively prohibited",
    ),
    (
        "root@a: Permission denied (publickey,password).\r\n",
        PermissionDenied,
        "Permission denied (publickey,password)",
    ),
    (
        (
            "Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures\r\n"
            "Disconnected from 10.0.0.1 port 22\r\n"
        ),
        PermissionDenied,
        "Too many authentication failures",
    ),
    (
        (
            "Permissions 0644 for '/root/k' are too open.\r\n"
            'Load key "/root/k": bad permissions\r\n'
            "root@a: Permission denied (publickey).\r\n"
        ),
        PermissionDenied,
        'Permission denied (publickey); Load key "/root/k": bad permissions',
    ),
    (
        "Host key ED25519 SHA256:abc revoked by file /etc/ssh/krl\r\nHost key verification failed.\r\n",
        HostKeyRevoked,
        "RevokedHostKeys: Host key ED25519 SHA256:abc revoked by file /etc/ssh/krl",
    ),
    (
        (
            "No ED25519 host key is known for a and you have requested strict checking.\r\n"
            "Host key verification failed.\r\n"
        ),
        HostKeyUnknown,
        "No ED25519 host key is known for a",
    ),
    (
        "Certificate invalid: expired\nHost key verification failed.\n",
        HostKeyUnknown,
        "Certificate invalid: expired",
    ),
    ("Host key verification failed.\r\n", HostKeyUnknown, "Host key verification failed"),
    (CHANGED, HostKeyChanged, "has changed: Offending ED25519 key in /root/.ssh/known_hosts:3"),
    (REVOKED, HostKeyRevoked, "is marked @revoked"),
    (
        "exec request failed on channel 0\r\n",
        HostError,
        "its sshd refused to open a session: exec request failed",
    ),
    (
        "mux_client_request_session: session request failed: Session open refused by peer\r\n",
        HostError,
        "refused to open a session",
    ),
    (
        "Bad owner or permissions on /root/.ssh/config\r\n",
        HostError,
        "the ssh configuration can't be used: Bad owner or permissions",
    ),
    ("Welcome to a\nsomething new\n", ConnectFailed, "ssh failed: Welcome to a"),
    (
        "Warning: Permanently added 'a' (ED25519) to the list of known hosts.\r\n",
        ConnectFailed,
        "ssh failed without a message",
    ),
    ("", ConnectFailed, "ssh failed without a message"),
]


@pytest.mark.parametrize(("said", "kind", "cause"), TABLE)
def test_a_text_is_an_error(said, kind, cause):
    error = explain(said, host="a", by_hand="ssh root@a")
    assert type(error) is kind
    assert cause in error.cause
    assert "\n" not in str(error)
    assert str(error).startswith("host a: ")
    assert error.exit_code == 69
    assert error.hint


BANNER = "*** gate ***\r\nAuthorized use only.\r\n"
GONE = "kex_exchange_identification: Connection closed by remote host\r\nConnection closed by UNKNOWN port 65535\r\n"


def test_a_jump_hosts_banner_is_no_reason():
    """ssh prints it, though all is well with the jump host; without a ProxyCommand nobody else speaks there."""
    error = explain(BANNER + GONE, host="a", by_hand="ssh a", is_ssh_alone=True)
    assert type(error) is SentAway
    assert error.cause.startswith("kex_exchange_identification: Connection closed by remote host")
    assert "(before that: Authorized use only.)" in error.cause
    other = explain(f"{BANNER}something new\n", host="a", by_hand="ssh a", is_ssh_alone=True)
    assert type(other) is ConnectFailed
    assert other.cause == "ssh failed: something new"


def test_a_jump_host_that_can_not_agree_is_not_tried_again():
    said = (
        "Unable to negotiate with 10.0.0.1 port 22: no matching host key type found. Their offer: ssh-rsa\r\n"
    )
    error = explain(BANNER + said + GONE, host="a", by_hand="ssh a", is_ssh_alone=True)
    assert type(error) is ConnectFailed
    assert error.cause.startswith("Unable to negotiate with 10.0.0.1")


def test_a_changed_key_tells_its_fingerprint():
    error = explain(CHANGED, host="a", by_hand="ssh root@a")
    assert isinstance(error, HostKeyChanged)
    assert (error.key_type, error.fingerprint) == (
        "ED25519",
        "SHA256:25QhAfd7RrarnE+EtOhrl3lzR4g3CKxAnZG3knpqRtU",
    )


@pytest.mark.parametrize(
    "said",
    [
        "Connection to a closed by remote host.\r\n",
        "client_loop: send disconnect: Broken pipe\r\n",
        "Timeout, server a not responding.\r\n",
        "noise\nConnection reset by 10.0.0.1 port 22\r\n",
    ],
)
def test_a_lost_connection(said):
    words = lost(said)
    assert words is not None
    assert "noise" not in words


@pytest.mark.parametrize("said", ["", "Traceback (most recent call last):\n", "Killed\n"])
def test_a_commands_stderr_is_no_lost_connection(said):
    assert lost(said) is None
    assert not was_sent_away(said)


def test_more_keys_than_sshd_takes_have_a_hint_of_their_own():
    error = explain("Received disconnect: 2: Too many authentication failures\n", host="a", by_hand="ssh a")
    assert error.hint is not None
    assert "`IdentitiesOnly yes`" in error.hint
