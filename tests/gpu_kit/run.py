# SPDX-License-Identifier: Apache-2.0
"""What lockstep's GPU kit runs: everything of lockstep that a simulator can't show. Ends in time, whatever hangs.

    run.py [--minutes 9] [--only NAME...]

Checks share the GPU; then comparisons with PyTorch have the machine for themselves, one after the other. Each check is a
program with a log of its own. table.md in $OUT, or out/, says how each ended, logs.tar.gz has the logs, *.json the figures.
Needs python3 with torch and CUDA, of the release that the kit was built for; g++ and Python's headers for the Python module.
"""
import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

KIT = Path(__file__).resolve().parent
OUT = Path(os.environ.get("OUT") or KIT / "out").resolve()
LOGS = Path(os.environ.get("TMPDIR", "/tmp")) / f"gpu_kit.{os.getpid()}"
BIN = KIT / "bin"


def libraries_that_are_missing():
    """A folder with those of the kit that this machine does not have: its own programs keep theirs."""
    folder = LOGS / "libraries"
    folder.mkdir(parents=True, exist_ok=True)
    there = subprocess.run("PATH=$PATH:/sbin ldconfig -p", shell=True, capture_output=True, text=True).stdout
    for library in (KIT / "debian").iterdir():
        if f"{library.name} (" not in there:
            (folder / library.name).symlink_to(library)
    return folder


TORCH = importlib.util.find_spec("torch")
TORCH = Path(TORCH.origin).parent if TORCH else None
HOME = KIT / "python/lockstep" / ("torch" + ".".join(version("torch").split(".")[:2]) if TORCH else "torch")
MODULE = HOME / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"

ENVIRONMENT = {
    **os.environ,
    "LD_LIBRARY_PATH": f"{KIT / 'lib'}:{TORCH and TORCH / 'lib'}:{libraries_that_are_missing()}",
    "PYTHONPATH": f"{KIT / 'python'}:{KIT / 'libexec/lockstep'}:{os.environ.get('PYTHONPATH', '')}",
    "PYTHONUNBUFFERED": "1",
    "PATH": f"{BIN}:{os.environ['PATH']}:/usr/local/cuda/bin",
}
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}  # float32 is compared with a CPU's
ON_GPUS = {**EXACT, "LOCKSTEP_TEST_DEVICES": "cuda"}


