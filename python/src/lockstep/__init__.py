"""The lockstep backend of torch.distributed: ranks of one machine exchange tensors through shared memory.

    import lockstep
    torch.distributed.init_process_group("lockstep")

It serves CPU tensors. With GPUs beside: init_process_group("cpu:lockstep,cuda:nccl").
"""

import torch.distributed

from lockstep._C import Error, MismatchError, PeerLost, RendezvousError, create_backend

__all__ = ["Error", "MismatchError", "PeerLost", "RendezvousError"]

torch.distributed.Backend.register_backend("lockstep", create_backend, devices=["cpu"])
