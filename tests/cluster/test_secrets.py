"""What must not be seen is not seen, and what must arrive arrives unchanged."""

import json
import secrets
import sys

import pytest

from tests.cluster.jobs import PROGRAMS, Job
from tests.testhosts.hosts import TestHosts

SECRET = f"s3cr3t-{secrets.token_hex(8)}"
"""Other tests' processes are seen in the driver place, too, and may have theirs on a command line until hvlaunch runs."""
REPORT = "import os, sys, time; print('TOKEN', os.environ['HVLAUNCH_TOKEN'], flush=True); time.sleep(3600)"


@pytest.mark.parametrize("chosen", ["API_KEY", f"API_KEY={SECRET}"], ids=["-x NAME", "-x NAME=VALUE"])
def test_ps_shows_neither_secret_nor_token(cluster: TestHosts, chosen: str) -> None:
    job = Job(
        cluster,
        ["-H", "a:1,b:1", "--verbose", "-x", chosen, sys.executable, "-c", REPORT],
        {"API_KEY": SECRET},
    )
    job.saw("TOKEN ", 2)
    token = job.stdout.split("TOKEN ")[1].split()[0]
    assert len(token) >= 32
    for place in (cluster.driver, cluster["a"], cluster["b"]):
        listing = place.run(["ps", "-ef", "-ww"], check=True).stdout
        assert "hvlaunch" in listing or "zlib.decompress" in listing
        assert SECRET not in listing
        assert token not in listing
    job.interrupt()
    assert job.code() == 130
    assert SECRET not in job.stdout + job.stderr
    assert token not in job.stderr


def test_dry_run_masks_and_connects_nowhere(cluster: TestHosts) -> None:
    cluster["a"].stop_sshd()
    cluster["b"].stop_sshd()
    job = Job(
        cluster,
        ["--dry-run", "--verbose", "-H", "a:2,b:2", "-x", f"API_KEY={SECRET}", "-x", "PLAIN=seen", "train"],
    )
    assert job.code() == 0, job.stderr
    assert SECRET not in job.stdout
    assert "API_KEY" in job.stdout
    assert "PLAIN=seen" in job.stdout


def test_ten_thousand_variables_and_odd_values_arrive_unchanged(cluster: TestHosts) -> None:
    odd = {
        "QUOTES": 'it\'s "quoted" `here` \\ and $HOME ${X} $(id) !! % ~',
        "LINES": "one\ntwo\r\n\tthree\n",
        "UNICODE": "größe – 大きさ",
        "NOT_UTF8": b"\xff\xfe\x80".decode("utf-8", "surrogateescape"),
        "EMPTY": "",
        "EQUALS": "a=b=c",
        "LONG": "x" * 120_000,
    }
    many = {f"MANY_{number}": f"value {number}" for number in range(10_000)}
    job = Job(
        cluster,
        [
            "-H",
            "a:1",
            "-x",
            "MANY_*",
            *(word for name in odd for word in ("-x", name)),
            sys.executable,
            PROGRAMS / "dump_env.py",
        ],
        {**odd, **many},
    )
    assert job.code() == 0, job.stderr
    env = json.loads(job.stdout.partition(": ")[2])["env"]
    assert {name: env[name] for name in odd} == odd
    assert {name: env[name] for name in many} == many


@pytest.mark.parametrize(
    "size", [131_072 - len("BIG=") - 1, 131_072 - len("BIG=")], ids=["the longest", "one too long"]
)
def test_a_value_too_long_for_the_kernel_is_a_named_error(cluster: TestHosts, tmp_path, size: int) -> None:
    file = tmp_path / "env"
    file.write_text(f"BIG={'x' * size}\n")
    job = Job(cluster, ["-H", "a:1", "--env-file", file, "sh", "-c", "echo ${#BIG}"])
    if size + len("BIG=") + 1 <= 131_072:
        assert job.code() == 0, job.stderr
        assert job.stdout == f"[0]<stdout>: {size}\n"
    else:
        assert job.code() == 2
        assert job.stderr.count("\n") == 1
        assert "BIG" in job.stderr
        assert "131072" in job.stderr or "128 KiB" in job.stderr


def test_more_than_the_kernel_takes_in_all_is_an_error(cluster: TestHosts, tmp_path) -> None:
    file = tmp_path / "env"
    file.write_text("".join(f"BIG_{number}={'x' * 100_000}\n" for number in range(80)))
    job = Job(cluster, ["-H", "a:1", "--env-file", file, "true"])
    assert job.code() == 126
    assert "more than this kernel allows" in job.stderr


def test_the_rendezvous_answers_only_to_the_token(cluster: TestHosts) -> None:
    ask = (
        "import os, ssl, urllib.request, urllib.error\n"
        "context = ssl._create_unverified_context()\n"
        "def ask(token):\n"
        "    r = urllib.request.Request(os.environ['HVLAUNCH_RENDEZVOUS'] + '/scope/key', method='PUT', data=b'v')\n"
        "    if token: r.add_header('Authorization', 'Bearer ' + token)\n"
        "    try: return urllib.request.urlopen(r, context=context).status\n"
        "    except urllib.error.HTTPError as e: return e.code\n"
        "print(ask(None), ask('wrong'), ask(os.environ['HVLAUNCH_TOKEN']))\n"
    )
    job = Job(cluster, ["-H", "a:1", sys.executable, "-c", ask])
    assert job.code() == 0, job.stderr
    assert job.stdout == "[0]<stdout>: 401 401 200\n"
