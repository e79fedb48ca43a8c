# SPDX-License-Identifier: Apache-2.0
"""What Python programs do with one GPU, each against PyTorch alone: its parameters, batches and sums. One rank."""
import contextlib
import copy
import sys
import tempfile
import traceback

import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import lockstep

GPU = torch.device("cuda:0")


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)).to(GPU)


def batches(count=12):
    torch.manual_seed(2)
    return [(torch.randn(16, 20, device=GPU), torch.randint(5, (16,), device=GPU)) for _ in range(count)]


def trained(loop, make, name, **options):
    """The parameters after `loop` with lockstep, and with PyTorch."""
    found = []
    for library in (lockstep, torch.optim):
        model = net()
        optimizer = getattr(library, name)(model.parameters(), **make)
        if library is lockstep:
            model = lockstep.DistributedDataParallel(model, optimizer, **options)
        loop(model, optimizer, library is lockstep)
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    return found


def same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def plain(model, optimizer, _):
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizers():
    same(*trained(plain, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}, "SGD"))
    same(*trained(plain, {"lr": 1e-2}, "Adam"))
    same(*trained(plain, {"lr": 1e-2, "weight_decay": 0.1}, "AdamW"))


def layouts():
    for options in ({"share_parameters": False}, {"mean_in_grad": True}, {"share_parameters": False, "gradient_as_bucket_view": True},
                    {"find_unused_parameters": False}, {"static_graph": True, "share_parameters": False}, {"hook": "bf16"}):
        found = trained(plain, {"lr": 1e-2}, "AdamW", **options)
        if "hook" not in options:
            same(*found)


def clipping():
    def loop(model, optimizer, ours):
        for x, y in batches():
            F.cross_entropy(model(x), y).backward()
            optimizer.clip_grad_norm(0.1) if ours else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

    same(*trained(loop, {"lr": 0.1}, "SGD"))


def accumulation():
    def loop(model, optimizer, ours):
        for index, (x, y) in enumerate(batches()):
            last = index % 3 == 2
            with model.no_sync() if ours and not last else contextlib.nullcontext():
                (F.cross_entropy(model(x), y) / 3).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

    same(*trained(loop, {"lr": 1e-2}, "AdamW"))


def loss_scaling():
    def loop(model, optimizer, _):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**20, growth_interval=2)
        for x, y in batches():
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    ours, theirs = trained(loop, {"lr": 1e-2}, "SGD")
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


def wrapped_net(model, name, **options):
    """It has made some steps."""
    optimizer = getattr(lockstep, name)(model.parameters(), **options)
    wrapped = lockstep.DistributedDataParallel(model, optimizer)
    plain(wrapped, optimizer, True)
    return wrapped, optimizer


def state():
    wrapped, optimizer = wrapped_net(net(), "AdamW", lr=1e-2)
    other = net()
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2)
    other.load_state_dict(wrapped.module.state_dict())
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    plain(wrapped, optimizer, True)
    plain(other, theirs, False)
    same(list(wrapped.parameters()), list(other.parameters()))


def checkpoints():
    wrapped, _ = wrapped_net(net(), "AdamW", lr=1e-2)
    with tempfile.TemporaryDirectory() as folder:
        kept = lockstep.Checkpoints(folder)
        kept.save(1, dict(wrapped.module.state_dict()))
        kept.finish(1)
        read = safetensors.torch.load_file(kept.newest())
    for name, tensor in wrapped.module.state_dict().items():
        assert torch.equal(read[name], tensor.cpu()), name


def backend():
    for device in (GPU, torch.device("cpu")):
        tensor = torch.arange(10, device=device)
        dist.all_reduce(tensor)
        assert tensor.tolist() == list(range(10)), tensor
    model = nn.parallel.DistributedDataParallel(net(), device_ids=[0])
    plain(model, torch.optim.SGD(model.parameters(), lr=0.1), False)


def loader():
    data, target = torch.randn(1000, 3, 32, 32), torch.randint(10, (1000,))
    dataset = lockstep.data.TensorDataset(data, target)
    on_gpu = list(lockstep.DataLoader(dataset, 64, device="cuda"))
    on_cpu = list(lockstep.DataLoader(dataset, 64))
    assert len(on_gpu) == len(on_cpu) == 16
    for (x, y), (x_of_cpu, y_of_cpu) in zip(on_gpu, on_cpu):
        assert x.device == y.device == GPU
        assert torch.equal(x.cpu(), x_of_cpu) and torch.equal(y.cpu(), y_of_cpu)


def sync_batch_norm():
    wrapped, _ = wrapped_net(lockstep.SyncBatchNorm.convert_sync_batchnorm(net()), "SGD", lr=0.1)
    other = net()
    plain(other, torch.optim.SGD(other.parameters(), lr=0.1), False)
    same(list(wrapped.parameters()), list(other.parameters()))


def compiled():
    model = net()
    optimizer = lockstep.SGD(model.parameters(), lr=0.1)
    wrapped = lockstep.DistributedDataParallel(model, optimizer)
    plain(torch.compile(wrapped, backend="aot_eager"), optimizer, True)


def main():
    folder = tempfile.mkdtemp()
    torch.cuda.set_device(GPU)
    dist.init_process_group("cpu:lockstep,cuda:nccl", rank=0, world_size=1, init_method=f"file://{folder}/store")
    failed = []
    for check in (optimizers, layouts, clipping, accumulation, loss_scaling, state, checkpoints, backend, loader, sync_batch_norm, compiled):
        try:
            check()
            print(f"{check.__name__}: as PyTorch", flush=True)
        except Exception:
            traceback.print_exc()
            failed.append(check.__name__)
            print(f"{check.__name__}: FAILED", flush=True)
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "all as PyTorch", flush=True)
    dist.destroy_process_group()
    sys.exit(len(failed) > 0)


main()
