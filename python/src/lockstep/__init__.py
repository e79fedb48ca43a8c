# SPDX-License-Identifier: Apache-2.0
"""The lockstep backend of torch.distributed: ranks of one machine exchange tensors through shared memory, machines by
Gloo, over which each byte of a sum goes once.

    import lockstep
    torch.distributed.init_process_group("lockstep")

It serves CPU tensors. With GPUs beside: init_process_group("cpu:lockstep,cuda:nccl").

DistributedDataParallel takes its gradient buckets from the backend, in memory that the ranks share: their all-reduce
copies nothing. torch does so where the environment says DDP_DISABLE_COMM_MEM=0, which is set here unless the
environment says something else.
"""

import os

import torch.distributed

if not torch.__version__.startswith("2.11."):
    raise ImportError(
        f"this lockstep needs torch 2.11 and found {torch.__version__}\n"
        f"  here:   {torch.__file__}\n"
        "  likely: torch was updated after lockstep was installed\n"
        "  next:   pip install 'torch==2.11.*', or a lockstep for this torch"
    )

from lockstep._C import Error, MismatchError, PeerLost, RendezvousError, create_backend

__all__ = ["Error", "MismatchError", "PeerLost", "RendezvousError"]

os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
torch.distributed.Backend.register_backend("lockstep", create_backend, devices=["cpu"])
