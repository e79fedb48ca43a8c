# SPDX-License-Identifier: Apache-2.0
"""How lockstep's methods keep torch.compile out of them without importing it: docs/design/torch-versions.md. torch's own way
(torch._disable_dynamo) imports it at a function's first call."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function, callees: bool = True) -> _Function:
    """torch.compile runs the function as it is, and may compile what it calls: torch._dynamo.skip, without the import.
    callees=False: nor that."""
    compiler = torch._C._dynamo.eval_frame
    skip, default = compiler._FrameAction.SKIP, compiler._FrameAction.DEFAULT
    compiler.set_code_exec_strategy(function.__code__, compiler._FrameExecStrategy(skip, default if callees else skip))
    function._torchdynamo_disable = True
    return function


def never_compiled(function: _Function) -> _Function:
    """Nor what it calls. Compiled code keeps what it has used: a replica that another has replaced would go on exchanging gradients."""
    return not_compiled(function, callees=False)


def optimizer_method(name: str) -> Callable[..., Any]:
    """torch.optim.Optimizer's, which torch keeps torch.compile out of; what that wraps, as long as nobody has imported it."""
    method = getattr(torch.optim.Optimizer, name)
    return method if "torch._dynamo" in sys.modules else method.__wrapped__
