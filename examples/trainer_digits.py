"""A small vision transformer, of random weights, that transformers' Trainer teaches scikit-learn's digits. Nothing is downloaded."""

import tempfile
from typing import Any

import torch
from ddp_digits import digits
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

EPOCHS = 12


class Images(Dataset[dict[str, torch.Tensor]]):
    """As the model takes them."""

    def __init__(self, pairs: Any) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image, label = self._pairs[index]
        return {"pixel_values": image, "labels": label}


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    train_set, test_set = digits()
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=not torch.cuda.is_available(),  # without this it makes no group on processors
            num_train_epochs=EPOCHS,
            learning_rate=3e-3,
            per_device_train_batch_size=64,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )
        model = ViTForImageClassification(config)
        trainer = Trainer(
            model,
            arguments,
            train_dataset=Images(train_set),
            eval_dataset=Images(test_set),
            compute_metrics=accuracy,
        )
        trainer.train()
        found = trainer.evaluate()
        total = sum(weight.detach().double().sum().item() for weight in model.parameters())
        rank, size = arguments.process_index, arguments.world_size
        print(f"rank {rank} of {size} has weights whose sum is {total:.9f}", flush=True)
        if rank == 0:
            print(f"accuracy {found['eval_accuracy']:.3f}", flush=True)
    # Else the model may go while Gloo still drops the last gather: each waits for the other's lock, and the rank never ends.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
