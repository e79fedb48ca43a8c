# SPDX-License-Identifier: Apache-2.0
"""A small GPT-2 that learns to count, with Transformers: lockstep run --nproc-per-node 2 -- python examples/transformers_training.py"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from lockstep.transformers import Trainer


def counting(rows):
    """Sequences of 16 numbers below 50, each one more than the one before."""
    starts = torch.randint(50, (rows, 1), generator=torch.Generator().manual_seed(1))
    numbers = (starts + torch.arange(16)) % 50
    return [{"input_ids": row, "labels": row} for row in numbers]


def main():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, num_train_epochs=4, per_device_train_batch_size=8, learning_rate=5e-3, save_strategy="no", report_to=[]
        )
        trainer = Trainer(model, arguments, train_dataset=counting(512), eval_dataset=counting(64))
        trainer.train()
    losses = trainer.evaluate()
    logits = model.eval()(torch.tensor([[3, 4, 5]])).logits
    if trainer.is_world_process_zero():
        print(f"loss {losses['eval_loss']:.3f}; after 3, 4, 5 comes {logits[0, -1].argmax()}")


if __name__ == "__main__":
    main()
