"""The network of ddp_digits.py, trained by Lightning's Trainer with DDP."""

import os
import tempfile
from typing import Any

import lightning
import torch
from ddp_digits import Net, digits
from torch import nn
from torch.utils.data import DataLoader

EPOCHS = 6


class Digits(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: list[torch.Tensor], _number: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def test_step(self, batch: list[torch.Tensor], _number: int) -> None:
        images, labels = batch
        share = (self.net(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", share, sync_dist=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 3e-3)


def trainer_of_this_job(folder: str) -> Any:
    return lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        strategy="ddp",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),  # slots of this host
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),  # hosts
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    train_set, test_set = digits()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of_this_job(folder)
        model = Digits()
        trainer.fit(model, DataLoader(train_set, batch_size=120 // trainer.world_size, shuffle=True))
        [result] = trainer.test(model, DataLoader(test_set, batch_size=120), verbose=False)
        total = sum(weight.detach().double().sum().item() for weight in model.parameters())
        rank, size = trainer.global_rank, trainer.world_size
        print(f"rank {rank} of {size} has weights whose sum is {total:.9f}", flush=True)
        if trainer.is_global_zero:
            print(f"accuracy {result['accuracy']:.3f}", flush=True)
        trainer.strategy.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
