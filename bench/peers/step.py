#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A training step with PyTorch: the peer of `lockstep bench step`. DistributedDataParallel over Gloo, or NCCL; or one process.

    step.py CASE RANKS BATCH LAYOUT WARMUP STEPS DEVICE   BATCH is global; LAYOUT: contiguous | channels_last; DEVICE: cpu | cuda
    step.py version                                       prints that of torch

Prints as JSON: the median step in seconds, with the exchange (ddp) and without (no_sync), blocks of both in turn;
the ranks' memory (PSS; of GPUs: what is taken of each) in MiB, idle and at the end. With 0 RANKS only the median step of one
process with a thread for each core and a fused optimizer, for a policy also torch's other two (one_process_LAYOUT); and the same with a malloc that keeps freed memory
(one_process_LAYOUT_kept), because glibc's gives large blocks back, and then new gradients cost a page fault for each 4 KiB.
"""
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

TOKENS, VOCABULARY = 128, 256


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10))


def mlp():
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000))


def policy():
    """As small as the policies of reinforcement learning: what a step costs beside its operators shows."""
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def alexnet():
    def conv(inputs, outputs, *arguments):
        return nn.Conv2d(inputs, outputs, *arguments), nn.ReLU(inplace=True)

    return nn.Sequential(
        *conv(3, 64, 11, 4, 2), nn.MaxPool2d(3, 2), *conv(64, 192, 5, 1, 2), nn.MaxPool2d(3, 2), *conv(192, 384, 3, 1, 1),
        *conv(384, 256, 3, 1, 1), *conv(256, 256, 3, 1, 1), nn.MaxPool2d(3, 2), nn.AdaptiveAvgPool2d(6), nn.Flatten(),
        nn.Dropout(), nn.Linear(9216, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 4096),
        nn.ReLU(inplace=True), nn.Linear(4096, 1000))


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x), inplace=True)


def resnet18():
    """ResNet-18 as it is for images of 32 x 32: a first convolution of 3 x 3, no pooling after it."""
    layers, inputs = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)], 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.attn_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + F.dropout(self.attn_proj(mixed.transpose(1, 2).flatten(2)), self.dropout)
        return x + F.dropout(self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")), self.dropout)


class GPT(nn.Module):
    def __init__(self, layers=6, heads=6, width=384, vocabulary=VOCABULARY, context=TOKENS, dropout=0.0):
        super().__init__()
        self.dropout = dropout
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens):
        x = F.dropout(self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device)), self.dropout)
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


def bert():
    """BERT base, 110 M parameters, on masked tokens. Needs Hugging Face's transformers."""
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(attn_implementation="sdpa"))
    model.register_forward_hook(lambda _model, _inputs, output: output.logits)
    return model


CASES = {
    "lenet": (lenet, (1, 28, 28), 10),
    "policy": (policy, (8,), 4),
    "mlp": (mlp, (1024,), 1000),
    "alexnet": (alexnet, (3, 224, 224), 1000),
    "resnet18-32": (resnet18, (3, 32, 32), 10),
    "gpt": (GPT, None, None),
    "bert": (bert, None, None),
}
BATCHES = {"lenet": 256, "policy": 128, "mlp": 32, "alexnet": 8, "resnet18-32": 64, "gpt": 8}  # global, as `lockstep bench step` has them


def samples(shape, classes, count):
    if shape is None:
        return torch.randint(VOCABULARY, (count, TOKENS)), torch.randint(VOCABULARY, (count, TOKENS))
    return torch.randn(count, *shape), torch.randint(classes, (count,))


def pss_mib():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:")) / 1024


def taken_mib(device):
    if device.type == "cpu":
        return pss_mib()
    free, all_of_it = torch.cuda.mem_get_info(device)
    return (all_of_it - free) / 2**20


def summed(value, device=torch.device("cpu")):
    total = torch.tensor(value, device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item()


def join(rank, ranks, store, device=torch.device("cpu")):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=ranks, init_method="file://" + store)


def memory_format(layout):
    return torch.channels_last if layout == "channels_last" else torch.contiguous_format


def run_ranks(train, ranks, *arguments):
    """Calls train(rank, ranks, store, *arguments) in a process per rank."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, args=(ranks, folder + "/store", *arguments), nprocs=ranks)


def pin(rank, ranks):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[rank::ranks] or os.sched_getaffinity(0))


def sgd(model, **implementation):
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, **implementation)


def wrap_in_ddp(model, group=None):
    model = nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    return model, sgd(model, foreach=True)


class Trainer:
    """A model of its own, wrapped by a function that gives model and optimizer, and a batch. The layout is that of images."""

    def __init__(self, wrap, case, batch, layout="channels_last", device=torch.device("cpu")):
        make, shape, classes = CASES[case]
        torch.manual_seed(1)
        model = make()
        self.data, self.target = samples(shape, classes, batch)
        if shape is not None and len(shape) == 3:
            model = model.to(memory_format=memory_format(layout))
            self.data = self.data.contiguous(memory_format=memory_format(layout))
        self.data, self.target = self.data.to(device), self.target.to(device)
        self.model, self.optimizer = wrap(model.to(device))
        self.device = device

    def loss(self):
        return F.cross_entropy(self.model(self.data).flatten(0, -2), self.target.flatten())

    def step(self, no_sync=False):
        """Seconds, until the device is done."""
        start = time.perf_counter()
        with self.model.no_sync() if no_sync else nullcontext():
            self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def block(self, steps, no_sync=False):
        dist.barrier()
        return [self.step(no_sync) for _ in range(steps)]


def train(rank, ranks, store, case, batch, layout, warmup, steps, kind="cpu"):
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    pin(rank, ranks)
    join(rank, ranks, store, device)
    idle = summed(taken_mib(device), device)
    trainer = Trainer(wrap_in_ddp, case, batch // ranks, layout, device)
    times = {"ddp": [], "no_sync": []}
    trainer.block(warmup)
    for _ in range(2):
        for name in times:
            times[name] += trainer.block(math.ceil(steps / 2), no_sync=name == "no_sync")
    memory = summed(taken_mib(device), device)
    if rank == 0:
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        print(json.dumps({**medians, "idle_mib": idle, "memory_mib": memory}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def one_process(case, batch, layout, warmup, steps):
    """The median of the fastest kind of SGD; None: torch's default."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    medians = []
    for kind in ("fused", "foreach", None) if case == "policy" else ("fused",):
        options = {kind: True} if kind else {}
        trainer = Trainer(lambda model: (model, sgd(model, **options)), case, batch, layout)
        seconds = [trainer.step() for _ in range(warmup + steps)]
        medians.append(statistics.median(seconds[warmup:]))
    return min(medians)


if __name__ == "__main__":
    if sys.argv[1:] == ["version"]:
        sys.exit(print(torch.__version__, end=""))
    case, ranks, batch, layout, warmup, steps, kind = sys.argv[1:]
    run = case, int(batch), layout, int(warmup), int(steps)
    if int(ranks) > 0:
        run_ranks(train, int(ranks), *run, kind)
    elif "MALLOC_TRIM_THRESHOLD_" in os.environ:
        print(one_process(*run))
    else:
        kept = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**40)}
        again = subprocess.run([sys.executable, *sys.argv], env={**os.environ, **kept}, stdout=subprocess.PIPE, check=True)
        print(json.dumps({f"one_process_{layout}": one_process(*run), f"one_process_{layout}_kept": float(again.stdout)}))
