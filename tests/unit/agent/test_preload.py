"""Standbys (--preload): a worker that waited after its imports differs from a fresh one in nothing that is not documented."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvlaunch.agent.workers.preload import program_of
from hvlaunch.agent.workers.standby import gpus_of, imports_of, script_of
from hvlaunch.driver.program import standby_program
from tests.testhosts.places import wait_until
from tests.unit.agent.harness import AgentProcess, interpreter

WAITS = "import os, signal\nif os.environ['HVLAUNCH_WORKER'].endswith('/0'): signal.pause()\n"
"""The first worker of a slot waits to be killed; later ones go on."""
LOOK = (Path(__file__).parent / "look.py").read_text()


class Rig:
    """An agent whose workers run scripts in a directory, with a module to preload."""

    def __init__(self, launch: Callable[..., AgentProcess], folder: Path, modules: list[str] | None) -> None:
        self.folder = folder
        self.modules = modules
        self.launch = launch
        self.agent = launch()
        self.agent.hello(elastic=5.0)
        self.round = -1

    def start(self, argv: list[str], **more: Any) -> int:
        """Start the next round's worker; its pid."""
        self.round += 1
        if self.modules is not None:
            more["preload"] = {"modules": self.modules, "program": standby_program()}
        self.agent.start(argv, round_number=self.round, cwd=str(self.folder), **more)
        pid: int = self.agent.expect("started")[0]["pid"]
        self.pid = pid
        return pid

    def kill(self) -> None:
        """Kill the worker, as a failure does."""
        self.agent.send("signal", slots=[0], signal=signal.SIGKILL)
        self.agent.expect("exited", start=self.round)

    def standby(self) -> int:
        """The pid of the process that waits, once it waits."""
        return int(wait_until(lambda: next(iter(self._waiting()), None), "a standby"))

    def _waiting(self) -> list[int]:
        # A worker that was a standby looks like one until it has read its order.
        return [
            child.pid for child in self.agent.agent.children() if child.pid != self.pid and _waits(child.pid)
        ]

    def end(self) -> tuple[dict[str, Any], bytes, bytes]:
        """How the worker ends, and what it printed."""
        header = self.agent.expect("exited", start=self.round)[0]
        return header, self.agent.output("stdout"), self.agent.output("stderr")


