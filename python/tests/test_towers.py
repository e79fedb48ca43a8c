# SPDX-License-Identifier: Apache-2.0
"""lockstep.towers: the devices of one process compute what one does."""

import collections
import os
import sys
import threading
import traceback
import unittest

import torch
from torch import nn

import lockstep
from lockstep import towers
from support import expect, expect_error, started

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "../.."))
SIZES, SAMPLES = (1, 2, 3, 4, 7), 11


def batch_of(step, samples=SAMPLES):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(samples, 6, dtype=torch.float64, generator=generator)
    return {"x": x, "y": x.sum(1, keepdim=True).sin()}


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)).double()


def loss_of(net, batch):
    if isinstance(net, nn.Module):
        return nn.functional.mse_loss(net(batch["x"]), batch["y"])
    first, first_bias, last, last_bias = net
    return nn.functional.mse_loss(nn.functional.linear(nn.functional.linear(batch["x"], first, first_bias).tanh(), last, last_bias), batch["y"])


def on_one_device(samples=SAMPLES, make=lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9)):
    net = make_model()
    optimizer = make(net.parameters())
    means = []
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(net, batch_of(step, samples))
        loss.backward()
        optimizer.step()
        means.append(loss.detach())
    return list(net.parameters()), means


class Towers(unittest.TestCase):
    def test_train_as_one_device_in_modules_and_in_lists_of_tensors(self):
        for size in SIZES:
            for samples in (SAMPLES, 3):  # with fewer samples than devices some have none
                expected, means = on_one_device(samples)
                for model in (make_model(), [each.detach() for each in make_model().parameters()]):
                    with self.subTest(devices=size, samples=samples, kind=type(model)):
                        devices = lockstep.Devices(size)
                        nets = towers.get_params(devices, model)
                        lists = [list(net.parameters()) if isinstance(net, nn.Module) else net for net in nets]
                        optimizers = [torch.optim.SGD(each, lr=0.2, momentum=0.9) for each in lists]
                        found = [towers.train_batch(devices, loss_of, nets, batch_of(step, samples), optimizers) for step in range(5)]
                        expect(found, means, 1e-9)
                        for each in lists:
                            expect(each, expected, 1e-9)

    def test_sums_are_exact_by_every_algorithm(self):
        for size in SIZES:
            devices = lockstep.Devices(size)
            for algorithm in ("direct", "central", "ring", "tree"):
                tensors = [torch.arange(1000.0) * (index + 1) for index in range(size)]
                towers.all_reduce(devices, tensors, algorithm)
                expect(tensors, [torch.arange(1000.0) * (size * (size + 1) // 2)] * size)

    def test_a_gradient_that_is_missing_counts_as_zero(self):
        devices = lockstep.Devices(2)
        nets = [[torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)] for _ in range(2)]
        nets[1][0].grad = torch.ones(3)
        towers.all_reduce_gradients(devices, nets)
        expect([net[0].grad for net in nets], [torch.ones(3)] * 2)
        self.assertEqual([net[1].grad for net in nets], [None, None])

    def test_shared_variables_train_as_one_device(self):
        expected, _ = on_one_device(make=torch.optim.Adam)
        for size in SIZES:
            devices, net = lockstep.Devices(size), make_model()
            nets = towers.share_variables(devices, net)
            optimizer = torch.optim.Adam(net.parameters())
            for step in range(5):
                shards = towers.split_and_load(devices, batch_of(step))
                towers.backward(devices, towers.losses(devices, loss_of, nets, shards), shards)
                combined = towers.combine_gradients(nets)
                self.assertTrue(all(parameter is own and parameter.grad is gradient for (gradient, parameter), own in zip(combined, net.parameters())))
                optimizer.step()
            for each in nets:
                expect(list(each.parameters()), expected, 1e-9)

    def test_blocks_are_averaged_by_weight(self):
        devices = lockstep.Devices(2)
        nets = [make_model(), make_model()]
        blocks = towers.flat_blocks(nets)
        blocks[0].fill_(1)
        blocks[1].fill_(4)
        towers.average(devices, blocks)
        self.assertTrue(all(parameter.eq(2.5).all() for net in nets for parameter in net.parameters()))
        blocks[1].fill_(5.5)
        towers.average(devices, blocks, [1, 2])
        expect(nets[0][0].weight, torch.full((9, 6), 4.5, dtype=torch.float64))

    def test_blocks_keep_strides(self):
        net = nn.Conv2d(3, 4, 5).to(memory_format=torch.channels_last)
        before = net.weight.detach().clone()
        blocks = towers.flat_blocks([net])
        self.assertEqual(net.weight.stride(), before.stride())
        expect(net.weight, before)
        blocks[0].zero_()
        self.assertTrue(net.weight.eq(0).all() and net.bias.eq(0).all())
        expect_error(lockstep.UsageError, "strides differ", lambda: towers.flat_blocks([net, nn.Conv2d(3, 4, 5)]))
        net.weight.data = torch.ones(4, 3, 5, 10)[..., ::2]
        expect_error(lockstep.UsageError, "gaps or overlaps in memory", lambda: towers.flat_blocks([net]))

    def test_devices_have_threads_that_go_on_while_this_one_waits(self):
        devices = lockstep.Devices(2)
        meet = threading.Barrier(2, timeout=60)
        waiting = lambda index: (meet.wait(), index, threading.get_ident())
        found = devices.run(waiting)
        self.assertEqual([index for _, index, _ in found], [0, 1])
        self.assertEqual(len({thread for *_, thread in found} | {threading.get_ident()}), 3)

    def test_devices_compute_under_the_callers_modes(self):
        devices = lockstep.Devices(2)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            found = devices.run(lambda index: (torch.is_grad_enabled(), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype))
        self.assertEqual(found, [(False, torch.bfloat16)] * 2)
        self.assertEqual(devices.run(lambda index: torch.is_grad_enabled()), [True, True])

    def test_random_numbers_follow_torchs_seed(self):
        devices = lockstep.Devices(2)
        draw = lambda seed: (torch.manual_seed(seed), devices.run(lambda index: torch.rand(5)), devices.run(lambda index: torch.rand(5)))[1:]
        first = draw(1)
        expect(draw(1), first)
        others = [*draw(2)[0], first[0][1], first[1][0], torch.rand(5)]
        self.assertFalse(any(torch.equal(first[0][0], other) for other in others))

    def test_parts_are_of_the_kind_of_the_batch(self):
        devices, kind = lockstep.Devices(2), collections.namedtuple("Pair", "x y")
        for batch in (kind(torch.arange(5), torch.arange(5)), (torch.arange(5), torch.arange(5)), [torch.arange(5)] * 2):
            first, last = towers.split_and_load(devices, batch)
            self.assertIs(type(first), type(batch))
            expect(list(first), [torch.arange(3)] * 2)
            expect(list(last), [torch.arange(3, 5)] * 2)

    def test_wrong_calls_are_errors_that_say_so(self):
        devices = lockstep.Devices(2)
        expect_error(lockstep.UsageError, "a batch of 11 samples does not divide evenly over 2", lambda: towers.split_and_load(devices, batch_of(0), even=True))
        expect_error(lockstep.UsageError, "[3, 4] samples", lambda: towers.split_and_load(devices, (torch.ones(3), torch.ones(4))))
        expect_error(lockstep.UsageError, "another number of tensors", lambda: towers.all_reduce(devices, [torch.ones(3)]))
        expect_error(lockstep.UsageError, "there is no such value", lambda: towers.all_reduce(devices, [torch.ones(3)] * 2, "fast"))
        expect_error(lockstep.UsageError, "a batch of ['int']", lambda: towers.split_and_load(devices, [1, 2]))
        nested_batch = (torch.ones(4), [torch.ones(4)] * 4)
        expect_error(lockstep.UsageError, "a batch of ['Tensor', 'list']", lambda: towers.split_and_load(devices, nested_batch))
        expect_error(lockstep.UsageError, "parameters of Half can't be averaged: weight", lambda: towers.flat_blocks([nn.Linear(2, 2).half()]))
        apart = lockstep.Devices(2)
        nested = lambda index: towers.all_reduce(apart, [torch.ones(3)] * 2)
        expect_error(lockstep.UsageError, "inside Devices.run()", lambda: apart.run(nested))
        again = lockstep.Devices(2)
        expect_error(lockstep.UsageError, "inside run()", lambda: again.run(lambda index: again.run(print)))
        several = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())]
        expect_error(lockstep.UsageError, "1.weight is Double", lambda: towers.flat_blocks(several))
        expect_error(lockstep.MismatchError, "", lambda: towers.all_reduce(devices, [torch.ones(3), torch.ones(4)]))
        error = expect_error(KeyError, "one device's", lambda: lockstep.Devices(2).run(self.fail_on_1))
        self.assertIn("fail_on_1", "".join(traceback.format_tb(error.__traceback__)))

    @staticmethod
    def fail_on_1(index):
        if index == 1:
            raise KeyError("one device's")

    def test_the_examples(self):
        for name, said in (("towers", r"epoch 0: accuracy 0\.[67]"), ("shared_variables", "loss 1.* -> 0"), ("averaged_nets", r"loss 0\.0000")):
            with self.subTest(example=name):
                ended = started(sys.executable, os.path.join(ROOT, f"examples/{name}.py"), *(["1"] if name == "towers" else []))
                self.assertEqual(ended.returncode, 0, ended.stdout)
                self.assertRegex(ended.stdout, said)


if __name__ == "__main__":
    unittest.main()
