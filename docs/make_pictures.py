"""Makes the pictures of README.md and docs/guides/ from real jobs on test hosts: make pictures (root, tmux, chromium)."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.browser import take  # noqa: E402
from tests.cluster.gpus import add_gpus  # noqa: E402
from tests.cluster.host_faults import FAULTS, WORK, make_fault, make_libraries, prepare_host  # noqa: E402
from tests.testhosts.hosts import TestHosts, wait_until  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
SESSION = "hvlaunch-pictures"
WIDTH, HEIGHT = 100, 22
FAILING = """\
import os, time
rank = int(os.environ["RANK"])
for step in range(4):
    time.sleep(0.3)
    if rank == 0:
        print(f"step {step} loss {2.3 / (step + 1):.3f}", flush=True)
if rank != 3:
    open(f"ready.{rank}", "w")
    time.sleep(60)
while len([name for name in os.listdir() if name.startswith("ready.")]) < 7:
    time.sleep(0.1)
open("/data/shard-3.npy", "rb")
"""
BARS = """\
import os, sys, time
for step in range(1, 201):
    done = "#" * (step // 10)
    print(f"\\repoch 1 [{done:<20}] {step}/200 loss {2.3 / step ** 0.3:.3f}", end="", file=sys.stderr, flush=True)
    time.sleep(0.05)
"""


def tmux(*words: str) -> str:
    return subprocess.run(["tmux", *words], capture_output=True, text=True, check=True).stdout


class Terminal:
    """A terminal in the driver place of test hosts, as a person would use one."""

    def __init__(self, hosts: TestHosts, folder: str, width: int = WIDTH, height: int = HEIGHT) -> None:
        path = f"{ROOT}/.venv/bin:/usr/bin:/bin"
        env = {**hosts.driver.env, "PATH": path, "PS1": "$ ", "TERM": "tmux-256color", "COLORTERM": ""}
        words = [f"{name}={value}" for name, value in env.items()]
        enter = [
            "nsenter",
            f"--net=/proc/{hosts.driver.pid}/ns/net",
            f"--mount=/proc/{hosts.driver.pid}/ns/mnt",
        ]
        named = ["unshare", "--uts", "sh", "-c", 'hostname login && exec "$@"', "sh"]
        self._shell = [*enter, *named, "env", "-i", "-C", folder, *words, "bash", "--norc"]
        size = ["-x", str(width), "-y", str(height)]
        tmux("new-session", "-d", "-s", SESSION, *size, *self._shell)

    def split(self, lines: int) -> None:
        """Open a second shell below, with so many lines; the first one stays the active one."""
        tmux("split-window", "-d", "-v", "-t", SESSION, "-l", str(lines), *self._shell)

    def type(self, line: str) -> None:
        """Type the line at a fresh prompt of an empty screen."""
        self.waits()
        tmux("send-keys", "-t", SESSION, "clear", "Enter")
        wait_until(
            lambda: tmux("capture-pane", "-p", "-t", SESSION).strip() == "$", "the screen is empty", 60
        )
        tmux("send-keys", "-t", SESSION, "-l", line)
        tmux("send-keys", "-t", SESSION, "Enter")

    def waits(self) -> None:
        """Return when the shell has its prompt again."""
        prompt = lambda: tmux("capture-pane", "-p", "-t", SESSION).rstrip().endswith("$")  # noqa: E731
        wait_until(prompt, "the shell waits", 60)

    def screen(self) -> str:
        return tmux("capture-pane", "-p", "-e", "-t", SESSION).rstrip()

    def shows(self, pattern: str) -> None:
        def is_there() -> bool:
            return re.search(pattern, tmux("capture-pane", "-p", "-t", SESSION)) is not None

        try:
            wait_until(is_there, f"the terminal shows {pattern}", 60)
        except TimeoutError:
            print(self.screen())
            raise

    def picture(self, file: Path, title: str) -> None:
        console = Console(record=True, width=WIDTH, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115, PTH123
        console.print(Text.from_ansi(self.screen()), soft_wrap=True)
        file.write_text(console.export_svg(title=title))


def copying(terminal: Terminal, folder: str, pictures: Path) -> None:
    terminal.waits()
    Path(folder, "model.bin").write_bytes(os.urandom(400_000_000))
    terminal.type("hvlaunch --sync -H 'gpu[1-4]:2' python train.py")
    terminal.shows("files [2-9]0% of")
    terminal.picture(pictures / "sync.svg", "copying a project")


def comparing(pictures: Path) -> None:
    """Make the picture of hvlaunch check; the hosts' GPUs are recorded ones."""
    names = ["gpu1", "gpu2", "gpu3", "gpu4"]
    faults = {fault.name: fault for fault in FAULTS}
    libraries = Path("/tmp/demo-libraries")  # noqa: S108 (it is no secret)
    shutil.rmtree(libraries, ignore_errors=True)
    libraries.mkdir()
    make_libraries(libraries)
    with TestHosts(names, share=[str(libraries)]) as hosts:
        for name in ("gpu1", "gpu4"):
            prepare_host(hosts, name, libraries)
        make_fault(hosts, "gpu2", libraries, faults["another torch"])
        make_fault(hosts, "gpu3", libraries, faults["low clock"])
        terminal = Terminal(hosts, str(libraries), height=50)
        try:
            terminal.type(
                f"hvlaunch check -H 'gpu[1-4]:2' --cwd {WORK} -x PYTHONPATH=/run/home/lib ./python train.py"
            )
            terminal.shows("error +gpu2: torch")
            terminal.waits()
            terminal.picture(pictures / "check.svg", "comparing hosts")
        finally:
            tmux("kill-session", "-t", SESSION)


def sharing(pictures: Path) -> None:
    """Make the picture of hvlaunch hosts: leases of two users, a GPU without one, and a job that waits."""
    folder = "/tmp/demo-leases"  # noqa: S108 (it is no secret)
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir()
    with TestHosts(["gpu1", "gpu2"], users=["ann", "bob"], share=[folder]) as hosts:
        add_gpus(hosts)
        jobs = [
            lease(hosts, "ann", "llama-8b", "-np", "4"),
            lease(hosts, "bob", "vit-sweep", "-np", "2"),
        ]
        # Their workers use the GPUs; another program does so without a lease.
        workers = (
            "cd /run/gpus; for gpu in $1; do pgrep -n -u $2 python3 > pid-$gpu; echo 97 > busy-$gpu; done"
        )
        hosts["gpu1"].run(["sh", "-c", workers, "sh", "0 1 2 3", "ann"], check=True)
        hosts["gpu2"].run(["sh", "-c", workers, "sh", "0 1", "bob"], check=True)
        stranger = "sleep 600 > /dev/null 2>&1 & echo $! > /run/gpus/pid-3"
        hosts["gpu2"].run(["sh", "-c", stranger], check=True)
        jobs.append(lease(hosts, "ann", "eval-70b", "--wait", "-np", "8"))
        terminal = Terminal(hosts, folder, height=30)
        try:
            terminal.type("hvlaunch hosts -H 'gpu[1-2]'")
            terminal.shows("waits for")
            terminal.waits()
            terminal.picture(pictures / "hosts.svg", "whose GPUs are whose")
        finally:
            tmux("kill-session", "-t", SESSION)
            for job in jobs:
                job.terminate()
                job.wait()


def lease(hosts: TestHosts, user: str, name: str, *words: str) -> "subprocess.Popen[bytes]":
    """Start a user's job, and wait until it runs or waits."""
    work = "import time; print('works', flush=True); time.sleep(600)"
    line = [sys.executable, "-m", "hvlaunch", "--ssh-user", user, "--lease-gpus", "--job-name", name]
    job = hosts.driver.popen(
        [*line, *words, "-H", "gpu1,gpu2", "python3", "-c", work],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    for text in job.stdout or ():
        if re.search(rb"works|waits for", text):
            break
    return job


def main(pictures: Path, *, has_copy: bool) -> None:
    """Make them in that folder; `has_copy` for that of 400 MB on their way to hosts too."""
    names = ["gpu1", "gpu2", "gpu3", "gpu4"]
    folder = "/tmp/demo"  # noqa: S108 (it stands in the pictures)
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir()
    with TestHosts(names, share=[folder]) as hosts:
        Path(folder, "train.py").write_text(FAILING)
        Path(folder, "bars.py").write_text(BARS)
        terminal = Terminal(hosts, folder)
        try:
            hosts["gpu3"].cut()
            terminal.type("hvlaunch --report report.html -H 'gpu[1-4]:2' python train.py")
            terminal.shows("connecting 3/4")
            terminal.picture(pictures / "connecting.svg", "connecting")
            hosts["gpu3"].heal()
            terminal.shows("failed first")
            terminal.shows("Try: check the path")
            terminal.waits()
            terminal.picture(pictures / "failure.svg", "a failure")
            take(f"file://{folder}/report.html", pictures / "report.png", width=1000, height=1300)
            terminal.type("hvlaunch -H 'gpu[1-2]:2' python bars.py")
            terminal.shows("1[0-9][0-9]/200")
            terminal.picture(pictures / "running.svg", "a running job")
            if has_copy:
                copying(terminal, folder, pictures)
        finally:
            tmux("kill-session", "-t", SESSION)
    comparing(pictures)
    if has_copy:
        sharing(pictures)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else PICTURES, has_copy=not sys.argv[1:])
