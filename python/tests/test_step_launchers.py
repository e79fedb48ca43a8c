# SPDX-License-Identifier: Apache-2.0
"""The same program started by lockstep run, torchrun, mpirun, Slurm's variables and torch.multiprocessing.spawn, with and
without a process group."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import lockstep
from support import started
from test_step import expect_equal, global_batch, global_batches, make_model, train

PROGRAM = os.path.abspath(__file__)
SECRET = "0123456789abcdef" * 2


def two_lines(fails=False):
    """Two lines, no matter who has started the ranks. Prints what shows that it is right."""
    net, alone = make_model(), make_model()
    optimizer = lockstep.AdamW(net.parameters(), lr=0.01)
    model = lockstep.DistributedDataParallel(net, optimizer)
    rank, size = model.rank, model.size
    for step in range(3):
        if fails and step == 1 and rank == 1:
            raise ValueError("rank 1 has had enough")
        part = [tensor[rank * 3 : rank * 3 + 3] for tensor in global_batch(step)]
        train(model, optimizer, [part])
    train(alone, torch.optim.AdamW(alone.parameters(), lr=0.01), global_batches(3))
    expect_equal(net, alone)
    machines = "several machines" if model.mean_in_grad else "one machine"
    print(f"rank {rank} of {size} has trained on {machines}", flush=True)


def program(fails, backend, store=None):
    """With a process group, unless backend is "none". store: a file in which ranks meet, by default where the launcher says;
    Slurm's variables number them then. Where the store outlives a group of lockstep's there is a second group over it."""
    torch.set_num_threads(1)
    if backend == "none":
        return two_lines(fails)
    arguments = {}
    if store is not None:
        ranks = {"rank": int(os.environ["SLURM_PROCID"]), "world_size": int(os.environ["SLURM_NTASKS"])}
        arguments = {"store": dist.FileStore(store, 2), **ranks}
    store_stays = store is not None or "TORCHELASTIC_USE_AGENT_STORE" in os.environ
    for _ in range(2 if store_stays and backend == "lockstep" else 1):
        dist.init_process_group(backend, **arguments)
        two_lines(fails)
        dist.destroy_process_group()


def tcp_listeners(pid):
    """The addresses at which a process listens, as the kernel lists them."""
    sockets = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            sockets.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        except FileNotFoundError:  # of listdir itself
            pass
    lines = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as listed:
            lines += [line.split() for line in listed]
    return [fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets]


def meets_by_tcp():
    """Whether the ranks of the process group have met at PyTorch's store."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore)


def again_and_again(backend, machines="one", by="env"):
    """A process group again and again, each used. On one machine nobody listens, neither here nor in the launcher."""
    for _ in range(2):
        dist.init_process_group(backend, **(lockstep.meet() if by == "meet" else {}))
        if meets_by_tcp():
            raise AssertionError("met at a TCPStore")
        if backend == "lockstep" and machines == "one":
            listeners = tcp_listeners(os.getpid()) + tcp_listeners(os.getppid())
            if listeners:
                raise AssertionError(f"listens at {listeners}")
        total = torch.ones(3)
        dist.all_reduce(total)
        objects = [None, None]
        dist.all_gather_object(objects, dist.get_rank())
        if total.tolist() != [2, 2, 2] or objects != [0, 1]:
            raise AssertionError(f"{total}, {objects}")
        dist.destroy_process_group()
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
    print(f"rank {rank} of 2 has trained on {machines} machine{'s' if machines == 'several' else ''}")


