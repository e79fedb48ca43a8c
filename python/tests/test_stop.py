# SPDX-License-Identifier: Apache-2.0
"""A signal to one rank: a loop of one's own is left by all ranks after the same step."""

import signal
import unittest

import lockstep
from support import run_ranks
from test_step import global_batch, loss_of, make_model

ASKED_IN_STEP = 3


def loop_that_is_asked_to_stop():
    lockstep.catch_stop_signals()
    net = make_model()
    optimizer = lockstep.SGD(net.parameters(), lr=0.01)
    model = lockstep.DistributedDataParallel(net, optimizer)
    for step in range(20):
        if step == ASKED_IN_STEP and model.rank == 1:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        loss_of(model, [tensor[model.rank * 3 : model.rank * 3 + 3] for tensor in global_batch(step)]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if lockstep.stop_requested():
            break
    assert step == ASKED_IN_STEP, f"rank {model.rank} left after step {step}"
    assert lockstep.stop_signal() == (signal.SIGTERM if model.rank == 1 else 0), lockstep.stop_signal()


class Stop(unittest.TestCase):
    def test_ranks_of_one_machine(self):
        run_ranks(2, loop_that_is_asked_to_stop, backend="gloo")

    def test_ranks_of_two_machines(self):
        run_ranks(2, loop_that_is_asked_to_stop, backend="gloo", machines=[0, 1])

    def test_ctrl_c_stays_an_exception(self):
        lockstep.catch_stop_signals([signal.SIGUSR2])
        with self.assertRaises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        self.assertEqual(lockstep.stop_signal(), 0)

    def test_a_signal_that_the_program_handles_itself_stays_as_it_is(self):
        before = signal.getsignal(signal.SIGUSR1)
        heard = []
        signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
        lockstep.catch_stop_signals([signal.SIGUSR1])
        signal.raise_signal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, before)
        self.assertEqual(heard, [signal.SIGUSR1])
        self.assertEqual(lockstep.stop_signal(), 0)


if __name__ == "__main__":
    unittest.main()
