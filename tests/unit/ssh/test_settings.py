"""Settings from the real `ssh -G` and from paramiko's parser: the same table for both."""

import os
import pwd
import shutil
import socket
import subprocess
import sys
import threading

import pytest

from hvlaunch.errors import HostError, StartTimeout
from hvlaunch.job import Host, SSHOptions
from hvlaunch.ssh.config import ask_ssh, by_hand, resolve

HOME = pwd.getpwuid(os.getuid()).pw_dir
USER = pwd.getpwuid(os.getuid()).pw_name


def no_ssh(arguments, timeout):
    raise FileNotFoundError("ssh")


needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs the ssh binary (openssh-client)")
both_ways = pytest.mark.parametrize(
    "ask", [pytest.param(ask_ssh, marks=needs_ssh, id="ssh -G"), pytest.param(no_ssh, id="parser")]
)


@pytest.fixture
def config(tmp_path):
    def write(*lines: str) -> SSHOptions:
        path = tmp_path / "config"
        path.write_text("".join(line + "\n" for line in lines))
        return SSHOptions(config=path)

    return write


@both_ways
def test_defaults(config, ask):
    found = resolve(Host("Node1"), config(), ask=ask, environ={})
    assert (found.hostname, found.port, found.user) == ("node1", 22, USER)
    assert found.identity is None
    assert f"{HOME}/.ssh/id_ed25519" in found.identity_files
    assert found.user_known_hosts_files == (f"{HOME}/.ssh/known_hosts", f"{HOME}/.ssh/known_hosts2")
    assert found.global_known_hosts_files == ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
    assert found.known_hosts_files == found.user_known_hosts_files + found.global_known_hosts_files
    assert found.identity_agent is None
    assert (found.proxy_command, found.proxy_jump, found.host_key_alias) == (None, None, None)
    assert (found.connect_timeout, found.address_family) == (None, socket.AF_UNSPEC)
    assert not found.identities_only
    assert not found.hash_known_hosts


@both_ways
@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("HostName %h.example.org", "hostname", "node.example.org"),
        ("Port 2222", "port", 2222),
        ("User ada", "user", "ada"),
        ("IdentityFile ~/k/%n-%r", "identity_files", (f"{HOME}/k/node-{USER}",)),
        ("IdentityFile %d/%h", "identity_files", (f"{HOME}/node",)),
        ('IdentityFile "/a b/key"', "identity_files", ("/a b/key",)),
        ("IdentityFile none", "identity_files", ()),
        ("IdentitiesOnly yes", "identities_only", True),
        ("IdentityAgent ~/agent", "identity_agent", f"{HOME}/agent"),
        ("IdentityAgent none", "identity_agent", None),
        ("IdentityAgent $OTHER", "identity_agent", "/other"),
        ("IdentityAgent SSH_AUTH_SOCK", "identity_agent", "/usual"),
        ("Compression yes", "identity_agent", "/usual"),
        ("UserKnownHostsFile ~/a /b", "user_known_hosts_files", (f"{HOME}/a", "/b")),
        ("UserKnownHostsFile none", "user_known_hosts_files", ()),
        ("GlobalKnownHostsFile /g", "global_known_hosts_files", ("/g",)),
        ("GlobalKnownHostsFile none", "global_known_hosts_files", ()),
        ("HashKnownHosts yes", "hash_known_hosts", True),
        ("HostKeyAlias cluster", "host_key_alias", "cluster"),
        ("ConnectTimeout 7", "connect_timeout", 7.0),
        ("AddressFamily inet6", "address_family", socket.AF_INET6),
        ("ProxyJump ada@gate:2200", "proxy_jump", "ada@gate:2200"),
        ("ProxyJump none", "proxy_jump", None),
        ("ProxyCommand none", "proxy_command", None),
        ("ProxyCommand nc %h %p", "proxy_command", "nc node 22"),
        ("CertificateFile ~/%r-cert.pub", "certificate_files", (f"{HOME}/{USER}-cert.pub",)),
        ("PKCS11Provider /usr/lib/token.so", "beyond", ("PKCS11Provider /usr/lib/token.so",)),
        ("GSSAPIAuthentication yes", "beyond", ("GSSAPIAuthentication yes",)),
        ("ProxyUseFdpass yes", "beyond", ("ProxyUseFdpass yes",)),
        ("HostbasedAuthentication no", "beyond", ()),
        ("ControlPath none", "control_path", None),
        ("ControlPath /run/sock", "control_path", "/run/sock"),
    ],
)
def test_one_line_of_the_configuration(config, ask, line, field, value):
    environ = {"SSH_AUTH_SOCK": "/usual", "OTHER": "/other"}
    found = resolve(Host("node"), config("Host node", line), ask=ask, environ=environ)
    assert getattr(found, field) == value


