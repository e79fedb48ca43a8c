# SPDX-License-Identifier: Apache-2.0
"""SGD, Adam, AdamW, RMSprop, Adagrad, LAMB and LARS: torch.optim.Optimizers whose step() is lockstep's C++.

Given to a DistributedDataParallel, the ranks of a machine share one copy of the parameters and of the state, and step()
sums the gradients of all ranks and updates in one pass over memory. Without one, step() uses each parameter's .grad.

With an option that they do not have (amsgrad, maximize, dampening, centered) these names make torch's own optimizer, and say so.

Schedulers, parameter groups, hooks and closures work as in torch.optim. state_dict() and load_state_dict() have torch's
format: a checkpoint of torch.optim.AdamW continues with lockstep.AdamW, and the other way round.
"""

import functools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import optimizer as torchs
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lockstep import _C
from lockstep._compiler import not_compiled, optimizer_method

__all__ = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "LAMB", "LARS", "GradientNorm"]

# torch.amp.GradScaler says so to every optimizer that applies the loss scale itself, as those here do.
warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)

# Options of torch's that lockstep does not have, and the value that each may have in a parameter group.
_ONLY = {"dampening": 0, "amsgrad": False, "maximize": False, "capturable": False, "differentiable": False}

_made = weakref.WeakSet()


def optimizers_of(parameters: Iterable[torch.Tensor]) -> "list[_Optimizer]":
    """Those of lockstep's that hold some of these, no others, and belong to no DistributedDataParallel."""
    parameters = set(parameters)
    return [each for each in _made if not each._attached and (held := each._parameters()) and held <= parameters]


class GradientNorm:
    """The 2-norm of a step's mean gradient before clipping; what clip_grad_norm() returns. float(norm) after step()."""

    def __init__(self) -> None:
        self._value = None

    def item(self) -> float:
        """Raises UsageError before the step()."""
        if self._value is None:
            _C.usage_error(
                "the norm of a gradient whose step() was not made yet",
                likely="clip_grad_norm() clips inside step(): only there the mean over all ranks is known",
                next="read it after optimizer.step()",
            )
        return self._value

    __float__ = item


class _StateOfParameter(dict):
    """optimizer.state[parameter]: what is set by its name goes into the C++ side; nothing can be dropped by its name."""

    def __init__(self, optimizer, parameter, state):
        super().__init__(state)
        self._optimizer, self._parameter = optimizer, parameter

    def __setitem__(self, name, value):
        if value is self.get(name):
            return
        super().__setitem__(name, value)
        self._optimizer._set_state(self._parameter, dict(self))

    def update(self, *states, **named):
        for name, value in dict(*states, **named).items():
            self[name] = value

    def _refuse(self, *_, **__):
        _C.usage_error(
            "something was dropped from optimizer.state[parameter]",
            likely="del or pop; lockstep keeps the state in C++",
            next="optimizer.state[parameter] = {name: tensor, …} on every rank, or = {} to start over",
        )

    __delitem__ = __ior__ = clear = pop = popitem = setdefault = _refuse


