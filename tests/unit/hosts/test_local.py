"""Which hosts are this machine."""

import os
import pwd
import socket

import pytest

from hvlaunch.hosts.local import Address, current_user, is_local, is_own, is_own_name, own_addresses, resolve
from hvlaunch.job import Host

OURS: Address = (socket.AF_INET, ("10.0.0.1", 0))
THEIRS: Address = (socket.AF_INET, ("10.0.0.2", 0))
NAMES = {"us": [OURS], "10.0.0.1": [OURS], "them": [THEIRS], "both": [THEIRS, OURS], "nowhere": []}


def names(name: str) -> list[Address]:
    if name == "x" * 64:
        raise UnicodeError("label too long")
    if name not in NAMES:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return NAMES[name]


@pytest.mark.parametrize(
    ("host", "local"),
    [
        (Host("localhost"), True),
        (Host("us", 4), True),
        (Host("10.0.0.1"), True),
        (Host("both"), True),
        (Host("them"), False),
        (Host("nowhere"), False),
        (Host("unknown"), False),
        (Host("x" * 64), False),
        (Host("us", user="me"), True),
        (Host("us", user="other"), False),
        (Host("localhost", user="other"), False),
        (Host("us", port=22), False),
        (Host("localhost", port=2222), False),
        (Host("them", address="us"), True),
        (Host("us", address="them"), False),
        (Host("localhost", address="them"), False),
        (Host("them", address="localhost"), True),
    ],
)
def test_is_local(host: Host, local: bool) -> None:
    found = is_local(
        host, is_own_name=lambda name: True, resolve=names, is_own=OURS.__eq__, user=lambda: "me"
    )
    assert found is local


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("gpu07", True),
        ("GPU07", True),
        ("gpu07.", True),
        ("gpu07.example.org", True),
        ("gpu070", False),
        ("gpu08.example.org", False),
        ("example.org", False),
        ("listed", True),
        ("listed.example.org", False),
        ("elsewhere", False),
        ("10.0.0.2", True),
        ("fe80::1%eth0", True),
        ("10.0.0.2.example.org", False),
    ],
)
def test_is_own_name(name: str, own: bool) -> None:
    listed = {"listed": ["10.0.0.2", "10.0.0.1"], "elsewhere": ["10.0.0.2"]}
    found = is_own_name(name, hostname=lambda: "gpu07", hosts_file=lambda: listed, is_own=OURS.__eq__)
    assert found is own


def test_a_hostname_with_a_domain_has_a_short_name() -> None:
    for name, own in (("gpu07", True), ("gpu07.example.org", True), ("gpu07.elsewhere.org", False)):
        assert is_own_name(name, hostname=lambda: "gpu07.example.org", hosts_file=dict) is own


def test_localhost_is_not_looked_up() -> None:
    def never(name: str) -> list[Address]:
        raise AssertionError(name)

    assert is_local(Host("localhost"), resolve=never)


def test_a_uid_without_a_name_matches_no_named_user() -> None:
    assert not is_local(Host("localhost", user="bob"), user=lambda: None)


def test_this_machine() -> None:
    me = pwd.getpwuid(os.getuid()).pw_name
    assert current_user() == me
    assert is_local(Host("127.0.0.1"))
    assert is_local(Host("127.0.0.1", user=me))
    assert not is_local(Host("192.0.2.7"))  # for documentation, RFC 5737
    assert not is_local(Host("2001:db8::7"))
    assert not is_local(Host("a" * 70 + ".example"))


def test_own_addresses_are_found_by_binding() -> None:
    assert all(is_own(address) for address in resolve("127.0.0.1"))
    assert not any(is_own(address) for address in resolve("192.0.2.7"))
    assert {family for family, _ in resolve("::1")} == {socket.AF_INET6}


def test_every_address_of_this_machine_is_its_own() -> None:
    found = own_addresses()
    assert "127.0.0.1" in found
    assert all(is_local(Host(address)) for address in found if not address.startswith("fe80:"))


def test_no_address_is_ours_if_the_kernel_binds_any() -> None:
    assert is_own(OURS, binds=OURS.__eq__)
    assert not is_own(OURS, binds=lambda address: True)