@both_ways
def test_a_proxy_command_is_found(config, ask):
    found = resolve(Host("node"), config("ProxyCommand nc -x proxy %h %p"), ask=ask)
    assert found.proxy_command is not None
    assert found.proxy_command.startswith("nc -x proxy ")


@both_ways
@pytest.mark.parametrize(
    ("host", "options", "expected"),
    [
        ({}, {}, ("conf", 1, "/conf")),
        ({}, {"user": "opt", "port": 2, "identity": "/opt"}, ("opt", 2, "/opt")),
        ({"user": "own", "port": 3, "identity": "/own"}, {}, ("own", 3, "/own")),
        (
            {"user": "own", "port": 3, "identity": "/own"},
            {"user": "opt", "port": 2, "identity": "/opt"},
            ("own", 3, "/own"),
        ),
    ],
)
def test_a_hosts_own_words_then_options_then_configuration(config, ask, host, options, expected):
    path = config("Port 1", "User conf", "IdentityFile /conf").config
    found = resolve(Host("node", **host), SSHOptions(config=path, **options), ask=ask)
    assert (found.user, found.port, found.identity_files[0]) == expected
    assert found.identity == (host.get("identity") or options.get("identity"))


@both_ways
def test_an_identity_of_ones_own_replaces_the_default_ones(config, tmp_path, ask):
    key = tmp_path / "k"
    key.touch()
    found = resolve(Host("node", identity=str(key)), config(), ask=ask)
    assert (found.identity, found.identity_files) == (str(key), (str(key),))


@needs_ssh
def test_all_tokens_of_a_proxy_command(config):
    found = resolve(
        Host("node", user="ada", port=2222), config("HostName real.%h", "ProxyCommand x %n %h %p %r 100%%")
    )
    assert found.proxy_command == "x node real.node 2222 ada 100%"


@both_ways
def test_a_jump_host_of_the_callers(config, ask):
    found = resolve(Host("node"), config("ProxyCommand nc %h %p"), ask=ask, jump="a,ada@b")
    assert (found.proxy_jump, found.proxy_command) == ("a,ada@b", None)
    found = resolve(Host("node"), config("ProxyJump other"), ask=ask, jump="a")
    assert found.proxy_jump == "a"


def test_an_identity_may_lie_at_home(config):
    assert resolve(Host("node", identity="~/k"), config(), ask=no_ssh).identity == f"{HOME}/k"


@both_ways
@pytest.mark.parametrize("address", ["10.0.0.7", "fe80::1%eth0"])
def test_an_address_is_where_to_connect_and_the_name_picks_the_configuration(config, ask, address):
    found = resolve(Host("node", address=address), config("Host node", "User ada", "HostName x"), ask=ask)
    assert (found.hostname, found.user) == (address, "ada")


@needs_ssh
def test_match_sees_user_and_port(config):
    options = config("Match user ada", "IdentityFile /matched", "Match all", "HostName elsewhere")
    assert resolve(Host("node", user="ada"), options).identity_files == ("/matched",)
    assert resolve(Host("node", user="bob"), options).identity_files != ("/matched",)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({}, "node"),
        ({"port": 2222}, "[node]:2222"),
        ({"name": "fe80::1", "port": 2222}, "[fe80::1]:2222"),
        ({"address": "10.0.0.7", "port": 2222}, "[10.0.0.7]:2222"),
    ],
)
def test_the_name_in_known_hosts(config, words, expected):
    found = resolve(Host(**{"name": "node", **words}), config(), ask=no_ssh)
    assert found.host_key_name == expected