class _State(MutableMapping):
    """optimizer.state: of each parameter that was updated, its tensors by name. They are views: the next step changes them."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def _parameters(self):
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])

    def __getitem__(self, parameter):
        return self._optimizer._state_of(parameter)

    def __setitem__(self, parameter, state):
        self._optimizer._set_state(parameter, state)

    def __delitem__(self, parameter):
        self._optimizer._set_state(parameter, {})

    def __contains__(self, parameter):
        return any(parameter is each for each in self._parameters()) and bool(self[parameter])

    def __iter__(self):
        return (parameter for parameter in self._parameters() if self[parameter])

    def __len__(self):
        return sum(1 for _ in self)


class _Optimizer:
    """Adds to torch's optimizers what lockstep's have. Stands before a torch.optim.Optimizer among the bases of a class."""

    _name: str  # of the C++ optimizer
    _keeps_step = True  # torch's state has "step"
    _only = _ONLY
    _step_supports_amp_scaling = True  # torch.amp.GradScaler leaves the loss scale to step()

    _unattached = {}  # the state of each parameter while there is no C++ side
    _native = None  # made by the first step(), or by DistributedDataParallel
    _pushed = []  # the options that it has, of each group
    _stepped = []  # the parameters that it has, of each group
    _connect_again = None  # weak: a method of the DistributedDataParallel that it belongs to, for other parameters
    _mean_in_grad = True
    _norm = None  # what clip_grad_norm() has returned for the next step
    _clipping = _clipped = (0.0, 0.0)  # in the next step, in the last one: largest norm, largest value

    def __new__(cls, *arguments: Any, **options: Any) -> torch.optim.Optimizer:
        """torch's optimizer, if it is asked for what lockstep's does not have."""
        asked = [f"{name}={options[name]}" for name, only in cls._only.items() if options.get(name, only) != only]
        if not asked:
            return super().__new__(cls)
        theirs = next(each for each in cls.__mro__ if each.__module__.startswith("torch.optim."))
        warnings.warn(
            f"lockstep: {cls.__name__} with {', '.join(asked)} is torch's own: each rank has its own parameters, which is slower",
            stacklevel=2,
        )
        return theirs(*arguments, **options)

    @property
    def _attached(self):
        """To a DistributedDataParallel, which has not been told to connect it again."""
        return self._native is not None and self._connect_again is not None

    def _parameters(self):
        return {parameter for group in self.param_groups for parameter in group["params"]}

    # ---- step()

    @staticmethod
    def profile_hook_step(step):
        """torch's takes longer than a small step(): only for hooks and profilers."""
        hooked = torch.optim.Optimizer.profile_hook_step(step)

        @not_compiled
        @functools.wraps(step)
        def either(self, *args, **kwargs):
            hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
            hooks = hooks or torchs._global_optimizer_pre_hooks or torchs._global_optimizer_post_hooks
            return (hooked if hooks or _C.has_profilers() else step)(self, *args, **kwargs)

        return either

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: torch.amp.GradScaler | None = None) -> Any:
        """Updates every parameter that has a gradient, and returns the closure's loss if there is a closure.

        With a DistributedDataParallel it blocks until all ranks have updated; every rank calls it, with the same
        options. The GIL is released meanwhile. `grad_scaler` is passed by torch.amp.GradScaler.step().

        Raises UsageError (.grad or a parameter was changed by hand while ranks share them), MismatchError on all ranks
        (other options on some rank, or a step that some rank leaves out: nothing was updated), PeerLost.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._native is None and self._connect_again is not None:
            _C.usage_error(
                "step() right after a parameter group was added",
                next="call add_param_group() after step(), before the next forward()",
            )
        native = self._native or self._adopt(self._make_native())
        self._push_options(native)
        native.set_clipping(*self._clipping)
        if grad_scaler is None and getattr(self, "grad_scale", None) is not None:
            _C.usage_error(
                "GradScaler.step() of an optimizer whose step() is wrapped",
                likely="a wrapper without functools.wraps, which hides that step() divides by the loss scale itself",
                next="give GradScaler.step() lockstep's optimizer",
            )
        if grad_scaler is None:
            native.step()
        else:
            self._step_scaled(native, grad_scaler)
        if self._norm is not None:
            self._norm._value = native.gradient_norm
        self._norm, self._clipped, self._clipping = None, self._clipping, (0.0, 0.0)
        return loss

    def clip_grad_norm(self, max_norm: float) -> GradientNorm:
        """Clips the mean gradient of all parameters together to this 2-norm, inside the next step().

        In place of torch.nn.utils.clip_grad_norm_, which would clip this rank's share. The same on every rank. Returns
        the norm before clipping: float() of it is known after the step().
        """
        self._clipping = (float(max_norm), self._clipping[1])
        self._norm = GradientNorm()
        return self._norm

    def clip_grad_value(self, clip_value: float) -> None:
        """Limits each element of the mean gradient to [-clip_value, clip_value], inside the next step(), after the norm."""
        self._clipping = (self._clipping[0], float(clip_value))

    def _step_scaled(self, native, scaler):
        """As torch.amp.GradScaler.step(): without a step if a gradient of any rank is not finite."""
        mine = scaler._per_optimizer_states[id(self)]
        if mine["stage"] is OptState.UNSCALED:
            if not self._mean_in_grad and not getattr(scaler, "makes_mean", False):
                _C.usage_error(
                    "torch.amp.GradScaler.unscale_() where .grad is this rank's own gradient",
                    likely="clipping between unscale_() and step()",
                    next="lockstep.GradScaler in its place; or leave unscale_() out and clip with optimizer.clip_grad_norm()",
                )
            if not any(float(found_inf) for found_inf in mine["found_inf_per_device"].values()):
                native.step()
            return
        native.set_loss_scale(scaler.get_scale())
        try:
            native.step()
        finally:
            native.set_loss_scale(None)
        mine["found_inf_per_device"] = {torch.device("cpu"): torch.full((), float(native.skipped))}

    @not_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim.Optimizer."""
        if not set_to_none or _C.has_profilers():
            return optimizer_method("zero_grad")(self, set_to_none)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    # ---- Options

    def _values(self, group):
        """The group's options as the C++ optimizer calls them."""
        for name, allowed in self._only.items():
            if group.get(name, allowed) != allowed:
                _C.usage_error(
                    f"{type(self).__name__} with {name}={group[name]}",
                    likely="an option of torch's optimizer that lockstep does not have",
                    next="leave it out, or use torch's optimizer with lockstep.DistributedDataParallel(model)",
                )
        names = ("lr", "weight_decay", "eps", "momentum", "nesterov", "alpha", "lr_decay", "trust")
        values = {name: float(group[name]) for name in names if name in self.defaults}
        if "betas" in self.defaults:
            values["beta1"], values["beta2"] = map(float, group["betas"])
        return values

    def _push_options(self, native):
        for i, group in enumerate(self.param_groups):
            self._require_same_parameters(i, group["params"])
            values = self._values(group)
            if values != self._pushed[i]:
                native.set_options(self._name, i, values)
                self._pushed[i] = values

    def _require_same_parameters(self, group, now):
        known = self._stepped[group] if group < len(self._stepped) else []
        if len(now) != len(known) or not all(map(operator.is_, now, known)):
            _C.usage_error(
                f"param_groups[{group}]['params'] are other parameters than at the first step() or in DistributedDataParallel",
                next="make the groups before that; freeze a parameter with requires_grad_(False) instead of taking it out",
            )

    @not_compiled
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer, on all ranks alike. With a DistributedDataParallel the model's next forward() in training mode
        waits for all ranks; backward() and step() follow it. Raises UsageError: parameters that are not the model's."""
        _made.add(self)
        parameters = param_group["params"]
        param_group["params"] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self._attached and (connect_again := self._connect_again()):
            connect_again(param_group["params"])
        if self._native is not None:
            self._detach()
        optimizer_method("add_param_group")(self, param_group)

    # ---- The C++ side

    def _make_native(self):
        if any(is_traceable_wrapper_subclass(each) for each in self._parameters()):
            _C.usage_error(
                f"lockstep.{type(self).__name__} of parameters that are DTensors or other tensor subclasses",
                likely="FSDP or tensor parallelism, where each rank has parts of the parameters and updates them itself",
                next=f"torch.optim.{type(self).__name__}; the backend lockstep carries what these exchange",
            )
        groups = [(group["params"], self._values(group)) for group in self.param_groups]
        rule = max((values for _, values in groups), key=lambda values: values.get("momentum", 0))
        return _C.Optimizer(self._name, groups, rule)

    def _adopt(self, native, connect_again=None, mean_in_grad=True):
        """From now on `native` steps. It gets the state that there is. connect_again: of the model that it belongs to, if any."""
        self._detach()
        self._native, self._connect_again, self._mean_in_grad = native, connect_again, mean_in_grad
        self._pushed = [self._values(group) for group in self.param_groups]
        self._stepped = [list(group["params"]) for group in self.param_groups]
        state, self._unattached = self._unattached, {}
        for parameter, tensors in state.items():
            self._set_state(parameter, tensors)
        return native

    def _detach(self):
        """Takes the state out of the C++ side, which is given up."""
        if self._native is not None:
            self._unattached = self._copied_state()
        self._native = None

    # ---- State

    @property
    def state(self) -> _State:
        return _State(self)

    @state.setter
    def state(self, states: dict[torch.Tensor, dict[str, torch.Tensor]]) -> None:
        states = dict(states)
        if self._native is None:
            self._unattached = {}
        for parameter in self.state._parameters() if "param_groups" in self.__dict__ else ():
            self._set_state(parameter, states.get(parameter, {}))

    def _copied_state(self):
        return {
            parameter: {name: value.clone() for name, value in tensors.items()}
            for parameter, tensors in self.state.items()
        }

    def _state_of(self, parameter):
        if self._native is None:
            return self._unattached.get(parameter, {})
        state = self._native.state_of(parameter)
        if not self._keeps_step:
            state.pop("step", None)
        elif "step" in state and torch.get_default_dtype() == torch.float64:
            state["step"] = state["step"].double()  # as torch has it then
        return _StateOfParameter(self, parameter, state)

    def _set_state(self, parameter, state):
        state = {name: value for name, value in state.items() if value is not None}
        if self._native is None:
            self._unattached[parameter] = state
            return
        if state:
            dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            state = {name: torch.as_tensor(value).to(dtype) for name, value in state.items()}
            state["step"] = torch.as_tensor(state.get("step", 1.0), dtype=torch.float32)
            if parameter.dtype in (torch.float16, torch.bfloat16):
                state.setdefault("master", parameter.detach().float())
        self._native.set_state(parameter, state)

    @not_compiled
    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.Optimizer, and in its format."""
        saved = optimizer_method("state_dict")(self)
        return {**saved, "state": {number: dict(state) for number, state in saved["state"].items()}}

    @not_compiled
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state_dict() of this class or of torch's optimizer of the same name. Every rank loads the same one."""
        optimizer_method("load_state_dict")(self, state_dict)
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        for number, parameter in zip(numbers, self.state._parameters()):
            # torch has rounded the state of 16-bit parameters to 16 bits.
            if parameter.dtype in (torch.float16, torch.bfloat16) and number in state_dict["state"]:
                self._set_state(parameter, state_dict["state"][number])

    def __getstate__(self):
        return {**super().__getstate__(), "state": self._copied_state()}

    def __setstate__(self, state):
        rest = {name: value for name, value in state.items() if name != "state"}
        super().__setstate__(rest)
        _made.add(self)
        if "state" in state:
            self.state = state["state"]


