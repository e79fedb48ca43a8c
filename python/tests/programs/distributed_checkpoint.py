# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint of a model that is wrapped: saved in mid-training, and read into a new one that goes on."""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 14), nn.GELU(), nn.Linear(14, 4))
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # lockstep: optimizer = lockstep.AdamW(model.parameters(), lr=1e-2)
    return net, model, optimizer


def train(model, optimizer, seed):
    source = torch.Generator().manual_seed(seed + dist.get_rank())
    for _ in range(5):
        x = torch.randn(8, 5, generator=source)
        nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    torch.set_default_dtype(torch.float64)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    net, model, optimizer = make(28)
    train(model, optimizer, 2800)
    dcp.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder[0])
    train(model, optimizer, 2850)

    again, its_model, its_optimizer = make(29)
    train(its_model, its_optimizer, 2900)  # it has a state to read into
    state = {"net": again.state_dict(), "optimizer": its_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])  # lockstep: its_model.write_parameters(lambda: dcp.load(state, checkpoint_id=folder[0]))
    its_optimizer.load_state_dict(state["optimizer"])
    train(its_model, its_optimizer, 2850)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    for one, other in zip(net.parameters(), again.parameters()):
        assert torch.equal(one, other)
    return again.state_dict()
