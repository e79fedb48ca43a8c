# SPDX-License-Identifier: Apache-2.0
"""lockstep trains one model on many devices and machines.

Two lines of a training loop change:

    model = lockstep.DistributedDataParallel(model)
    optimizer = lockstep.AdamW(model.parameters(), lr=1e-3)      # or SGD, Adam, RMSprop …

help(lockstep.DistributedDataParallel) says what that does. lockstep is also a backend of torch.distributed, over which
PyTorch's own DistributedDataParallel, FSDP and functional collectives run unmodified: the ranks of one machine exchange
CPU tensors through shared memory, machines through Gloo. With GPUs beside: init_process_group("cpu:lockstep,cuda:nccl").

    import lockstep
    torch.distributed.init_process_group("lockstep")

PyTorch's DistributedDataParallel takes its gradient buckets from the backend, in memory that the ranks share: their
all-reduce copies nothing. torch does so where the environment says DDP_DISABLE_COMM_MEM=0, which is set here unless the
environment says something else.

Errors are lockstep.Error: str() is the whole message, and its parts are the attributes what, here, peer, likely, next.
"""

import os

import torch.distributed

# A folder of each release of torch has what depends on it: the module _C, the library, the command.
__path__.append(os.path.join(__path__[0], "torch" + ".".join(torch.__version__.split(".")[:2])))
try:
    import lockstep._C
except ModuleNotFoundError:
    _there = sorted(name[5:] for name in os.listdir(__path__[0]) if name.startswith("torch"))
    raise ImportError(
        f"this lockstep needs torch {' or '.join(_there)} and found {torch.__version__}\n"
        f"  here:   {torch.__file__}\n"
        "  likely: torch was updated after lockstep was installed\n"
        f"  next:   pip install 'torch=={_there[-1]}.*', or a lockstep for this torch"
    ) from None

from lockstep._C import (
    CheckpointError,
    DataError,
    DeviceError,
    EnvironmentError,
    Error,
    MismatchError,
    NonFiniteError,
    PeerLost,
    RendezvousError,
    SystemError,
    UsageError,
    create_backend,
)
from lockstep._meeting import keep_strangers_out, meet
from lockstep._stop import catch_stop_signals, stop_requested, stop_signal
from lockstep.averaging import Averaging
from lockstep.batch_norm import SyncBatchNorm
from lockstep.checkpoints import Checkpoints
from lockstep.data import DataLoader, Sampler
from lockstep.ddp import DistributedDataParallel
from lockstep.gradients import GradScaler, clip_grad_norm_, clip_grad_value_, mean_grad
from lockstep.kvstore import KVStore
from lockstep.optim import LAMB, LARS, SGD, Adagrad, Adam, AdamW, GradientNorm, RMSprop
from lockstep.recovery import Recovery, recover
from lockstep.timeline import Timeline
from lockstep.towers import Devices
from lockstep.world import World

__all__ = [
    "Adagrad",
    "Adam",
    "AdamW",
    "Averaging",
    "CheckpointError",
    "Checkpoints",
    "DataError",
    "DataLoader",
    "DeviceError",
    "Devices",
    "DistributedDataParallel",
    "EnvironmentError",
    "Error",
    "GradScaler",
    "GradientNorm",
    "KVStore",
    "LAMB",
    "LARS",
    "MismatchError",
    "NonFiniteError",
    "PeerLost",
    "RMSprop",
    "Recovery",
    "RendezvousError",
    "SGD",
    "Sampler",
    "SyncBatchNorm",
    "SystemError",
    "Timeline",
    "UsageError",
    "World",
    "catch_stop_signals",
    "clip_grad_norm_",
    "clip_grad_value_",
    "mean_grad",
    "meet",
    "recover",
    "stop_requested",
    "stop_signal",
]

os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
torch.distributed.Backend.register_backend("lockstep", create_backend, devices=["cpu"])
keep_strangers_out()
