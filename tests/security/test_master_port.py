"""Other users' programs that want MASTER_PORT before rank 0 listens there."""

import os
import re
import sys

import pytest

from tests.security.conftest import BOB
from tests.unit.test_local_jobs import run

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="another user's program takes root")

THIEF = """
import os, signal, socket, sys
os.setuid(int(sys.argv[1]))
sock = socket.socket()
sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(sys.argv[3]))
try:
    sock.bind(("", int(sys.argv[2])))
    sock.listen()
except OSError:
    print("refused", flush=True)
else:
    print("taken", flush=True)
signal.pause()
"""
"""Takes the port, or is refused. With a 1 behind it, it does so on purpose: by the option that torch has, too."""

RANK_ZERO = f"""
import os, socket, subprocess, sys
words = [sys.executable, "-c", {THIEF!r}, "{BOB}", os.environ["MASTER_PORT"], sys.argv[1]]
thief = subprocess.Popen(words, stdout=subprocess.PIPE)
print(thief.stdout.readline().decode(), "port", os.environ["MASTER_PORT"], flush=True)
socket.create_server(("", int(os.environ["MASTER_PORT"])))
print("listening")
"""


def test_a_port_that_is_kept_is_not_had_by_the_way() -> None:
    """Programs that take any port that is free, and the kernel itself, find it taken until rank 0 listens."""
    done = run("-np", "1", sys.executable, "-c", RANK_ZERO, "0")
    assert done.returncode == 0, done.stderr
    assert "refused" in done.stdout
    assert "listening" in done.stdout


def test_the_report_names_the_user_and_program_that_took_the_port() -> None:
    done = run("-np", "1", sys.executable, "-c", RANK_ZERO, "1")
    assert done.returncode == 1
    assert "taken" in done.stdout
    (port,) = re.findall(
        f"its MASTER_PORT (\\d+) was taken by .* uid {BOB}.*: python[0-9.]*, pid ", done.stderr
    )
    assert f"port {port}" in done.stdout
    assert "rank 0 of 1 on host localhost failed" in done.stderr
    assert "hvlaunch.torch" in done.stderr


def test_an_elastic_job_begins_again_at_another_port() -> None:
    program = RANK_ZERO.replace(
        "import os", "import os\nif os.environ['HVLAUNCH_ROUND'] != '0': raise SystemExit(0)\nimport os", 1
    )
    done = run("-np", "1", "--min-np", "1", sys.executable, "-c", program, "1")
    assert done.returncode == 0, done.stderr
    assert "taken" in done.stdout
    assert "round 1: 1 worker on host" in done.stderr
