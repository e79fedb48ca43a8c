# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint: FSDP2's parts of a model and its optimizer are saved by all ranks, and read into a model that is
not sharded, and into a sharded one that goes on."""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def make(seed, sharded=True):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 14), nn.GELU(), nn.Linear(14, 4))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


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
    model, optimizer = make(24)
    train(model, optimizer, 2400)
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(saved, checkpoint_id=folder[0])

    whole, _ = make(25, sharded=False)
    state = {"model": whole.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    again, its_optimizer = make(26)
    state_of_again = dict(zip(("model", "optimizer"), get_state_dict(again, its_optimizer)))
    dcp.load(state_of_again, checkpoint_id=folder[0])
    set_state_dict(again, its_optimizer, model_state_dict=state_of_again["model"], optim_state_dict=state_of_again["optimizer"])
    for each in (model, optimizer), (again, its_optimizer):
        train(*each, 2450)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    for name, value in again.state_dict().items():
        assert torch.equal(value.full_tensor(), model.state_dict()[name].full_tensor()), name
    return {**state["model"], **{f"trained.{name}": value.full_tensor() for name, value in model.state_dict().items()}}
