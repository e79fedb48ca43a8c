#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The memory of a training step: lockstep in C++ and in Python, PyTorch's DDP over Gloo, and PyTorch in one process, in turn;
the latter also with gradients that stay (zero_grad(set_to_none=False)), as those in buckets do.

    bench/step_memory.py [CASE...] [--only SYSTEM...] [--rounds 3] [--steps 10] [--save]

Needs lockstep's Python package (a wheel, or PYTHONPATH); bert needs Hugging Face's transformers. C++ is `lockstep bench step`,
which has SGD only. Every rank stops itself when it has met the others, after the first steps, and after the measured ones.
Between the last two stops this program adds up the PSS of all ranks again and again: "steady" is the median, "peak" the most.
What they had at the first stop is taken off: torch, and the rendezvous. Pages of files don't count: programs and libraries.

Of p ranks each has gradients of its own, and all share s copies of the parameters: themselves and the optimizer's state. The
bound is (s + p) / (s + 1) times the memory of one process with gradients that stay, and 5 % more.
"""
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent / "peers")]
import common

RANKS = 2
WARM_UP = 3
PATIENCE = 300  # seconds: a rank that has not stopped by then has failed
CASES = {"mlp": ("mlp", "sgd"), "mlp-adamw": ("mlp", "adamw"), "alexnet": ("alexnet", "sgd"), "gpt": ("gpt", "sgd"),
         "gpt-adamw": ("gpt", "adamw"), "bert": ("bert", "adamw")}
COPIES = {"sgd": 2, "adamw": 3}  # of the parameters that all ranks share: themselves, momentum or two moments
SYSTEMS = ("lockstep_cpp", "lockstep", "one_process", "one_process_kept", "ddp_gloo")
FIGURES = ("steady", "peak")
MEETING = "STEP_MEMORY_FOLDER"  # where ranks of a job say that they have come to a place
THIS_JOB = "--job"  # as first argument: this process is a rank


# ---- what a rank does in Python

def with_lockstep(model, optimizer):
    import lockstep

    made = {"sgd": lambda p: lockstep.SGD(p, lr=1e-3, momentum=0.9), "adamw": lambda p: lockstep.AdamW(p, lr=1e-4)}
    optimizer = made[optimizer](model.parameters())
    return lockstep.DistributedDataParallel(model, optimizer), optimizer


def with_torch(model, optimizer):
    import torch

    made = {"sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=True),
            "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True)}
    optimizer = made[optimizer](model.parameters())
    if torch.distributed.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model, optimizer


def stop(phase, ranks):
    """Stops this rank when all have come here: from one that is stopped the others get nothing."""
    if ranks > 1:
        import torch.distributed as dist

        dist.barrier()
    here = Path(os.environ[MEETING])
    (here / f"{phase}-{os.getpid()}").touch()
    while len([*here.glob(f"{phase}-*")]) < ranks:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSTOP)


def job(system, case, steps):
    import torch.distributed as dist
    from step import BATCHES, Trainer

    model, optimizer = CASES[case]
    if system == "lockstep":
        import lockstep  # noqa: F401, its backend
    if ranks_of(system) > 1:
        dist.init_process_group("lockstep" if system == "lockstep" else "gloo")
    stop(0, ranks_of(system))
    wrap = with_lockstep if system == "lockstep" else with_torch
    trainer = Trainer(lambda made: wrap(made, optimizer), model, {**BATCHES, "bert": 8}[model] // ranks_of(system))
    if system == "one_process_kept":
        trainer.optimizer.zero_grad = partial(trainer.optimizer.zero_grad, set_to_none=False)
    for phase, count in enumerate((WARM_UP, steps), 1):
        for _ in range(count):
            trainer.step()
        stop(phase, ranks_of(system))


# ---- who looks at the ranks

def ranks_of(system):
    return 1 if system.startswith("one_process") else RANKS


def command_of(system, case, steps):
    if system == "lockstep_cpp":
        return [common.LOCKSTEP, "bench", "step", "--models", CASES[case][0], "--turns", 1, "--steps", 10_000]
    this = [sys.executable, __file__, THIS_JOB, system, case, steps]
    return this if ranks_of(system) == 1 else [common.LOCKSTEP, "run", "--nproc-per-node", RANKS, "--", *this]


def environment_of(system, steps):
    """The variables of a job. A rank in C++ stops by faults, in Python by itself."""
    stops = "".join(f";phase=backward,step={step},signal=19" for step in (WARM_UP, WARM_UP + steps))
    own = {"LOCKSTEP_FAULT": "phase=meeting,at=end,signal=19" + stops} if system == "lockstep_cpp" else {}
    return {**os.environ, "OMP_NUM_THREADS": str(max(1, os.cpu_count() // ranks_of(system))), **own}


def is_stopped(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def until_stopped(process, count):
    """The pids of the job's ranks, once all of them have stopped."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        ranks = [pid for pid in [process.pid, *common.descendants(process.pid)] if is_stopped(pid)]
        if len(ranks) == count:
            return ranks
        time.sleep(0.005)
    raise RuntimeError(f"{process.args} does not train")


