# SPDX-License-Identifier: Apache-2.0
"""A training step in Python on one GPU: lockstep beside PyTorch alone and PyTorch's DistributedDataParallel over NCCL.

    step.py RESULTS.json [CASE...]

One rank; AdamW, fused. First each system trains alone: its losses, and the most memory that its tensors take. Then all
take turns in blocks of steps. Times are medians.
"""
import faulthandler
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from peers.step import Trainer

import lockstep

CASES = {"mlp": 256, "gpt": 64, "gpt in bfloat16": 64, "resnet18-32": 256, "lenet": 256, "alexnet": 64}
ADAMW = {"lr": 1e-3, "weight_decay": 0.01}
LOSSES, WARM_UP, ROUNDS, STEPS = 8, 5, 7, 30


def of_torch(model, wrap=lambda model: model):
    return wrap(model), torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)


def of_lockstep(model, **options):
    optimizer = lockstep.AdamW(model.parameters(), **ADAMW)
    return lockstep.DistributedDataParallel(model, optimizer, **options), optimizer


SYSTEMS = {
    "torch": of_torch,
    "ddp": partial(of_torch, wrap=partial(torch.nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True)),
    "lockstep": of_lockstep,
    "lockstep separate": partial(of_lockstep, share_parameters=False),
}
GPU = torch.device("cuda:0")


def trainer(name, case):
    made = Trainer(SYSTEMS[name], case.split()[0], CASES[case], device=GPU)
    made.bfloat16 = case.endswith("bfloat16")
    made.model.eval() if case == "alexnet" else None  # dropout would make its losses different
    return made


def loss_of(made):
    with torch.autocast("cuda", torch.bfloat16, enabled=made.bfloat16):
        return made.loss()


def step(made):
    loss = loss_of(made)
    loss.backward()
    made.optimizer.step()
    made.optimizer.zero_grad()
    return loss.detach()


def alone(name, case):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = trainer(name, case)
    losses = torch.stack([step(made) for _ in range(LOSSES)]).tolist()
    return {"losses": losses, "peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}


def block(made, steps):
    """Seconds a step, where nobody waits for the GPU in between."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step(made)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


CALLS = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize")


def calls_of(made):
    """What a step asks of CUDA: how often, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        block(made, 2)
    return {each.key: each.count / 2 for each in profile.key_averages() if each.key in CALLS}


def in_turn(case):
    trainers = {name: trainer(name, case) for name in SYSTEMS}
    seconds = {name: [] for name in SYSTEMS}
    for made in trainers.values():
        block(made, WARM_UP)
    for _ in range(ROUNDS):
        for name, made in trainers.items():
            seconds[name].append(block(made, STEPS))
    return {name: (statistics.median(of_one), calls_of(trainers[name])) for name, of_one in seconds.items()}


def main():
    results, *cases = sys.argv[1:]
    faulthandler.dump_traceback_later(60, repeat=True)  # where it stands, if it hangs
    torch.cuda.set_device(GPU)
    torch.backends.cudnn.benchmark = False
    store = f"file://{tempfile.mkdtemp()}/store"  # NCCL meets there at its first collective
    dist.init_process_group("nccl", rank=0, world_size=1, init_method=store)
    found, wrong = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": {}}, []
    for case in cases or CASES:
        try:
            systems = {name: alone(name, case) for name in SYSTEMS}
            medians = in_turn(case)
        except Exception as error:
            print(f"{case}: {type(error).__name__}: {error}", flush=True)
            wrong.append(case)
            continue
        reference = systems["torch"]["losses"]
        for name, one in systems.items():
            one["ms"], one["calls"] = 1e3 * medians[name][0], medians[name][1]
            one["worst_loss"] = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(one["losses"], reference))
            print(f"{case:12} {name:18} {one['ms']:8.3f} ms  {one['peak_mib']:7.0f} MiB  losses {one['worst_loss']:.1e} off  {one['calls']}", flush=True)
            if one["worst_loss"] > 1e-2:
                wrong.append(f"{case} {name}")
        found["cases"][case] = systems
        Path(results).write_text(json.dumps(found, indent=1))
    print("other losses or errors: " + ", ".join(wrong) if wrong else "the same losses")
    dist.destroy_process_group()
    os._exit(len(wrong) > 0)


main()