def test_the_name_in_known_hosts_may_be_an_alias(config):
    found = resolve(Host("node", port=2222), config("HostKeyAlias other"), ask=no_ssh)
    assert found.host_key_name == "other"


@pytest.mark.parametrize(
    "words",
    [
        {"name": "-oProxyCommand=touch pwned"},
        {"name": ""},
        {"name": "a b"},
        {"name": "a\nb"},
        {"name": "a;b"},
        {"name": "$(x)"},
        {"name": "ada@b"},
        {"name": "ssh://b"},
        {"name": "b", "address": "-x"},
        {"name": "b", "user": "-oProxyCommand=x"},
        {"name": "b", "user": "a\nb"},
        {"name": "b", "user": "a;touch pwned"},
        {"name": "b", "user": "$(x)"},
    ],
)
def test_words_that_ssh_could_misread_never_reach_it(words):
    def ask(arguments, timeout):
        raise AssertionError(arguments)

    with pytest.raises(HostError, match=r"is not a valid (name for a host|address for a host|user name)"):
        resolve(Host(**words), SSHOptions(), ask=ask)


@both_ways
def test_a_configuration_that_is_not_there(tmp_path, ask):
    with pytest.raises(HostError, match=r"nowhere.*No such file") as caught:
        resolve(Host("node"), SSHOptions(config=tmp_path / "nowhere"), ask=ask)
    assert caught.value.host == "node"


@both_ways
def test_a_configuration_that_can_not_be_parsed(config, ask):
    options = config("Host *", "nonsense-without-value")
    with pytest.raises(HostError, match=r"the ssh configuration can't be used: .*config") as caught:
        resolve(Host("node"), options, ask=ask)
    assert "\n" not in str(caught.value)


def test_a_port_that_is_no_number(config):
    with pytest.raises(HostError, match="can't be used"):
        resolve(Host("node"), config("Port ssh"), ask=no_ssh)


@needs_ssh
def test_a_configuration_that_takes_too_long(config):
    options = config('Match exec "sleep 600"', "User ada")
    with pytest.raises(StartTimeout, match=r"did not answer within 0.2 s"):
        resolve(Host("node"), options, timeout=0.2)


def test_ssh_gets_the_users_words_and_nothing_after_the_name(tmp_path):
    asked = []

    def ask(arguments, timeout):
        asked.append((list(arguments), timeout))
        return subprocess.CompletedProcess(arguments, 0, "hostname h\n", "")

    host = Host("node", user="ada", port=22, identity="/k", address="fe80::1%2")
    resolve(host, SSHOptions(config=tmp_path / "c"), ask=ask, timeout=3)
    words = ["-G", "-T", "-F", f"{tmp_path}/c", "-p", "22", "-l", "ada", "-i", "/k"]
    assert asked == [([*words, "-o", "HostName=fe80::1%%2", "--", "node"], 3)]


def test_the_command_for_hints_can_be_pasted(config):
    host = Host("node", user="ada", port=2222, identity="/a b")
    options = config()
    assert by_hand(host, options, resolve(host, options, ask=no_ssh)) == (
        f"ssh -F {options.config} -p 2222 -i '/a b' ada@node"
    )


@needs_ssh
def test_many_threads_at_once(config):
    options = config("Host n*", "HostName %h.example")
    found = {}

    def work(name: str) -> None:
        found[name] = resolve(Host(name), options).hostname

    threads = [threading.Thread(target=work, args=(f"n{i}",)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {f"n{i}": f"n{i}.example" for i in range(64)}


def test_imports_of_a_local_job():
    code = (
        "import sys, hvlaunch.ssh.config, hvlaunch.ssh, hvlaunch.ssh.keyring;"
        "assert not {'paramiko', 'cryptography'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
