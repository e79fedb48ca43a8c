# SPDX-License-Identifier: Apache-2.0
"""Runs a program of this folder as it is over Gloo, and its second version over lockstep, on the same ranks, and compares what
main() returns.

In the second version each line that ends with "# lockstep: CODE" is CODE in its place, and `import lockstep` comes before the
other imports.
"""

import contextlib
import importlib.util
import os
import re
import tempfile
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import lockstep
from support import processes

FOLDER = Path(__file__).parent
CHANGED_AT_MOST = 3  # lines of a program
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.1}
LATE = 120  # seconds for both versions

_CHANGED = re.compile(r"^(\s*)(\S.*?)  # lockstep: (.*)$", re.MULTILINE)


def second_version(text):
    """The program with lockstep, and how many lines have changed."""
    text, changed = _CHANGED.subn(r"\1\3", text)
    return re.sub(r"^(?=import |from )", "import lockstep\n", text, count=1, flags=re.MULTILINE), changed


def names():
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "runner")


def context(compiler=False):
    """Ranks are forked from a process that has imported what they use, which takes seconds. compiler: also what torch.compile
    imports at its first use."""
    made = processes()
    made.set_forkserver_preload([
        *("torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.nn", "torch.utils.data", "torch._dynamo", "lockstep"),
        *(("torch._inductor.compile_fx", "torch._dynamo.backends.debugging", "networkx") if compiler else ()),
    ])  # fmt: skip
    return made


# ---- In a rank


def _main_of(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@contextlib.contextmanager
def _process_group(backend, store, rank, size):
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    if backend == "gloo":
        _kept.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()


_kept = []  # a hook's callback that is the last to hold Gloo's group ends the process: its thread would wait for itself


def _scale_gradients_of_rank_0():
    """A defect that has to be seen: the gradient of the first parameter of each model is 1.01 of what it should be."""

    def wrong(make):
        def wrapped(self_or_module, *arguments, **options):
            made = make(self_or_module, *arguments, **options)
            if dist.get_rank() == 0:
                module = made or getattr(self_or_module, "submod", self_or_module)
                parameter = next(each for each in module.parameters() if each.requires_grad)
                parameter.register_hook(lambda gradient: gradient * 1.01)
            return made

        return wrapped

    def wrong_shards(make):
        def wrapped(module, **options):
            made = make(module, **options)
            if dist.get_rank() == 0:
                made.register_forward_hook(lambda module, inputs, output: output.register_hook(lambda gradient: gradient * 1.01) and None)
            return made

        return wrapped

    import torch.distributed.fsdp as fsdp
    from torch.distributed import pipelining
    from torch.distributed.tensor import parallel

    for each in lockstep.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel, pipelining.PipelineStage:
        each.__init__ = wrong(each.__init__)
    parallel.parallelize_module = wrong(parallel.parallelize_module)
    fsdp.fully_shard = wrong_shards(fsdp.fully_shard)


def _run_rank(folder, rank, size, spoiled, environment):
    os.environ.clear()  # those of the process that was forked
    os.environ.update(environment)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch.distributed.nn is to have another name
    try:
        for backend in ("gloo", "lockstep"):
            torch.set_default_dtype(torch.float32)
            if backend == "lockstep" and spoiled:
                _scale_gradients_of_rank_0()
            with _process_group(backend, folder / f"{backend}.store", rank, size):
                torch.save(_main_of(folder / f"with_{backend}.py")(), folder / f"{backend}.{rank}.result")
    except BaseException:
        (folder / f"{backend}.{rank}.error").write_text(traceback.format_exc())
        os._exit(1)  # as a crash: nothing of this rank is tidied up
    os._exit(0)


# ---- In the test


class Failed(AssertionError):
    """backend: which of the two versions failed. texts: of every rank that did."""

    def __init__(self, name, size, backend, texts):
        super().__init__(f"{name} on {size} ranks over {backend}:\n" + "\n".join(texts))
        self.backend, self.texts = backend, texts


def run(name, size, spoiled=False, altered=(), machines=1):
    """Returns the results of all ranks: over Gloo, over lockstep. altered: text of the second version, and what it has in its
    place. machines: that the ranks count as being on, in turn. Raises Failed."""
    text = (FOLDER / f"{name}.py").read_text()
    second, changed = second_version(text)
    assert changed <= CHANGED_AT_MOST, f"{name} changes {changed} lines"
    if altered:
        assert second.count(altered[0]) == 1, f"{altered[0]!r} in {name}"
        second = second.replace(*altered)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "with_gloo.py").write_text(text)
        (folder / "with_lockstep.py").write_text(second)
        forked = context(os.environ.get("LOCKSTEP_ALL_PROGRAMS") == "1")
        environments = [{**os.environ, "GROUP_RANK": str(rank % machines)} for rank in range(size)]
        ranks = [forked.Process(target=_run_rank, args=(folder, rank, size, spoiled, environments[rank])) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(LATE)
        for rank in ranks:
            rank.kill()
            rank.join()
        for backend in ("gloo", "lockstep"):
            errors = [path.read_text() for path in sorted(folder.glob(f"{backend}.*.error"))]
            late = [rank for rank in range(size) if not (folder / f"{backend}.{rank}.result").exists()]
            if errors or late:
                raise Failed(name, size, backend, [*errors, f"ranks without a result: {late}, exit codes {[each.exitcode for each in ranks]}"])
        return [[torch.load(folder / f"{backend}.{rank}.result") for rank in range(size)] for backend in ("gloo", "lockstep")]


def differences(expected, actual):
    """Between two results: the largest of each tensor, in units of what is allowed."""
    assert expected.keys() == actual.keys(), f"{expected.keys() ^ actual.keys()}"
    found = {}
    for name, value in expected.items():
        other = actual[name]
        assert value.dtype == other.dtype and value.shape == other.shape, f"{name}: {value.dtype}, {value.shape}; {other.dtype}, {other.shape}"
        allowed = TOLERANCES.get(value.dtype, 0.5)
        difference = (value.double() - other.double()).abs() / (allowed * value.double().abs().clamp(min=1))
        difference = difference.where(value != other, 0).nan_to_num(float("inf"))  # NaN: infinities of which one is missing
        found[name] = difference.max().item() if value.numel() else 0.0
    return found


def compare(name, size, spoiled=False, machines=1):
    """Returns the largest difference in units of what is allowed. Raises AssertionError where there is more."""
    over_gloo, over_lockstep = run(name, size, spoiled, machines=machines)
    largest = 0.0
    for rank in range(size):
        for what, one, other in (
            ("Gloo and lockstep", over_gloo[rank], over_lockstep[rank]),
            ("ranks 0 and this over Gloo", over_gloo[0], over_gloo[rank]),
            ("ranks 0 and this over lockstep", over_lockstep[0], over_lockstep[rank]),
        ):
            found = differences(one, other)
            worst = max(found, key=found.get)
            largest = max(largest, found[worst])
            assert found[worst] <= 1, f"{name} on {size} ranks, rank {rank}: {worst} differs between {what} {found[worst]:.3g} times what is allowed"
    return largest
