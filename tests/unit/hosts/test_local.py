"""Which hosts are this machine, and which variables belong to it or to one process alone."""

import fnmatch
import os
import pwd
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlaunch.hosts.local import (
    Address,
    current_user,
    host_environ,
    is_local,
    is_own,
    is_own_name,
    is_pattern,
    matcher,
    only_local,
    own_addresses,
    resolve,
    without_outer_rank,
)
from hvlaunch.job import ElasticOptions, Host, JobSpec
from hvlaunch.mpi import ALL_NAMES

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


OF_THE_WHOLE_JOB = {"SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "OMPI_MCA_btl", "LSB_JOBID", "PATH"}


def test_ranks_of_the_outer_job_are_removed():
    ranks = {*ALL_NAMES, "SLURM_NODEID", "PMI_FD", "PMIX_NAMESPACE"} - OF_THE_WHOLE_JOB
    assert without_outer_rank(dict.fromkeys(ranks, "0")) == {}


def test_variables_of_the_outer_jobs_rank_are_removed():
    outer = ("HVLAUNCH_ELASTIC", "HVLAUNCH_WORKER_PORTS", "HOROVOD_ELASTIC", "TORCHELASTIC_USE_AGENT_STORE")
    assert without_outer_rank(dict.fromkeys(outer, "1")) == {}


def test_variables_that_hold_for_all_processes_stay():
    environ = dict.fromkeys(OF_THE_WHOLE_JOB, "x") | {"UPMI_RANK": "x", "SLURM_PROCIDS": "x"}
    assert without_outer_rank(environ) == environ


HERE = {
    "HOME": "/root",
    "TMPDIR": "/t",
    "CUDA_VISIBLE_DEVICES": "0",
    "PATH": "/bin",
    "MINE": "1",
    "MODULEPATH": "/m",
}


def test_workers_here_get_no_more_variables_than_on_other_hosts():
    assert host_environ(HERE, {"PATH": "/elsewhere"}) == {
        "HOME": "/root",
        "TMPDIR": "/t",
        "CUDA_VISIBLE_DEVICES": "0",
        "PATH": "/bin",
    }


def test_a_job_is_only_local_if_no_host_may_ever_be_another():
    def is_only_local(*names, **fields):
        spec = JobSpec(command=("true",), hosts=tuple(map(Host, names)), cwd="/", **fields)
        return only_local(spec, is_local=lambda host: host.name in ("localhost", "me"))

    assert is_only_local("localhost", "me")
    assert not is_only_local("localhost", "b")
    assert is_only_local("localhost", elastic=ElasticOptions(min_np=1))
    assert not is_only_local(elastic=ElasticOptions(min_np=1, discovery_script="./hosts.sh"))


CHARACTERS = "AB*?[]!_\n"


@pytest.mark.parametrize(
    ("patterns", "names", "others"),
    [
        (("PATH",), ["PATH"], ["PATHS", "XPATH", "path", ""]),
        (("NCCL_*",), ["NCCL_", "NCCL_DEBUG", "NCCL_A\nB"], ["NCCL", "XNCCL_A"]),
        (("*_DEVICES",), ["_DEVICES", "CUDA_DEVICES"], ["CUDA_DEVICES_"]),
        (("A?", "B[12]", "C*D*"), ["AX", "B2", "CD", "CXDX"], ["A", "B3", "CX"]),
        (("*",), ["", "A"], []),
        (("A*", "A*B*"), ["A", "AXBX"], ["B"]),
        ((), [], ["", "A"]),
    ],
)
def test_names(patterns, names, others):
    matches = matcher(*patterns)
    assert [name for name in [*names, *others] if matches(name)] == names


@given(st.lists(st.text(CHARACTERS, max_size=4), max_size=4), st.text(CHARACTERS, max_size=6))
def test_it_is_as_for_file_names(patterns, name):
    assert matcher(*patterns)(name) == any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def test_a_plain_name_is_not_a_pattern():
    assert [text for text in ("A", "A*", "A?", "[A]", "") if is_pattern(text)] == ["A*", "A?", "[A]"]
