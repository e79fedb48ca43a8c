# SPDX-License-Identifier: Apache-2.0
"""The peer of first_all_reduce.cc, for torchrun."""
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
tensor = torch.ones(1024)
dist.all_reduce(tensor)
if dist.get_rank() == 0:
    print(f"reduced {tensor[0].item():g}", flush=True)
dist.destroy_process_group()