class SGD(_Optimizer, torch.optim.SGD):
    """torch.optim.SGD."""

    _name = "sgd"
    _keeps_step = False


class Adam(_Optimizer, torch.optim.Adam):
    """torch.optim.Adam. decoupled_weight_decay: use AdamW."""

    _name = "adam"
    _only = {**_ONLY, "decoupled_weight_decay": False}


class AdamW(_Optimizer, torch.optim.AdamW):
    """torch.optim.AdamW."""

    _name = "adamw"


class RMSprop(_Optimizer, torch.optim.RMSprop):
    """torch.optim.RMSprop."""

    _name = "rmsprop"
    _only = {**_ONLY, "centered": False}

    def _set_state(self, parameter, state):
        if "square_avg" in state and any(group["momentum"] > 0 for group in self.param_groups):
            state = {"momentum_buffer": torch.zeros_like(state["square_avg"]), **state}  # torch has none in a group without momentum
        super()._set_state(parameter, state)


class Adagrad(_Optimizer, torch.optim.Adagrad):
    """torch.optim.Adagrad."""

    _name = "adagrad"
    _only = {**_ONLY, "initial_accumulator_value": 0}

    def _state_of(self, parameter):
        """torch's has a state before the first step."""
        first = {"step": torch.tensor(0.0), "sum": torch.zeros_like(parameter, requires_grad=False)}
        return super()._state_of(parameter) or _StateOfParameter(self, parameter, first)


class LAMB(_Optimizer, torch.optim.Optimizer):
    """LAMB (You et al., ICLR 2020): Adam whose steps are scaled per parameter. state: step, exp_avg, exp_avg_sq."""

    _name = "lamb"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})


class LARS(_Optimizer, torch.optim.Optimizer):
    """LARS (You, Gitman and Ginsburg, 2017): SGD whose rate is scaled per parameter. state: momentum_buffer."""

    _name = "lars"
    _keeps_step = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust: float = 1e-3,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})
