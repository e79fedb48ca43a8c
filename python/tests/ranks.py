# SPDX-License-Identifier: Apache-2.0
"""Ranks that stay: processes which run one function after another, each in process groups of its own."""

import atexit
import faulthandler
import os
import tempfile
import traceback
import unittest

import torch
import torch.distributed as dist

import lockstep  # noqa: F401  registers the backend
from support import processes

SIZE = 3
LATE = 300  # seconds; a rank that hangs then shows where, and ends


def _serve(rank, store, connection):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    while (call := connection.recv()) is not None:
        function, size, machines, arguments = call
        os.environ["GROUP_RANK"] = str(machines[rank]) if machines and rank < size else "0"
        group = dist.new_group(list(range(size)))
        faulthandler.dump_traceback_later(LATE, exit=True)
        try:
            if rank < size:
                function(group, *arguments)
            connection.send(None)
        except BaseException:
            connection.send(traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


class RanksTestCase(unittest.TestCase):
    """Tests whose functions run on ranks 0 ... size - 1 of three, with a process group of these as their first argument. The
    ranks are the same for all such classes."""

    folder = None

    @classmethod
    def setUpClass(cls):
        if RanksTestCase.folder is None:
            RanksTestCase.start()

    @staticmethod
    def start():
        """Of the base class, so that all classes find them there."""
        cls = RanksTestCase
        cls.folder = tempfile.TemporaryDirectory()
        context = processes()
        pipes = [context.Pipe() for _ in range(SIZE)]
        cls.connections = [here for here, _ in pipes]
        store = os.path.join(cls.folder.name, "store")
        cls.ranks = [context.Process(target=_serve, args=(rank, store, pipes[rank][1])) for rank in range(SIZE)]
        for rank in cls.ranks:
            rank.start()
        atexit.register(cls.end)

    @staticmethod
    def end():
        cls = RanksTestCase
        atexit.unregister(cls.end)
        for rank, connection in zip(cls.ranks, cls.connections):
            if rank.is_alive():
                connection.send(None)
        for rank in cls.ranks:
            rank.join(60)
            rank.kill()
        cls.folder.cleanup()

    def on_ranks(self, size, function, *arguments, machines=None):
        """Fails with what every rank raised. machines: the machine that each rank counts as."""
        for connection in self.connections:
            connection.send((function, size, machines, arguments))
        texts = []
        for rank, connection in enumerate(self.connections):
            try:
                text = connection.recv() if connection.poll(2 * LATE) else "has not ended"
            except EOFError:
                text = "was late and has ended"
            if text is not None:
                texts.append(f"rank {rank} of {size}: {text}")
        if texts:  # the next test begins with new ranks
            for rank in self.ranks:
                rank.kill()
                rank.join()
            self.end()
            self.start()
            self.fail("\n".join(texts))