def go_on(ranks):
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)


def mebibytes(ranks):
    kib = 0
    for pid in ranks:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        kib += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return kib / 1024


def watch(process, count):
    ranks = until_stopped(process, count)
    idle = mebibytes(ranks)
    go_on(ranks)
    until_stopped(process, count)
    go_on(ranks)
    samples, end = [], time.monotonic() + PATIENCE
    while not all(map(is_stopped, ranks)):
        samples.append(mebibytes(ranks) - idle)
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{process.args} ended early, or takes more than {PATIENCE} s")
    if not samples:
        raise RuntimeError(f"{process.args} was too fast for a sample: give more --steps")
    return {"steady": common.median(samples), "peak": max(samples), "samples": len(samples)}


def end(process):
    """Ends the ranks first, so that their launcher collects them."""
    for pid in common.descendants(process.pid) or [process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    try:
        process.wait(timeout=30)
    finally:
        process.kill()


def run(system, case, steps):
    command = [*map(str, command_of(system, case, steps))]
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryDirectory() as folder:
        variables = {**environment_of(system, steps), MEETING: folder}
        process = subprocess.Popen(command, env=variables, stdout=said, stderr=said)
        try:
            return watch(process, ranks_of(system))
        except (RuntimeError, OSError) as error:
            said.seek(0)
            raise RuntimeError(f"{error}: {said.read()[-3000:]}") from error
        finally:
            end(process)


# ---- the table

def bound(case):
    copies = COPIES[CASES[case][1]]
    return 1.05 * (copies + RANKS) / (copies + 1)


def measure(case, arguments):
    systems = [each for each in arguments.only if each != "lockstep_cpp" or CASES[case][1] == "sgd"]
    found = common.take_turns(arguments.rounds, {name: lambda name=name: run(name, case, arguments.steps) for name in systems})
    medians = {name: {figure: common.median([each[figure] for each in runs]) for figure in FIGURES}
               for name, runs in found.items()}
    alone = medians.get("one_process_kept")
    for name, mib in medians.items():
        figures = [f"{figure} {mib[figure]:7.0f} MiB " + (f"{mib[figure] / alone[figure]:.2f} x" if alone else "") for figure in FIGURES]
        samples = min(each["samples"] for each in found[name])
        print(f"{case:10} {name:16} {'   '.join(figures)}   bound {bound(case):.2f} x   {samples} samples", flush=True)
    return {"bound": bound(case), "mebibytes": medians, "rounds": found}


def main():
    if sys.argv[1:2] == [THIS_JOB]:
        return job(*sys.argv[2:4], int(sys.argv[4]))
    parser = common.parser_for("memory", __doc__, CASES, rounds=3)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=SYSTEMS, metavar="SYSTEM", help=", ".join(SYSTEMS))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # through end(): stopped ranks hear no signal
    print(f"{RANKS} ranks; {arguments.rounds} rounds in turn\n{common.machine()}\n")
    found = {case: measure(case, arguments) for case in arguments.cases}
    if arguments.save:
        common.save_cases("memory", found, ranks=RANKS, steps=arguments.steps)


if __name__ == "__main__":
    main()
