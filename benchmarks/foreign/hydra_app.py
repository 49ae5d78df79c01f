"""A program with its settings by Hydra, which has options and output folders of its own."""

import os

import hydra
from omegaconf import DictConfig
from torch import distributed as dist


def run(settings: DictConfig) -> None:
    dist.init_process_group(settings.backend)
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, settings.steps)
    assert found == [3] * int(os.environ["WORLD_SIZE"])
    print("right", dist.get_rank(), flush=True)
    dist.destroy_process_group()


hydra.main(version_base=None, config_path=None)(run)()
