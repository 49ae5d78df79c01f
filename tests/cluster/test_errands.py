"""An errand on a real host outlives the connection that it was started over."""

import subprocess
import sys

from tests.cluster.test_sessions import kill_sshd
from tests.testhosts.hosts import CHECKOUT, TestHosts

LIMIT = 90.0
ENDED = "/tmp/the-errand-has-ended"
WORKER = f"until rm {ENDED} 2>/dev/null; do sleep 0.1; done"


def test_an_errand_goes_on_when_its_connection_is_lost(cluster: TestHosts) -> None:
    job = cluster.driver.popen(
        [sys.executable, "-m", "tests.cluster.programs.with_errand", "-v", "-H", "b:1", "sh", "-c", WORKER],
        cwd=CHECKOUT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stderr is not None
    lines = []
    for line in job.stderr:
        lines.append(line)
        if "a quarter is sent" in line:
            kill_sshd(cluster)
        if "errand: " in line and " bytes" in line:
            cluster["b"].run(["touch", ENDED], check=True)
    assert job.wait(LIMIT) == 0, lines
    text = "".join(lines)
    assert "host b: connected again after" in text
    size = sum(len(f"line {number}\n") for number in range(100))
    assert f"errand: {size} of {size} bytes" in text
