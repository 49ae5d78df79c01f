"""Saves each step to the memory of the hosts, and restores the newest at its start. Its values follow from rank and step.

keep_steps.py END [together]: the job ends when the file END exists. With `together` all hosts see END, and ranks are in step.
"""

import os
import sys
import time
from pathlib import Path

import torch

from hvlaunch.torch import checkpoint

sys.path.append(str(Path(__file__).parent))
from steps_together import wait_for_others


def main() -> None:
    rank = int(os.environ["RANK"])
    step, weights = checkpoint.load() or (0, torch.zeros(1000))
    is_right = bool(weights.eq(step * (rank + 1)).all())
    place = f"round {os.environ['HVLAUNCH_ROUND']} rank {rank} host {os.environ['HVLAUNCH_HOST']}"
    print(f"{place} starts at step {step}: {'right' if is_right else 'WRONG'}")
    while not Path(sys.argv[1]).exists():
        step += 1
        if "together" in sys.argv:
            wait_for_others(Path(sys.argv[1]), step)
        weights = weights + rank + 1
        checkpoint.save(step, weights)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