def _waits(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
    except OSError:
        return False


@pytest.fixture
def rig(launch, tmp_path) -> Rig:
    (tmp_path / "wait.py").write_text(WAITS + "print(os.getpid())\n")
    (tmp_path / "slow.py").write_text("")
    return Rig(launch, tmp_path, ["slow"])


WAIT = [sys.executable, "wait.py"]


def test_restart_takes_the_process_that_has_imported_already(rig):
    imports = rig.folder / "imports"
    (rig.folder / "slow.py").write_text(
        f"import os\nopen({str(imports)!r}, 'a').write(f'{{os.getpid()}} ')\n"
    )
    (rig.folder / "wait.py").write_text("import slow\n" + WAITS + "print(os.getpid())\n")
    first = rig.start(WAIT)
    waiting = rig.standby()
    assert imports.read_text().split() == [str(first), str(waiting)]
    rig.kill()
    assert rig.start(WAIT) == waiting
    header, stdout, stderr = rig.end()
    assert (header["code"], stdout, stderr) == (0, b"%d\n" % waiting, b"")
    # The next standby may have imported too, but this worker has not again.
    assert imports.read_text().split().count(str(waiting)) == 1


def test_leftovers_of_a_worker_are_killed_and_the_standby_stays(rig, hunt):
    (rig.folder / "wait.py").write_text(
        f"import subprocess\nsubprocess.Popen(['sleep', '{hunt.mark}'], start_new_session=True)\n" + WAITS
    )
    rig.start(WAIT)
    hunt.wait_for("sleep")
    waiting = rig.standby()
    rig.kill()
    assert rig.start(WAIT) == waiting
    hunt.wait_for("sleep")  # that of the second worker alone
    rig.end()


def test_nothing_is_left_at_the_end_of_the_job(rig):
    rig.start(WAIT)
    process = psutil.Process(rig.standby())
    header, status = rig.agent.bye()
    assert (header["left"], status) == (0, 0)
    assert not process.is_running()


def test_output_of_the_imports_is_the_workers(rig):
    (rig.folder / "slow.py").write_text("print('imported')\nimport warnings\nwarnings.warn('old')\n")
    rig.start(WAIT)
    rig.standby()
    rig.kill()
    rig.agent.output("stdout")
    rig.agent.output("stderr")
    pid = rig.start(WAIT)
    _, stdout, stderr = rig.end()
    assert stdout == b"imported\n%d\n" % pid
    assert b"UserWarning: old" in stderr


@pytest.mark.parametrize(
    ("module", "change", "is_kept"),
    [
        ("", {"RANK": "1"}, True),
        ("import os\nos.environ.get('RANK')", {"RANK": "1"}, False),
        ("import os\nos.environ.get('RANK')", {"MASTER_PORT": "1"}, True),
        ("", {"OMP_NUM_THREADS": "7"}, False),
        ("", {"ANY": "7"}, False),
    ],
)
def test_a_changed_variable_that_modules_may_have_read_means_a_fresh_start(rig, module, change, is_kept):
    (rig.folder / "slow.py").write_text(module)
    (rig.folder / "wait.py").write_text(WAITS + "print(*map(os.environ.get, ('RANK', 'ANY')))\n")
    rig.start(WAIT, env={"RANK": "0", "ANY": "1"})
    waiting = rig.standby()
    rig.kill()
    assert (rig.start(WAIT, env={"RANK": "0", "ANY": "1", **change}) == waiting) is is_kept
    values = {"RANK": "0", "ANY": "1", **change}
    assert rig.end()[1].decode().split() == [values["RANK"], values["ANY"]]


def test_other_program_with_the_first_environment_imports_nothing(rig):
    pid = rig.start(WAIT)
    rig.standby()
    lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    environment = dict(line.split(b"=", 1) for line in lines if line)
    # As the observer runs the worker's Python; the descriptor may be anything there.
    words = [
        sys.executable,
        "-c",
        "import os, sys\nprint('slow' in sys.modules, os.environ.get('PYTHONPATH'))",
    ]
    done = subprocess.run(words, env=environment, capture_output=True, check=True, cwd=rig.folder, timeout=60)
    assert (done.stdout, done.stderr) == (b"False None\n", b"")
    rig.kill()


def test_process_that_is_killed_is_replaced_once(rig):
    worker = rig.start(WAIT)
    first = rig.standby()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(first), "the agent to reap it")
    second = rig.standby()
    assert second != first
    os.kill(second, signal.SIGKILL)
    cause = rig.agent.expect("no_preload")[0]["cause"]
    assert cause == "two processes that waited are lost; the last one was killed by SIGKILL"
    assert psutil.pid_exists(worker)
    rig.kill()
    rig.start(WAIT)
    assert rig.end()[0]["code"] == 0


def test_stopped_process_is_replaced_by_a_fresh_one(rig):
    rig.start(WAIT)
    waiting = rig.standby()
    os.kill(waiting, signal.SIGSTOP)
    rig.kill()
    pid = rig.start(WAIT)
    assert pid != waiting
    assert rig.end()[1] == b"%d\n" % pid
    wait_until(lambda: not psutil.pid_exists(waiting), "the end of the stopped process")


def test_import_that_fails_is_told_and_the_script_runs(rig):
    (rig.folder / "slow.py").write_text("raise ValueError('no\\nGPU')")
    (rig.folder / "wait.py").write_text("print(1)")
    rig.start(WAIT)
    assert rig.agent.expect("no_preload")[0]["cause"] == "ValueError: no GPU"
    header, stdout, stderr = rig.end()
    assert (header["code"], stdout, stderr) == (0, b"1\n", b"")


