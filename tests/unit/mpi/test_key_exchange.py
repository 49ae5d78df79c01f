"""The order of key exchanges that a launcher's ssh gets."""

import subprocess

import pytest

from hvlaunch.mpi import Kind
from hvlaunch.mpi.request import key_exchange_words

DEBIAN_12 = "sntrup761x25519-sha512@openssh.com,curve25519-sha256,ecdh-sha2-nistp256"
QUICK = ("-o", "KexAlgorithms=curve25519-sha256,sntrup761x25519-sha512@openssh.com,ecdh-sha2-nistp256")


def words(listed=DEBIAN_12, *, kind=Kind.OPEN_MPI, hosts=("a", "b"), flags=(), environ=None, by_host=None):
    asked = []

    def ask(arguments, timeout):
        asked.append(arguments)
        if listed is None:
            raise FileNotFoundError("ssh")
        names = (by_host or {}).get(arguments[-1], listed)
        return subprocess.CompletedProcess(arguments, 0, f"host a\nkexalgorithms {names}\n", "")

    found = key_exchange_words(kind, hosts, ("-F", "/c"), flags, environ or {}, ask)
    assert all(arguments[-4:-1] == ["-F", "/c", "-G"] for arguments in asked)
    return found


@pytest.mark.parametrize("kind", [Kind.OPEN_MPI, Kind.MPICH, Kind.INTEL])
def test_quick_exchanges_come_first_and_none_is_added(kind):
    assert words(kind=kind) == QUICK


def test_quick_post_quantum_exchange_is_first():
    listed = "sntrup761x25519-sha512,curve25519-sha256,mlkem768x25519-sha256"
    assert words(listed)[1] == (
        "KexAlgorithms=mlkem768x25519-sha256,curve25519-sha256,sntrup761x25519-sha512"
    )


@pytest.mark.parametrize(
    "listed",
    ["sntrup761x25519-sha512", "ecdh-sha2-nistp256", "mlkem768x25519-sha256,curve25519-sha256", "", None],
)
def test_configured_order_stays_without_a_quicker_exchange(listed):
    assert words(listed) == ()


def test_hosts_with_settings_of_their_own_keep_them():
    assert words(by_host={"b": "ecdh-sha2-nistp256,curve25519-sha256"}) == ()


@pytest.mark.parametrize(
    "more",
    [
        {"kind": Kind.SRUN},
        {"hosts": ()},
        {"environ": {"SLURM_JOB_ID": "1"}},
        {"environ": {"OMPI_MCA_plm_rsh_agent": "kubexec.sh"}},
        {"flags": ("--mca", "plm_rsh_args", "-v")},
    ],
)
def test_no_option_if_the_launcher_may_not_call_ssh(more):
    assert words(**more) == ()