class Check:
    """A command with a deadline. `quiet`: it measures, so nothing else runs beside it."""

    def __init__(self, name, command, seconds, environment=None, quiet=False, needs=()):
        self.name, self.command, self.seconds, self.quiet, self.needs = name, [str(word) for word in command], seconds, quiet, needs
        self.environment = {**ENVIRONMENT, **(environment or {})}
        self.result, self.last, self.took = "not run", "", 0.0

    def run(self, until):
        missing = [str(path) for path in self.needs if not Path(path).exists()]
        if missing:
            self.last = "there is no " + ", ".join(missing)
            return
        start = time.monotonic()
        seconds = min(self.seconds, until - start)
        if seconds < 5:
            self.last = "no time was left"
            return
        log = LOGS / f"{self.name}.log"
        with open(log, "wb") as file:
            try:
                program = subprocess.Popen(self.command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                           env=self.environment, cwd=KIT, start_new_session=True)
            except OSError as error:
                self.last = f"can't run it: {error}"
                return
            try:
                code = program.wait(seconds)
                self.result = "passed" if code == 0 else f"failed ({code})"
            except subprocess.TimeoutExpired:
                self.result = f"killed after {seconds:.0f} s"
            try:
                os.killpg(program.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            program.wait()
        self.took = time.monotonic() - start
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        self.last = lines[-1][:160] if lines else ""
        print(f"{self.took:6.1f} s  {self.name}: {self.result}. {self.last}", flush=True)


def shards(name, program, cases, count, seconds, environment):
    return [Check(f"{name}.{index + 1}_of_{count}", [BIN / program, f"--gtest_filter={cases}"], seconds,
                  {**environment, "GTEST_TOTAL_SHARDS": str(count), "GTEST_SHARD_INDEX": str(index)})
            for index in range(count)]


def compiler():
    """The Python module, for the Python of this machine."""
    headers = [KIT / "source", KIT / "source/include", TORCH / "include", TORCH / "include/torch/csrc/api/include",
               sysconfig.get_path("include")]
    return ["g++", "-std=c++20", "-O1", "-march=x86-64-v3", "-fPIC", "-shared", "-fvisibility=hidden", "-w",
            "-DTORCH_API_INCLUDE_EXTENSION_H", *(f"-isystem{folder}" for folder in headers), KIT / "source/module.cc", "-o", MODULE,
            f"-L{KIT / 'lib'}", "-l:liblockstep.so.0", f"-L{TORCH / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]


def checks():
    filters = json.loads((KIT / "filters.json").read_text())
    facts = [
        Check("env", [BIN / "lockstep", "env"], 60),
        Check("python_module", ["true"] if MODULE.exists() else compiler() if TORCH else ["false"], 120),
    ]
    shared = [
        Check("python", [sys.executable, KIT / "python.py"], 100, needs=[MODULE]),
        *shards("strategies", "strategy_test", filters["strategy_test"], 6, 240, ON_GPUS),
        *shards("command", "gpu_command_test", filters["gpu_command_test"], 4, 240, EXACT),
        Check("ddp_with_nccl", [BIN / "lockstep", "train", "--strategy", "ddp", "--ranks", "1", "--devices", "cuda", "--max-steps",
                                "200", "--data", "synthetic", "--metrics", LOGS / "ddp.jsonl"], 100, EXACT),
        Check("ddp_in_buckets", [BIN / "lockstep", "train", "--strategy", "ddp", "--ranks", "1", "--devices", "cuda", "--max-steps",
                                 "200", "--data", "synthetic", "--separate-parameters", "--metrics", LOGS / "buckets.jsonl"], 100, EXACT),
        *shards("step_fuzz", "step_fuzz", filters["step_fuzz"], 2, 200, ON_GPUS),
        Check("strategies_under_memcheck", ["compute-sanitizer", "--error-exitcode", "9", BIN / "strategy_test",
                                            f"--gtest_filter={filters['memcheck']}"], 200, ON_GPUS),
    ]
    alone = [
        Check("python_step", [sys.executable, KIT / "step.py", OUT / "python_step.json"], 150, quiet=True, needs=[MODULE]),
        Check("bench_step", [BIN / "lockstep", "bench", "step", "--device", "cuda", "--ranks", "1", "--models", "mlp,gpt",
                             "--turns", "2", "--steps", "50",
                             "--json", OUT / "step.json"], 200, quiet=True),
    ]
    return facts, shared, alone


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="everything ends by then")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="checks whose names begin so")
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes - 10
    groups = [[check for check in group if not arguments.only or check.name.startswith(tuple(arguments.only))] for group in checks()]
    OUT.mkdir(parents=True, exist_ok=True)
    if TORCH is None:
        print("run: python3 has no torch: install the release that the kit was built for, with CUDA")
    if not Path("/dev/nvidia0").exists():
        print("run: there is no GPU here (/dev/nvidia0). It would run:", *(check.name for check in sum(groups, [])), sep="\n  ")
        groups = groups[:1]
    for group in groups:
        alone = group and group[0].quiet
        with ThreadPoolExecutor(1 if alone else len(group) or 1) as pool:
            list(pool.map(lambda check: check.run(until), group))
    rows = [f"| {check.name} | {check.result} | {check.took:.1f} s | {check.last.replace('|', ' ')} |" for check in sum(groups, [])]
    (OUT / "table.md").write_text("\n".join(["| check | result | time | last line |", "| --- | --- | --- | --- |", *rows]) + "\n")
    with tarfile.open(OUT / "logs.tar.gz", "w:gz") as tar:
        for log in sorted(LOGS.glob("*.*")):
            tar.add(log, arcname=f"logs/{log.name}")
    failed = sum(check.result != "passed" for check in sum(groups, []))
    print(f"{sum(map(len, groups)) - failed} passed, {failed} failed or not run")
    return failed > 0


sys.exit(main())
