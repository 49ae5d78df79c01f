"""`hvlaunch bisect` on real hosts: a bad link and a bad host are told from each other."""

import json
import sys
from typing import Any

import pytest

from tests.testhosts.hosts import TestHosts

MEET = 'for host in $(echo "$HVLAUNCH_HOSTS" | tr , " "); do host=${host#*=}; timeout 2 bash -c "</dev/tcp/${host%:*}/22" || exit 1; done'
"""Each worker connects to each host of the job."""


def bisect(hosts: TestHosts, *command: str) -> tuple[int, dict[str, Any]]:
    words = [
        "bisect",
        "--json",
        "--quiet",
        "-H",
        ",".join(f"{name}:1" for name in hosts.names),
        "--",
        *command,
    ]
    result = hosts.driver.run([sys.executable, "-m", "hvlaunch", *words], timeout=180)
    answer: dict[str, Any] = json.loads(result.stdout)
    return result.returncode, answer


@pytest.mark.long
def test_bad_link_is_told_from_a_bad_host(cluster: TestHosts) -> None:
    cluster["b"].part(cluster["d"])
    code, answer = bisect(cluster, "bash", "-c", MEET)
    assert (code, answer["cause"], answer["hosts"]) == (69, "link", ["b", "d"])
    assert answer["rounds"] <= 6
    assert answer["confidence"] > 0.9
    cluster["b"].repair()
    cluster["d"].repair()
    code, answer = bisect(cluster, "sh", "-c", 'test "$HVLAUNCH_HOST" != c')
    assert (code, answer["cause"], answer["hosts"]) == (69, "host", ["c"])
    record = cluster.driver.run([sys.executable, "-m", "hvlaunch", "hosts"]).stdout
    rows = {line.split()[0]: line for line in record.splitlines()}
    assert "suspect" in rows["c"]
    assert "the link between hosts b and d is bad" in rows["b"]
    assert rows.keys() >= {"b", "c", "d"}
    assert "a" not in rows
