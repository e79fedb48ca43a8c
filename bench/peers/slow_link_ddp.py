# SPDX-License-Identifier: Apache-2.0
"""PyTorch's DistributedDataParallel over Gloo on the GPTs of `lockstep compare slow-links`, with the same data, batch, dropout and
AdamW.

    slow_link_ddp.py MODEL FILE BLOCK BATCH STEPS SEED METRICS   MODEL: gpt-char | gpt-mini | gpt2; BATCH is global

Where and which rank: torchrun's variables. Rank 0 prints "warm" after three steps, and writes METRICS as lockstep train does.
"""
import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from step import GPT

WARM_UP = 3
DROPOUT = 0.1
SHAPES = {  # layers, heads, width, vocabulary, context
    "gpt-mini": (4, 4, 128, 256, 128),
    "gpt-char": (6, 6, 384, 256, 128),
    "gpt2": (12, 12, 768, 50257, 1024),
}


def gpt(layers, *shape):
    """With the first weights of GPT-2."""
    net = GPT(layers, *shape, dropout=DROPOUT)
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if name.endswith("proj.weight") else 0.02)
    return net


def batches(file, block, batch, steps, seed):
    """This rank's part of each: tokens, and those that follow them."""
    tokens = torch.frombuffer(bytearray(open(file, "rb").read()), dtype=torch.uint8).long()
    samples, drawn = (len(tokens) - 1) // block, []
    generator = torch.Generator().manual_seed(seed)
    while len(drawn) < steps * batch:
        drawn += torch.randperm(samples, generator=generator).tolist()
    for step in range(steps):
        part = drawn[step * batch : (step + 1) * batch][dist.get_rank() :: dist.get_world_size()]
        yield tuple(torch.stack([tokens[i * block + next : (i + 1) * block + next] for i in part]) for next in (0, 1))


def main():
    model, file, block, batch, steps, seed, metrics = sys.argv[1:]
    block, batch, steps, seed = int(block), int(batch), int(steps), int(seed)
    local, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[local::local_size] or cores)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if batch % dist.get_world_size():
        sys.exit(f"slow_link_ddp.py: {batch} samples do not divide evenly: DDP's mean would be another")
    torch.manual_seed(seed)
    net = gpt(*SHAPES[model])
    torch.manual_seed(1000 * seed + dist.get_rank())
    net = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    events, start = [], time.perf_counter()
    for step, (tokens, targets) in enumerate(batches(file, block, batch, steps, seed)):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(tokens).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # as lockstep reports it
        now = time.perf_counter()
        events.append({"event": "step", "step": step, "loss": mean.item() / dist.get_world_size(), "seconds": now - start, "samples": batch})
        start = now
        if dist.get_rank() == 0 and step + 1 == WARM_UP:
            print("warm", flush=True)
    if dist.get_rank() == 0:
        with open(metrics, "w") as out:
            out.writelines(json.dumps(event) + "\n" for event in events)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
