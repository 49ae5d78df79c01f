"""transformers' Trainer, on a small model of random weights."""

import os
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

STEPS = 3
examples = [
    {"input_ids": torch.randint(0, 99, (8,)), "attention_mask": torch.ones(8).long(), "labels": number % 2}
    for number in range(16)
]
config = BertConfig(
    vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=2, report_to=[], save_strategy="no"
    )
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=examples)
    assert trainer.train().global_step == STEPS
    assert arguments.world_size == int(os.environ["WORLD_SIZE"])
    weights = trainer.accelerator.gather(next(trainer.model.parameters()).sum().reshape(1))
    assert len(weights) == arguments.world_size
    assert torch.allclose(weights, weights[0])
print("right", arguments.process_index, flush=True)
torch.distributed.destroy_process_group()