@pytest.mark.parametrize(
    "argv",
    [
        ["sh", "-c", "echo $PYTHONPATH $HVL_STANDBY"],
        [sys.executable, "-I", "wait.py"],
        [sys.executable, "-c", "print()"],
    ],
)
def test_other_commands_start_as_usual(rig, argv):
    (rig.folder / "wait.py").write_text("print()")
    rig.start(argv)
    cause = rig.agent.expect("no_preload")[0]["cause"]
    assert cause == "the command is not `python [OPTIONS] SCRIPT` or `python [OPTIONS] -m MODULE`"
    assert rig.end()[1] == b"\n"


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("python train.py -m x", ("train.py", None)),
        ("/a/bin/python3.13t -u -OO -W error -Xdev train.py", ("train.py", None)),
        ("python -Bum pkg.train --lr 1", (None, "pkg.train")),
        ("python -mpkg", (None, "pkg")),
        ("python -uc pass", None),
        ("python -", None),
        ("python --version", None),
        ("python -sE x.py", None),
        ("python", None),
        ("torchrun train.py", None),
    ],
)
def test_command_of_python(words, program):
    assert program_of(words.split()) == program


def test_auto_takes_the_imports_at_the_top(tmp_path):
    (tmp_path / "mine.py").write_text("")
    text = b'''"""Trains."""
from __future__ import annotations
import json, mine
import email.message as message
from collections import abc, OrderedDict
from . import other
import no_such_module
DEBUG = True
def main():
    import decimal
    os.environ["A"] = "1"
import csv
os.environ["OMP_NUM_THREADS"] = "1"
import fractions
'''
    assert list(imports_of(text, str(tmp_path))) == [
        ("json", ()),
        ("email.message", ()),
        ("collections", ["abc", "OrderedDict"]),
        ("csv", ()),
    ]


def test_script_of_a_module_is_found_without_an_import(tmp_path, monkeypatch):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError")
    (package / "__main__.py").write_text("")
    (package / "train.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert script_of(None, "pkg") == str(package / "__main__.py")
    assert script_of(None, "pkg.train") == str(package / "train.py")
    assert script_of(None, "pkg.other") is None
    assert script_of(str(package), None) == str(package / "__main__.py")


def test_open_gpus_are_seen(tmp_path):
    for number, path in enumerate(
        ("/dev/null", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia3", "/dev/kfd")
    ):
        (tmp_path / str(number)).symlink_to(path)
    assert sorted(gpus_of(str(tmp_path))) == ["/dev/kfd", "/dev/nvidia3"]


def _seen(
    launch: Callable[..., AgentProcess], folder: Path, argv: list[str], modules: list[str] | None
) -> Any:
    """What look.py sees in the second worker of a slot."""
    rig = Rig(launch, folder, modules)
    env = {"RANK": "0", "LC_ALL": "C.UTF-8", "PYTHONPATH": str(folder / "site")}
    rig.start(argv, env=env)
    if modules is not None:
        waiting = rig.standby()
    rig.kill()
    rig.agent.output("stdout")
    rig.agent.output("stderr")
    pid = rig.start(argv, env=env)
    assert modules is None or pid == waiting
    header, stdout, stderr = rig.end()
    assert header["code"] == 0
    rig.agent.end()
    return {**json.loads(stdout), "stderr": stderr.decode()}


DOCUMENTED = {"modules", "environ at the start", "pid", "agent", "scratch", "random", "hash", "authkey"}
"""What look.py sees and a preloaded worker may have otherwise; all but the first two differ between any two processes."""


SITES = {
    "": "",
    "good": "import builtins, sys\nbuiltins.seen_by_site = [*sys.path]\n",
    "bad": "import sys\nprint(1, file=sys.stderr)\nraise ValueError('bad')\n",
}
"""The user's own sitecustomize, by its kind."""


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("", ["look.py", "--lr", "1"]),
        ("", ["-OuBW", "error::ImportWarning", "-m", "look", "good"]),
        ("", ["-Xdev", ".", "bad"]),
        pytest.param("3.8", ["look.py"], marks=pytest.mark.long),
        pytest.param("3.9", ["-m", "look"], marks=pytest.mark.long),
        pytest.param("3.12", ["look.py"], marks=pytest.mark.long),
        pytest.param("3.13", ["look.py"], marks=pytest.mark.long),
        pytest.param("3.14", ["look.py"], marks=pytest.mark.long),
    ],
)
def test_script_sees_a_fresh_interpreter(launch, tmp_path, version, words):
    (tmp_path / "look.py").write_text(WAITS + LOOK)
    (tmp_path / "__main__.py").write_text(WAITS + LOOK)
    (tmp_path / "site").mkdir()
    if site := SITES.get(words[-1]):
        (tmp_path / "site" / "sitecustomize.py").write_text(site)
    argv = [interpreter(version) if version else sys.executable, *words]
    fresh = _seen(launch, tmp_path, argv, None)
    preloaded = _seen(launch, tmp_path, argv, ["json", "decimal"])
    differences = {name for name in {*fresh, *preloaded} if fresh.get(name) != preloaded.get(name)}
    assert differences <= DOCUMENTED, {
        name: (fresh.get(name), preloaded.get(name)) for name in differences - DOCUMENTED
    }
    more = set(preloaded["modules"]) ^ set(fresh["modules"])
    assert more <= {"decimal", "_decimal", "numbers", "__future__"}


