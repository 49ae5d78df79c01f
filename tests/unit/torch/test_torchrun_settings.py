"""The meaning of torchrun's options for the backend, and the messages for mistakes."""

import socket
from contextlib import closing

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from hvlaunch.rendezvous.serving.certificate import Certificate
from hvlaunch.torch.torchrun.settings import TorchrunSettings

TOKEN = {"HVLAUNCH_TOKEN": "secret"}
CERTIFICATE = Certificate()
PIN = "sha256:" + "0" * 64


def parameters(endpoint="10.0.0.1:4000", *, local_addr="here", cert=PIN, **conf) -> RendezvousParameters:
    if cert is not None:
        conf["cert"] = cert
    return RendezvousParameters("hvlaunch", endpoint, "job", 2, 3, local_addr, timeout=900, **conf)


def test_the_defaults():
    found = TorchrunSettings.of(parameters(), TOKEN)
    assert (found.url, found.token, found.run_id) == ("https://10.0.0.1:4000", "secret", "job")
    assert (found.limits.min_nodes, found.limits.max_nodes) == (2, 3)
    assert (found.limits.join, found.limits.last_call) == (600.0, 30.0)
    assert (found.interval, found.lease, found.address) == (1.0, 6.0, "here")


def test_settings_of_rdzv_conf():
    conf = {
        "join_timeout": "5",
        "last_call_timeout": "0",
        "keep_alive_interval": "0.5",
        "keep_alive_max_attempt": "4",
    }
    found = TorchrunSettings.of(parameters(read_timeout="7", **conf), TOKEN)
    assert (found.limits.join, found.limits.last_call) == (5.0, 0.0)
    assert (found.interval, found.lease, found.read_timeout) == (0.5, 2.0, 7.0)


def test_settings_of_torchs_backends_are_ignored():
    conf = {"is_host": "1", "store_type": "tcp", "close_timeout": "30", "heartbeat_timeout": "5"}
    assert TorchrunSettings.of(parameters(**conf), TOKEN).lease == 6.0


def test_the_token_of_the_file_comes_before_the_environments(tmp_path):
    for name in ("conf", "env"):
        (tmp_path / name).write_text(f"{name}-token-of-the-job\n")
        (tmp_path / name).chmod(0o600)
    environ = {**TOKEN, "HVLAUNCH_TOKEN_FILE": str(tmp_path / "env")}
    assert (
        TorchrunSettings.of(parameters(token_file=str(tmp_path / "conf")), environ).token
        == "conf-token-of-the-job"
    )
    assert TorchrunSettings.of(parameters(), environ).token == "env-token-of-the-job"
    assert TorchrunSettings.of(parameters(), TOKEN).token == "secret"


def test_no_text_of_the_settings_has_the_token():
    assert "secret" not in repr(TorchrunSettings.of(parameters(), TOKEN))


@pytest.mark.parametrize(
    ("endpoint", "conf", "environ", "told"),
    [
        ("", {}, TOKEN, "--rdzv-endpoint='' is not HOST:PORT"),
        (":80", {}, TOKEN, "--rdzv-endpoint=':80' is not HOST:PORT"),
        ("host:0", {}, TOKEN, "is not HOST:PORT"),
        ("host:99999", {}, TOKEN, "is not HOST:PORT"),
        ("user@host:80", {}, TOKEN, "is not HOST:PORT"),
        ("https://host:80", {}, TOKEN, "is not HOST:PORT"),
        ("host:80", {"join_timeout": "soon"}, TOKEN, "join_timeout=soon is not a number of seconds"),
        ("host:80", {"join_timeout": "-1"}, TOKEN, "join_timeout=-1 is not a number of seconds"),
        ("host:80", {"keep_alive_max_attempt": "0"}, TOKEN, "keep_alive_max_attempt=0 is not a whole number"),
        (
            "host:80",
            {"tokenfile": "x"},
            TOKEN,
            "has tokenfile, but this backend knows only cert, join_timeout,",
        ),
        ("host:80", {"token_file": "/nowhere"}, TOKEN, "token file /nowhere: No such file"),
        ("host:80", {}, {}, "the rendezvous needs the job's token; set --rdzv-conf token_file=FILE"),
        (
            "host:80",
            {},
            {"HVLAUNCH_TOKEN": "two words"},
            "HVLAUNCH_TOKEN must be one word of printable ASCII",
        ),
    ],
)
def test_a_mistake_is_told_with_the_settings_name(endpoint, conf, environ, told):
    with pytest.raises(ValueError) as caught:
        TorchrunSettings.of(parameters(endpoint, **conf), environ)
    assert told in str(caught.value)
    assert "two words" not in str(caught.value)


def test_the_nodes_address_is_the_one_on_the_way_to_the_rendezvous():
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(("192.0.2.1", 1))
        except OSError:
            pytest.skip("this machine has no route")
        own = probe.getsockname()[0]
    assert TorchrunSettings.of(parameters("192.0.2.1:1", local_addr=None), TOKEN).address == own


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "no-such-host.invalid:1"])
def test_the_fallback_address_is_the_nodes_name(endpoint):
    assert TorchrunSettings.of(parameters(endpoint, local_addr=None), TOKEN).address == socket.getfqdn()


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [("[::1]:80", "https://[::1]:80"), ("host", "https://host:29400"), (" host:1 ", "https://host:1")],
)
def test_the_endpoint_is_a_host_and_a_port(endpoint, url):
    assert TorchrunSettings.of(parameters(endpoint), TOKEN).url == url


def test_a_token_that_others_may_read_is_not_taken(tmp_path):
    (tmp_path / "token").write_text("conf-token-of-the-job\n")
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(ValueError, match="every user of this machine can read"):
        TorchrunSettings.of(parameters(token_file=str(tmp_path / "token")), {})


def test_a_rendezvous_on_another_machine_needs_a_certificate():
    with pytest.raises(ValueError, match="set --rdzv-conf cert=FILE or HVLAUNCH_RENDEZVOUS_CERT"):
        TorchrunSettings.of(parameters(cert=None), TOKEN)
    with pytest.raises(ValueError, match="certificate /nowhere: No such file"):
        TorchrunSettings.of(parameters(cert="/nowhere"), TOKEN)
    found = TorchrunSettings.of(parameters(cert=None), {**TOKEN, "HVLAUNCH_RENDEZVOUS_CERT": PIN})
    assert (found.url, found.certificate) == ("https://10.0.0.1:4000", PIN)
    assert TorchrunSettings.of(parameters("localhost:1", cert=None), TOKEN).url == "http://localhost:1"


def test_the_certificate_beside_the_token_file_is_taken(tmp_path):
    token = tmp_path / "token"
    token.write_text("a-token-of-the-user")
    token.chmod(0o600)
    (tmp_path / "token.crt").write_bytes(CERTIFICATE.pem)
    found = TorchrunSettings.of(parameters(cert=None, token_file=str(token)), {})
    assert (found.url, found.certificate) == ("https://10.0.0.1:4000", CERTIFICATE.fingerprint)
