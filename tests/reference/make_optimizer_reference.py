# SPDX-License-Identifier: Apache-2.0
"""Makes optimizers.safetensors: what PyTorch's optimizers, and timm's for LAMB and LARS, do in 10 steps.

    pip install --no-deps --target DIR timm==1.0.19
    PYTHONPATH=.deps/pytorch:DIR python3 tests/reference/make_optimizer_reference.py

Parameters and gradients come from formulas (`ramp`), so that the C++ test has the same ones. The file holds the parameters
after the last step, in float64.
"""
import importlib.util
import sys
import types
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from make_ddp_reference import ramp, write_safetensors

STEPS = 10
SHAPES = [(5, 3), (7,), (4, 3, 3, 3)]


def timm_optimizer(name):
    """timm.optim.NAME without the rest of timm, which needs torchvision."""
    folder = next(Path(p) / "timm/optim" for p in sys.path if (Path(p) / "timm/optim").is_dir())
    package = types.ModuleType("timm_optim")
    package.__path__ = [str(folder)]
    sys.modules["timm_optim"] = package
    spec = importlib.util.spec_from_file_location(f"timm_optim.{name}", folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def parameters():
    return [torch.nn.Parameter((ramp(torch.Size(shape).numel(), i) * 2).reshape(shape)) for i, shape in enumerate(SHAPES)]


def train(make, clip=lambda p: None, after_step=lambda p: None):
    p = parameters()
    optimizer = make(p)
    for step in range(STEPS):
        for i, each in enumerate(p):
            each.grad = ramp(each.numel(), 100 + 10 * step + i).reshape(each.shape)
        clip(p)
        optimizer.step()
        after_step(p)
    return p


def average(decay):
    module, of_module = torch.nn.Module(), []

    def make(p):
        for i, each in enumerate(p):
            module.register_parameter(f"p{i}", each)
        of_module.append(AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay)))
        return torch.optim.SGD(p, lr=0.1)

    train(make, after_step=lambda p: of_module[0].update_parameters(module))
    return list(of_module[0].module.parameters())


Lamb, Lars = timm_optimizer("lamb").Lamb, timm_optimizer("lars").Lars
COURSES = {
    "sgd": train(lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": train(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)),
    "nesterov": train(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "adam": train(lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)),
    "adamw": train(lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)),
    "lamb": train(lambda p: Lamb(p, lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, max_grad_norm=None)),
    "lars": train(lambda p: Lars(p, lr=0.5, momentum=0.9, weight_decay=0.01, trust_coeff=0.02, eps=0)),
    "clipped by norm": train(lambda p: torch.optim.SGD(p, lr=0.1), clip=lambda p: torch.nn.utils.clip_grad_norm_(p, 0.5)),
    "clipped by value": train(lambda p: torch.optim.SGD(p, lr=0.1), clip=lambda p: torch.nn.utils.clip_grad_value_(p, 0.2)),
    "average": average(0.9),
}

tensors = {f"{name}/{i}": p.detach() for name, course in COURSES.items() for i, p in enumerate(course)}
write_safetensors(Path(__file__).parent / "optimizers.safetensors", tensors)
