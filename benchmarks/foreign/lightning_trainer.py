"""Lightning's Trainer, by DDP."""

import os
import tempfile

import lightning
import torch


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: tuple[torch.Tensor, ...], _number: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=2)
local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=local,
        num_nodes=world // local,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    model = Model()
    trainer.fit(model, data)
    assert trainer.world_size == world
    assert trainer.global_rank == int(os.environ["RANK"])
    weights = trainer.strategy.all_gather(model.layer.weight.detach().sum().reshape(1))
    assert torch.allclose(weights, weights[0])
print("right", os.environ["RANK"], flush=True)
