# SPDX-License-Identifier: Apache-2.0
"""Ranks that stay: processes which run one function after another, each in process groups of its own."""

import os
import tempfile
import traceback
import unittest

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import lockstep  # noqa: F401  registers the backend

SIZE = 3


def _serve(rank, store, connection):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    while (call := connection.recv()) is not None:
        function, size, arguments = call
        group = dist.new_group(list(range(size)))
        try:
            if rank < size:
                function(group, *arguments)
            connection.send(None)
        except BaseException:
            connection.send(traceback.format_exc())
    dist.destroy_process_group()


class RanksTestCase(unittest.TestCase):
    """Tests whose functions run on ranks 0 ... size - 1 of three, with a process group of these as their first argument."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        pipes = [context.Pipe() for _ in range(SIZE)]
        cls.connections = [here for here, _ in pipes]
        store = os.path.join(cls.folder.name, "store")
        cls.ranks = [context.Process(target=_serve, args=(rank, store, pipes[rank][1])) for rank in range(SIZE)]
        for rank in cls.ranks:
            rank.start()

    @classmethod
    def tearDownClass(cls):
        for connection in cls.connections:
            connection.send(None)
        for rank in cls.ranks:
            rank.join(60)
            rank.kill()
        cls.folder.cleanup()

    def on_ranks(self, size, function, *arguments):
        """Fails with what every rank raised."""
        for connection in self.connections:
            connection.send((function, size, arguments))
        texts = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(120):
                self.fail(f"rank {rank} is late; the others: {texts}")
            if (text := connection.recv()) is not None:
                texts.append(f"rank {rank} of {size}:\n{text}")
        if texts:
            self.fail("\n".join(texts))
