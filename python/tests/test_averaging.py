# SPDX-License-Identifier: Apache-2.0
"""lockstep.Averaging beside the same computed on one rank, rank after rank."""

import copy
import unittest

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from support import expect, expect_error, run_ranks

STEPS = 12


def make_model():
    torch.manual_seed(31)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(step, rank):
    return torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def train_step(model, optimizer, step, rank):
    model(batch(step, rank)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def inner(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def reference(size, every, outer):
    """All ranks in one process."""
    models = [make_model() for _ in range(size)]
    optimizers = [inner(model) for model in models]
    last = [nn.Parameter(each.detach().clone()) for each in models[0].parameters()]
    outer_optimizer = outer(last) if outer else None
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers)):
            train_step(model, optimizer, step, rank)
        if (step + 1) % every == 0:
            means = [torch.stack(list(each)).mean(0).detach() for each in zip(*(model.parameters() for model in models))]
            if outer:
                for start, mean in zip(last, means):
                    start.grad = start.detach() - mean
                outer_optimizer.step()
                means = [start.detach() for start in last]
            with torch.no_grad():
                for model in models:
                    for parameter, mean in zip(model.parameters(), means):
                        parameter.copy_(mean)
    return [list(model.parameters()) for model in models]


def averages(every, outer):
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    if rank > 0:
        nn.init.ones_(model[0].weight)  # all begin with rank 0's
    averaging = lockstep.Averaging(model, every, outer)
    optimizer = inner(model)
    for step in range(STEPS):
        train_step(model, optimizer, step, rank)
        assert averaging.step() == ((step + 1) % every == 0)
    expect(list(model.parameters()), reference(size, every, outer)[rank], 1e-9)


def resumes():
    rank = dist.get_rank()
    model = make_model()
    averaging, optimizer = lockstep.Averaging(model, 2, nesterov), inner(model)
    for step in range(STEPS):
        if step == 5:  # between two averages
            saved = copy.deepcopy([each.state_dict() for each in (model, averaging, optimizer)])
        train_step(model, optimizer, step, rank)
        averaging.step()
    again = make_model()
    its_averaging, its_optimizer = lockstep.Averaging(again, 2, nesterov), inner(again)
    for each, state in zip((again, its_averaging, its_optimizer), saved):
        each.load_state_dict(state)
    for step in range(5, STEPS):
        train_step(again, its_optimizer, step, rank)
        its_averaging.step()
    expect(list(again.parameters()), list(model.parameters()))


def wrong_arguments():
    expect_error(lockstep.UsageError, "every=0", lambda: lockstep.Averaging(make_model(), 0))
    expect_error(lockstep.UsageError, "torch.bfloat16", lambda: lockstep.Averaging(make_model().bfloat16()))


def everything():
    for every, outer in ((1, None), (4, None), (4, nesterov), (5, nesterov)):
        averages(every, outer)
    resumes()
    wrong_arguments()


class Averages(unittest.TestCase):
    def test_are_those_of_ranks_in_one_process(self):
        for size in (1, 2, 3, 4):
            with self.subTest(size=size):
                run_ranks(size, everything)


if __name__ == "__main__":
    unittest.main()
