# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel over lockstep's C++ step: see the class."""

import dataclasses
import itertools
import math
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep import _C
from lockstep._compiler import never_compiled, not_compiled
from lockstep._hooks import GradBucket, starter
from lockstep._worlds import group_of, reference_to, world_of
from lockstep.batch_norm import SyncBatchNorm
from lockstep.optim import _Optimizer, optimizers_of

__all__ = ["DistributedDataParallel"]

_connected = weakref.WeakSet()
_kind_of = operator.attrgetter("dtype", "device", "requires_grad")
_dicts_of = operator.attrgetter("_parameters", "_buffers", "_modules")
_CHANGE_FIRST = "change the model first, then make optimizer and DistributedDataParallel"


def make_mean_of(parameters: Iterable[torch.Tensor]) -> None:
    """Calls mean_gradients() of each model that has one of these, in the order in which the models were made."""
    for model in _models_of(parameters):
        if not model.mean_in_grad:
            model._replica.mean_gradients()


def note_clipping(parameters: Iterable[torch.Tensor], clip: Callable[[], Any]) -> None:
    """For join(): a rank without a batch does what it did with its last one."""
    for model in _models_of(parameters):
        model._clipping.append(clip)


def _models_of(parameters):
    parameters = set(parameters)
    models = (each for each in _connected if not parameters.isdisjoint(each.module.parameters()))
    return sorted(models, key=lambda each: each._number)


def _tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, set)):
        for each in value:
            yield from _tensors_in(each)
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])