def spawned(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    two_lines()
    dist.destroy_process_group()


def by_slurms_variables(nodes, *arguments):
    """What srun sets, and no more: two ranks on these nodes. Returns exit codes and outputs."""
    of_job = {"SLURM_JOB_ID": f"{os.getpid()}", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    of_job["SLURM_TASKS_PER_NODE"] = "2" if nodes == (0, 0) else "1(x2)"
    ranks = []
    for rank, node in enumerate(nodes):
        of_rank = {"SLURM_PROCID": f"{rank}", "SLURM_NODEID": f"{node}", "SLURM_LOCALID": f"{rank - node}"}
        command = [sys.executable, PROGRAM, *arguments]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks.append(subprocess.Popen(command, env={**os.environ, **of_job, **of_rank}, **output))
    texts = [rank.communicate(timeout=300)[0] for rank in ranks]
    return max(rank.returncode for rank in ranks), "".join(texts)


def lockstep_run(*arguments):
    return started(shutil.which("lockstep"), "run", "--nproc-per-node", "2", "--", sys.executable, PROGRAM, *arguments)


def own_address():
    """By which other machines reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as to_others:
        to_others.connect(("192.0.2.1", 1))  # sends nothing
        return to_others.getsockname()[0]


def two_lockstep_runs(secrets, *arguments):
    """Two launchers, each of which starts one rank and takes itself for a machine. Returns exit codes and outputs."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((own_address(), 0))
        address, port = reserved.getsockname()
        launchers = []
        for node, secret in enumerate(secrets):
            where = ("--nnodes", "2", "--node-rank", str(node), "--master-addr", address, "--master-port", str(port))
            environment = {**os.environ, "LOCKSTEP_SECRET": secret}
            output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
            launchers.append(subprocess.Popen([shutil.which("lockstep"), "run", *where, "--", sys.executable, PROGRAM, *arguments], **output))
        texts = [launcher.communicate(timeout=300)[0] for launcher in launchers]
    return max(launcher.returncode for launcher in launchers), "".join(texts)


class Launchers(unittest.TestCase):
    def expect_trained(self, code, output, times=1, machines="one machine"):
        self.assertEqual(code, 0, output)
        for rank in range(2):
            self.assertEqual(output.count(f"rank {rank} of 2 has trained on {machines}"), times, output)

    def test_lockstep_run(self):
        for backend in ("none", "gloo"):
            result = lockstep_run("train", backend)
            self.expect_trained(result.returncode, result.stdout)

    def test_process_groups_of_lockstep_run_listen_at_no_tcp_port(self):
        with socket.create_server(("127.0.0.1", 0)):
            self.assertEqual(len(tcp_listeners(os.getpid())), 1, "a listener is found")
        for backend in ("lockstep", "gloo"):
            result = lockstep_run("again", backend)
            self.expect_trained(result.returncode, result.stdout)

    def test_process_groups_of_lockstep_run_on_several_machines_meet_with_the_secret(self):
        for backend in ("lockstep", "gloo"):
            self.expect_trained(*two_lockstep_runs((2 * SECRET,) * 2, "again", backend, "several"), machines="several machines")
        code, output = two_lockstep_runs((2 * SECRET, SECRET[::-1] * 2), "meet_once")
        self.assertNotEqual(code, 0)
        self.assertIn("was refused", output)

    def test_meet_is_for_any_launcher(self):
        self.expect_trained(*by_slurms_variables((0, 0), "again", "gloo", "one", "meet"))

    def test_a_meeting_at_which_anybody_can_join_is_warned_of(self):
        from lockstep import _meeting

        for url, host, said in (
            ("tcp://10.0.0.1:29500?rank=0&world_size=2", "10.0.0.1", 1),
            ("tcp://10.0.0.1:29500?rank=1&world_size=2", "10.0.0.1", 0),
            ("tcp://127.0.0.1:29500?rank=0&world_size=2", "127.0.0.1", 0),
            ("tcp://10.0.0.1:29500?rank=0&world_size=1", "10.0.0.1", 0),
        ):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                _meeting._warn_of_strangers(url, host)
            self.assertEqual(len(warned), said, url)

    def test_torchrun(self):
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM)
        for backend, times in (("none", 1), ("gloo", 1), ("lockstep", 2)):
            result = started(*torchrun, "train", backend)
            self.expect_trained(result.returncode, result.stdout, times)

    def test_mpirun(self):
        mpirun = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, PROGRAM)
        result = started(*mpirun, "train", "none")
        self.expect_trained(result.returncode, result.stdout)

    def test_slurms_variables(self):
        self.expect_trained(*by_slurms_variables((0, 0), "train", "none"))
        for backend, times in (("gloo", 1), ("lockstep", 2)):
            with tempfile.TemporaryDirectory() as folder:
                several = by_slurms_variables((0, 1), "train", backend, os.path.join(folder, "store"))
                self.expect_trained(*several, times, machines="several machines")

    def test_spawn(self):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(spawned, (os.path.join(folder, "store"),), nprocs=2)

    def test_a_rank_that_raises_ends_the_job_and_is_named(self):
        result = lockstep_run("fail", "none")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("rank 1 has had enough", result.stdout)
        # The launcher names the rank whose process ends first. If that is rank 0, its own error names rank 1.
        self.assertRegex(result.stdout, r"RankFailed: rank 1 exited|PeerLost: rank 1 ")

    def test_alone_in_a_spawned_process_is_said(self):
        context = mp.get_context("spawn")
        queue = context.SimpleQueue()
        process = context.Process(target=alone, args=(queue,))
        process.start()
        process.join(60)
        self.assertIn("this process trains alone", queue.get())


def alone(queue):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        lockstep.DistributedDataParallel(make_model())
    queue.put("\n".join(str(each.message) for each in said))


if __name__ == "__main__":
    if sys.argv[1:2] == ["again"]:
        again_and_again(*sys.argv[2:])
    elif sys.argv[1:2] == ["meet_once"]:
        lockstep.meet(timedelta(seconds=3))
    elif sys.argv[1:2] in (["train"], ["fail"]):
        program(sys.argv[1] == "fail", *sys.argv[2:])
    else:
        unittest.main()
