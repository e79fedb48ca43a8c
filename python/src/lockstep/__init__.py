"""The lockstep backend of torch.distributed: ranks of one machine exchange tensors through shared memory.

    import lockstep
    torch.distributed.init_process_group("lockstep")

It serves CPU tensors. With GPUs beside: init_process_group("cpu:lockstep,cuda:nccl").
lockstep.share_buckets(model) makes the exchange of a DistributedDataParallel model faster still.
"""

import torch.distributed

from lockstep._C import Error, MismatchError, PeerLost, RendezvousError, create_backend
from lockstep.ddp import share_buckets

__all__ = ["Error", "MismatchError", "PeerLost", "RendezvousError", "share_buckets"]

torch.distributed.Backend.register_backend("lockstep", create_backend, devices=["cpu"])