class DistributedDataParallel(nn.Module):
    """Data parallel training with a replica of the model in every rank, exchanged and updated by lockstep.

        model = lockstep.DistributedDataParallel(model)
        optimizer = lockstep.AdamW(model.parameters(), lr=1e-3)
        for x, y in loader:
            loss = loss_function(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    Every rank makes it at the same time, with the same model, and makes the same calls in the same order. The ranks are
    those of `process_group`, else of torch.distributed where it is initialised, else those that the launcher (lockstep
    run, torchrun, srun, mpirun) has started.

    With one of lockstep's optimizers the ranks of a machine share one copy of the parameters and of the optimizer's
    state. If all ranks are on one machine nothing is sent: backward() leaves this rank's own gradient in .grad, and
    step() sums the gradients of all ranks and updates in one pass; lockstep.clip_grad_norm_, clip_grad_value_, GradScaler
    and mean_gradients() make .grad the mean before that. Otherwise, and with `mean_in_grad` or a `hook`,
    gradients are all-reduced in buckets, and .grad is the mean after backward(). With any other optimizer, or several, .grad
    is the mean, too, and every rank has its own parameters.

    The optimizer may be made before and given, or after: the first forward() in training mode finds it, moves parameters
    and state into shared memory, and waits for all ranks.

    The mean is over ranks, as in PyTorch. samples(n) before each backward() makes it one over samples, or tokens: a rank
    with m of all n counts m / n, if its loss is the mean over its own m.

    Args:
        module: on the CPU, or on CUDA in a build with it. Its parameters move to memory that the ranks share.
        optimizer: of lockstep's or torch's; holds no other parameters; makes no step before. In its place `device_ids`.
        device_ids, output_device, dim, init_sync, check_reduction, delay_all_reduce_named_params, param_to_hook_all_reduce,
            mixed_precision, device_mesh, skip_all_reduce_unused_params: PyTorch's, for programs that have them. An error
            where they ask for what lockstep does not do.
        weights: "samples": each backward() counts as many samples as dimension 0 of the tensors given to forward() has;
            several forwards that it passes through add up. A number that is not known is an error. None: ranks count
            alike, and where dimension 0 differs between them a warning says so once.
        broadcast_buffers: rank 0's buffers go to every rank after each backward().
        find_unused_parameters: False makes a parameter without a gradient an error. True costs nothing before a step
            has left one out.
        static_graph, gradient_as_bucket_view, bucket_cap_mb: as in PyTorch, for gradients that go through buckets. None:
            8 MiB between CPUs without a hook, else 25.
        share_parameters: False: every rank has its own parameters and state.
        mean_in_grad: True: .grad is the mean after backward(), as in PyTorch; slower.
        hook, hook_amount: a lossy sum: "fp16", "bf16", "powersgd" (rank), "2bit" (threshold) or "topk" (share).
        algorithm: of the all-reduce, for comparison: "direct", "ring", and on one machine "central", "tree".

    Raises UsageError (an optimizer of other parameters), MismatchError on all ranks (models that differ), DeviceError,
    PeerLost, RendezvousError.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[int | torch.device] | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        weights: str | None = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = True,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        bucket_cap_mb: float | None = None,
        share_parameters: bool = True,
        mean_in_grad: bool = False,
        hook: str | None = None,
        hook_amount: float = 0,
        algorithm: str = "direct",
        **of_pytorch: Any,
    ) -> None:
        arguments = locals()
        super().__init__()
        if isinstance(optimizer, (list, tuple)):  # PyTorch's second argument
            of_pytorch, optimizer = {"device_ids": optimizer, **of_pytorch}, None
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"DistributedDataParallel(module, optimizer): {type(optimizer).__name__} is not an optimizer")
        _check_arguments_of_pytorch(module, of_pytorch)
        self.module = module
        self.process_group = process_group
        elsewhere = ("self", "module", "optimizer", "process_group", "of_pytorch", "__class__")
        self._arguments = {name: value for name, value in arguments.items() if name not in elsewhere}
        self._number = next(_numbers)
        self._clipping = []  # of .grad, since the last forward() that trains
        self._connect(optimizer)
        self._looks_for_optimizer = optimizer is None

    def _connect(self, optimizer):
        parameters = list(self.module.named_parameters(remove_duplicate=False))
        buffers = list(self.module.named_buffers(remove_duplicate=False))
        self.device = parameters[0][1].device if parameters else torch.device("cpu")
        self._world = world_of(self.process_group, self.device)
        self._optimizer = optimizer
        self._buffers_known = dict(buffers)
        self._parameters_known = {name: (each, *_kind_of(each)) for name, each in parameters}
        ours = isinstance(optimizer, _Optimizer)
        native = optimizer._make_native() if ours else None
        if optimizer is not None and not ours:
            _require_parameters_of(self.module, optimizer)
        options = {
            **self._arguments,
            "ignored": set(getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())),
            "sparse_parameters": _sparse_parameters(self.module),
        }
        if (mebibytes := self._arguments["bucket_cap_mb"]) is not None:
            options["bucket_bytes"] = max(1, int(mebibytes * 2**20))
        self._replica = _C.Replica(self._world, parameters, buffers, native, options)
        _connected.add(self)
        self._note_contents()
        if ours:
            optimizer._adopt(native, weakref.WeakMethod(self._connect_again), self._replica.mean_in_grad)
            self._world.barrier()  # the optimizer's state is what every rank has written

    @never_compiled
    def _find_optimizer(self):
        """All ranks come here with as many optimizers; one of them is then as if it had been given."""
        self._looks_for_optimizer = False
        found = optimizers_of(self.module.parameters())
        counts = self._world.all_gather(torch.tensor(len(found), device=self.device)).tolist()
        if len(set(counts)) > 1:
            _C.mismatch_error(
                f"the ranks have made {counts} optimizers of lockstep's for one model",
                likely="an optimizer that some ranks only have made before the first forward()",
                next="make the same optimizers on all ranks, then train",
            )
        trained = {each for each in self.module.parameters() if each.requires_grad}
        if len(found) == 1 and trained <= found[0]._parameters():
            self._reconnect(found[0])
        elif found:
            warnings.warn(
                "lockstep: several optimizers for one model, or one that leaves out parameters that are not frozen: each rank "
                "has its own parameters, which is slower. One optimizer with several parameter groups shares them",
                stacklevel=4,
            )

    @never_compiled
    def _reconnect(self, optimizer):
        no_sync = self._replica.no_sync
        self._connect(optimizer)
        self._replica.no_sync = no_sync

    def _connect_again(self, added):
        """The optimizer will have these, too."""
        if not set(added) <= set(self.module.parameters()):
            _C.usage_error(
                "a parameter group of parameters that the module did not have when DistributedDataParallel was made",
                next=_CHANGE_FIRST,
            )
        self._optimizer, self._looks_for_optimizer = None, True

    # ---- A step

    @not_compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward. In training mode it waits for all ranks where it has to look for the optimizer: the first one, if
        none was given, and one after parameters were added to it or unfrozen."""
        changed = self._contents() != self._noted
        thawed = changed and self._require_same_parameters()
        if self.training and torch.is_grad_enabled():
            if self._looks_for_optimizer:
                self._find_optimizer()
            elif thawed:
                self._reconnect(self._optimizer)
            self._clipping.clear()
        if changed:
            self._require_same_buffers()
            if not thawed:
                self._note_contents()
        self._replica.enter_forward(self.training)
        output = self._modules["module"](*inputs, **kwargs)
        self._replica.leave_forward()
        if torch.is_grad_enabled():
            sizes = {tensor.size(0) for tensor in _tensors_in((*inputs, *kwargs.values())) if tensor.dim() > 0}
            self._replica.watch(list(_tensors_in(output)), sizes.pop() if len(sizes) == 1 else math.nan)
        return output

    @never_compiled
    def _note_contents(self):
        self._modules_known = [*self.module.modules()]
        self._held = [*itertools.chain(*self._views())], [*self.module.parameters()]  # keeps their ids
        scripted = any(isinstance(each, list) for each in self._views())
        self._noted = not scripted and self._contents()

    @never_compiled
    def _contents(self):
        """Without names: those take longer than a small forward()."""
        return [*map(id, itertools.chain(*self._views())), *map(_kind_of, self._held[1])]

    @never_compiled
    def _views(self):
        """Of the dicts that the modules have now: __init__() and __setstate__() make new ones."""
        return [each.values() for it in (self, *self._modules_known) for each in _dicts_of(it)]

    @never_compiled
    def _require_same_parameters(self):
        """Returns whether one is trained now that was frozen before."""
        now = dict(self.module.named_parameters(remove_duplicate=False))
        thawed = False
        for name, (parameter, dtype, device, trained) in self._parameters_known.items():
            found = now.pop(name, None)
            if found is parameter and found.dtype == dtype and found.device == device:
                thawed = thawed or (found.requires_grad and not trained)
                continue
            is_now = "gone" if found is None else f"{found.dtype} on {found.device}"
            _C.usage_error(
                f"parameter {name} is another one than when DistributedDataParallel was made: "
                f"it was {dtype} on {device} and is {is_now}",
                likely="model.to(), half() or float(), or an assignment to the parameter, after that",
                next=_CHANGE_FIRST,
            )
        if now:
            _C.usage_error(
                "the module has other parameters than when DistributedDataParallel was made",
                likely="a layer that was added after that: each rank would train it alone",
                next=_CHANGE_FIRST,
            )
        return thawed

    @never_compiled
    def _require_same_buffers(self):
        now = dict(self.module.named_buffers(remove_duplicate=False))
        for name in {*now, *self._buffers_known}:
            if now.get(name) is not self._buffers_known.get(name):
                _C.usage_error(
                    f"buffer {name} is another tensor than when DistributedDataParallel was made",
                    likely="a module that assigns it: self.name = ...; rank 0's would go to the old one",
                    next="write into it: self.name.copy_(...), self.name.lerp_(...)",
                )

    @contextmanager
    def mean_gradients(self) -> Iterator[None]:
        """Between the last backward() of a step and step(), on every rank: inside it, and from then on, .grad is the mean over
        all ranks. What all ranks do alike with .grad counts; step() uses what it finds there.

        Blocks until all ranks are here. Costs a pass over the gradients of all ranks; where mean_in_grad says that .grad is
        the mean anyway, nothing. Raises MismatchError on all ranks (some are in another call), UsageError."""
        self._replica.mean_gradients()
        yield

    def samples(self, count: int) -> None:
        """The next backward() counts this many samples of this rank, or tokens. 0: nothing, even if its gradient is NaN.

        Every rank calls it before each backward() of a step: else backward() raises MismatchError on all of them."""
        self._replica.set_samples(count)

    def skip_batch(self) -> None:
        """Instead of forward and backward() on a rank that has no batch for this step. step() follows as on every rank.
        The mean is over the other ranks.

        Blocks as backward() does. Raises UsageError for a model with SyncBatchNorm."""
        self._require_no_sync_batch_norm("skip_batch()")
        self._clipping = []
        self._replica.skip_batch(joined=False)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside it backward() adds to this rank's .grad and exchanges nothing; the next one outside exchanges the sum."""
        before = self._replica.no_sync
        self._replica.no_sync = True
        try:
            yield
        finally:
            self._replica.no_sync = before

    @contextmanager
    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True) -> Iterator[None]:
        """For ranks that may have different numbers of batches: around the loop, with one step() per batch.

        A rank that leaves the loop takes part in the steps of the others without a batch, until none has any, and clips by
        lockstep's functions as in its last step. Without a batch in this loop it does not know how: if the others clip, that is an
        error on all ranks, as whatever else they do with .grad before step(). The sum of
        gradients is divided by the number of all ranks, as in PyTorch, or with divide_by_initial_world_size=False by that
        of the ranks that have a batch; where samples are counted, in both cases by these. The learning rate has to be
        the same on all ranks then, too. Waits for all ranks where it has to look for the optimizer, as forward() does. Raises
        UsageError: there is none; a model with SyncBatchNorm."""
        if enable and self._looks_for_optimizer:
            self._find_optimizer()
        if enable and self._optimizer is None:
            _C.usage_error(
                "join() without an optimizer",
                likely="an optimizer that is not lockstep's, or several, made after DistributedDataParallel",
                next="DistributedDataParallel(model, optimizer)",
            )
        if enable:
            self._require_no_sync_batch_norm("join()")
        yield
        if enable and not self._replica.accumulates:
            self._optimizer.zero_grad()  # a loop that begins with zero_grad() leaves gradients that a step() has used
        while enable:
            self._replica.skip_batch(joined=divide_by_initial_world_size)
            if self.samples_of_last_batch == 0:
                return
            clipping, self._clipping = self._clipping, []
            for clip in clipping:
                clip()
            if isinstance(self._optimizer, _Optimizer):
                self._optimizer._clipping = self._optimizer._clipped
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _require_no_sync_batch_norm(self, call):
        synchronised = (each for each in self.module.modules() if isinstance(each, SyncBatchNorm) and each.training)
        if self.size > 1 and any(synchronised):
            _C.usage_error(
                f"{call} of a model with SyncBatchNorm",
                likely="the layers of the other ranks would wait for this rank's forward()",
                next="give a rank without a batch an empty one, (0, ...), and call forward() and backward() as the others do; "
                "make the model with weights='samples'",
            )

    # ---- Parameters

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module's. Every rank calls it with the same values. Blocks until all ranks have loaded."""
        if assign:
            _C.usage_error("load_state_dict(assign=True) on parameters that ranks share", next="leave assign out")
        errors = []

        def load():
            try:
                return super(DistributedDataParallel, self).load_state_dict(state_dict, strict)
            except RuntimeError as error:  # on every rank, and all that fits is loaded: a program may go on
                errors.append(error)

        result = self.write_parameters(load)
        if errors:
            raise errors[0]
        return result

    def write_parameters(self, write: Callable[[], Any]) -> Any:
        """Calls write(), in which every rank writes the same values into parameters, and returns what it returns.

        Blocks until all ranks have written. Where ranks share parameters, each writes into copies, which write() may read, too:
        as many bytes for each rank as the parameters. A view of numpy's must not be kept. Where write() raises, shared parameters
        have the values of before, the other ranks get PeerLost, and the ranks can't go on together. Raises MismatchError on all
        ranks: a parameter's values differ; UsageError: one was written by hand before, or through numpy's view from before."""
        results = []
        self._replica.write_parameters(lambda: results.append(write()))
        return results[0]

    def parameters_written(self) -> None:
        """Every rank has just written the same values into parameters by other means. Blocks until all have."""
        self._replica.parameters_written()

    # ---- What is known

    @property
    def rank(self) -> int:
        """This process's number among the ranks that train together."""
        return self._world.rank

    @property
    def size(self) -> int:
        """The number of ranks that train together."""
        return self._world.size

    @property
    def samples_of_last_batch(self) -> int:
        """The samples of the last exchange, over all ranks. Where ranks count alike: the number of ranks that had a batch."""
        return self._replica.samples_of_last_batch

    @property
    def mean_in_grad(self) -> bool:
        """Whether .grad is the mean over all ranks between backward() and step(), or this rank's own gradient."""
        return self._replica.mean_in_grad

    @property
    def statistics(self) -> dict[str, float]:
        """Since the start, on this rank: exchanges, bytes, exchange_seconds, waiting_seconds."""
        return self._replica.statistics

    # ---- Copies

    def __getstate__(self):
        """Without connections and optimizer. Copying or loading it makes new ones: every rank does so at the same time, with
        the process group that was given, which is known by its name and ranks."""
        state = {name: value for name, value in self.__dict__.items() if name not in _CONNECTIONS}
        return {**state, "process_group": reference_to(self.process_group)}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._number, self._clipping = next(_numbers), []
        self._looks_for_optimizer = True
        self.process_group = group_of(state["process_group"])
        self._connect(None)

    def register_comm_hook(self, state: Any, hook: Callable[[Any, GradBucket], torch.futures.Future]) -> None:
        """As PyTorch's: hook(state, bucket) returns the future of the mean over all ranks, by the collectives of
        torch.distributed. Before training, once, on all ranks. Blocks until all ranks are here.

        Gradients then go through buckets, and .grad is the mean. `hook` of the constructor names hooks of lockstep's own."""
        if self._arguments["hook"] is not None:
            _C.usage_error("a second communication hook", next="register one hook")
        self._arguments["hook"] = starter(self.size, state, hook)
        self._reconnect(self._optimizer)


