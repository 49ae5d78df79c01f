"""Commits bytes that follow from rank and step to the memory of the host, without torch. keep_bytes.py END [DIE]

The job ends when the file END exists. A rank whose host has the file DIE is killed in the middle of a commit.
"""

import os
import signal
import sys
import time
from pathlib import Path

from hvlaunch.agent import commits
from hvlaunch.agent.commits import KeptCommit
from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.messages import KEPT

sys.path.append(str(Path(__file__).parent))
from steps_together import wait_for_others


def main() -> None:
    end, *die = map(Path, sys.argv[1:])
    rank, size, number = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "HVLAUNCH_ROUND"))
    directory = commits.make_directory(os.environ["HVLAUNCH_SCRATCH"])
    with Client.from_environment() as client:
        client.put(KEPT, f"here.{os.environ['HVLAUNCH_HOST']}", b"1")
    step = 0
    while not end.exists():
        step += 1
        wait_for_others(end, step)
        content = f"{rank}.{step} ".encode() * 30_000
        commit = KeptCommit(f"default.{rank}", number, step, size, 0, len(content))
        descriptor = commits.begin(directory, commit, lambda: commits.pins(directory), is_saved=True)
        os.pwrite(descriptor, content, commits.PAGE)
        if any(path.exists() for path in die):
            os.kill(os.getpid(), signal.SIGKILL)
        commits.seal(descriptor, commit)
        commits.release(descriptor)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
