# SPDX-License-Identifier: Apache-2.0
"""LockstepStrategy: two ranks with Lightning's Trainer against one rank of plain PyTorch on the same global batches."""

import os
import tempfile
import unittest

import torch
import torch.distributed as dist
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import lockstep
from lockstep.lightning import LockstepStrategy
from support import expect_error, expect_import_error, layers, run_ranks, samples

EPOCHS = 2
GLOBAL_BATCH = 16

ADAMW = "AdamW, clipped by norm, two batches a step"

# By name: the optimizer, and the Trainer's options.
CASES = {
    "SGD": (lambda parameters: lockstep.SGD(parameters, lr=0.1, momentum=0.9), {}),
    "synchronised batch normalisation": (lambda parameters: lockstep.SGD(parameters, lr=0.1), {"sync_batchnorm": True}),
    ADAMW: (
        lambda parameters: lockstep.AdamW(parameters, lr=1e-2),
        {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
    ),
    "SGD, clipped by value": (
        lambda parameters: lockstep.SGD(parameters, lr=0.1),
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "torch's AdamW, clipped by norm": (
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
    ),
}


def as_torch(optimizer):
    """The optimizer of torch that does the same."""
    if isinstance(optimizer, torch.optim.Optimizer) and type(optimizer).__module__.startswith("torch."):
        return optimizer
    kind = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[type(optimizer).__name__]
    (group,) = optimizer.param_groups
    options = {"lr": group["lr"], "momentum": group["momentum"]} if kind is torch.optim.SGD else {"lr": group["lr"]}
    return kind(group["params"], **options)


class Classifier(LightningModule):
    def __init__(self, make_optimizer, normalised=False):
        super().__init__()
        self.layers = layers(nn.BatchNorm1d if normalised else nn.Identity)
        self.make_optimizer = make_optimizer

    def loss(self, batch):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def training_step(self, batch, batch_index):
        return self.loss(batch)

    def validation_step(self, batch, batch_index):
        self.log("loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def loader():
    """This rank's half of every global batch. The sampler that Lightning inserts would shuffle."""
    return DataLoader(samples(), GLOBAL_BATCH // 2, sampler=DistributedSampler(samples(), shuffle=False))


def trainer(folder, **options):
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # Lightning takes the ranks that are there
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"max_epochs": EPOCHS, "enable_checkpointing": False, "default_root_dir": folder, **quiet}
    return Trainer(strategy=LockstepStrategy(), accelerator="cpu", devices=2, **{**defaults, **options})


def state_of_plain_torch(name):
    make_optimizer, options = CASES[name]
    model = layers(nn.BatchNorm1d if "sync_batchnorm" in options else nn.Identity)
    optimizer = as_torch(make_optimizer(model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    every = options.get("accumulate_grad_batches", 1)
    for _ in range(EPOCHS):
        for index, (inputs, labels) in enumerate(DataLoader(samples(), GLOBAL_BATCH)):
            (nn.functional.cross_entropy(model(inputs), labels) / every).backward()
            if (index + 1) % every:
                continue
            if "gradient_clip_algorithm" in options:
                nn.utils.clip_grad_value_(model.parameters(), options["gradient_clip_val"])
            elif "gradient_clip_val" in options:
                nn.utils.clip_grad_norm_(model.parameters(), options["gradient_clip_val"])
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    return model.state_dict()


class ClipsItself(Classifier):
    def on_before_optimizer_step(self, optimizer):
        self.optimizers().clip_grad_norm(CASES[ADAMW][1]["gradient_clip_val"])


def expect_as_plain_torch(model, name):
    torch.testing.assert_close(model.layers.state_dict(), state_of_plain_torch(name), msg=lambda text: f"{name}: {text}")


def train_each_case(folder):
    refuse(folder)
    for name, (make_optimizer, options) in CASES.items():
        model = Classifier(make_optimizer, "sync_batchnorm" in options)
        trainer(folder, **options).fit(model, loader())
        expect_as_plain_torch(model, name)
    model = ClipsItself(CASES[ADAMW][0])
    trainer(folder, accumulate_grad_batches=2).fit(model, loader())
    expect_as_plain_torch(model, ADAMW)


def resume(folder):
    """Two epochs; and one, its checkpoint, and one more in a new Trainer. Then what Trainers do with a trained module."""
    make_optimizer, _ = CASES[ADAMW]
    whole, first, second = (Classifier(make_optimizer) for _ in range(3))
    trainer(folder).fit(whole, loader())
    saving = ModelCheckpoint(dirpath=folder, filename="first")
    trainer(folder, max_epochs=1, enable_checkpointing=True, callbacks=[saving]).fit(first, loader())
    path = os.path.join(folder, "first.ckpt")
    trainer(folder).fit(second, loader(), ckpt_path=path)
    torch.testing.assert_close(second.state_dict(), whole.state_dict(), rtol=0, atol=0)

    assert os.path.getsize(path) < 200_000, "more than the tensors of the module and the optimizer"
    checkpoint = torch.load(path, weights_only=True)
    torch.testing.assert_close(checkpoint["state_dict"], first.state_dict(), rtol=0, atol=0)
    torch.optim.AdamW(layers().parameters()).load_state_dict(checkpoint["optimizer_states"][0])

    (result,) = trainer(folder).validate(second, loader(), verbose=False)
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(result["loss"]), second.loss(samples().tensors), check_dtype=False)
    before = second.loss(samples().tensors)
    trainer(folder).fit(second, loader())  # once more, with the parameters that were shared before
    assert second.loss(samples().tensors) < before


class ManualOptimization(Classifier):
    def __init__(self):
        super().__init__(CASES["SGD"][0])
        self.automatic_optimization = False


def refuse(folder):
    fit = lambda: trainer(folder).fit(ManualOptimization(), loader())
    expect_error(lockstep.UsageError, "manual optimization in ManualOptimization", fit)
    expect_error(lockstep.UsageError, "ddp_comm_hook", lambda: LockstepStrategy(ddp_comm_hook=print))


class Failing(Classifier):
    def training_step(self, batch, batch_index):
        if batch_index == 1 and self.global_rank == 1:
            raise ValueError("a bad sample")
        return self.loss(batch)


def fail(folder):
    trainer(folder).fit(Failing(CASES["SGD"][0]), loader())


class Lightning(unittest.TestCase):
    def test_trains_like_plain_torch_on_one_rank_and_refuses_the_rest(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(2, train_each_case, folder)

    def test_resumes_from_a_checkpoint_and_goes_on(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(2, resume, folder)

    def test_a_rank_that_raises_is_named_by_the_others(self):
        with tempfile.TemporaryDirectory() as folder, self.assertRaises(AssertionError) as caught:
            run_ranks(2, fail, folder)
        self.assertIn("a bad sample", str(caught.exception))
        self.assertRegex(str(caught.exception), "PeerLost: .*rank 1")

    def test_lockstep_does_not_need_lightning(self):
        expect_import_error("lockstep.lightning", "sys.modules['lightning'] = None", "lightning")


if __name__ == "__main__":
    unittest.main()
