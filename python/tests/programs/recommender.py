# SPDX-License-Identifier: Apache-2.0
"""A recommender: embedding tables are spread over the ranks and travel by all_to_all_single; the dense layers are replicas."""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FEATURES, ROWS, WIDTH, BATCH = 4, 20, 6, 8  # each rank has FEATURES / ranks of the tables


def batches():
    """Of this rank: FEATURES ids for each sample, some dense values, and a click or none."""
    source = torch.Generator().manual_seed(600 + dist.get_rank())
    while True:
        ids, dense = torch.randint(ROWS, (FEATURES, BATCH), generator=source), torch.randn(BATCH, 5, generator=source)
        yield ids, dense, ((ids.sum(0) % 3 == 0) | (dense[:, 0] > 1)).double()


def embedded(tables, ids):
    """Ids go to the ranks of their tables, embeddings come back: (BATCH, FEATURES * WIDTH)."""
    size = dist.get_world_size()
    asked = torch.empty_like(ids)
    dist.all_to_all_single(asked, ids)  # (ranks, my tables, BATCH)
    asked = asked.view(size, len(tables), BATCH)
    found = torch.stack([table(asked[:, i]) for i, table in enumerate(tables)], 1).contiguous()
    back = torch.distributed.nn.functional.all_to_all_single(torch.empty_like(found), found)
    return back.view(FEATURES, BATCH, WIDTH).transpose(0, 1).flatten(1)


def main():
    torch.set_default_dtype(torch.float64)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(FEATURES)).requires_grad_(False)
    tables = tables[rank * FEATURES // size : (rank + 1) * FEATURES // size].requires_grad_(True)
    dense = nn.Sequential(nn.Linear(5 + FEATURES * WIDTH, 24), nn.ReLU(), nn.Linear(24, 1))
    model = DistributedDataParallel(dense)  # lockstep: model = lockstep.DistributedDataParallel(dense)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)  # lockstep: optimizer = lockstep.Adam(model.parameters(), lr=5e-3)
    of_tables = torch.optim.Adagrad(tables.parameters(), lr=0.05)
    for _, (ids, values, clicks) in zip(range(20), batches()):
        scores = model(torch.cat([values, embedded(tables, ids)], 1)).squeeze(1)
        optimizer.zero_grad()
        of_tables.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(scores, clicks).backward()
        for table in tables:
            table.weight.grad /= size  # the sum over the ranks' losses has come back
        optimizer.step()
        of_tables.step()
    mine = torch.stack([table.weight.detach() for table in tables])
    whole = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(whole, mine)
    return {**model.module.state_dict(), "tables": torch.cat(whole)}