_numbers = itertools.count()
_CONNECTIONS = """_world _replica _optimizer _looks_for_optimizer _buffers_known _parameters_known _clipping
    _modules_known _held _noted""".split()


def _check_arguments_of_pytorch(module, given):
    """Each argument has these values here; with any of them it means what it means in PyTorch."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    accepted = {
        "device_ids": (None, []) if device.index is None else (None, [], [device], [device.index]),
        "output_device": (None, device, device.index),
        "dim": (0,),
        # With init_sync, too: the ranks' parameters are those of rank 0 in any case.
        **dict.fromkeys(("init_sync", "check_reduction", "skip_all_reduce_unused_params"), (True, False)),
        **dict.fromkeys(("delay_all_reduce_named_params", "param_to_hook_all_reduce", "mixed_precision", "device_mesh"), (None,)),
    }
    for name, value in given.items():
        if name not in accepted:
            raise TypeError(f"DistributedDataParallel got an unexpected argument {name}={value}")
        if (list(value) if isinstance(value, tuple) else value) not in accepted[name]:
            _C.usage_error(
                f"DistributedDataParallel({name}={value}) of a module on {device}",
                likely="an argument for PyTorch's that asks for what lockstep does not do",
                next="leave it out"
                + {
                    "device_ids": ": the module's own device is used",
                    "mixed_precision": ", and use torch.autocast",
                    "device_mesh": ", and give process_group",
                }.get(name, ""),
            )


def _require_parameters_of(module, optimizer):
    own = set(module.parameters())
    for parameter in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if parameter not in own:
            _C.usage_error(
                f"the optimizer holds a tensor of shape {list(parameter.shape)} that is not a parameter of the module",
                next="make the optimizer from module.parameters()",
            )


def _sparse_parameters(module):
    embeddings = (each for each in module.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag)))
    sparse = {each.weight for each in embeddings if each.sparse}
    return {name for name, parameter in module.named_parameters() if parameter in sparse}
