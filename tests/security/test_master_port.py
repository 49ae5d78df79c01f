"""Other users' programs that want MASTER_PORT before rank 0 listens there."""

import os
import re
import sys
import textwrap
from pathlib import Path

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
print(thief.stdout.readline().decode())
socket.create_server(("", int(os.environ["MASTER_PORT"])))
print("listening")
"""


def test_a_port_that_is_kept_is_not_had_by_the_way() -> None:
    """Programs that take any port that is free, and the kernel itself, find it taken until rank 0 listens."""
    done = run("-np", "1", sys.executable, "-c", RANK_ZERO, "0")
    assert done.returncode == 0, done.stderr
    assert "refused" in done.stdout
    assert "listening" in done.stdout


def test_who_takes_it_on_purpose_is_named_in_the_report() -> None:
    done = run("-np", "1", sys.executable, "-c", RANK_ZERO, "1")
    assert done.returncode == 1
    assert "taken" in done.stdout
    assert f"its MASTER_PORT was taken by a program of another user, uid {BOB} (exit code 1)" in done.stderr
    assert "hvlaunch.torch" in done.stderr
    assert "the job ends: this was its second try" in done.stderr


def test_a_static_job_begins_once_more(tmp_path: Path) -> None:
    """Rank 1 works until it is stopped; in the second try nobody takes the port, and stdin is at its end again.

    The files of output have both.
    """
    program = f"""
import os, sys, time
if os.environ["HVLAUNCH_ROUND"] == "0":
    if os.environ["RANK"] == "1":
        time.sleep(1000)
{textwrap.indent(RANK_ZERO, "    ")}
print("port", os.environ["MASTER_PORT"], repr(sys.stdin.read()))
"""
    options = ("-np", "2", "--stdin", "all", "--output-filename", tmp_path)
    done = run(*options, sys.executable, "-c", program, "1")
    assert done.returncode == 0, done.stderr
    assert "taken" in done.stdout
    (first,) = re.findall(f"MASTER_PORT (\\d+) on host localhost was taken by .* uid {BOB}", done.stderr)
    assert "the job begins once more, at another port" in done.stderr
    ports = re.findall(r"port (\d+) ''", done.stdout)
    assert len(ports) == 2
    assert first not in ports
    kept = (tmp_path / "latest" / "rank.0" / "stdout").read_text()
    assert kept.startswith("taken")
    assert f"port {ports[0]}" in kept


def test_a_static_job_whose_input_was_given_ends() -> None:
    program = "import sys; sys.stdin.readline()" + RANK_ZERO
    done = run("-np", "1", sys.executable, "-c", program, "1", input="only once\n")
    assert done.returncode == 1
    assert f"uid {BOB}" in done.stderr
    assert "once more" not in done.stderr


def test_an_elastic_job_begins_again_at_another_port() -> None:
    program = RANK_ZERO.replace(
        "import os", "import os\nif os.environ['HVLAUNCH_ROUND'] != '0': raise SystemExit(0)\nimport os", 1
    )
    done = run("-np", "1", "--min-np", "1", sys.executable, "-c", program, "1")
    assert done.returncode == 0, done.stderr
    assert "taken" in done.stdout
    assert "round 1: 1 worker on host" in done.stderr