ENDS: Mapping[str, str] = {
    "text": "raise SystemExit('no data')",
    "number": "raise SystemExit(7)",
    "none": "raise SystemExit",
    "error": "def load():\n    raise KeyError('x')\nload()",
    "syntax": "import broken",
    "interrupt": "raise KeyboardInterrupt",
    "signal": "os.kill(os.getpid(), 15)",
    "hard": "print('lost', end='')\nos._exit(3)",
    "exits": "import atexit\natexit.register(print, 'bye')\nprint(1)",
    "thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "other thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('done'))).start()",
    "closed": "os.close(1)\nprint(1)",
    "children": """
import multiprocessing, sys
class Item:
    pass
def make(_):
    return Item()
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            [item] = pool.map(make, [0])
        print(method, type(item) is Item)
""",
}
"""Ends of scripts, by name."""


def test_scripts_end_as_in_a_fresh_interpreter(launch, tmp_path):
    (tmp_path / "broken.py").write_text("def f(:\n")
    script = tmp_path / "end.py"
    rigs = [Rig(launch, tmp_path, modules) for modules in (None, ["json"])]
    for name, text in ENDS.items():
        ends = []
        for rig in rigs:
            # The first worker's name ends in /0, and that of each second one in something else.
            script.write_text(WAITS.replace("'/0'", "'first'") + text)
            argv = [sys.executable, "end.py"]
            rig.start(argv, own={"HVLAUNCH_WORKER": "first"})
            waiting = None if rig.modules is None else rig.standby()
            rig.kill()
            rig.agent.output("stderr")
            pid = rig.start(argv, own={"HVLAUNCH_WORKER": "second"})
            assert waiting in (None, pid)
            header, stdout, stderr = rig.end()
            ends.append((header["code"], header["signal"], stdout, stderr))
        assert ends[0] == ends[1], name


TRAIN = """
import multiprocessing
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.tensor(float(index * index))

class Net(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2 + x.matmul(x)

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=method)
        print(method, [batch.tolist() for batch in loader], flush=True)
    x = torch.ones(64, 64)
    print("compiled", torch.equal(torch.compile(Net())(x), Net()(x)), torch.get_num_threads(), flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_data_loaders_and_compilers_of_torch_work(launch, tmp_path):
    pytest.importorskip("torch")
    if shutil.which("cc") is None:
        pytest.skip("torch.compile needs a C compiler")
    (tmp_path / "train.py").write_text(WAITS + TRAIN)
    rig = Rig(launch, tmp_path, ["torch"])
    argv, env = [sys.executable, "train.py"], {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    rig.start(argv, env=env)
    waiting = rig.standby()
    rig.kill()
    assert rig.start(argv, env=env) == waiting
    output = b""
    while b"compiled" not in output:
        output += rig.agent.read_output(1)
    header, stdout, _ = rig.end()
    assert (header["code"], (output + stdout).decode().splitlines()) == (
        0,
        [
            *[f"{method} [[0.0, 1.0, 4.0, 9.0]]" for method in ("fork", "spawn", "forkserver")],
            "compiled True 2",
        ],
    )
