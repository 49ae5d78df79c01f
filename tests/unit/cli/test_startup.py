"""What is not imported until it is needed: the command line answers at once."""

import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

import hvlaunch
from hvlaunch.job import JobSpec, SSHOptions

ROOT = Path(hvlaunch.__file__).parents[1]
HEAVY = {
    "rich",
    "rich_argparse",
    "paramiko",
    "cryptography",
    "torch",
    "numpy",
    "ClusterShell",
    "shtab",
    "psutil",
    "httptools",
    "prometheus_client",
    "asyncio",
    "argparse",
    "tomllib",
    "tomli",
    "yaml",
}

SCRIPT = """
import json, sys
from hvlaunch.cli.main import main
from hvlaunch.job import JobResult
sys.stdout = open("/dev/null", "w")
main(sys.argv[1:], run=lambda spec, *, stdout, stderr, on_detached, advise: JobResult(exit_code=0, elapsed=0.0))
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.__stdout__)
"""


def modules(line):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *line.split()],
        capture_output=True,
        cwd=ROOT,
        timeout=60,
        check=True,
    )
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "line",
    [
        "-np 2 true",
        "-np 8 -H a:4,b:4 -p 22 -x A=1 python train.py",
        "-np 2 --prefix {host}/{rank} --ranks 0-1 --merge --color never --quiet --events e true",
        "--env all true",
        "--dry-run -np 2 true",
        "--check-build",
        "--version",
        "--bogus",
    ],
)
def test_a_plain_line_loads_nothing_heavy(line):
    assert not modules(line) & HEAVY


def test_the_controller_of_a_local_job_loads_nothing_heavy_either():
    script = "import json, sys, hvlaunch.gloo.controller; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, cwd=ROOT, timeout=60, check=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & (HEAVY - {"httptools", "asyncio"})


FOR_OTHER_HOSTS = """
import json, sys
import hvlaunch.gloo.controller
from hvlaunch.hosts.local import own_addresses
from hvlaunch.rendezvous.serving.certificate import Certificate
assert own_addresses() and Certificate().fingerprint
print(json.dumps(sorted(sys.modules)))
"""


def test_a_driver_for_other_hosts_loads_little_more():
    done = subprocess.run(
        [sys.executable, "-c", FOR_OTHER_HOSTS], capture_output=True, cwd=ROOT, timeout=60, check=True
    )
    # Each takes 10 ms, the last two are those that cryptography loads for writing keys.
    assert not set(json.loads(done.stdout)) & {
        "psutil",
        "bcrypt",
        "cryptography.hazmat.primitives.serialization",
    }


LOGIN = """
import sys
from hvlaunch.ssh import by_paramiko as client
client._load_login()
loaded = {"invoke", "email", "importlib.metadata"} & sys.modules.keys()
assert not loaded, loaded
import importlib.metadata, paramiko
assert paramiko.__version__ == importlib.metadata.version("paramiko")
"""


def test_the_ssh_client_is_loaded_without_what_it_does_not_need():
    subprocess.run([sys.executable, "-I", "-c", LOGIN], timeout=60, check=True)


def test_a_needed_library_is_loaded():
    assert "rich" in modules("--help")
    assert "ClusterShell" in modules("-H gpu[01-02] true")


OWN_MODULES = 78
"""Of hvlaunch, that each job loads before it connects: 0.1 ms each."""
OWN_DATACLASSES = 6
"""Likewise; making one takes 0.2 to 1 ms, a named tuple 0.05."""
LATER = {
    "console/files.py": "jobs with --output-filename or --events",
    "console/masking.py": "lines with a wrong option, and plans and reports that are shown",
    "driver/control.py": "jobs that somebody asks about",
    "driver/history.py": "jobs with a directory, once it is there",
    "driver/links/errands.py": "jobs that are observed, or run errands",
    "driver/links/host_ends.py": "hosts that were lost, or did not start an agent",
    "driver/links/relay.py": "hosts that do not reach the rendezvous; it needs asyncio",
    "driver/links/warm_way.py": "jobs on a warm pool",
    "driver/observing/observation.py": "jobs that somebody watches",
    "driver/observing/stacks.py": "jobs whose stacks are taken",
    "driver/job_record.py": "jobs with other hosts, or that may be detached",
    "driver/worker_files.py": "jobs with --output-filename, or that call a function",
    "driver/worker_messages.py": "elastic jobs, and jobs of Horovod",
    "watch/overview.py": "jobs with a directory, once it is there",
    "watch/recorder.py": "jobs with --events, or of which somebody asks for the events",
    "watch/sentences.py": "jobs with more to say than that they start and end",
}
"""Modules that stand apart because a local job that goes well does not load them before it connects: by path, with the jobs that need them."""
LOADED = """
import dataclasses, json, sys
import hvlaunch.cli.main, hvlaunch.gloo.controller, hvlaunch.driver.loop
own = [module for name, module in sys.modules.items() if name.partition(".")[0] == "hvlaunch"]
classes = {each for module in own for each in vars(module).values() if isinstance(each, type)}
made = [each.__name__ for each in classes if dataclasses.is_dataclass(each) and each.__module__.startswith("hvlaunch.")]
print(json.dumps([sorted(module.__name__ for module in own), sorted(made)]))
"""


def test_modules_loaded_before_a_job_connects():
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, cwd=ROOT, timeout=60, check=True
    )
    own, made = json.loads(done.stdout)
    modules_by_path = {"hvlaunch." + path.removesuffix(".py").replace("/", "."): path for path in LATER}
    assert not [modules_by_path[name] for name in own if name in modules_by_path]
    assert len(own) <= OWN_MODULES, own
    assert len(made) <= OWN_DATACLASSES, made


@pytest.mark.parametrize("path", LATER)
def test_the_table_of_later_modules_names_modules_that_exist(path):
    assert (Path(hvlaunch.__file__).parent / path).is_file()


COLLECTIONS = """
import gc, os, sys
found = []
gc.callbacks.append(lambda phase, info: found.append(info["generation"]))
end = os._exit
os._exit = lambda code: (print(code, *found, file=sys.stderr, flush=True), end(code))
import hvlaunch.__main__
found.clear()
hvlaunch.__main__.script()
"""


def test_no_garbage_collection_runs_while_a_job_starts(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", COLLECTIONS, "--quiet", "-np", "2", "true"],
        capture_output=True,
        cwd=ROOT,
        timeout=120,
        check=False,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )
    assert done.stderr.splitlines()[-1:] == [b"0"], done.stderr


def test_ctrl_c_before_the_first_import_is_quiet() -> None:
    program = """
import os, sys
before = set(sys.modules)
import hvlaunch.__main__ as program
assert set(sys.modules) - before <= {"hvlaunch", "hvlaunch.__main__", "gc"}
def interrupt(*_):
    raise KeyboardInterrupt
os.open = interrupt
program.script()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_options_without_compiled_methods_are_checked_like_dataclasses() -> None:
    options = SSHOptions(port=22)
    assert (options.port, options.client) == (22, "paramiko")
    assert replace(options, user="me") == SSHOptions(user="me", port=22) != options
    assert hash(SSHOptions(port=22)) == hash(options)
    assert JobSpec(command=(), hosts=(), cwd="/").env is not JobSpec(command=(), hosts=(), cwd="/").env
    with pytest.raises(FrozenInstanceError, match="port"):
        options.port = 23  # type: ignore[misc]
    with pytest.raises(TypeError, match="SSHOptions has no prot"):
        SSHOptions(prot=22)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="JobSpec without cwd"):
        JobSpec(command=(), hosts=())  # type: ignore[call-arg]
